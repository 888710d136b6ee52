"""Schedules of a graph that takes several kernels: they are for the one that needs them most."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from operator import itemgetter
from typing import Any

from tilewright.device import MAX_GRID, DeviceSpec
from tilewright.fusion.cuda.pointwise.schedule import (
    PointwiseSchedule,
    pointwise_heuristic,
    pointwise_space,
    roomier_points,
)
from tilewright.fusion.cuda.programs import (
    finds_parts,
    has_few_rows,
    kind_of,
    kind_of_segment,
    main_area,
    main_kernel,
    moments_of_parts,
    program_of,
    tiles_of,
    walks_tiles,
)
from tilewright.fusion.cuda.rows.heuristics import roomier_rows, row_heuristic
from tilewright.fusion.cuda.rows.row_sets import set_heuristic, set_promising, set_space
from tilewright.fusion.cuda.rows.space import SEARCHED, row_space
from tilewright.fusion.cuda.stages import column_rows, column_space, rows_last, sets_in
from tilewright.fusion.cuda.tiles.heuristics import (
    AGAIN,
    beyond_cache,
    meeting_heuristic,
    meeting_promising,
    merit,
    roomier_tiles,
    tile_heuristic,
    tile_promising,
    tile_space,
    wastes_sectors,
)
from tilewright.fusion.cuda.tiles.schedule import TileSchedule
from tilewright.fusion.cuda.tiles.tiling import Tiles
from tilewright.fusion.ir import Graph
from tilewright.fusion.program import Program
from tilewright.fusion.remembered import remembered
from tilewright.space import ConfigSpace


@remembered
def _choices(graph: Graph, device: DeviceSpec) -> tuple[Program | None, Program | None]:
    """The kernels where no walk is divided, unless that is worse, and those where the main one's
    is, if it can be."""
    whole = program_of(graph, PointwiseSchedule(), device)
    divided = program_of(graph, TileSchedule(splits=2), device)
    segment = divided.segments[main_kernel(divided)]
    if finds_parts(graph, device):
        return whole, divided
    if kind_of_segment(segment) in ("columns", "sets") or not segment.only_adds:
        return whole, None
    split = kind_of(whole, main_kernel(whole)) != "tile" and has_few_rows(whole, device)
    return (None if split or divided.large() < whole.large() else whole), divided


def space(graph: Graph, device: DeviceSpec) -> ConfigSpace[Any]:
    program, divided = _choices(graph, device)
    if program is None:
        assert divided is not None
        return tile_space(main_area(divided), device)
    segment = program.segments[main_kernel(program)]
    match kind_of_segment(segment):
        case "pointwise":
            return pointwise_space(segment.graph, device)
        case "rows":
            return row_space(rows_last(segment.graph), device, SEARCHED)
        case "columns":
            return column_space(segment, device)
        case "sets":
            return set_space(sets_in(segment), device)
    whole = tile_space(main_area(program), device)
    if divided is None or segment.only_adds:
        return whole
    other = tile_space(main_area(divided), device)
    if not finds_parts(graph, device):
        return _either(whole, other, other.why_not)

    def unequal_or_misfit(c: TileSchedule) -> str | None:
        parts = moments_of_parts(graph, c.splits, device)
        if parts is None:
            return f"the walk has no {c.splits} equal parts"
        return tile_space(main_area(parts), device).why_not(replace(c, splits=1))

    return _either(whole, other, unequal_or_misfit)


def _either(
    whole: ConfigSpace[TileSchedule],
    divided: ConfigSpace[TileSchedule],
    why_not: Callable[[TileSchedule], str | None],
) -> ConfigSpace[TileSchedule]:
    """Schedules of one kernel, whose blocks each have a walk or share it, and those of a divided
    walk."""
    values = {
        name: tuple(dict.fromkeys((*whole.values[name], *divided.values[name])))
        for name in whole.values
    }
    values["splits"] = tuple(2**k for k in range(11))

    def of_one_kernel(c: TileSchedule) -> bool:
        return c.splits == 1 or c.combine == "grid"

    return ConfigSpace(
        TileSchedule, values, lambda c: whole.why_not(c) if of_one_kernel(c) else why_not(c)
    )


@remembered
def heuristic(graph: Graph, device: DeviceSpec) -> Any:
    """Where a walk that is divided takes more passes, a kernel whose blocks each keep a walk of
    their own is better, or else one whose blocks share it: see meeting_heuristic. So is that where
    walks of their own are too narrow."""
    found, whole = _heuristic(graph, device), _choices(graph, device)[0]
    if whole is None or not isinstance(found, TileSchedule):
        return found
    area = main_area(whole)
    if found.splits > 1:
        stays = program_of(graph, found, device).large() <= whole.large()
    else:
        stays = not wastes_sectors(found, area, device)
    if stays:
        return found
    alone = tile_heuristic(area, device)
    return alone if alone.storage == "registers" else meeting_heuristic(area, device) or found


def _heuristic(graph: Graph, device: DeviceSpec) -> Any:
    """By passes over large tensors, and by how near to a device's bandwidth the model comes."""
    program, divided = _choices(graph, device)
    if program is None:
        assert divided is not None
        return tile_heuristic(main_area(divided), device)
    segment = program.segments[main_kernel(program)]
    match kind_of_segment(segment):
        case "pointwise":
            return pointwise_heuristic(segment.graph, device)
        case "rows":
            return row_heuristic(rows_last(segment.graph), device)
        case "columns":
            return row_heuristic(column_rows(segment), device)
        case "sets":
            return set_heuristic(sets_in(segment), device)
    area = main_area(program)
    whole = tile_heuristic(area, device)
    if divided is None or segment.only_adds:
        return whole
    if finds_parts(graph, device):
        copies, in_parts = _parts_promising(graph, device)[0]
        return whole if _copies(program, whole, device) <= copies else in_parts
    other = tile_heuristic(main_area(divided), device)
    if divided.large() > program.large():
        stays = _copies(program, whole, device) <= _copies(divided, other, device)
    else:
        threads = Tiles(area, whole).blocks * whole.block_threads
        stays = 2 * threads >= device.sms * device.threads_per_sm
    best = whole if stays else other
    return best if best.splits > 1 else whole  # splits=1 is a schedule of the whole walk


def _copies(program: Program, schedule: TileSchedule, device: DeviceSpec) -> float:
    """As how many copies of what it reads a program's passes over large tensors may count."""
    tiles = Tiles(main_area(program), schedule)
    reached = merit(tiles, device) * beyond_cache(tiles, device)
    return sum(1 / reached if kind_of(program, k) == "tile" else 1 for k in program.largest())


def _parts_promising(graph: Graph, device: DeviceSpec) -> list[tuple[float, TileSchedule]]:
    """For each number of parts of moments the schedule of which the model expects most, and as how
    many copies its passes may count, with what is read again to join the parts; the best first."""
    found = []
    for parts in (2**k for k in range(1, 11)):
        if (program := moments_of_parts(graph, parts, device)) is not None:
            area = main_area(program)
            c = tile_heuristic(area, device)
            moments = sum(math.prod(area.graph.nodes[i].shape) for i, _ in area.graph.outputs)
            again = AGAIN * moments / math.prod(area.graph.space)
            copies = _copies(program, c, device) + again
            found.append((copies, replace(c, splits=parts)))
    return sorted(found, key=itemgetter(0))


def promising(graph: Graph, device: DeviceSpec) -> list[Any]:
    """Schedules of tiles, or of sets of rows, for a search to begin with; of other kernels the
    heuristic is one."""
    program, divided = _choices(graph, device)
    areas = [main_area(divided)] if divided and not finds_parts(graph, device) else []
    meeting = list[TileSchedule]()
    if program is not None and kind_of(program, main_kernel(program)) == "tile":
        areas.append(main_area(program))
        meeting = meeting_promising(areas[-1], device)
    if program is not None and kind_of(program, main_kernel(program)) == "sets":
        return set_promising(sets_in(program.segments[main_kernel(program)]), device)
    every = space(graph, device)
    in_parts = [c for _, c in _parts_promising(graph, device)]
    of_areas = (c for area in areas for c in tile_promising(area, device))
    return [c for c in dict.fromkeys((*meeting, *in_parts, *of_areas)) if c in every]


def roomier(graph: Graph, config: Any, device: DeviceSpec) -> Iterator[Any]:
    """Schedules that leave a thread of the main kernel more registers; of sets of rows there are
    none."""
    program = program_of(graph, config, device)
    segment = program.segments[main_kernel(program)]
    match kind_of_segment(segment):
        case "pointwise":
            return roomier_points(config)
        case "rows":
            return roomier_rows(rows_last(segment.graph), config, device)
        case "columns":
            return roomier_rows(column_rows(segment), config, device)
        case "tile":
            walking = [k for k in range(len(program.segments)) if walks_tiles(program, k)]
            return roomier_tiles(config, [tiles_of(program, k, config) for k in walking], device)
    return iter(())


def unsupported(graph: Graph, device: DeviceSpec) -> str | None:
    config = heuristic(graph, device)
    if config is None:
        return f"rows of {graph.reduced_size} elements fit no schedule on {device.name}"
    program = program_of(graph, config, device)
    for k, segment in enumerate(program.segments):
        if kind_of(program, k) == "rows":
            rows = rows_last(segment.graph)
            if row_heuristic(rows, device) is None:
                return f"rows of {rows.reduced_size} elements fit no schedule on {device.name}"
        if kind_of(program, k) == "tile":
            blocks = tiles_of(program, k, config).blocks
            if blocks > MAX_GRID:
                return f"{blocks} tiles exceed a grid of {MAX_GRID} blocks"
    return None
