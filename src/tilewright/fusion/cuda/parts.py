"""Kernels as parts of one launch: device functions, each of which has a range of the blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tilewright.device import DeviceSpec
from tilewright.fusion.cuda.kernel import ENTRY, Kernel
from tilewright.fusion.cuda.launches import schedule_of
from tilewright.fusion.cuda.pointwise.kernel import PointwiseKernel
from tilewright.fusion.cuda.pointwise.schedule import PointwiseSchedule, pointwise_registers
from tilewright.fusion.cuda.programs import is_joining, tiles_of
from tilewright.fusion.cuda.registers import launch_bounds
from tilewright.fusion.cuda.rows.footprint import Footprint, estimated_registers
from tilewright.fusion.cuda.rows.kernel import RowKernel
from tilewright.fusion.cuda.rows.schedule import RowSchedule
from tilewright.fusion.cuda.stages import Schedule, Stage, rows_last
from tilewright.fusion.cuda.tiles.kernel import TileKernel
from tilewright.fusion.cuda.tiles.schedule import TileSchedule
from tilewright.fusion.cuda.tiles.tiling import Tiles, blocks_asked_for
from tilewright.fusion.plan import plan_rows
from tilewright.fusion.program import Program, Segment


@dataclass(frozen=True)
class Part:
    """One kernel of a launch, as a device function.

    Attributes:
        name: of the function, which takes the number of a block of its own, tensors, numbers and
            scalars.
        buffers: of its tensors.
        numbers: their values, the count of rows or elements first where it takes that.
        bounds: of a launch that it leads.
        awaits: it reads what the launch before wrote in such a way that it may begin before that
            has ended.
    """

    kernel: Kernel
    text: str
    name: str
    buffers: tuple[int, ...]
    counts: tuple[int, ...]
    blocks: int
    block_threads: int
    bounds: str
    estimated_registers: int
    awaits: bool = False

    @property
    def tensors(self) -> list[str]:
        return self.kernel.parameters_of_kernel()[: len(self.buffers)]

    @property
    def numbers(self) -> list[str]:
        counts = ["i64 count" for _ in self.counts]
        return [*counts, *self.kernel.extent_parameters()]

    @property
    def scalars(self) -> list[str]:
        return self.kernel.scalar_parameters()

    @property
    def codes(self) -> str:
        return "q" * len(self.counts) + self.kernel.extent_codes()

    @property
    def values(self) -> tuple[int, ...]:
        return (*self.counts, *self.kernel.extents.values())


def part_of(
    program: Program, k: int, config: Schedule, device: DeviceSpec, name: str, threads: int = 0
) -> Part:
    """Segment `k`, with blocks of so many threads, or of as many as suit it."""
    segment = program.segments[k]
    buffers = (*segment.reads, *segment.writes)
    s = schedule_of(program, k, config, device, threads)
    if isinstance(s, TileSchedule):
        tiles = Tiles(tiles_of(program, k, config).area, s)
        return _of_tiles(program, k, tiles, device, name)
    if isinstance(s, RowSchedule):
        graph = rows_last(segment.graph)
        rows = RowKernel(plan_rows(graph, s.moments, s.recompute), s, name)
        count = math.prod(graph.space[a] for a in graph.kept)
        blocks = math.ceil(count / (s.rows_per_block * s.rows_per_thread))
        bounds = launch_bounds(s.block_threads, s.min_blocks, s.max_registers)
        estimated = estimated_registers(s, Footprint(graph))
        text = rows.emit_part()
        return Part(rows, text, name, buffers, (count,), blocks, s.block_threads, bounds, estimated)
    assert isinstance(s, PointwiseSchedule), s
    points = PointwiseKernel(segment.graph, s, name)
    count = math.prod(segment.graph.space)
    blocks = math.ceil(count / points.per_block)
    bounds = launch_bounds(s.block_threads, 1, s.max_registers)
    estimated = pointwise_registers(segment.graph, s)
    text = points.emit_part()
    return Part(points, text, name, buffers, (count,), blocks, s.block_threads, bounds, estimated)


def _of_tiles(program: Program, k: int, tiles: Tiles, device: DeviceSpec, name: str) -> Part:
    segment, s, joins = program.segments[k], tiles.s, is_joining(program, k)
    assert _has_room(program, segment, tiles), (segment, s)
    kernel = TileKernel(tiles)
    text = kernel.emit(name)
    bounds = launch_bounds(
        s.block_threads, 1 if joins else blocks_asked_for(tiles, device), s.max_registers
    )
    buffers = (*segment.reads, *segment.writes)
    estimated = 0 if joins else tiles.estimated_registers
    return Part(
        kernel, text, name, buffers, (), tiles.blocks, s.block_threads, bounds, estimated, True
    )


def _has_room(program: Program, segment: Segment, tiles: Tiles) -> bool:
    """Whether temporaries are as large as what a kernel leaves in them, and outputs hold one
    partial."""
    first = program.inputs + program.outputs
    for k, i in tiles.area.added.items():
        buffer, numel = segment.writes[k], math.prod(tiles.area.graph.nodes[i].shape)
        room = numel if buffer < first else program.temporaries[buffer - first].numel
        if tiles.count_of_partials(i) * numel != room:
            return False
    return True


def side_by_side(parts: list[Part], entry: str) -> tuple[str, Stage]:
    """One launch: its first blocks are those of the first part, and so on."""
    numbers, calls, codes = list[str](), list[tuple[str, str]](), ""
    values: list[int] = []
    tensors: dict[int, str] = {}
    first, scalars = 0, parts[0].scalars  # those of the whole function
    for n, part in enumerate(parts):
        assert (part.block_threads, part.scalars) == (parts[0].block_threads, scalars), part
        for buffer, declared in zip(part.buffers, part.tensors, strict=True):
            tensors.setdefault(buffer, declared.rpartition("__restrict__")[0])
        start = f"first{n}" if n else "0"
        own = [f"{declared}_{n}" for declared in part.numbers]
        given = [*(f"b{b}" for b in part.buffers), *(p.split()[-1] for p in (*own, *scalars))]
        calls.append((start, f"{part.name}({', '.join([f'blockIdx.x - {start}', *given])});"))
        numbers += [f"int {start}", *own] if n else own
        codes += ("i" if n else "") + part.codes
        values += [*([first] if n else []), *part.values]
        first += part.blocks
    declared = ", ".join(
        [*(f"{kind}__restrict__ b{b}" for b, kind in tensors.items()), *numbers, *scalars]
    )
    head = f'extern "C" __global__ void {parts[0].bounds} {entry}({declared}) {{'
    # What the kernel before it wrote must not be read before the wait: that hides its pointer.
    read = [b for b, kind in tensors.items() if kind.startswith("const")]
    wait = ["  await_previous();", *(f"  b{b} = afresh(b{b});" for b in read)]
    overlaps = entry != ENTRY and all(part.awaits for part in parts)
    body = [
        f"  {'else ' if n < len(calls) - 1 else ''}if (blockIdx.x >= {start}) {call}"
        for n, (start, call) in reversed(list(enumerate(calls)))
    ]
    texts = [part.text for part in parts]
    text = "\n".join([*texts, head, *(wait if overlaps else []), *body, "}", ""])
    stage = Stage(
        entry,
        tuple(tensors),
        "P" * len(tensors) + codes + parts[0].kernel.scalar_codes(),
        blocks=first,
        block_threads=parts[0].block_threads,
        estimated_registers=parts[0].estimated_registers,
        extents=tuple(values),
        overlaps=overlaps,
    )
    return text, stage
