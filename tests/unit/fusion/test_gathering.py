"""Tile kernels whose own blocks put partials of results together: what they compute."""

import random
from dataclasses import replace

import pytest
import torch

from emulated import Emulated
from program_graphs import LERP, PADDLE_C
from tilewright.compile import cxx
from tilewright.compile.cache import compiled
from tilewright.compile.counters import COUNTERS
from tilewright.device import DEVICES
from tilewright.dispatch.functions.fuse import fuse
from tilewright.fusion.cuda import program_source, target
from tilewright.fusion.cuda.tiles.schedule import TileSchedule
from tilewright.impls.fused import graph_of
from tilewright.measure.verify import Verifier
from tilewright.op import OPS, Workload
from tilewright.tensor_spec import TensorSpec

H200 = DEVICES["h200"]
emulation = pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing()))


def gathering(graph, count, device=H200):
    """Some schedules of which the last block joins."""
    space = target.space(graph, device)
    assert "last" in space.values["combine"]
    space = space.restricted({"combine": ("last",)})
    return space.sample(random.Random(0), count)


def assert_right(w, tried):
    graph = graph_of(w)
    for config in gathering(graph, tried):
        verdict = Verifier(w, torch.device("cpu")).check(Emulated(graph, config, H200, w))
        assert verdict.message == "", config


@emulation
@pytest.mark.parametrize(
    "text",
    [
        LERP.format(d="f32", g="4,3,20,20", x="4,1,1,1", e="4,3,20,20", w="3,1,20"),
        LERP.format(d="bf16", g="4,3,20,24", x="4,1,1,1", e="4,3,20,24", w="3,1,24"),
        LERP.format(d="f32", g="5,7,33", x="5,1,1", e="5,7,33", w="33"),
    ],
    ids=["C", "halves", "odd"],
)
def test_the_last_block_of_each_group_joins_what_the_group_has_left(text):
    assert_right(Workload.parse(text), 4)


@emulation
@pytest.mark.usefixtures("late_warps")
def test_any_warp_may_be_late():
    assert_right(Workload.parse(LERP.format(d="f32", g="5,7,33", x="5,1,1", e="5,7,33", w="33")), 3)


@emulation
@pytest.mark.parametrize("combine", ["kernel", "last"])
@pytest.mark.parametrize(("shares", "unroll"), [(4, 2), (8, 1)])
def test_steps_may_be_loaded_while_those_before_are_computed(shares, unroll, combine):
    text = LERP.format(d="f32", g="4,3,21,20", x="4,1,1,1", e="4,3,21,20", w="3,1,20")
    w = Workload.parse(text)
    config = TileSchedule(1, 32, shares, 1, unroll, 1, combine=combine, ahead=True)
    assert config in target.space(graph_of(w), H200)
    verdict = Verifier(w, torch.device("cpu")).check(Emulated(graph_of(w), config, H200, w))
    assert verdict.message == ""


@emulation
@pytest.mark.parametrize(("vector", "lanes", "shares", "splits"), [(1, 32, 8, 1), (4, 8, 4, 2)])
def test_partials_may_be_left_before_results_are_stored(vector, lanes, shares, splits):
    text = LERP.format(d="f32", g="4,3,21,20", x="4,1,1,1", e="4,3,21,20", w="3,1,20")
    w = Workload.parse(text)
    config = TileSchedule(vector, lanes, shares, 1, 2, splits, "registers", combine="last")
    assert config in target.space(graph_of(w), H200)
    source, *_ = program_source.emit(graph_of(w), config, H200)
    kernel = source[source.index("void tiles0") :]
    assert kernel.index("leave_partial(") < kernel.index("store<") < kernel.index("join_partials<")
    verdict = Verifier(w, torch.device("cpu")).check(Emulated(graph_of(w), config, H200, w))
    assert verdict.message == ""


@emulation
@pytest.mark.parametrize("combine", ["kernel", "last"])
def test_sizes_may_be_compiled_in(combine):
    text = LERP.format(d="f32", g="4,3,21,20", x="4,1,1,1", e="4,3,21,20", w="3,1,20")
    w = Workload.parse(text)
    given = TileSchedule(1, 32, 8, 1, 2, 1, combine=combine)
    config = replace(given, sizes="compiled")
    arguments = [program_source.emit(graph_of(w), c, H200)[2][0].extents for c in (given, config)]
    assert len(arguments[0]) > 5
    assert arguments[1] == ()
    verdict = Verifier(w, torch.device("cpu")).check(Emulated(graph_of(w), config, H200, w))
    assert verdict.message == ""


@pytest.mark.parametrize(("splits", "threads"), [(1, 256), (16, 1024)])
def test_blocks_that_join_few_partials_are_small(splits, threads):
    config = TileSchedule(1, 32, 8, 1, 1, splits)
    _, _, stages = program_source.emit(graph_of(Workload.parse(PADDLE_C)), config, H200)
    assert [s.block_threads for s in stages] == [256, threads]


def test_stores_come_last_only_where_blocks_join_the_partials():
    space = target.space(graph_of(Workload.parse(PADDLE_C)), H200)
    config = TileSchedule(4, 8, 32, 1, 1, 1, "registers", combine="last")
    assert config in space
    assert "stores come last" in space.why_not(replace(config, combine="kernel"))


@emulation
def test_every_sweep_of_several_loads_its_own_steps_ahead():
    w = Workload.parse("softmax(x=f32[2,100,48], dim=1)")
    config = TileSchedule(1, 32, 4, 1, 2, 1, ahead=True)
    assert config in target.space(graph_of(w), H200)
    verdict = Verifier(w, torch.device("cpu")).check(Emulated(graph_of(w), config, H200, w))
    assert verdict.message == ""


@emulation
def test_what_follows_from_sums_of_the_same_dims_reads_what_it_needs():
    def function(a, b, c):
        total, most = (a * b).sum((1, 2), keepdim=True), a.amax((1, 2), keepdim=True)
        return total * 2 + c, (a + b).sum((0, 1), keepdim=True), most - c, a * b

    fuse(function, name="followed_sums")
    try:
        whole, row = TensorSpec("f32", (4, 9, 40)), TensorSpec("f32", (4, 1, 1))
        w = OPS["followed_sums"].workload(a=whole, b=whole, c=row)
        assert_right(w, 3)
    finally:
        OPS.remove("followed_sums")


def test_one_launch_takes_inputs_and_results_and_no_workspace():
    graph = graph_of(Workload.parse(PADDLE_C))
    config = TileSchedule(1, 32, 8, 1, 8, 1, combine="last")
    _, program, stages = program_source.emit(graph, config, H200)
    (stage,) = stages
    assert set(stage.buffers) == set(range(program.inputs + program.outputs))
    assert program.temporaries == ()
    assert 2 * (16 * 732 + 24 * 16) < stage.counters <= COUNTERS
    kernels = target.describe(graph, config, H200)
    assert all(k.endswith("(in one launch with kernel 0)") for k in kernels[1:])


def test_partials_that_need_more_words_than_a_launch_has_are_left_to_a_second_kernel():
    graph = graph_of(Workload.parse(PADDLE_C))
    config = TileSchedule(4, 32, 8, 1, 4, 4, combine="last")
    assert "words of partials exceed" in target.space(graph, H200).why_not(config)
    assert replace(config, combine="kernel") in target.space(graph, H200)


def test_sums_in_fp64_are_left_to_a_second_kernel():
    graph = graph_of(Workload.parse(PADDLE_C.replace("f32", "f64")))
    assert target.space(graph, H200).values["combine"] == ("kernel",)


@pytest.mark.parametrize("device", ["a100", "h200", "b200"])
def test_what_a_search_begins_with_compiles_without_spilling(device):
    graph, spec = graph_of(Workload.parse(PADDLE_C)), DEVICES[device]
    found = target.promising(graph, spec)
    assert {c.combine for c in found} == {"kernel", "last"}
    for config in [TileSchedule(1, 32, 8, 1, 8, 1, combine="last"), *found[:8]]:
        assert compiled(target.task(graph, config, spec)).resources.spill_bytes == 0, config
