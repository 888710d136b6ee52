"""Kernels as parts of one launch: device functions, each of which has a range of the blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tilewright.device import DeviceSpec
from tilewright.fusion.cuda.kernel import ENTRY, Kernel
from tilewright.fusion.cuda.launches import schedule_of
from tilewright.fusion.cuda.pointwise.kernel import PointwiseKernel
from tilewright.fusion.cuda.pointwise.schedule import PointwiseSchedule, pointwise_registers
from tilewright.fusion.cuda.programs import is_joining, tiles_of
from tilewright.fusion.cuda.registers import launch_bounds
from tilewright.fusion.cuda.rows.footprint import Footprint, estimated_registers
from tilewright.fusion.cuda.rows.kernel import RowKernel, planned
from tilewright.fusion.cuda.rows.schedule import RowSchedule
from tilewright.fusion.cuda.stages import Schedule, Stage, rows_last
from tilewright.fusion.cuda.tiles.kernel import TileKernel
from tilewright.fusion.cuda.tiles.schedule import TileSchedule
from tilewright.fusion.cuda.tiles.tiling import Tiles, blocks_asked_for
from tilewright.fusion.passes import remove_dead
from tilewright.fusion.program import Program, Segment


@dataclass(frozen=True)
class Part:
    """One kernel of a launch, as a device function.

    Attributes:
        name: of the function, which takes shared memory, if it shares that, the number of a block
            of its own, tensors, numbers and scalars.
        buffers: of its tensors.
        numbers: their values, the count of rows or elements first where it takes that.
        bounds: of a launch that it leads.
        shared_bytes: of what all parts of a launch have in one place; None of one that declares its
            own.
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
    shared_bytes: int | None = None

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


def parts_of(
    program: Program, group: list[int], config: Schedule, device: DeviceSpec
) -> list[Part]:
    """The kernels of a launch, with as many threads as the first of them has.

    Steps alone are a part for each output, except in the first: all threads have as many registers
    as the part that needs most, and the first should not pay for what is small. The sums of pixels
    and their neighbours, f32[64,512,512], took 101.2 us on an H200 with one part for four corners,
    whose 80 registers left it fewer threads, and 68.3 alone (47cace64, no file kept).
    """
    threads, parts = 0, list[Part]()
    for k in group:
        segment, s = program.segments[k], schedule_of(program, k, config, device, threads)
        several = _by_output(segment) if isinstance(s, PointwiseSchedule) and parts else [segment]
        for each in several:
            name = f"part{len(parts)}"
            if isinstance(s, PointwiseSchedule):
                parts.append(_of_steps(each, s, name))
            elif isinstance(s, RowSchedule):
                parts.append(_of_rows(each, s, name))
            else:
                assert isinstance(s, TileSchedule), s
                tiles = Tiles(tiles_of(program, k, config).area, s)
                parts.append(_of_tiles(program, k, tiles, device, name))
        threads = parts[0].block_threads
    return parts


def _by_output(segment: Segment) -> list[Segment]:
    return [
        replace(
            segment, graph=remove_dead(replace(segment.graph, outputs=(output,))), writes=(buffer,)
        )
        for output, buffer in zip(segment.graph.outputs, segment.writes, strict=True)
    ]


def _of_steps(segment: Segment, s: PointwiseSchedule, name: str) -> Part:
    kernel = PointwiseKernel(segment.graph, s, name)
    count = math.prod(segment.graph.space)
    return Part(
        kernel, kernel.emit_part(), name, (*segment.reads, *segment.writes), (count,),
        math.ceil(count / kernel.per_block), s.block_threads,
        launch_bounds(s.block_threads, 1, s.max_registers),
        pointwise_registers(segment.graph, s),
    )  # fmt: skip


def _of_rows(segment: Segment, s: RowSchedule, name: str) -> Part:
    graph = rows_last(segment.graph)
    kernel = RowKernel(planned(graph, s, s.recompute), s, name)
    count = math.prod(graph.space[a] for a in graph.kept)
    return Part(
        kernel, kernel.emit_part(), name, (*segment.reads, *segment.writes), (count,),
        math.ceil(count / (s.rows_per_block * s.rows_per_thread)), s.block_threads,
        launch_bounds(s.block_threads, s.min_blocks, s.max_registers),
        estimated_registers(s, Footprint(graph)),
    )  # fmt: skip


def _of_tiles(program: Program, k: int, tiles: Tiles, device: DeviceSpec, name: str) -> Part:
    segment, s, joins = program.segments[k], tiles.s, is_joining(program, k)
    assert _has_room(program, segment, tiles), (segment, s)
    kernel = TileKernel(tiles)
    at_once = 1 if joins else blocks_asked_for(tiles, device)
    text = kernel.emit(name, apart=False)
    return Part(
        kernel, text, name, (*segment.reads, *segment.writes), (),
        tiles.blocks, s.block_threads, launch_bounds(s.block_threads, at_once, s.max_registers),
        0 if joins else tiles.estimated_registers, True, kernel.shared_bytes,
    )  # fmt: skip


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
        given = [f"blockIdx.x - {start}", *given]
        given = given if part.shared_bytes is None else ["shared", *given]
        calls.append((start, f"{part.name}({', '.join(given)});"))
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
    tiled = [part.shared_bytes for part in parts if part.shared_bytes is not None]
    quads = max(math.ceil(max(tiled, default=0) / 16), 1)
    shared = [f"  __shared__ Quad shared[{quads}];"] if tiled else []
    body = [
        f"  {'else ' if n < len(calls) - 1 else ''}if (blockIdx.x >= {start}) {call}"
        for n, (start, call) in reversed(list(enumerate(calls)))
    ]
    texts = [part.text for part in parts]
    text = "\n".join([*texts, head, *shared, *(wait if overlaps else []), *body, "}", ""])
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
