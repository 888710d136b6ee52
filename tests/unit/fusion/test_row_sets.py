"""Reductions along rows, over sets of them, and of what rows were reduced to, in one kernel."""

import random
import re
from dataclasses import replace

import pytest
import torch
from fused_on_cpu import assert_verified

from emulated import Emulated
from row_sets import (
    group_peaks,
    group_products,
    group_share,
    many_sums,
    normed_gradients,
    of_groups,
    sums_of_columns,
    two_scales,
)
from tilewright.compile import cxx
from tilewright.compile.cache import compiled
from tilewright.compile.resources import parse_ptxas
from tilewright.device import DEVICES, MAX_GRID
from tilewright.fusion.cuda import program_source, programs, target
from tilewright.fusion.cuda.rows.row_sets import MOST_ROWS, set_heuristic, set_promising, set_space
from tilewright.fusion.cuda.stages import nests, sets_in
from tilewright.fusion.cuda.tiles.schedule import TileSchedule
from tilewright.impls.fused import graph_of
from tilewright.measure.verify import Verifier

H100, CPU = DEVICES["h100"], torch.device("cpu")
pytestmark = pytest.mark.usefixtures("forgets_functions")
emulation = pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing()))


def program_of(w, device=H100):
    graph = graph_of(w)
    return programs.program_of(graph, target.heuristic(graph, device), device)


def sets_of(w, device=H100):
    first = program_of(w, device).segments[0]
    assert nests(first)
    return sets_in(first)


@pytest.mark.parametrize("device", ["a100", "h100", "b200"])
@pytest.mark.parametrize(
    ("images", "channels"), [("2,64,32,32", 64), ("2,256,16,16", 256), ("8,32,40,40", 32)]
)
def test_gradients_of_group_norm_take_one_pass_and_what_joins_images(device, images, channels):
    spec = DEVICES[device]
    w = normed_gradients("f16", images, channels)
    program = program_of(w, spec)
    assert (program.large(), len(program.segments)) == (1, 2)
    graph = graph_of(w)
    config = target.heuristic(graph, spec)
    assert config in target.space(graph, spec)
    log = compiled(target.task(graph, config, spec)).log
    assert not any(parse_ptxas(log, e).spill_bytes for e in ("fused", "fused1"))


@emulation
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("images", ["2,24,8,8", "3,24,5,5", "1,24,12,11"])
def test_gradients_of_group_norm_are_right(dtype, images):
    w = normed_gradients(dtype, images, 24)
    assert sets_of(w).set_rows == 6
    assert_verified(w)


@emulation
@pytest.mark.parametrize("asked", ["x", "x,weight", "bias", "weight,bias"])
def test_any_of_the_gradients_may_be_asked_for(asked):
    w = normed_gradients("f32", "2,24,8,8", 24)
    assert_verified(w.with_args(grads=tuple(asked.split(","))))


@emulation
@pytest.mark.parametrize("function", [group_share, group_peaks, group_products, two_scales])
@pytest.mark.parametrize("shape", ["3,2,4,96", "2,3,5,33"])
def test_all_kinds_of_joins_over_sets(function, shape):
    w = of_groups(function, "f32", shape)
    assert len(program_of(w).segments) == 1
    assert sets_of(w).set_rows == int(shape.split(",")[2])
    assert_verified(w)


@emulation
def test_sums_of_columns_of_a_set_are_cut():
    w = of_groups(sums_of_columns, "f32", "3,2,8,96")
    assert not any(map(nests, program_of(w).segments))
    assert_verified(w)


@emulation
def test_sets_of_too_many_rows_are_cut():
    w = of_groups(two_scales, "f32", f"2,2,{MOST_ROWS + 1},40")
    assert not any(map(nests, program_of(w).segments))
    assert_verified(w)


def test_more_sets_than_a_grid_has_blocks_are_cut():
    w = of_groups(two_scales, "f16", f"{MAX_GRID + 1},1,2,64")
    assert not any(map(nests, program_of(w).segments))
    assert target.unsupported(graph_of(w), H100) is not None or program_of(w).large() > 1


@pytest.mark.parametrize("shape", ["4,8,64,512", "2,8,64,1024"])
def test_what_warps_tell_one_another_fits_a_block(shape):
    graph = graph_of(of_groups(many_sums, "f64", shape))
    found = compiled(target.task(graph, target.heuristic(graph, H100), H100))
    assert found.resources.shared_bytes <= 48 << 10  # which a driver refuses to exceed


def test_a_program_that_is_asked_for_again_is_the_same():
    graph, divided = graph_of(normed_gradients("f16", "2,64,32,32", 64)), TileSchedule(splits=4)
    found = programs.program_of(graph, divided, H100)
    assert programs.program_of(graph, divided, H100) is found
    programs.program_of(graph, TileSchedule(), H100)
    assert programs.program_of(graph, divided, H100) == found


def test_sets_that_no_block_or_cluster_holds_are_cut():
    w = normed_gradients("f32", "1,64,256,256", 64)
    assert not any(map(nests, program_of(w).segments))
    assert program_of(w).large() > 1


@emulation
@pytest.mark.parametrize("images", ["2,32,16,16", "2,48,7,16"])
def test_schedules_of_all_kinds_are_right(images):
    channels = int(images.split(",")[1])
    w = normed_gradients("f16", images, channels)
    graph = graph_of(w)
    sets = sets_of(w)
    space = set_space(sets, H100)
    found = space.sample(random.Random(0), 60)
    kinds = {(c.cluster, c.rows_per_block > 1): c for c in found}
    assert (
        {cluster > 1 for cluster, _ in kinds} == {several for _, several in kinds} == {False, True}
    )
    for config in kinds.values():
        assert config.rows_per_block * config.rows_per_thread == sets.set_rows
        verdict = Verifier(w, CPU).check(Emulated(graph, config, H100, w))
        assert verdict.message == "", config


@emulation
@pytest.mark.usefixtures("late_warps")
def test_any_warp_may_be_late():
    w = normed_gradients("f16", "2,32,16,16", 32)
    graph = graph_of(w)
    for config in set_promising(sets_of(w), H100)[:3]:
        verdict = Verifier(w, CPU).check(Emulated(graph, config, H100, w))
        assert verdict.message == "", config


def test_a_search_begins_with_what_is_chosen_untuned_and_a_set_fills_a_block():
    w = normed_gradients("f16", "2,128,64,64", 128)
    graph = graph_of(w)
    found = target.promising(graph, H100)
    assert found[0] == target.heuristic(graph, H100) == set_heuristic(sets_of(w), H100)
    space = target.space(graph, H100)
    assert all(c in space for c in found)
    alone = replace(found[0], rows_per_thread=1, rows_per_block=1)
    assert space.why_not(alone) == "1 rows of sets of 32"


def test_a_row_of_a_set_is_no_part_of_a_warp():
    sets = sets_of(normed_gradients("f16", "2,32,16,16", 32))
    space, config = set_space(sets, H100), set_heuristic(sets, H100)
    assert space.why_not(replace(config, row_threads=32)) is None
    assert space.why_not(replace(config, row_threads=16)) == "a row takes whole warps"


def test_one_kernel_serves_any_number_of_images():
    sources = set()
    for n in (104, 111, 120, 128):
        graph = graph_of(normed_gradients("f16", f"{n},32,16,16", 32))
        sources.add(
            target.task(graph, target.heuristic(graph, H100), H100).source.split("fused1")[0]
        )
    assert len(sources) == 1


def test_all_barriers_of_a_cluster_are_made_before_another_block_may_use_them():
    graph = graph_of(normed_gradients("f16", "2,128,64,64", 128))
    config = target.heuristic(graph, H100)
    assert config.cluster > 1
    source = program_source.emit(graph, config, H100)[0].rpartition("namespace kernel0")[2]
    made = source.index("barriers_made();")
    barriers = set(re.findall(r"store_remote\(.*?, &?(\w+)", source))
    assert {"whole_joined0", "whole_joined1", "joined2"} <= barriers
    assert all(f"barrier_init(&{name}[threadIdx.x])" in source[:made] for name in barriers)
    assert "barrier_init" not in source[made:]
