"""Stream-K of the Hopper weight gradient, on a GPU."""

import functools
from dataclasses import replace

import pytest
import torch

from compile_ahead import compile_ahead
from infinities import assert_infinities_stay, with_infinities
from side_by_side import assert_graphs_and_threads_give
from tilewright.compile.counters import counters
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
SM90 = IMPLS["conv2d_weight_grad_sm90"]
TILES = [tile for tile in sm90.WARPGROUPS if tile != (64, 576)]
BLOCKS = (1, 5, 17, 132)


def layer(n, c, k, h, w, kernel, stride=1, padding=0, dtype="f16", more="", name=""):
    p, q = ((size + 2 * padding - kernel) // stride + 1 for size in (h, w))
    return Workload.parse(
        f"conv2d_weight_{name}grad(x={dtype}[{n},{c},{h},{w}]@channels_last,"
        f" grad_output={dtype}[{n},{k},{p},{q}]@channels_last, kernel_size={kernel},"
        f" stride={stride}, padding={padding}{more})"
    )


PLAIN = layer(6, 72, 136, 19, 13, 3, padding=1)
LAYERS = [
    PLAIN,
    layer(5, 320, 264, 9, 9, 1, dtype="bf16"),
    layer(3, 24, 40, 20, 20, 5, 2, 2),
    layer(6, 72, 136, 19, 13, 3, padding=1, more=", out_dtype=f32"),
    layer(6, 72, 136, 19, 13, 3, padding=1, more=", into=f32[136,72,3,3]@channels_last"),
    layer(6, 72, 136, 19, 13, 3, padding=1, name="bias_"),
    layer(
        6,
        72,
        136,
        19,
        13,
        3,
        padding=1,
        name="bias_",
        more=", into=f32[136,72,3,3]@channels_last, into_bias=f32[136]",
    ),
]
OTHERS = [
    {"tile_k": 32},
    {"pending": 0},
    {"stages": 2},
    {"tile_n": 192, "halo": -1},
    {"whole": True, "pending": 0, "stages": 2},
]


def fits(w, config):
    space = SM90.space(w, spec_of(0)).restricted({"blocks": [config.blocks]})
    return space.why_not(config) is None


def configs(w, tile, blocks=BLOCKS):
    found = [sm90.Config(*tile, stages=3, blocks=n) for n in blocks]
    found += [replace(c, whole=True) for c in found]
    return [c for c in found if fits(w, c)]


def other(w, more):
    config = replace(sm90.Config(64, 64, stages=4, blocks=17), **more)
    return replace(config, halo=halo_of(problem_of(w), 192, 64)) if config.halo else config


def build(config, w):
    return SM90.build(config, w, spec_of(0))


@pytest.fixture(scope="module", autouse=True)
def compiled_ahead():
    cases = [(w, c) for w in LAYERS for tile in TILES for c in configs(w, tile, (1,))]
    cases += [(PLAIN, other(PLAIN, more)) for more in OTHERS]
    compile_ahead(
        SM90, [*cases, (LAYERS[1], replace(configs(LAYERS[1], (64, 64))[0], fetch="matrix"))]
    )


@pytest.fixture(scope="module")
def verifiers():
    return functools.cache(lambda w: Verifier(w, DEVICE))


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("w", LAYERS, ids=str)
def test_every_tile_and_number_of_blocks_is_right(w, tile, verifiers):
    found = configs(w, tile, BLOCKS if w is PLAIN else (5, 132))
    if not found:
        pytest.skip(f"{tile} does not fit {w}")
    for config in found:
        verdict = verifiers(w).check(build(config, w))
        assert verdict.ok, (config, verdict.message)
        assert verdict.deterministic


@pytest.mark.parametrize("more", OTHERS, ids=str)
def test_stages_go_round_through_all_segments(more):
    for w in (PLAIN, layer(4, 64, 200, 15, 13, 3, padding=1)):
        for blocks in (2, 9) if "whole" in more else (2, 17, 132):
            config = replace(other(w, more), blocks=blocks)
            assert fits(w, config)
            assert Verifier(w, DEVICE).check(build(config, w)).message == "", config


def test_x_copied_as_a_matrix_is_right():
    for config in configs(LAYERS[1], (64, 64)):
        kernel = build(replace(config, fetch="matrix"), LAYERS[1])
        assert Verifier(LAYERS[1], DEVICE).check(kernel).message == ""


@pytest.mark.parametrize("tile", TILES)
def test_infinities_do_not_meet_the_padding(tile):
    x, grad = with_infinities(PLAIN)
    for config in configs(PLAIN, tile):
        found = build(config, PLAIN)(x.cuda(), grad.cuda())
        assert_infinities_stay(PLAIN, found.cpu(), x, grad)


def test_streams_graphs_and_threads_give_the_same_bits_and_leave_counters_zero():
    run = build(configs(PLAIN, (64, 64), (17,))[0], PLAIN)
    tensors = PLAIN.operator.examples(PLAIN, "random", 0, DEVICE)
    expected = run(*tensors)
    assert_graphs_and_threads_give(run, tensors, expected)
    assert not any(words.any() for words in counters._kept)
