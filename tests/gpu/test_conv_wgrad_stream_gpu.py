"""Taps that share one copy of x in the Hopper weight gradient, on a GPU."""

import pytest
import torch

from tilewright.device import spec_of
from tilewright.impl import IMPLS
from tilewright.impls import conv2d_weight_grad_sm90 as sm90
from tilewright.impls._weight_grad import problem_of
from tilewright.impls._weight_grad_stream import halo_of
from tilewright.measure.verify import Verifier
from tilewright.op import Workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]

DEVICE = torch.device("cuda:0")
NAME = "conv2d_weight_grad_sm90"
TILES = ((64, 192), (128, 192), (64, 576))
MODES = [(1, 1, "last"), (3, 1, "last"), (3, 1, "grid"), (5, 1, "kernel"), (2, 2, "last"),
         (8, 4, "kernel")]  # fmt: skip
"""(split_k, cluster, combine)"""


def layer(n, c, k, h, w, padding=(1, 1), dilation=(1, 1), kernel=(3, 3), more="", name=""):
    p, q = (
        size + 2 * pad - d * (taps - 1)
        for size, pad, d, taps in zip((h, w), padding, dilation, kernel, strict=True)
    )
    text = (
        f"conv2d_weight_{name}grad(x=f16[{n},{c},{h},{w}]@channels_last,"
        f" grad_output=f16[{n},{k},{p},{q}]@channels_last, kernel_size={list(kernel)},"
        f" padding={list(padding)}, dilation={list(dilation)}{more})"
    )
    return Workload.parse(text)


def config_of(w, tile, tile_k=64, split_k=1, cluster=1, combine="last", stages=8):
    """With as many stages as fit, or None where taps of such tiles share nothing."""
    halo = halo_of(problem_of(w), tile[1], tile_k)
    space = IMPLS[NAME].space(w, spec_of(0)).restricted({"split_k": [split_k]})
    for deep in (s for s in (8, 6, 4, 3, 2) if halo and s <= stages):
        config = sm90.Config(*tile, tile_k, deep, split_k, cluster, combine, halo=halo)
        if space.why_not(config) is None:
            return config
    return None


def integers_are_exact(w, config):
    x, grad = w.operator.examples(w, "integer", 0, DEVICE)
    found = IMPLS[NAME].build(config, w, spec_of(0))(x, grad)
    truth = torch.nn.grad.conv2d_weight(
        x.double(), w.outputs[0].shape, grad.double(), padding=w["padding"], dilation=w["dilation"]
    )
    return torch.equal(found.double(), truth)


@pytest.mark.parametrize("tile", TILES)
def test_one_image_without_slices_is_exact(tile):
    w = layer(1, 64, 128, 8, 8)
    assert integers_are_exact(w, config_of(w, tile, stages=4))


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("tile_k", [64, 128])
def test_a_ring_that_is_filled_many_times_is_exact(tile, tile_k):
    for stages in (2, 3, 8):
        w = layer(6, 64, 128, 19, 21)
        config = config_of(w, tile, tile_k, stages=stages)
        if config is not None:
            assert integers_are_exact(w, config), config


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(
    "w",
    [
        layer(4, 64, 128, 15, 13),
        layer(3, 72, 40, 17, 9, padding=(0, 2), dilation=(2, 3)),
        layer(2, 136, 136, 7, 30, padding=(2, 0)),
        layer(5, 24, 8, 6, 5, padding=(1, 1)),
        layer(2, 64, 128, 11, 70),
        layer(2, 64, 64, 12, 9, kernel=(1, 3), padding=(0, 1)),
        layer(1, 64, 64, 3, 200),
    ],
    ids=str,
)
def test_every_geometry_and_split_mode_is_right(tile, w):
    verifier, checked = Verifier(w, DEVICE), 0
    for split_k, cluster, combine in MODES:
        config = config_of(w, tile, 64, split_k, cluster, combine)
        if config is not None:
            message = verifier.check(IMPLS[NAME].build(config, w, spec_of(0))).message
            assert message == "", config
            checked += 1
    if checked == 0:
        pytest.skip(f"taps of {tile} share nothing")


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("more", [", out_dtype=f32", ", into=f32[136,72,3,3]@channels_last"])
def test_fp32_results_and_added_ones_are_right(tile, more):
    w = layer(3, 72, 136, 11, 12, more=more)
    verifier = Verifier(w, DEVICE)
    for split_k, cluster, combine in MODES[:4]:
        config = config_of(w, tile, 64, split_k, cluster, combine)
        message = verifier.check(IMPLS[NAME].build(config, w, spec_of(0))).message
        assert message == "", config


@pytest.mark.parametrize("tile", TILES)
def test_the_bias_is_summed_beside_the_weight(tile):
    w = layer(3, 72, 136, 11, 12, name="bias_")
    verifier = Verifier(w, DEVICE)
    for split_k, cluster, combine in MODES:
        config = config_of(w, tile, 64, split_k, cluster, combine)
        if config is not None:
            message = verifier.check(IMPLS[NAME].build(config, w, spec_of(0))).message
            assert message == "", config
