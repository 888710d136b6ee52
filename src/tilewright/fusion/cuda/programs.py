"""A graph that takes several kernels on a GPU: how it is cut, and what kind each kernel is.

Kernels follow one another in a stream, or are one launch where they need nothing of one another:
see launches.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeGuard

from tilewright.device import DeviceSpec
from tilewright.fusion.cuda.rows.row_sets import RowSets, may_have_sets, set_heuristic
from tilewright.fusion.cuda.stages import (
    Schedule,
    adds_columns,
    column_graphs,
    fits_rows,
    nests,
    sets_of_rows,
    shares_rows,
)
from tilewright.fusion.cuda.tiles.area import Area
from tilewright.fusion.cuda.tiles.capabilities import TileKernels, few_rows
from tilewright.fusion.cuda.tiles.schedule import TileSchedule
from tilewright.fusion.cuda.tiles.tiling import Tiles, fitted, joining_schedule
from tilewright.fusion.ir import Graph
from tilewright.fusion.program import Program, Segment
from tilewright.fusion.remembered import last_remembered, remembered
from tilewright.fusion.segments import cut
from tilewright.fusion.split_moments import most_parts, split_moments
from tilewright.fusion.subgraphs import main_axis


@last_remembered
def program_of(graph: Graph, schedule: Schedule, device: DeviceSpec) -> Program:
    """The kernels under a schedule: its `splits` decide whether walks are divided. Moments of a
    divided walk are those of its splits, where these are equal, and one pass finds them."""
    whole = whole_walks(graph, device)  # in the same places as under any schedule
    if not isinstance(schedule, TileSchedule) or schedule.combine == "grid":
        return whole
    if (parts := moments_of_parts(graph, schedule.splits, device)) is not None:
        return parts
    divided = _cut(graph, schedule, device, True, has_few_rows(whole, device))
    tiled = kind_of(whole, main_kernel(whole)) == "tile" and divided.large() >= whole.large()
    return _cut(graph, schedule, device) if tiled and schedule.splits == 1 else divided


@remembered
def moments_of_parts(graph: Graph, parts: int, device: DeviceSpec) -> Program | None:
    """The kernels for moments of so many equal parts of a walk: of the parts, of all of them, and
    what follows. None where the walk is no such one."""
    whole = whole_walks(graph, device)
    equal = parts & (parts - 1) == 0 and 1 < parts <= most_parts(graph)
    if not equal or kind_of(whole, main_kernel(whole)) != "tile":
        return None
    return cut(split_moments(graph, parts), kernels=TileKernels(TileSchedule(), parts=True))


def finds_parts(graph: Graph, device: DeviceSpec) -> bool:
    """Whether a divided walk is one of parts that find moments."""
    return moments_of_parts(graph, 2, device) is not None


@remembered
def whole_walks(graph: Graph, device: DeviceSpec) -> Program:
    return _cut(graph, TileSchedule(), device)


def _cut(
    graph: Graph,
    tiles: TileSchedule,
    device: DeviceSpec,
    split_rows: bool = False,
    few: bool = False,
) -> Program:
    """The kernels with the fewest passes.

    A walk that adds up over different dims may spare one, or begin what a row kernel would do at
    once. Beside reductions over a row and more, row kernels may leave a partial of those for each
    row, and add up over all rows; the latter, where rows are not split, beside others, too, and
    then rows across the order of memory may be added up along it. There a reduction over everything
    else is one row, which no more passes make worthwhile.
    """
    sets = graph.reduction_sets
    ways = [{"mixes": True}, {"mixes": False}] if len(sets) > 1 else [{"mixes": True}]
    apart = not split_rows and any(not {*row} & {*axes} for row in sets for axes in sets)
    if any(set(row) < set(axes) for row in sets for axes in sets):
        by_row = [{"rows": True, "columns": True}, {"rows": True}]
        ways = [*ways, *by_row] if split_rows else [*by_row, *ways]
    elif apart:
        ways = [*ways, {"rows": True, "columns": True}]
    if apart:
        ways = [*ways, {"adds_across": True}]
    own = device if few else None
    kernels = [TileKernels(tiles, own, **way) for way in ways]
    found = [cut(graph, split_rows=split_rows, kernels=each) for each in kernels]
    best = min((p for p in found if _fits(p, device)), key=Program.large)
    if split_rows or best.large() == 1 or not may_have_sets(graph):
        return best
    in_sets = cut(graph, kernels=TileKernels(tiles, own, sets=True))
    return in_sets if in_sets.large() < best.large() and _fits(in_sets, device) else best


def _fits(program: Program, device: DeviceSpec) -> bool:
    """Whether there are kernels for all rows that also add up over all of them, or come in sets."""
    summing = map(column_graphs, filter(adds_columns, program.segments))
    sets = map(sets_of_rows, filter(nests, program.segments))
    return all(found is not None and fits_rows(found[1], device) for found in summing) and all(
        isinstance(found, RowSets) and set_heuristic(found, device) is not None for found in sets
    )


def has_few_rows(program: Program, device: DeviceSpec) -> bool:
    """Whether the main kernel has too few rows for a device."""
    k = main_kernel(program)
    segment, kind = program.segments[k], kind_of(program, k)
    if kind in ("pointwise", "columns", "sets") or segment.only_adds:
        return False
    if kind == "rows":
        return shares_rows(segment.graph, device)
    area = Area(segment)
    return few_rows(area.graph.space, area.walk, area.lane, device)


def kind_of(program: Program, k: int) -> str:
    """What kind of kernel does segment `k`: "tile", "rows", "columns", "sets" or "pointwise"."""
    return "tile" if is_joining(program, k) else kind_of_segment(program.segments[k])


def kind_of_segment(segment: Segment) -> str:
    if nests(segment):
        return "sets"
    if adds_columns(segment):
        return "columns"
    if segment.added():
        return "tile"
    if not segment.graph.reductions:
        return "pointwise"
    lane = main_axis(segment.graph, range(len(segment.graph.nodes)))
    return "rows" if lane in segment.graph.reduced else "tile"


def walks_tiles(program: Program, k: int) -> bool:
    """Whether segment `k` is a tile kernel under the schedule itself."""
    return kind_of(program, k) == "tile" and not is_joining(program, k)


def is_joining(program: Program, k: int) -> bool:
    """Whether segment `k` puts partials together that an earlier one left."""
    temporaries = set(program.segments[k].reads) - set(range(program.inputs))
    return program.segments[k].row is None and k > 0 and bool(temporaries)


def joins_alone(program: Program) -> bool:
    """Whether all that follows the first kernel, if anything, is putting its partials together, in
    one launch."""
    first, *others = program.segments
    joining = all(is_joining(program, k) for k in range(1, len(program.segments)))
    if not first.added() or len(levels(program)) > 2 or not joining:
        return False
    partials = {first.writes[k] for k in first.added()}
    known = {*partials, *range(program.inputs)}
    generated = any(a.generator for s in others for a in s.graph.inputs)
    return not generated and all(set(s.reads) <= known and partials & set(s.reads) for s in others)


def main_kernel(program: Program) -> int:
    """The kernel that the schedule is for: the first of the largest, or the first of tiles among
    them, which need a device's attention more than rows do, and most where they both complete
    reductions and add up across these."""
    largest = program.largest()
    tiles = [k for k in largest if kind_of(program, k) == "tile"]
    return next((k for k in tiles if program.segments[k].adds_across), (tiles or largest)[0])


def main_area(program: Program) -> Area:
    return Area(program.segments[main_kernel(program)], joins_alone(program))


def tiles_of(program: Program, k: int, config: Schedule) -> Tiles:
    """The tiles of segment `k`, under the schedule or what fits it best."""
    area = Area(program.segments[k], k == 0 and joins_alone(program))
    if meets(config):
        if k == main_kernel(program):
            return Tiles(area, config)
        config = TileSchedule(sizes=config.sizes)  # under which all others were cut, see _whole
    if isinstance(config, TileSchedule) and not any(s.added() for s in program.segments):
        config = replace(config, splits=1)
    if is_joining(program, k):
        joins = [s for j, s in enumerate(program.segments) if is_joining(program, j)]
        return Tiles(area, joining_schedule(area, max(Area(s).steps for s in joins)))
    return Tiles(area, fitted(config if isinstance(config, TileSchedule) else TileSchedule(), area))


def levels(program: Program) -> list[list[int]]:
    """Segments that need nothing of one another, by how many must have ended before."""
    writers = {b: k for k, segment in enumerate(program.segments) for b in segment.writes}
    found: list[list[int]] = []
    level: dict[int, int] = {}
    for k, segment in enumerate(program.segments):
        before = [level[writers[b]] for b in segment.reads if b in writers]
        level[k] = max(before, default=-1) + 1
        found += [[]] * (level[k] == len(found))
        found[level[k]] = [*found[level[k]], k]
    return found


def gathers(config: Schedule) -> bool:
    """Whether the blocks of the first kernel put their partials together."""
    return isinstance(config, TileSchedule) and config.combine == "last"


def meets(config: Schedule) -> TypeGuard[TileSchedule]:
    """Whether blocks of the main kernel wait for one another."""
    return isinstance(config, TileSchedule) and config.combine == "grid"
