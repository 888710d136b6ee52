"""Which kernels of a program are one launch, side by side: a range of its blocks for each.

Those that put partials of results together are, and start while the kernel before them ends. So are
kernels that walk, where one needs nothing of the other and is much the smaller: the first and the
last tokens of a sequence beside all others.
"""

from __future__ import annotations

import math
from dataclasses import replace

from tilewright.device import MAX_GRID, DeviceSpec
from tilewright.fusion.cuda.pointwise.schedule import (
    PointwiseSchedule,
    pointwise_heuristic,
    pointwise_registers,
)
from tilewright.fusion.cuda.programs import (
    gathers,
    is_joining,
    kind_of,
    levels,
    main_area,
    main_kernel,
    meets,
    program_of,
    tiles_of,
)
from tilewright.fusion.cuda.rows.footprint import Footprint, estimated_registers
from tilewright.fusion.cuda.rows.heuristics import row_heuristic
from tilewright.fusion.cuda.rows.schedule import RowSchedule
from tilewright.fusion.cuda.rows.space import row_space
from tilewright.fusion.cuda.stages import Schedule, adds_columns, rows_last
from tilewright.fusion.cuda.tiles.schedule import TileSchedule
from tilewright.fusion.cuda.tiles.tiling import Tiles, blocks_asked_for
from tilewright.fusion.ir import Graph
from tilewright.fusion.program import Program

SMALLER = 4
"""Times, at least: kernels of a size keep the registers that suit each."""
MOST_BYTES = 4096
"""Of a launch's parameters: older drivers take no more."""


def launches(program: Program, config: Schedule, device: DeviceSpec) -> list[list[int]]:
    """Segments by launch; the first of each decides how many threads a block has."""
    main, found = main_kernel(program), list[list[int]]()
    for level in levels(program):
        joins = [k for k in level if is_joining(program, k)]
        groups, rest = [joins] if joins else [], [k for k in level if k not in joins]
        rest.sort(key=lambda k: (k == main, _elements(program, k)), reverse=True)
        while rest:
            leader, *others = rest
            threads, registers = _led(program, leader, config, device)
            beside: list[int] = []
            for k in others if threads else []:
                group = [leader, *beside, k]
                if _is_smaller(program, k, leader, device) and _have_room(program, group):
                    s = schedule_of(program, k, config, device, threads)
                    if s and _is_content(program, k, s, config, device, registers):
                        beside.append(k)
            groups.append([leader, *sorted(beside)])
            rest = [k for k in others if k not in beside]
        found += sorted(groups, key=min)
    return found


def schedule_of(
    program: Program, k: int, config: Schedule, device: DeviceSpec, threads: int = 0
) -> Schedule | None:
    """Of segment `k`, which walks; with blocks of so many threads, if there is one."""
    segment, own = program.segments[k], config if k == main_kernel(program) else None
    match kind_of(program, k):
        case "pointwise":
            fits = isinstance(own, PointwiseSchedule)
            points = own if fits else pointwise_heuristic(segment.graph, device)
            assert isinstance(points, PointwiseSchedule)
            return replace(points, block_threads=threads or points.block_threads)
        case "tile":
            tiles = tiles_of(program, k, config)
            if threads in (0, tiles.s.block_threads):
                return tiles.s
            # More shares than steps leave threads idle; fewer take more steps each.
            shared = replace(tiles.s, shares=max(threads // tiles.s.lanes, 1))
            fits = shared.block_threads == threads and Tiles(tiles.area, shared).overload() is None
            return shared if fits else None
        case "rows":
            rows = rows_last(segment.graph)
            found = own if isinstance(own, RowSchedule) else row_heuristic(rows, device)
            assert isinstance(found, RowSchedule), rows
            if not threads:
                return found
            groups = max(threads // found.row_threads, 1)
            found = replace(found, rows_per_block=groups)
            fits = found.block_threads == threads and found in row_space(rows, device)
            return found if fits and _is_plain(found) else None
    return None


def _led(program: Program, k: int, config: Schedule, device: DeviceSpec) -> tuple[int, int]:
    """Threads of a block of a launch that segment `k` leads, and registers that its bounds leave
    each; 0 where it has its launch to itself."""
    if (k == main_kernel(program) and meets(config)) or adds_columns(program.segments[k]):
        return 0, 0
    s = schedule_of(program, k, config, device)
    if s is None or (isinstance(s, RowSchedule) and not _is_plain(s)):
        return 0, 0
    return s.block_threads, _registers_left(program, k, s, config, device)


def _registers_left(
    program: Program, k: int, s: Schedule, config: Schedule, device: DeviceSpec
) -> int:
    """What the bounds of segment `k` leave a thread."""
    at_once = s.min_blocks if isinstance(s, RowSchedule) else 1
    if isinstance(s, TileSchedule):
        at_once = blocks_asked_for(Tiles(tiles_of(program, k, config).area, s), device)
    left = device.registers_left(s.block_threads, at_once)
    return min(left, s.max_registers or left)


def _is_content(
    program: Program, k: int, s: Schedule, config: Schedule, device: DeviceSpec, registers: int
) -> bool:
    """Whether segment `k` needs no more registers than these: its own bounds leave it no more, or
    it is reckoned to need half of them, which is no close estimate."""
    if _registers_left(program, k, s, config, device) <= registers:
        return True
    segment = program.segments[k]
    if isinstance(s, TileSchedule):
        needed = Tiles(tiles_of(program, k, config).area, s).estimated_registers
    elif isinstance(s, RowSchedule):
        needed = estimated_registers(s, Footprint(rows_last(segment.graph)))
    else:
        needed = pointwise_registers(segment.graph, s)
    return 2 * needed <= registers


def _is_plain(s: RowSchedule) -> bool:
    """Whether blocks know their rows by their number alone, and share memory of a size that the
    source declares."""
    alone = s.cluster == 1 and s.blocks_per_row == 1 and not s.persistent
    return alone and s.storage != "shared"


def _is_smaller(program: Program, k: int, leader: int, device: DeviceSpec) -> bool:
    """Whether a kernel is so much the smaller, or has steps alone, as the leader has, and both so
    few elements that a device can take all at once."""
    several = [_elements(program, k), _elements(program, leader)]
    plain = {kind_of(program, k), kind_of(program, leader)} == {"pointwise"}
    few = math.fsum(several) <= device.sms * device.threads_per_sm
    return (plain and few) or several[0] * SMALLER <= several[1]


def _have_room(program: Program, group: list[int]) -> bool:
    """Whether grids and parameters of these kernels fit one launch: addresses, and for each part
    its sizes, those as divisors, and strides."""
    blocks, words = 0, 0
    for n, k in enumerate(group):
        graph, segment = program.segments[k].graph, program.segments[k]
        by_output = n > 0 and kind_of(program, k) == "pointwise"
        written = 1 if by_output else len(segment.writes)
        strides = len(graph.space) * (3 + len(segment.reads) + written)
        words += len(segment.reads) + len(segment.writes) + len(graph.scalars)
        words += (2 + strides) * (len(segment.writes) if by_output else 1)
        blocks += _elements(program, k)
    return blocks <= MAX_GRID and 8 * words <= MOST_BYTES


def _elements(program: Program, k: int) -> int:
    return math.prod(program.segments[k].graph.space)


def describe(graph: Graph, config: Schedule, device: DeviceSpec) -> list[str]:
    """One line for each kernel, and which of them are one launch."""
    program = program_of(graph, config, device)
    lines = program.describe()
    if meets(config):
        meetings = main_area(program).meetings
        lines[main_kernel(program)] += (
            f"; {config.splits} blocks share a walk, and meet {meetings} times"
        )
    for k, segment in enumerate(program.segments):
        if adds_columns(segment):
            lines[k] += " (and a launch that joins what its blocks summed over rows)"
    for group in launches(program, config, device):
        for k in group if gathers(config) and group[0] else group[1:]:
            lines[k] += f" (in one launch with kernel {0 if gathers(config) else group[0]})"
    return lines
