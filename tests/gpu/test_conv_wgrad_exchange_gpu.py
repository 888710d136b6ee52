"""Blocks of a cluster that send each other sums in the Hopper weight gradient, on a GPU."""

from dataclasses import replace

import pytest
import torch

from compile_ahead import compile_ahead
from tilewright.device import spec_of
from tilewright.impl import IMPLS
from tilewright.impls.weight_gradient import conv2d_weight_grad_sm90 as sm90
from tilewright.measure.verify import Verifier
from tilewright.op import Workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]

DEVICE = torch.device("cuda:0")
SM90 = IMPLS["conv2d_weight_grad_sm90"]


def layer(c, k, kernel, more=""):
    return Workload.parse(
        f"conv2d_weight_grad(x=f16[5,{c},15,13]@channels_last,"
        f" grad_output=f16[5,{k},15,13]@channels_last, kernel_size={kernel},"
        f" padding={kernel // 2}{more})"
    )


ONE_TAP, NINE, WIDE = layer(128, 128, 1), layer(72, 264, 3), layer(136, 40, 3, ", out_dtype=f32")
SENT = sm90.Config(tile_n=64, exchange="sent")
CASES = [
    (ONE_TAP, replace(SENT, split_k=2, cluster=2)),
    (ONE_TAP, replace(SENT, split_k=8, cluster=8)),
    (ONE_TAP, replace(SENT, tile_m=128, tile_n=128, split_k=8, cluster=4, combine="kernel")),
    (NINE, replace(SENT, tile_n=128, split_k=3, cluster=3)),
    (NINE, replace(SENT, tile_n=128, split_k=4, cluster=2)),
    (NINE, replace(SENT, tile_m=128, tile_n=128, stages=3, split_k=4, cluster=2, combine="grid")),
    (WIDE, replace(SENT, split_k=6, cluster=6)),
    (WIDE, replace(SENT, stages=3, split_k=9, cluster=3)),
]


def read(config):
    return replace(config, exchange="read")


@pytest.fixture(scope="module", autouse=True)
def compiled_ahead():
    compile_ahead(SM90, [(w, c) for w, config in CASES for c in (config, read(config))])


@pytest.mark.parametrize(("w", "config"), CASES[:3], ids=str)
def test_integers_are_exact(w, config):
    x, grad = w.operator.examples(w, "integer", 0, DEVICE)
    truth = torch.nn.grad.conv2d_weight(x.double(), w.outputs[0].shape, grad.double())
    assert torch.equal(SM90.build(config, w, spec_of(0))(x, grad).double(), truth)


@pytest.mark.parametrize(("w", "config"), CASES, ids=str)
def test_sums_that_are_sent_give_the_bits_of_those_that_are_read(w, config):
    kernel, other = (SM90.build(c, w, spec_of(0)) for c in (config, read(config)))
    assert Verifier(w, DEVICE).check(kernel).message == ""
    tensors = w.operator.examples(w, "random", 3, DEVICE)
    expected = other(*tensors)
    for _ in range(3):
        assert torch.equal(kernel(*tensors), expected)
