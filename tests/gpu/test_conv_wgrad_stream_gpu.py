"""Taps that share one copy of x in the Hopper weight gradient, on a GPU."""

import pytest
import torch

from compile_ahead import compile_ahead
from tilewright.device import spec_of
from tilewright.impl import IMPLS
from tilewright.impls.weight_gradient import conv2d_weight_grad_sm90 as sm90
from tilewright.impls.weight_gradient._problem import problem_of
from tilewright.impls.weight_gradient._stream import halo_of
from tilewright.measure.verify import Verifier
from tilewright.op import Workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]

DEVICE = torch.device("cuda:0")
NAME = "conv2d_weight_grad_sm90"
TILES = ((64, 192), (128, 192), (64, 576))
MODES = [(1, 1, "last"), (3, 1, "last"), (3, 1, "grid"), (5, 1, "kernel"), (2, 2, "last")]
"""(split_k, cluster, combine)"""
INTO = "[136,72,3,3]@channels_last"


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


def configs_of(w, tile, modes):
    found = [config_of(w, tile, 64, *mode) for mode in modes]
    return [config for config in found if config is not None]


GEOMETRIES = [
    layer(4, 64, 128, 15, 13),
    layer(3, 72, 40, 17, 9, padding=(0, 2), dilation=(2, 3)),
    layer(2, 136, 136, 7, 30, padding=(2, 0)),
    layer(5, 24, 8, 6, 5),
    layer(2, 64, 64, 12, 9, kernel=(1, 3), padding=(0, 1)),
    layer(1, 64, 64, 3, 200),
]
RESULTS = [layer(3, 72, 136, 11, 12, more=m) for m in (", out_dtype=f32", f", into=f32{INTO}")]
BIAS = layer(3, 72, 136, 11, 12, name="bias_")
ROUND = layer(6, 64, 128, 19, 21)
CASES = [
    *((GEOMETRIES[0], tile, MODES) for tile in TILES),
    *((w, tile, MODES[1:3]) for w in (*GEOMETRIES[1:], *RESULTS, BIAS) for tile in TILES),
]
"""Of which every mode that fits is verified, infinities and NaN in x included."""
DEPTHS = [(tile, tile_k, stages) for tile in TILES for tile_k in (64, 128) for stages in (2, 3, 8)]


@pytest.fixture(scope="module", autouse=True)
def compiled_ahead():
    checked = [(w, config) for w, tile, modes in CASES for config in configs_of(w, tile, modes)]
    rings = [(ROUND, config_of(ROUND, tile, k, stages=stages)) for tile, k, stages in DEPTHS]
    compile_ahead(IMPLS[NAME], [*checked, *(case for case in rings if case[1] is not None)])


@pytest.mark.parametrize(("tile", "tile_k", "stages"), DEPTHS)
def test_a_ring_that_is_filled_many_times_is_exact(tile, tile_k, stages):
    config = config_of(ROUND, tile, tile_k, stages=stages)
    if config is None:
        pytest.skip(f"{stages} stages of {tile} hold no results")
    x, grad = ROUND.operator.examples(ROUND, "integer", 0, DEVICE)
    found = IMPLS[NAME].build(config, ROUND, spec_of(0))(x, grad)
    truth = torch.nn.grad.conv2d_weight(x.double(), found.shape, grad.double(), padding=1)
    assert torch.equal(found.double(), truth)


@pytest.mark.parametrize(("w", "tile", "modes"), CASES, ids=str)
def test_every_geometry_result_and_split_mode_is_right(w, tile, modes):
    verifier, configs = Verifier(w, DEVICE), configs_of(w, tile, modes)
    for config in configs:
        message = verifier.check(IMPLS[NAME].build(config, w, spec_of(0))).message
        assert message == "", config
    if not configs:
        pytest.skip(f"taps of {tile} share nothing")


def test_an_infinity_at_the_border_stays_with_the_taps_that_meet_it():
    w = GEOMETRIES[0]
    x, grad = w.operator.examples(w, "random", 0, DEVICE)
    x[:, 5, :, -1], x[0, 9, 0, :] = torch.inf, -torch.inf
    for tile in TILES:
        kernel = IMPLS[NAME].build(config_of(w, tile), w, spec_of(0))
        found = kernel(x, grad)
        assert found[:, 5, :, 0].isfinite().all()
        assert found[:, 9, 2].isfinite().all()
        assert not found[:, 5, 1, 1:].isfinite().any()
        assert torch.equal(kernel(x, grad).view(torch.int16), found.view(torch.int16))
