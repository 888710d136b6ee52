"""Gradients of vectors that each sample has of its own: row kernels add up over its rows."""

import random
from dataclasses import replace

import pytest
import torch
from fused_on_cpu import assert_verified
from torch.nn import functional as F

from emulated import Emulated
from norms_of_samples import ADAPTIVE, GATED, ODDLY_APART, adaptive, gated
from tilewright.compile import cxx
from tilewright.device import DEVICES
from tilewright.dispatch.functions.fuse import fuse
from tilewright.fusion.cuda import program_source, target
from tilewright.fusion.cuda.column_graph import MOST_SAMPLES, SAMPLE_ROWS, RowGraph, split
from tilewright.fusion.cuda.kernel import MOST_WAVES, Launch
from tilewright.impls.fused import graph_of
from tilewright.measure.verify import Verifier
from tilewright.op import Workload

H200, CPU = DEVICES["h200"], torch.device("cpu")
pytestmark = pytest.mark.usefixtures("forgets_functions")
emulation = pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing()))


def chunked(x, condition):
    """Both vectors from one product, as slices of it."""
    shift, scale = condition.chunk(2, -1)
    return F.rms_norm(x, x.shape[-1:], eps=1e-6) * (1.0 + scale) + shift


def dropped(x, scale):
    return F.dropout(F.rms_norm(x, x.shape[-1:], eps=1e-6) * scale, 0.3)


def weighted(x, weight, scale):
    """The weight is that of all samples."""
    return F.layer_norm(x, x.shape[-1:], weight) * scale


def in_sum(x, scale):
    """What is written is the sum of samples."""
    return (F.rms_norm(x, x.shape[-1:], eps=1e-6) * scale).sum(0)


def positions(x, place, scale):
    """Sums over samples beside those over rows."""
    return F.rms_norm(x + place, x.shape[-1:], eps=1e-6) * scale


def peaks(x):
    """Reduced over rows, not summed: the least and the greatest, beside what the row's mean is."""
    y = x - x.mean(-1, keepdim=True)
    return y, y.amax(1), y.amin(1), y.sum(1)


def workload(function, text):
    fuse(function)
    return Workload.parse(text)


def adaptive_norm(dtype, samples, rows, width):
    return workload(adaptive, ADAPTIVE.format(d=dtype, s=samples, r=rows, h=width))


def verify(w, config):
    found = Verifier(w, CPU).check(Emulated(graph_of(w), config, H200, w))
    assert found.message == "", config


ONE_PASS = {
    "adaptive": (adaptive, ADAPTIVE.format(d="f16", s=3, r=33, h=264)),
    "another dim first": (
        adaptive,
        "adaptive_backward(grad_output=f32[33,3,264], x=f32[33,3,264], shift=f32[1,3,264], scale=f32[1,3,264])",  # noqa: E501
    ),
    "several dims of rows": (
        adaptive,
        "adaptive_backward(grad_output=f32[3,5,7,264], x=f32[3,5,7,264]@strides(18480,264,2640,1), shift=f32[3,1,1,264], scale=f32[3,1,1,264])",  # noqa: E501
    ),
    "fp64": (adaptive, ADAPTIVE.format(d="f64", s=2, r=20, h=264)),
    "a gate": (gated, GATED.format(d="bf16", s=3, r=33, h=264)),
    "slices": (
        chunked,
        "chunked_backward(grad_output=f32[3,33,264], x=f32[3,33,264], condition=f32[3,1,528])",
    ),
    "strided": (
        adaptive,
        "adaptive_backward(grad_output=f16[3,33,264]@strides(8712,264,1), x=f16[3,33,264]@strides(20000,512,1), shift=f16[3,1,264], scale=f16[3,1,264]@strides(1056,1056,1))",  # noqa: E501
    ),
    "oddly apart": (adaptive, ODDLY_APART.format(d="f16")),
    "oddly apart, by copies": (adaptive, ODDLY_APART.format(d="f32")),
    "dropout": (
        dropped,
        "dropped_backward(grad_output=f32[3,33,264], x=f32[3,33,264], scale=f32[3,1,264], seed=i64[])",  # noqa: E501
    ),
    "one of the gradients": (
        adaptive,
        ADAPTIVE.format(d="f16", s=3, r=33, h=264).replace(")", ", grads=[x,scale])"),
    ),
    "a sum of samples": (
        in_sum,
        "in_sum_backward(grad_output=f32[33,264], x=f32[3,33,264], scale=f32[3,1,264])",
    ),
    "extremes": (peaks, "peaks(x=f16[3,33,264])"),
}


@emulation
@pytest.mark.parametrize("name", ONE_PASS)
def test_rows_and_the_sums_of_each_sample_are_one_pass(name):
    w = workload(*ONE_PASS[name])
    rows = target.one_pass(graph_of(w), H200)
    assert isinstance(rows, RowGraph)
    assert rows.samples in (2, 3)
    assert_verified(w)


SEVERAL = {
    "a weight of all": (
        weighted,
        "weighted_backward(grad_output=f32[3,33,264], x=f32[3,33,264], weight=f32[264], scale=f32[3,1,264])",  # noqa: E501
    ),
    "positions": (
        positions,
        "positions_backward(grad_output=f32[3,33,264], x=f32[3,33,264], place=f32[33,264], scale=f32[3,1,264])",  # noqa: E501
    ),
    "samples of two dims": (
        adaptive,
        "adaptive_backward(grad_output=f32[3,2,33,264], x=f32[3,2,33,264], shift=f32[1,2,1,264], scale=f32[3,2,1,264])",  # noqa: E501
    ),
    "few rows": (adaptive, ADAPTIVE.format(d="f32", s=4, r=SAMPLE_ROWS - 1, h=264)),
}


@emulation
@pytest.mark.parametrize("name", SEVERAL)
def test_what_does_not_fit_is_right_by_several_kernels(name):
    w = workload(*SEVERAL[name])
    assert isinstance(split(graph_of(w)), str)
    assert_verified(w)


@pytest.mark.parametrize(
    ("samples", "rows", "why"),
    [
        (4, SAMPLE_ROWS - 1, "sums over 15 rows, fewer than 16"),
        (MOST_SAMPLES + 1, SAMPLE_ROWS, "for each of 65536 samples: a grid has 65535"),
    ],
)
def test_samples_that_a_grid_does_not_hold_or_that_are_too_short_are_left(samples, rows, why):
    graph = graph_of(adaptive_norm("f16", samples, rows, 1024))
    assert why in split(graph)
    assert target.unsupported(graph, H200) is None
    _, program, _ = program_source.emit(graph, target.heuristic(graph, H200), H200)
    assert program.large() == 2


@emulation
@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"stages": 0, "parameters": "reload"},
        {"stages": 1, "parameters": "registers", "rows_per_block": 2, "min_blocks": 4},
        {"rows_per_thread": 2, "rematerialize": True},
        {"cluster": 2, "row_threads": 64, "rows_per_block": 4, "vector": 8},
        {"bulk": True, "widened": True, "vector": 8},
        {"vector": 2, "row_threads": 128, "rows_per_block": 1, "min_blocks": 2, "early": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [17, 31])
def test_schedules_of_all_kinds_keep_samples_apart(changed, rows):
    w = adaptive_norm("f16", 3, rows, 1032)
    config = replace(target.heuristic(graph_of(w), H200), **changed)
    space = target.space(graph_of(w), H200)
    assert config in space, space.why_not(config)
    verify(w, config)


@emulation
def test_schedules_at_random_keep_samples_apart():
    w = adaptive_norm("f16", 2, 19, 520)
    space = target.space(graph_of(w), H200)
    assert space.values["combine"] == ("kernel",)
    for config in space.sample(random.Random(0), 8):
        verify(w, config)


@emulation
@pytest.mark.usefixtures("late_warps")
def test_any_warp_may_be_late():
    w = adaptive_norm("f16", 2, 19, 520)
    verify(w, target.heuristic(graph_of(w), H200))


def test_one_kernel_serves_all_lengths_of_samples():
    sources = set()
    for rows in (40, 41, 64, 100):
        graph = graph_of(adaptive_norm("f16", 64, rows, 1152))
        sources.add(target.task(graph, target.heuristic(graph, H200), H200).source)
    assert len(sources) == 1


def launch(samples, per_block, cluster=1, most=None):
    return Launch(
        256, per_block, 0, cluster, "", samples=samples, persistent=True, most_blocks=most
    )


@pytest.mark.parametrize("resident", [132, 264, 8])
@pytest.mark.parametrize("samples", [1, 2, 7, 32, 100, 132, 133, 5000])
@pytest.mark.parametrize("rows", [16, 17, 256, 4096])
@pytest.mark.parametrize("cluster", [1, 4])
def test_blocks_of_samples_leave_little_of_a_device_idle(resident, samples, rows, cluster):
    made = launch(samples, 4, cluster)
    blocks = made.walking(rows, resident)
    assert blocks % cluster == 0
    assert 0 < blocks <= made.blocks(rows)
    at_once, clusters = resident // cluster, blocks // cluster
    taken = -(-samples * clusters // at_once) * (-(-rows // (4 * clusters)) + 1)
    evenly = samples * rows / (4 * at_once) + 1  # by a device of which nothing is idle
    alone = -(-samples // at_once) * (-(-rows // 4) + 1)
    assert taken <= alone
    assert samples * (clusters - 1) < MOST_WAVES * at_once
    if samples * -(-rows // 4) >= 4 * at_once and rows >= 256:
        assert taken <= 1.35 * evenly
    assert launch(samples, 4, cluster, most=blocks).walking(rows, resident) == blocks


@pytest.mark.parametrize("resident", [120, 264])
@pytest.mark.parametrize(("samples", "rows"), [(1, 4096), (7, 4096), (32, 256), (132, 16)])
def test_no_more_blocks_walk_than_there_is_room_for_what_they_leave(samples, rows, resident):
    """However many run at once: of other numbers, others would be the fastest."""
    most = launch(samples, 4).walking(rows, 132)
    assert 0 < launch(samples, 4, most=most).walking(rows, resident) <= most


def test_few_samples_take_a_block_of_every_sm():
    assert launch(32, 8).walking(256, 132) == 4
    assert launch(100, 8).walking(1024, 132) * 100 > 3 * 132
    assert launch(1, 8).walking(10000, 132) == 132
