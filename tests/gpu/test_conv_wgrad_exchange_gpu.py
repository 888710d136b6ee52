"""Blocks of a cluster that send each other sums in the Hopper weight gradient, on a GPU."""

from dataclasses import replace

import pytest
import torch

from tilewright.device import spec_of
from tilewright.impl import IMPLS
from tilewright.impls import conv2d_weight_grad_sm90 as sm90
from tilewright.measure.verify import Verifier
from tilewright.op import Workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]

DEVICE = torch.device("cuda:0")
SM90 = IMPLS["conv2d_weight_grad_sm90"]
MODES = [(2, 2, "last"), (3, 3, "last"), (4, 4, "last"), (6, 6, "last"), (8, 8, "last"),
         (4, 2, "last"), (6, 2, "grid"), (8, 4, "kernel"), (9, 3, "last")]  # fmt: skip
"""(split_k, cluster, combine)"""


def layer(c, k, kernel, more=""):
    return Workload.parse(
        f"conv2d_weight_grad(x=f16[5,{c},15,13]@channels_last,"
        f" grad_output=f16[5,{k},15,13]@channels_last, kernel_size={kernel},"
        f" padding={kernel // 2}{more})"
    )


def configs(w, tile):
    for split_k, cluster, combine in MODES:
        space = SM90.space(w, spec_of(0)).restricted({"split_k": [split_k]})
        for stages in (4, 3, 2):
            config = sm90.Config(*tile, 64, stages, split_k, cluster, combine, exchange="sent")
            read = replace(config, exchange="read")
            if space.why_not(config) is None and space.why_not(read) is None:
                yield config, read
                break


@pytest.mark.parametrize("tile", [(64, 64), (128, 128)])
def test_integers_are_exact(tile):
    w = layer(128, 128, 1)
    x, grad = w.operator.examples(w, "integer", 0, DEVICE)
    truth = torch.nn.grad.conv2d_weight(x.double(), w.outputs[0].shape, grad.double())
    for config, _ in configs(w, tile):
        found = SM90.build(config, w, spec_of(0))(x, grad)
        assert torch.equal(found.double(), truth), config


@pytest.mark.parametrize("tile", [(64, 64), (64, 128), (128, 128), (128, 192)])
@pytest.mark.parametrize(
    "w", [layer(128, 256, 1), layer(72, 264, 3), layer(136, 40, 3, ", out_dtype=f32")], ids=str
)
def test_sums_that_are_sent_give_the_bits_of_those_that_are_read(tile, w):
    verifier, found = Verifier(w, DEVICE), 0
    tensors = w.operator.examples(w, "random", 3, DEVICE)
    for config, read in configs(w, tile):
        kernel = SM90.build(config, w, spec_of(0))
        assert verifier.check(kernel).message == "", config
        expected = SM90.build(read, w, spec_of(0))(*tensors)
        for _ in range(3):
            assert torch.equal(kernel(*tensors), expected), config
        found += 1
    if not found:
        pytest.skip(f"{tile} leaves no memory free")
