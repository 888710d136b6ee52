"""The Hopper kernel of the weight gradient, run on a CPU: copies, barriers, stages, products."""

import re
import struct
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from convolutions import bias_off_by, weight_grad, with_bias, with_fp32_bias
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tensor_cores_on_cpu import DEVICE, OnCpu, without_a_gpu

from geometries import configs, layers
from infinities import assert_infinities_stay, assert_overflow_is_infinite, with_infinities
from on_cpu import fails
from tilewright.compile import cxx, nvrtc
from tilewright.impl import IMPLS
from tilewright.impls.weight_gradient import _launch
from tilewright.impls.weight_gradient import conv2d_weight_grad_sm90 as sm90
from tilewright.impls.weight_gradient._model import MARKED, SERIAL
from tilewright.impls.weight_gradient._problem import problem_of
from tilewright.impls.weight_gradient._stream import halo_of
from tilewright.op import Workload

pytestmark = pytest.mark.skipif(
    nvrtc.missing() is not None or cxx.missing() is not None, reason="a compiler is missing"
)
SM90 = IMPLS["conv2d_weight_grad_sm90"]
HEADER = (Path(__file__).parent / "hopper_on_cpu.hpp").read_text()
BOX = "Q12i"
PLAIN = weight_grad("2,72,7,6", "2,72,7,6", "kernel_size=3, padding=1")
STRIDED = weight_grad("3,24,9,8", "3,136,5,4", "kernel_size=3, stride=2, padding=1", dtype="bf16")
MATRIX = weight_grad("3,136,7,8", "3,72,7,8", "kernel_size=1")
BIAS = Workload.parse(str(PLAIN).replace("weight_grad", "weight_bias_grad"))
BIAS_F32 = with_fp32_bias(PLAIN)


def tiled(dtype, address, sizes, strides, box):
    columns, pixels = sizes
    return struct.pack(BOX, address, columns, 0, pixels, 0, 0, box[1], *[0] * 6).ljust(128, b"\0")


def im2col(dtype, address, sizes, strides, lower, upper, channels, pixels, stride):
    columns, width, height, images = sizes
    fields = (columns, 1, width, height, images, pixels, *lower, *upper, *stride)
    return struct.pack(BOX, address, *fields).ljust(128, b"\0")


@pytest.fixture(autouse=True)
def counters(monkeypatch):
    monkeypatch.setattr(sm90.tensor_map, "tiled", tiled)
    monkeypatch.setattr(sm90.tensor_map, "im2col", im2col)
    zeros = without_a_gpu(monkeypatch, _launch)
    yield zeros
    assert not zeros.any()


def on_cpu(w, config, fault=("", "")):
    def task(config, w, device):
        text = SM90.task(config, w, device).source
        text = re.sub(r"TW_DEVICE void (multiply|begin)\(.*?\n}\n", "", text, flags=re.S)
        for barrier, name in (
            ("sync 1", "consumers"),
            ("sync 2", "everyone"),
            ("arrive 2", "arrive"),
        ):
            text = text.replace(f"bar.{barrier}, %0", f"bar.{name} %0")
        return SimpleNamespace(source=HEADER + text)

    return OnCpu(SimpleNamespace(build=SM90.build, task=task), config, w, fault)


def check(w, config, fault=("", "")):
    space = SM90.space(w, DEVICE).restricted(
        {"blocks": [config.blocks], "split_k": [config.split_k]}
    )
    assert space.why_not(config) is None
    kernel = on_cpu(w, config, fault)
    for _ in range(2):  # threads take turns forwards, then backwards
        x, grad, *more = w.operator.examples(w, "integer", 0, "cpu")
        found = kernel(x, grad, *more)
        for one, truth in zip(
            found if isinstance(found, tuple) else (found,),
            w.operator.truth(w, (x, grad, *more)),
            strict=True,
        ):
            if not torch.equal(one.double(), truth.to(one.dtype).double()):
                return False
    return True


GROUPS = weight_grad("2,72,7,6", "2,72,7,6", "kernel_size=3, padding=1, groups=9")
WIDE_GROUPS = weight_grad(
    "2,128,9,8", "2,128,5,4", "kernel_size=3, stride=2, padding=1, groups=4", dtype="bf16"
)
GROUPS_BIAS = Workload.parse(str(WIDE_GROUPS).replace("weight_grad", "weight_bias_grad"))
WHOLE = [
    (PLAIN, sm90.Config(64, 64, 32, 3, split_k=2)),
    (STRIDED, sm90.Config(128, 128, 64, 2, pending=0)),
    (MATRIX, sm90.Config(64, 128, 32, 4, fetch="matrix")),
    (BIAS, sm90.Config(64, 64, 32, 3, split_k=2, combine=SERIAL)),
    (with_bias(PLAIN, "f16"), sm90.Config(64, 64, 32, 3, split_k=2, combine=SERIAL)),
    (with_bias(MATRIX, "f32"), sm90.Config(64, 128, 32, 3)),
    (BIAS_F32, sm90.Config(64, 64, 32, 3, split_k=3, combine="kernel")),
    (BIAS_F32, sm90.Config(128, 128, 32, 3, split_k=2, pending=0)),
    (with_bias(PLAIN, "f32"), sm90.Config(64, 64, 32, 3, split_k=3, combine=SERIAL)),
    (MATRIX, sm90.Config(64, 128, 32, 3, split_k=5, combine=SERIAL)),
    (PLAIN, sm90.Config(64, 64, 32, 3, split_k=2, combine="kernel", add_threads=128)),
    (PLAIN, sm90.Config(64, 192, 64, 3, halo=halo_of(problem_of(PLAIN), 192, 64))),
    (GROUPS, sm90.Config(64, 192, 64, 2, split_k=2)),
    (GROUPS, sm90.Config(64, 192, 64, 3, halo=halo_of(problem_of(GROUPS), 192, 64))),
    (WIDE_GROUPS, sm90.Config(64, 128, 32, 2)),
    (GROUPS_BIAS, sm90.Config(64, 64, 32, 2)),
    (Workload.parse(str(GROUPS)[:-1] + ", out_dtype=f32)"), sm90.Config(64, 128, 32, 2)),
]
RANGES = [
    (PLAIN, sm90.Config(64, 64, 32, 3, blocks=7)),
    (BIAS, sm90.Config(64, 128, 32, 2, blocks=5, pending=0)),
    (with_bias(PLAIN, "f16"), sm90.Config(64, 128, 32, 2, blocks=5)),
    (with_bias(PLAIN, "f32"), sm90.Config(64, 128, 32, 2, blocks=5)),
    (STRIDED, sm90.Config(128, 64, 32, 2, blocks=4)),
    (MATRIX, sm90.Config(64, 64, 32, 4, blocks=5, fetch="matrix")),
    (BIAS, sm90.Config(64, 64, 32, 3, blocks=4, whole=True)),
    (STRIDED, sm90.Config(64, 64, 32, 2, blocks=2, whole=True, pending=0)),
    (PLAIN, sm90.Config(64, 192, 64, 2, blocks=5, halo=halo_of(problem_of(PLAIN), 192, 64))),
]


TALL = weight_grad("3,136,7,8", "3,200,7,8", "kernel_size=1")
SMALL, PAIRS = sm90.Config(64, 64, 32, 3), sm90.Config(64, 64, 64, 3, cluster=2)
TOGETHER = [
    (PLAIN, replace(SMALL, split_k=3, combine="grid")),
    (STRIDED, sm90.Config(128, 128, 32, 3, split_k=2, combine="grid", pending=0)),
    (BIAS_F32, replace(SMALL, split_k=2, combine="grid")),
    (PLAIN, replace(SMALL, split_k=3, combine=MARKED)),
    (with_bias(PLAIN, "f32"), replace(SMALL, split_k=2, combine=MARKED)),
    (PLAIN, replace(PAIRS, split_k=2)),
    (MATRIX, replace(PAIRS, tile_k=32, stages=5, split_k=4)),
    (MATRIX, replace(PAIRS, tile_k=32, stages=5, split_k=4, combine="grid")),
    (MATRIX, replace(PAIRS, tile_k=32, stages=5, split_k=4, combine="kernel")),
    (BIAS_F32, replace(PAIRS, split_k=2)),
    (with_bias(MATRIX, "f16"), replace(PAIRS, cluster=3, split_k=3)),
    (Workload.parse(str(MATRIX)[:-1] + ", out_dtype=f32)"), replace(PAIRS, cluster=3, split_k=3)),
    (GROUPS, replace(PAIRS, split_k=2)),
    (PLAIN, sm90.Config(64, 192, 64, 3, 2, 2, halo=halo_of(problem_of(PLAIN), 192, 64))),
    (PLAIN, replace(PAIRS, split_k=2, exchange="sent")),
    (MATRIX, replace(PAIRS, cluster=3, split_k=3, exchange="sent")),
    (MATRIX, replace(PAIRS, tile_k=32, stages=5, split_k=4, exchange="sent")),
    (MATRIX, replace(PAIRS, tile_k=32, stages=5, split_k=4, exchange="sent", combine="grid")),
    (TALL, sm90.Config(64, 128, 32, 3, fetch="shared")),
    (TALL, sm90.Config(128, 128, 32, 3, split_k=2, fetch="shared", combine="grid")),
]


@pytest.mark.parametrize(("w", "config"), WHOLE, ids=str)
def test_steps_of_a_tile_are_copied_and_multiplied(w, config):
    assert check(w, config)


@pytest.mark.parametrize(("w", "config"), TOGETHER, ids=str)
def test_blocks_add_each_others_slices_and_share_boxes(w, config):
    assert check(w, config)


@pytest.mark.usefixtures("late_warps")
@pytest.mark.parametrize(
    ("w", "config"),
    [WHOLE[0], WHOLE[1], WHOLE[11], RANGES[1], *(TOGETHER[i] for i in (0, 3, 6, 14, 18))],
    ids=str,
)
def test_any_warp_may_be_late(w, config):
    assert check(w, config)


MEETS = "while (*(volatile u32*)counter < t.groups) {}"
ENDS = "cluster_arrive_relaxed();  // what was read has been stored: no load is under way"


@pytest.mark.parametrize(
    ("place", "fault"),
    [
        (0, (MEETS, "")),
        (0, ("t.rank * t.groups + t.group;", "t.rank * t.groups;")),
        (3, ("if (is_marked(v[i][j]))", "if (false)")),
        (5, ("cluster_arrive();\n  cluster_wait();\n  Quad* group", "Quad* group")),
        (5, (f"{ENDS}\n  cluster_wait();", "")),
        (6, ("own + (begin + i * THREADS) * 16", "own + begin * 16")),
        (
            14,
            (
                "(CLUSTER - 1) * (segment_begin(rank + 1)",
                "(CLUSTER - 2) * (segment_begin(rank + 1)",
            ),
        ),
        (14, ("cluster_wait();  // until all barriers are there", "")),
        (18, ("CONSUMERS * SHARE", "CONSUMERS")),
        (18, ("j % SHARE) load_rows_everywhere", "j % SHARE) load_rows")),
    ],
)
def test_blocks_that_do_not_wait_or_add_other_segments_are_found(place, fault, counters):
    w, config = TOGETHER[place]
    assert fails(lambda: check(w, config, fault))
    counters.zero_()  # who is given up leaves them as they were


@settings(max_examples=4)
@given(st.data())
def test_any_two_axes_and_any_config_are_right(data):
    w = data.draw(layers(depths=(None, 8, 32), most_images=2, most_size=9, most_units=12))
    assume(SM90.unsupported(w, DEVICE) is None)
    space = SM90.space(w, DEVICE).restricted({"blocks": [0]})
    config = data.draw(configs(space, sm90.Config(stages=2)))
    assert check(w, config), (w, config)


LONG = with_fp32_bias(weight_grad("6,8,32,32", "6,72,32,32", "kernel_size=1"))
"""6144 terms of the bias."""


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"split_k": 24, "combine": "kernel"},
        {"split_k": 24, "combine": "grid"},
        {"split_k": 24, "combine": MARKED},
        {"split_k": 24, "cluster": 2},
        {"split_k": 24, "combine": SERIAL},
        {"split_k": 24, "combine": SERIAL, "pending": 0},
        {"blocks": 5},
    ],
)
def test_fp32_sums_of_the_bias_are_rounded_about_once(more):
    assert bias_off_by(on_cpu(LONG, sm90.Config(64, 64, 64, 3, **more)), LONG) < 1.2


@pytest.mark.parametrize(
    ("more", "fault"),
    [
        ({}, ("rest += before", "0 * before")),
        ({"split_k": 96, "combine": "kernel"}, ("& 0xfffc0000u", "& ~0u")),
    ],
)
def test_what_fp32_sums_of_the_bias_are_rounded_by_counts(more, fault):
    config = sm90.Config(64, 64, 64, 2, **more)
    assert bias_off_by(on_cpu(LONG, config), LONG) < 1.2
    assert bias_off_by(on_cpu(LONG, config, fault), LONG) > 1.3


def test_infinities_of_grad_output_are_infinite_in_the_bias():
    w = with_bias(PLAIN, "f32")
    tensors = w.operator.examples(w, "random", 0, "cpu")
    grad = tensors[1]
    grad[0, 3, 2, 2], grad[1, 5, 1, 1], grad[0, 9, 0, 0] = torch.inf, -torch.inf, torch.nan
    grad[0, 7, 3, 3], grad[1, 7, 3, 3] = torch.inf, -torch.inf
    for split_k, combine in ((1, "last"), (2, "kernel"), (2, SERIAL)):
        kernel = on_cpu(w, sm90.Config(64, 64, 32, 3, split_k=split_k, combine=combine))
        found, truth = kernel(*tensors)[1].double(), w.operator.truth(w, tensors)[1]
        torch.testing.assert_close(found, truth, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("halo", [0, halo_of(problem_of(GROUPS), 192, 64)])
def test_infinities_stay_with_their_groups(halo):
    x, grad = with_infinities(GROUPS)
    kernel = on_cpu(GROUPS, sm90.Config(64, 192, 64, 3, halo=halo))
    assert_infinities_stay(GROUPS, kernel(x, grad), x, grad)


@pytest.mark.parametrize(("w", "config"), RANGES, ids=str)
def test_stages_go_round_through_all_segments_of_a_block(w, config):
    assert check(w, config)


@pytest.mark.parametrize(
    "fault",
    [
        ("else if (held >= 0) release(held);", "else release(stage);"),
        ("(t.first + i - done) * TILE_K", "(t.first + i) * TILE_K"),
        ("u32 parity = done / STAGES & 1;", "u32 parity = 0;"),
    ],
)
def test_a_stage_given_back_too_early_and_steps_of_another_segment_are_found(fault, counters):
    config = replace(RANGES[0][1], stages=2)
    assert fails(lambda: check(MATRIX, replace(config, fetch="matrix"), fault))
    counters.zero_()  # who is given up leaves them as they were


@pytest.mark.parametrize("config", [WHOLE[0][1], RANGES[0][1]], ids=str)
def test_results_beyond_the_range_of_a_half_are_infinite(config):
    assert_overflow_is_infinite(PLAIN, on_cpu(PLAIN, config))
