"""Stream-K of the Hopper weight gradient: blocks that walk equal ranges of all tiles' steps, or of
whole tiles."""

import struct
from dataclasses import replace

import pytest
import torch
from convolutions import SIMPLE, weight_grad, with_bias
from epilogue_on_cpu import SM90, epilogue_on_cpu
from hypothesis import given, settings
from hypothesis import strategies as st
from tensor_cores_on_cpu import without_a_gpu

from on_cpu import fails
from tilewright.compile import cxx, nvrtc
from tilewright.compile.cache import compiled
from tilewright.device import DEVICES
from tilewright.impls.weight_gradient import _launch
from tilewright.impls.weight_gradient import conv2d_weight_grad_sm90 as sm90
from tilewright.impls.weight_gradient._model import predicted_us
from tilewright.impls.weight_gradient._problem import problem_of
from tilewright.measure.verify import Verifier
from tilewright.op import Workload

H200 = DEVICES["h200"]
DEEP = weight_grad("256,512,7,7", "256,512,7,7", "kernel_size=3, padding=1")
"""Of 72 tiles of 128 x 256, which fill an H200's SMs badly."""
TILES = [tile for tile in sm90.WARPGROUPS if tile != (64, 576)]
MANY = weight_grad("32,1024,14,14", "32,1024,14,14", "kernel_size=3, padding=1")
"""Of 288 tiles of 128 x 256: three for some of an H200's SMs, and two for the others."""
KERNEL = """
extern "C" __global__ void __launch_bounds__(THREADS) weight_grad(const u16* x, const u16* grad,
    Out* weight, Out* bias, float* partial, u32* counters, int phase,
    const __grid_constant__ Problem p) {
  __shared__ Panel panels[TILE_PANELS];
  const int warp = threadIdx.x / 32;
  for (int at = range_begin(p, blockIdx.x); at < range_begin(p, blockIdx.x + 1);) {
    const Tile t = segment_at(p, at);
    at += t.steps;
    if ((phase == 0) != (t.first > 0)) continue;
    __syncthreads();
    find_panels(panels, p, t);
    __syncthreads();
    float sums[BLOCKS][COLUMNS / 2], bias_sums[BLOCKS][4] = {};
    for (int m = 0; m < BLOCKS; ++m) {
      for (int j = 0; j < COLUMNS / 2; ++j) sums[m][j] = NAN;
      const int pixel = t.first * TILE_K, end = min(p.pixels, pixel + t.steps * TILE_K);
      for (int below = 0; below < 2; ++below) {
        const int k = t.row + Fragment(warp, m, 0, threadIdx.x % 32).row + below * 8;
        for (int i = pixel; i < end && k < p.features; ++i)
          add_to_bias(bias_sums[m] + below * 2, DTYPE::widen(grad[i * p.features + k]));
      }
    }
    leave_padding_out(x, grad, p, t, p.channels, panels, warp, sums);
    finish_segment<THREADS>({weight, bias}, partial, counters, panels, p, t, warp, sums, bias_sums);
  }
}
"""
"""Products left nothing but NaN, which is summed again pixel by pixel. Blocks run one after the
other, so the segments that others wait for come first."""
SMALL = weight_grad("2,72,7,6", "2,72,7,6", "kernel_size=3, padding=1")
LAYERS = [
    SMALL,
    weight_grad("3,24,9,8", "3,136,5,4", "kernel_size=3, stride=2, padding=1", dtype="bf16"),
    weight_grad("2,72,7,6", "2,72,7,6", "kernel_size=3, padding=1, out_dtype=f32"),
    weight_grad(
        "2,72,7,6", "2,72,7,6", "kernel_size=3, padding=1, into=f16[72,72,3,3]@channels_last"
    ),
    Workload.parse(str(SMALL).replace("weight_grad", "weight_bias_grad")),
    with_bias(SMALL, "f16"),
    with_bias(SMALL, "f32"),
]


def on_cpu(w, tile, blocks, fault=("", ""), whole=False):
    more = {"blocks": blocks, "whole": whole}
    return epilogue_on_cpu(w, KERNEL, *tile, 32, 4, phases=2, fault=fault, **more)


@pytest.mark.skipif(
    nvrtc.missing() is not None or cxx.missing() is not None, reason="a compiler is missing"
)
@pytest.mark.parametrize("w", LAYERS, ids=str)
def test_segments_of_tiles_add_up_to_the_gradient(w, monkeypatch):
    zeros = without_a_gpu(monkeypatch, _launch)
    more = [((64, 128), 13), ((128, 128), 3)]
    for tile, blocks in [((64, 64), 7), *(more if w is SMALL else [])]:
        verdict = Verifier(w, torch.device("cpu")).check(on_cpu(w, tile, blocks))
        assert verdict.ok, verdict.message
        assert verdict.deterministic
        assert not zeros.any()
    persistent = on_cpu(w, (64, 64), 3, whole=True)
    verdict = Verifier(w, torch.device("cpu")).check(persistent)
    assert verdict.ok, verdict.message
    assert persistent.executable.workspace_bytes == 0
    assert not persistent.executable.waits


@pytest.mark.skipif(
    nvrtc.missing() is not None or cxx.missing() is not None, reason="a compiler is missing"
)
def test_a_segment_that_is_not_added_is_found(monkeypatch):
    without_a_gpu(monkeypatch, _launch)
    lost = on_cpu(SMALL, (64, 64), 7, ("int i = 1; i <= later", "int i = 2; i <= later"))
    assert fails(lambda: Verifier(SMALL, torch.device("cpu")).check(lost).ok)


@pytest.mark.parametrize("tile", sm90.WARPGROUPS)
@pytest.mark.parametrize(
    "w",
    [
        *(SIMPLE, Workload.parse(str(SIMPLE)[:-1] + ", out_dtype=f32)")),
        *(with_bias(SIMPLE, dtype) for dtype in (None, "f16", "f32")),
    ],
    ids=str,
)
def test_every_tile_compiles_without_spills_or_serialised_products(tile, w):
    whole = sm90.Config(*tile, stages=4, blocks=132, whole=True)
    if tile == (64, 576):
        whole = replace(whole, tile_k=32)
    if whole.sums < sm90.MOST_SUMS or not problem_of(w).bias:
        built = compiled(SM90.task(whole, w, H200))
        assert built.resources.spill_bytes == 0
        assert "serialized" not in built.log
    if tile not in TILES:
        return
    config = replace(whole, whole=False)
    if w.tensors.get("into_bias") and w["into_bias"].dtype == "f32" and config.sums > 64:
        why = SM90.space(w, H200).restricted({"blocks": [132]}).why_not(replace(config, stages=2))
        assert "too few registers for fp32 sums of the bias" in why
        return
    built = compiled(SM90.task(config, w, H200))
    assert built.resources.spill_bytes == 0
    assert "serialized" not in built.log


@pytest.mark.parametrize(
    ("w", "more"),
    [
        (weight_grad("8,64,56,56", "8,128,56,56", "kernel_size=3, padding=1, out_dtype=f32"), {}),
        (
            weight_grad(
                "8,64,56,56",
                "8,128,56,56",
                "kernel_size=3, padding=1, into=f16[128,64,3,3]@channels_last",
            ),
            {},
        ),
        (SIMPLE, {"pending": 0}),
        (SIMPLE, {"tile_k": 128, "stages": 2}),
        (SIMPLE, {"tile_n": 192, "halo": 1}),
        (weight_grad("8,256,56,56", "8,128,56,56", "kernel_size=1"), {"fetch": "matrix"}),
    ],
)
def test_every_result_and_way_to_copy_compiles_without_spills(w, more):
    for tile in ((64, 64), (128, 256)):
        config = replace(sm90.Config(*tile, stages=4, blocks=132), **more)
        if SM90.space(w, H200).why_not(config) is None:
            assert compiled(SM90.task(config, w, H200)).resources.spill_bytes == 0
            return
    pytest.fail("neither fits")


def test_what_does_not_go_with_ranges_is_refused_in_words():
    space = SM90.space(SIMPLE, H200).restricted({"blocks": [0, 132, 264], "split_k": [1, 2]})
    ranges = sm90.Config(128, 128, stages=4, blocks=132)
    assert space.why_not(ranges) is None
    assert "cut no slices" in space.why_not(replace(ranges, split_k=2))
    assert "cut no slices" in space.why_not(replace(ranges, warm=True))
    assert "by blocks, not by slices" in space.why_not(replace(ranges, combine="grid"))
    assert "cannot run at once" in space.why_not(replace(ranges, blocks=264))
    assert "too few registers" in space.why_not(replace(ranges, tile_m=64, tile_n=576, stages=2))
    assert "tiles are one or none for each of 132 blocks" in space.why_not(
        replace(ranges, whole=True)
    )
    assert "without ranges" in space.why_not(replace(ranges, blocks=0, whole=True))
    many = SM90.space(MANY, H200).restricted({"blocks": [132], "split_k": [1, 2]})
    persistent = sm90.Config(128, 256, stages=2, blocks=132, whole=True)
    assert many.why_not(persistent) is None
    with_sums = SM90.space(with_bias(MANY, None), H200).restricted({"blocks": [132]})
    assert "tile after tile beside sums" in with_sums.why_not(persistent)
    assert "cut no slices" in many.why_not(replace(persistent, split_k=2))
    small = weight_grad("1,64,8,8", "1,64,8,8", "kernel_size=1")
    assert "no ranges of 132 blocks" in SM90.space(small, H200).why_not(
        sm90.Config(64, 64, stages=4, blocks=132)
    )


def test_ranges_are_forecast_to_fill_what_tiles_do_not():
    problem = problem_of(DEEP)
    ranges = sm90.Config(128, 256, stages=4, blocks=132)
    found = SM90.forecast(ranges, DEEP, H200)
    assert (found["tiles"], found["waves"], found["tail"]) == (72, 1.0, 0.0)
    assert found["workspace_bytes"] == 132 * 128 * 256 * 4
    others = [replace(ranges, blocks=0, split_k=n, combine="kernel") for n in (1, 2, 3, 4)]
    assert all(predicted_us(problem, H200, c) > 1.1 * found["predicted_us"] for c in others[1:])
    assert any(c.blocks for c in SM90.promising(DEEP, H200))
    assert SM90.heuristic(DEEP, H200).blocks == H200.sms


def test_persistent_blocks_are_forecast_and_tried_where_tiles_are_many():
    problem = problem_of(MANY)
    persistent = sm90.Config(128, 256, stages=4, blocks=132, whole=True)
    found = SM90.forecast(persistent, MANY, H200)
    assert (found["tiles"], found["slices"], found["workspace_bytes"]) == (288, 1, 0)
    one_by_one = replace(persistent, blocks=0, whole=False)
    assert 0 < found["predicted_us"] < predicted_us(problem, H200, one_by_one)
    assert found["predicted_us"] > 0.9 * predicted_us(problem, H200, one_by_one)
    assert any(c.whole for c in SM90.promising(MANY, H200))
    assert not any(c.whole for c in SM90.promising(DEEP, H200))


def test_one_binary_serves_every_number_of_blocks():
    few, many = sm90.Config(64, 64, blocks=132), sm90.Config(64, 64, blocks=264)
    assert SM90.task(few, SIMPLE, H200) == SM90.task(many, SIMPLE, H200)
    assert SM90.compile_key(few, SIMPLE) == SM90.compile_key(many, SIMPLE)
    assert SM90.compile_key(few, SIMPLE) != SM90.compile_key(sm90.Config(64, 64), SIMPLE)
    assert SM90.compile_key(few, SIMPLE) != SM90.compile_key(replace(few, whole=True), SIMPLE)


@settings(max_examples=40)
@given(st.integers(1, 40), st.integers(1, 30), st.integers(1, 50))
def test_ranges_meet_every_step_once_and_leave_one_segment_for_others(tiles, steps, blocks):
    """What the kernel computes of Problem.steps and .longer."""
    blocks = min(blocks, tiles * steps)
    shape = f"{64 * steps},64,1,1"
    packed = problem_of(weight_grad(shape, shape, "kernel_size=1")).packed(64, 64, blocks, tiles)
    each, longer = struct.unpack_from("2i", packed, 8 * 4)
    begins = [b * each + min(b, longer) for b in range(blocks + 1)]
    assert (begins[0], begins[-1]) == (0, tiles * steps)
    for block in range(blocks):
        firsts = []
        at = begins[block]
        while at < begins[block + 1]:
            first = at % steps
            firsts.append(first)
            at += min(steps - first, begins[block + 1] - at)
        assert at == begins[block + 1]
        assert all(first == 0 for first in firsts[1:])
    blocks = min(blocks, tiles)
    packed = problem_of(weight_grad(shape, shape, "kernel_size=1")).packed(
        64, 64, blocks, tiles, True
    )
    each, longer = struct.unpack_from("2i", packed, 8 * 4)
    assert each * blocks + longer == tiles
    assert 0 <= longer < blocks
