"""Tile kernels whose blocks share walks: what they compute, emulated, and where they are chosen."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from emulated import Emulated
from shared_walks import (
    FUNCTIONS,
    MEETING,
    channel_softmax,
    column_softmax,
    images,
    normed_columns,
    weighed_columns,
    workload,
)
from tilewright.compile import cxx
from tilewright.compile.cache import compiled
from tilewright.device import DEVICES
from tilewright.fusion.cuda import program_source, programs, target
from tilewright.fusion.cuda.tiles.area import Area
from tilewright.fusion.cuda.tiles.heuristics import meeting_promising
from tilewright.fusion.cuda.tiles.tiling import Tiles, blocks_that_meet
from tilewright.impls.fused import graph_of
from tilewright.measure.verify import Verifier
from tilewright.tensor_spec import TensorSpec

H100, CPU = DEVICES["h100"], torch.device("cpu")
emulation = pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing()))
pytestmark = pytest.mark.usefixtures("forgets_functions")
MOST_SPILLED = 128
"""Bytes of a thread that keeps 56 registers of steps: a few of those, written and read once."""


def meeting_in(w, count, seed=0, device=H100):
    """So many schedules whose blocks meet, of all that fit."""
    space, rng, found = target.space(graph_of(w), device), random.Random(f"{w} {seed}"), []
    for config in space.sample(rng, 4000):
        if config.combine == "grid" and config.shares >= 8:
            found.append(config)
    assert len(found) >= count, w
    return found[:count]


def assert_right(w, config, device=H100):
    graph = graph_of(w)
    assert config in target.space(graph, device), target.space(graph, device).why_not(config)
    found = Verifier(w, CPU).check(Emulated(graph, config, device, w))
    # On few elements how well PyTorch's own rounding turns out is luck.
    assert found.ok or "PyTorch's largest error" in found.message, (config, found.message)


@emulation
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_block_goes_on_with_what_all_have_found(function, dtype):
    w = workload(function, TensorSpec(dtype, (181, 26)))
    for config in (MEETING, replace(MEETING, sizes="compiled", splits=2), *meeting_in(w, 3)):
        assert_right(w, config)


def test_what_other_blocks_leave_is_not_held_to_be_a_blocks_own():
    w = workload(normed_columns, TensorSpec("f32", (181, 26)))
    source = target.task(graph_of(w), MEETING, H100).source
    assert " float* partials" in source
    assert "__restrict__ partials" not in source


@emulation
@given(
    rows=st.integers(8, 300),
    width=st.integers(1, 70),
    splits=st.sampled_from([2, 4, 8]),
    storage=st.sampled_from(["registers", "reread"]),
    function=st.sampled_from(FUNCTIONS),
)
def test_columns_of_any_size_are_shared(rows, width, splits, storage, function):
    w = workload(function, TensorSpec("f32", (rows, width)))
    config = replace(MEETING, splits=splits, storage=storage)
    assume(config in target.space(graph_of(w), H100))
    assert_right(w, config)


@emulation
@pytest.mark.parametrize("dtype", ["f16", "f64"])
def test_batch_norm_of_channels_last_images_and_its_gradients(dtype):
    for w in images(3, 24, 9, dtype):
        for config in meeting_in(w, 3):
            assert_right(w, config)


@emulation
def test_each_sample_has_walks_of_its_own():
    w = workload(channel_softmax, TensorSpec("f32", (3, 90, 35)))
    for config in meeting_in(w, 4):
        assert_right(w, config)


@emulation
def test_sums_that_all_columns_have_in_common():
    w = workload(weighed_columns, TensorSpec("f32", (150, 40)), TensorSpec("f32", (150, 1)))
    assert_right(w, replace(MEETING, splits=8))


def sums_beside_a_softmax(x):
    y = x.softmax(1)
    return y, (y * y).sum(0), y.amax(2)


@emulation
@pytest.mark.parametrize("shape", [(12, 64, 48), (5, 33, 200)])
def test_kernels_beside_one_that_meets_find_room_for_what_they_leave(shape):
    w = workload(sums_beside_a_softmax, TensorSpec("f32", shape))
    graph, every = graph_of(w), meeting_in(w, 40)
    for config in every:
        target.task(graph, config, H100)  # which holds temporaries against what is left in them
    assert_right(w, next(c for c in every if c.lanes >= 32))


@emulation
def test_rows_of_the_last_block_may_be_few_or_none():
    w = workload(normed_columns, TensorSpec("f32", (65, 12)))
    for splits, last in ((8, 2), (32, -28)):
        config = replace(MEETING, shares=8, splits=splits, storage="reread")
        tiles = tiles_of(w, config)
        assert 65 - (splits - 1) * tiles.split_steps == last
        assert_right(w, config)


def tiles_of(w, config):
    return programs.tiles_of(programs.whole_walks(graph_of(w), H100), 0, config)


@emulation
def test_means_far_from_zero_cost_deviations_nothing():
    w = workload(column_deviations, TensorSpec("f32", (4096, 16)))
    x = torch.randn(4096, 16) + 1e5
    (config,) = meeting_in(w, 1)
    found = Emulated(graph_of(w), config, H100, w)(x)
    true = column_deviations(x.double())
    for own, right in zip(found, true, strict=True):
        assert ((own - right).abs() <= 1e-6 * right.abs().max()).all()


def column_deviations(x):
    deviation = x.std(0, keepdim=True)
    return x * (1 / deviation), deviation.squeeze(0)


# ---- where they are chosen ----------------------------------------------------------------------


def untuned(w, device):
    graph = graph_of(w)
    config = target.heuristic(graph, device)
    assert config in target.space(graph, device)
    return graph, config


@pytest.mark.parametrize("device", ["h100", "h200", "b200"])
def test_what_several_kernels_would_read_again_stays_on_chip(device):
    spec = DEVICES[device]
    for w in (*images(32, 128, 28), *images(32, 256, 14), images(32, 64, 56)[0]):
        graph, config = untuned(w, spec)
        assert (config.combine, config.storage) == ("grid", "registers"), (w, config)
        _, program, (stage,) = program_source.emit(graph, config, spec)
        assert stage.meetings == (3 if "backward" in w.op else 2)
        tiles = Tiles(Area(program.segments[0]), config)
        resources = compiled(target.task(graph, config, spec)).resources
        resident, _ = spec.occupancy(
            config.block_threads, resources.registers, resources.shared_bytes
        )
        assert resident >= blocks_that_meet(tiles, spec)
        assert resources.spill_bytes <= MOST_SPILLED


def test_what_one_block_keeps_is_not_shared_and_what_no_chip_holds_is_divided():
    for w in images(32, 2048, 7):
        assert untuned(w, H100)[1].splits == 1
    for w in images(32, 512, 56):
        assert untuned(w, H100)[1].combine == "kernel"


def test_what_registers_do_not_hold_is_left_to_the_caches_of_all_sms():
    """Streams would pass these by."""
    for w in (*images(32, 512, 28), images(32, 1024, 14)[1]):
        graph, config = untuned(w, H100)
        assert (config.combine, config.storage, config.stream_loads) == ("grid", "reread", False)
        assert compiled(target.task(graph, config, H100)).resources.spill_bytes == 0


def test_a_device_with_less_room_divides_what_another_shares():
    (w, _) = images(32, 64, 56)
    small = replace(H100, sms=16)
    graph, config = untuned(w, small)
    assert config.combine == "kernel"
    why = target.space(graph, small).why_not(target.heuristic(graph, H100))
    assert "blocks wait for one another, and registers let 32 run at once" in why


def test_a_search_begins_with_some_that_meet():
    for w in images(32, 512, 28):
        found = target.promising(graph_of(w), H100)
        assert {"grid", "kernel"} == {c.combine for c in found}


def test_a_kernel_whose_blocks_share_walks_serves_other_sizes():
    sources = set()
    for rows in (5000, 5100):
        w = workload(column_softmax, TensorSpec("f16", (rows, 256)))
        graph = graph_of(w)
        config = replace(MEETING, vector=4, lanes=16, splits=32)
        sources.add(target.task(graph, config, H100).source)
    assert len(sources) == 1


def test_blocks_meet_only_over_walks_that_are_shared_and_needed_again():
    w = workload(column_softmax, TensorSpec("f32", (600, 40)))
    space = target.space(graph_of(w), H100)
    assert "blocks meet that share a walk" in space.why_not(replace(MEETING, splits=1))
    sums = workload(column_sums, TensorSpec("f32", (600, 40)))
    area = programs.main_area(programs.whole_walks(graph_of(sums), H100))
    assert not area.meets
    assert not meeting_promising(area, H100)


def column_sums(x):
    return x.sum(0)


def test_it_is_told_how_many_share_a_walk_and_how_often_they_meet():
    w = workload(normed_columns, TensorSpec("f32", (600, 40)))
    (line,) = target.describe(graph_of(w), MEETING, H100)
    assert line.endswith("; 4 blocks share a walk, and meet 2 times")
