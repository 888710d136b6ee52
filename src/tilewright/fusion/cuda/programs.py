"""A graph that takes several kernels on a GPU: how it is cut, and the source of all of them.

Kernels follow one another in a stream. Those that put partials of results together are one launch:
a range of its blocks for each result. It starts while the kernel before it ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from operator import itemgetter
from typing import Any, TypeGuard

from tilewright.device import MAX_GRID, DeviceSpec
from tilewright.fusion.cuda.kernel import ENTRY, prelude, tiles_prelude
from tilewright.fusion.cuda.pointwise.schedule import (
    PointwiseSchedule,
    pointwise_heuristic,
    pointwise_space,
)
from tilewright.fusion.cuda.registers import launch_bounds
from tilewright.fusion.cuda.rows.heuristics import row_heuristic
from tilewright.fusion.cuda.rows.row_sets import (
    RowSets,
    may_have_sets,
    set_heuristic,
    set_promising,
    set_space,
)
from tilewright.fusion.cuda.rows.space import SEARCHED, row_space
from tilewright.fusion.cuda.stages import (
    Schedule,
    Stage,
    adds_columns,
    column_graphs,
    column_rows,
    column_space,
    column_stages,
    fits_rows,
    nests,
    plain_stage,
    rows_last,
    sets_in,
    sets_of_rows,
    shares_rows,
)
from tilewright.fusion.cuda.tiles.area import Area
from tilewright.fusion.cuda.tiles.capabilities import TileKernels, few_rows
from tilewright.fusion.cuda.tiles.gathering import GatheringKernel
from tilewright.fusion.cuda.tiles.heuristics import (
    AGAIN,
    meeting_heuristic,
    meeting_promising,
    merit,
    tile_heuristic,
    tile_promising,
    tile_space,
    wastes_sectors,
)
from tilewright.fusion.cuda.tiles.kernel import TileKernel
from tilewright.fusion.cuda.tiles.meeting import SharedWalkKernel
from tilewright.fusion.cuda.tiles.schedule import TileSchedule
from tilewright.fusion.cuda.tiles.tiling import (
    Tiles,
    blocks_asked_for,
    blocks_of_sm,
    blocks_that_meet,
    fitted,
    joining_schedule,
)
from tilewright.fusion.ir import Graph
from tilewright.fusion.program import Program, Segment
from tilewright.fusion.remembered import last_remembered, remembered
from tilewright.fusion.segments import cut, main_axis
from tilewright.fusion.split_moments import most_parts, split_moments
from tilewright.space import ConfigSpace
from tilewright.tensor_spec import TensorSpec


@last_remembered
def program_of(graph: Graph, schedule: Schedule, device: DeviceSpec) -> Program:
    """The kernels under a schedule: its `splits` decide whether walks are divided. Moments of a
    divided walk are those of its splits, where these are equal, and one pass finds them."""
    whole = _whole(graph, device)  # in the same places as under any schedule
    if not isinstance(schedule, TileSchedule) or schedule.combine == "grid":
        return whole
    if (parts := _moments_of_parts(graph, schedule.splits, device)) is not None:
        return parts
    divided = _cut(graph, schedule, device, True, has_few_rows(whole, device))
    tiled = kind_of(whole, _main(whole)) == "tile" and divided.large() >= whole.large()
    return _cut(graph, schedule, device) if tiled and schedule.splits == 1 else divided


@remembered
def _moments_of_parts(graph: Graph, parts: int, device: DeviceSpec) -> Program | None:
    """The kernels for moments of so many equal parts of a walk: of the parts, of all of them, and
    what follows. None where the walk is no such one."""
    whole = _whole(graph, device)
    equal = parts & (parts - 1) == 0 and 1 < parts <= most_parts(graph)
    if not equal or kind_of(whole, _main(whole)) != "tile":
        return None
    return cut(split_moments(graph, parts), kernels=TileKernels(TileSchedule(), parts=True))


def _finds_parts(graph: Graph, device: DeviceSpec) -> bool:
    """Whether a divided walk is one of parts that find moments."""
    return _moments_of_parts(graph, 2, device) is not None


@remembered
def _whole(graph: Graph, device: DeviceSpec) -> Program:
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
    row, and add up over all rows. Where rows are not split, a reduction over everything else is one
    row, which no more passes make worthwhile.
    """
    sets = graph.reduction_sets
    ways: list[tuple[bool, ...]] = [(True,), (False,)] if len(sets) > 1 else [(True,)]
    if any(set(row) < set(axes) for row in sets for axes in sets):
        by_row: list[tuple[bool, ...]] = [(True, True, True), (True, True)]
        ways = [*ways, *by_row] if split_rows else [*by_row, *ways]
    own = device if few else None
    kernels = [TileKernels(tiles, own, *way) for way in ways]
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
    k = _main(program)
    segment, kind = program.segments[k], kind_of(program, k)
    if kind in ("pointwise", "columns", "sets") or segment.added():
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


def is_joining(program: Program, k: int) -> bool:
    """Whether segment `k` puts partials together that an earlier one left."""
    temporaries = set(program.segments[k].reads) - set(range(program.inputs))
    return program.segments[k].row is None and k > 0 and bool(temporaries)


def joins_alone(program: Program) -> bool:
    """Whether all that follows the first kernel is putting its partials together, in one launch."""
    first, *others = program.segments
    if not first.added() or len(_groups(program)) != 2 or not is_joining(program, 1):
        return False
    partials = {first.writes[k] for k in first.added()}
    known = {*partials, *range(program.inputs)}
    drawn = any(a.draw for s in others for a in s.graph.inputs)
    return not drawn and all(set(s.reads) <= known and partials & set(s.reads) for s in others)


def _main(program: Program) -> int:
    """The kernel that the schedule is for: the first of the largest, or the first of tiles among
    them, which need a device's attention more than rows do."""
    largest = program.largest()
    return next((k for k in largest if kind_of(program, k) == "tile"), largest[0])


@remembered
def _choices(graph: Graph, device: DeviceSpec) -> tuple[Program | None, Program | None]:
    """The kernels where no walk is divided, unless that is worse, and those where the main one's
    is, if it can be."""
    whole = program_of(graph, PointwiseSchedule(), device)
    divided = program_of(graph, TileSchedule(splits=2), device)
    segment = divided.segments[_main(divided)]
    if _finds_parts(graph, device):
        return whole, divided
    if kind_of_segment(segment) in ("columns", "sets") or not segment.added():
        return whole, None
    split = kind_of(whole, _main(whole)) != "tile" and has_few_rows(whole, device)
    return (None if split or divided.large() < whole.large() else whole), divided


def _main_area(program: Program) -> Area:
    return Area(program.segments[_main(program)], joins_alone(program))


# ---- spaces and heuristics -----------------------------------------------------------------------


def space(graph: Graph, device: DeviceSpec) -> ConfigSpace[Any]:
    program, divided = _choices(graph, device)
    if program is None:
        assert divided is not None
        return tile_space(_main_area(divided), device)
    segment = program.segments[_main(program)]
    match kind_of_segment(segment):
        case "pointwise":
            return pointwise_space(segment.graph, device)
        case "rows":
            return row_space(rows_last(segment.graph), device, SEARCHED)
        case "columns":
            return column_space(segment, device)
        case "sets":
            return set_space(sets_in(segment), device)
    whole = tile_space(_main_area(program), device)
    if divided is None or segment.added():
        return whole
    other = tile_space(_main_area(divided), device)
    if not _finds_parts(graph, device):
        return _either(whole, other, other.why_not)

    def unequal_or_misfit(c: TileSchedule) -> str | None:
        parts = _moments_of_parts(graph, c.splits, device)
        if parts is None:
            return f"the walk has no {c.splits} equal parts"
        return tile_space(_main_area(parts), device).why_not(replace(c, splits=1))

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
    area = _main_area(whole)
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
        return tile_heuristic(_main_area(divided), device)
    segment = program.segments[_main(program)]
    match kind_of_segment(segment):
        case "pointwise":
            return pointwise_heuristic(segment.graph, device)
        case "rows":
            return row_heuristic(rows_last(segment.graph), device)
        case "columns":
            return row_heuristic(column_rows(segment), device)
        case "sets":
            return set_heuristic(sets_in(segment), device)
    area = _main_area(program)
    whole = tile_heuristic(area, device)
    if divided is None or segment.added():
        return whole
    if _finds_parts(graph, device):
        copies, in_parts = _parts_promising(graph, device)[0]
        return whole if _copies(program, whole, device) <= copies else in_parts
    other = tile_heuristic(_main_area(divided), device)
    if divided.large() > program.large():
        stays = _copies(program, whole, device) <= _copies(divided, other, device)
    else:
        threads = Tiles(area, whole).blocks * whole.block_threads
        stays = 2 * threads >= device.sms * device.threads_per_sm
    best = whole if stays else other
    return best if best.splits > 1 else whole  # splits=1 is a schedule of the whole walk


def _copies(program: Program, schedule: TileSchedule, device: DeviceSpec) -> float:
    """As how many copies of what it reads a program's passes over large tensors may count."""
    tiles = merit(Tiles(_main_area(program), schedule), device)
    return sum(1 / tiles if kind_of(program, k) == "tile" else 1 for k in program.largest())


def _parts_promising(graph: Graph, device: DeviceSpec) -> list[tuple[float, TileSchedule]]:
    """For each number of parts of moments the schedule of which the model expects most, and as how
    many copies its passes may count, with what is read again to join the parts; the best first."""
    found = []
    for parts in (2**k for k in range(1, 11)):
        if (program := _moments_of_parts(graph, parts, device)) is not None:
            area = _main_area(program)
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
    areas = [_main_area(divided)] if divided and not _finds_parts(graph, device) else []
    meeting = list[TileSchedule]()
    if program is not None and kind_of(program, _main(program)) == "tile":
        areas.append(_main_area(program))
        meeting = meeting_promising(areas[-1], device)
    if program is not None and kind_of(program, _main(program)) == "sets":
        return set_promising(sets_in(program.segments[_main(program)]), device)
    every = space(graph, device)
    in_parts = [c for _, c in _parts_promising(graph, device)]
    of_areas = (c for area in areas for c in tile_promising(area, device))
    return [c for c in dict.fromkeys((*meeting, *in_parts, *of_areas)) if c in every]


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
            blocks = _tiles(program, k, config).blocks
            if blocks > MAX_GRID:
                return f"{blocks} tiles exceed a grid of {MAX_GRID} blocks"
    return None


def describe(graph: Graph, config: Schedule, device: DeviceSpec) -> list[str]:
    """One line for each kernel, and which of them are one launch."""
    program = program_of(graph, config, device)
    lines = program.describe()
    if _meets(config):
        meetings = _main_area(program).meetings
        lines[_main(program)] += f"; {config.splits} blocks share a walk, and meet {meetings} times"
    for k, segment in enumerate(program.segments):
        if adds_columns(segment):
            lines[k] += " (and a launch that joins what its blocks summed over rows)"
    for group in _groups(program):
        for k in group if _gathers(config) and group[0] else group[1:]:
            lines[k] += f" (in one launch with kernel {0 if _gathers(config) else group[0]})"
    return lines


def _gathers(config: Schedule) -> bool:
    """Whether the blocks of the first kernel put their partials together."""
    return isinstance(config, TileSchedule) and config.combine == "last"


def _meets(config: Schedule) -> TypeGuard[TileSchedule]:
    """Whether blocks of the main kernel wait for one another."""
    return isinstance(config, TileSchedule) and config.combine == "grid"


# ---- source --------------------------------------------------------------------------------------


def emit(graph: Graph, config: Schedule, device: DeviceSpec) -> tuple[str, Program, list[Stage]]:
    """The source of all kernels, and how to launch them."""
    program = program_of(graph, config, device)
    if _gathers(config):
        text, stage = _gathering_stage(program, config, device)
        source = "\n".join([prelude(), tiles_prelude(), text])
        return source, replace(program, temporaries=()), [stage]
    main = _main(program)
    texts, stages = [prelude(), tiles_prelude()], list[Stage]()
    for group in _groups(program):
        entry = ENTRY + (str(len(stages)) if stages else "")
        kind, k = kind_of(program, group[0]), group[0]
        own = config if k == main else None
        buffer = program.inputs + program.outputs + len(program.temporaries)
        if k == main and _meets(config):
            found, partials = _meeting_stage(program, k, config, device, entry, buffer)
            made = [found]
            program = replace(program, temporaries=(*program.temporaries, partials))
        elif kind == "tile":
            made = [_tile_stage(program, group, config, device, entry)]
        elif kind == "columns":
            made, partials = column_stages(program.segments[k], own, device, entry, buffer)
            program = replace(program, temporaries=(*program.temporaries, partials))
        else:
            made = [plain_stage(program.segments[k], kind, own, device, entry)]
        for text, stage in made:
            texts.append(f"namespace kernel{len(stages)} {{\n{text}}}\n")
            stages.append(stage)
    return "\n".join(texts), program, stages


def _groups(program: Program) -> list[list[int]]:
    """Segments by launch: kernels that put partials together and need nothing of one another."""
    groups: list[list[int]] = []
    for k, segment in enumerate(program.segments):
        together = groups and is_joining(program, k) and is_joining(program, groups[-1][0])
        written = {b for j in groups[-1] for b in program.segments[j].writes} if together else set()
        if together and not written & set(segment.reads):
            groups[-1].append(k)
        else:
            groups.append([k])
    return groups


def _gathering_stage(program: Program, config: Schedule, device: DeviceSpec) -> tuple[str, Stage]:
    """The first kernel, with what the others do."""
    assert joins_alone(program), program.describe()
    segment, *joins = program.segments
    tiles = _tiles(program, 0, config)
    kernel = GatheringKernel(tiles, segment, joins)
    text, stage = _counting_stage(
        kernel, tuple(kernel.buffers()), blocks_of_sm(tiles, device), ENTRY, kernel.counters
    )
    return f"namespace kernel0 {{\n{text}}}\n", stage


def _meeting_stage(
    program: Program, k: int, config: Schedule, device: DeviceSpec, entry: str, partials: int
) -> tuple[tuple[str, Stage], TensorSpec]:
    """A kernel whose blocks share walks, and what they leave in the buffer `partials`."""
    segment, tiles = program.segments[k], _tiles(program, k, config)
    kernel = SharedWalkKernel(tiles)
    buffers = (*segment.reads, *segment.writes, partials)
    at_once, words = blocks_that_meet(tiles, device), tiles.meeting_words
    text, stage = _counting_stage(kernel, buffers, at_once, entry, words)
    return (text, replace(stage, meetings=tiles.area.meetings)), kernel.partials


def _counting_stage(
    kernel: GatheringKernel | SharedWalkKernel,
    buffers: tuple[int, ...],
    at_once: int,
    entry: str,
    counters: int,
) -> tuple[str, Stage]:
    """A tile kernel alone in its launch, whose blocks count in zeroed words, so many of them on an
    SM."""
    s, text = kernel.tiles.s, kernel.emit("tiles0")
    declared = [*kernel.tensors(), *kernel.numbers()]
    given = ", ".join(["blockIdx.x", *(d.split()[-1] for d in declared)])
    bounds = launch_bounds(s.block_threads, at_once, s.max_registers)
    head = f'extern "C" __global__ void {bounds} {entry}({", ".join(declared)}) {{'
    stage = Stage(
        entry,
        buffers,
        "P" * (len(buffers) + 1) + kernel.extent_codes() + kernel.scalar_codes(),
        blocks=kernel.tiles.blocks,
        block_threads=s.block_threads,
        estimated_registers=kernel.tiles.estimated_registers,
        counters=counters,
        extents=tuple(kernel.extents.values()),
    )
    return "\n".join([text, head, f"  tiles0({given});", "}", ""]), stage


def _tiles(program: Program, k: int, config: Schedule) -> Tiles:
    """The tiles of segment `k`, under the schedule or what fits it best."""
    area = Area(program.segments[k], k == 0 and joins_alone(program))
    if _meets(config):
        if k == _main(program):
            return Tiles(area, config)
        config = TileSchedule(sizes=config.sizes)  # under which all others were cut, see _whole
    if isinstance(config, TileSchedule) and not any(s.added() for s in program.segments):
        config = replace(config, splits=1)
    if is_joining(program, k):
        joins = [s for j, s in enumerate(program.segments) if is_joining(program, j)]
        return Tiles(area, joining_schedule(area, max(Area(s).steps for s in joins)))
    return Tiles(area, fitted(config if isinstance(config, TileSchedule) else TileSchedule(), area))


def _has_room(program: Program, segment: Segment, tiles: Tiles) -> bool:
    """Whether temporaries are as large as what a kernel leaves in them."""
    left = {
        segment.writes[k] - program.inputs - program.outputs: tiles.count_of_partials(i)
        * math.prod(tiles.area.graph.nodes[i].shape)
        for k, i in tiles.area.added.items()
    }
    return all(n == program.temporaries[b].numel for b, n in left.items() if b >= 0)


def _tile_stage(
    program: Program, group: list[int], config: Schedule, device: DeviceSpec, entry: str
) -> tuple[str, Stage]:
    """Tile kernels side by side, each with its range of blocks."""
    texts, numbers, calls, codes = list[str](), list[str](), list[tuple[str, str]](), ""
    extents: list[int] = []
    tensors: dict[int, str] = {}
    first = 0
    every = [_tiles(program, k, config) for k in group]
    for n, (k, tiles) in enumerate(zip(group, every, strict=True)):
        segment = program.segments[k]
        assert _has_room(program, segment, tiles), (segment, tiles.s)
        kernel = TileKernel(tiles)
        texts.append(kernel.emit(f"tiles{n}"))
        buffers = (*segment.reads, *segment.writes)
        for buffer, declared in zip(buffers, kernel.tensors(), strict=True):
            tensors.setdefault(buffer, declared.rpartition("__restrict__")[0])
        start = f"first{n}" if n else "0"
        own = [f"int {start}"] if n else []
        own += [f"{declared}_{n}" for declared in kernel.extent_parameters()]
        given = [*(f"b{b}" for b in buffers), *(p.split()[-1] for p in own[n > 0 :])]
        given += [p.split()[-1] for p in kernel.scalars()]
        calls.append((start, f"tiles{n}({', '.join([f'blockIdx.x - {start}', *given])});"))
        numbers += own
        codes += ("i" if n else "") + kernel.extent_codes()
        extents += [*([first] if n else []), *kernel.extents.values()]
        first += tiles.blocks
    numbers, codes = [*numbers, *kernel.scalars()], codes + kernel.scalar_codes()
    declared = ", ".join([*(f"{kind}__restrict__ b{b}" for b, kind in tensors.items()), *numbers])
    s, joins = every[0].s, is_joining(program, group[0])  # all of a group have as many threads
    at_once = 1 if joins else blocks_asked_for(every[0], device)
    bounds = launch_bounds(s.block_threads, at_once, s.max_registers)
    head = f'extern "C" __global__ void {bounds} {entry}({declared}) {{'
    # What the kernel before it wrote must not be read before the wait: that hides its pointer.
    read = [b for b, kind in tensors.items() if kind.startswith("const")]
    wait = ["  await_previous();", *(f"  b{b} = afresh(b{b});" for b in read)]
    body = [
        f"  {'else ' if n < len(calls) - 1 else ''}if (blockIdx.x >= {start}) {call}"
        for n, (start, call) in reversed(list(enumerate(calls)))
    ]
    text = "\n".join([*texts, head, *(wait if entry != ENTRY else []), *body, "}", ""])
    stage = Stage(
        entry,
        tuple(tensors),
        "P" * len(tensors) + codes,
        blocks=first,
        block_threads=s.block_threads,
        estimated_registers=0 if joins else every[0].estimated_registers,
        extents=tuple(extents),
    )
    return text, stage
