"""The source of a graph that takes several kernels, and how to launch them."""

from __future__ import annotations

import math
from dataclasses import replace

from tilewright.device import DeviceSpec
from tilewright.fusion.cuda.kernel import ENTRY, prelude, tiles_prelude
from tilewright.fusion.cuda.programs import (
    gathers,
    is_joining,
    joins_alone,
    kind_of,
    launches,
    main_kernel,
    meets,
    program_of,
    tiles_of,
)
from tilewright.fusion.cuda.registers import launch_bounds
from tilewright.fusion.cuda.stages import Schedule, Stage, column_stages, plain_stage
from tilewright.fusion.cuda.tiles.gathering import GatheringKernel
from tilewright.fusion.cuda.tiles.kernel import TileKernel
from tilewright.fusion.cuda.tiles.meeting import SharedWalkKernel
from tilewright.fusion.cuda.tiles.tiling import (
    Tiles,
    blocks_asked_for,
    blocks_of_sm,
    blocks_that_meet,
)
from tilewright.fusion.ir import Graph
from tilewright.fusion.program import Program, Segment
from tilewright.tensor_spec import TensorSpec


def emit(graph: Graph, config: Schedule, device: DeviceSpec) -> tuple[str, Program, list[Stage]]:
    """The source of all kernels, and how to launch them."""
    program = program_of(graph, config, device)
    if gathers(config):
        text, stage = _gathering_stage(program, config, device)
        source = "\n".join([prelude(), tiles_prelude(), text])
        return source, replace(program, temporaries=()), [stage]
    main = main_kernel(program)
    texts, stages = [prelude(), tiles_prelude()], list[Stage]()
    for group in launches(program):
        entry = ENTRY + (str(len(stages)) if stages else "")
        kind, k = kind_of(program, group[0]), group[0]
        own = config if k == main else None
        buffer = program.inputs + program.outputs + len(program.temporaries)
        if k == main and meets(config):
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


def _gathering_stage(program: Program, config: Schedule, device: DeviceSpec) -> tuple[str, Stage]:
    """The first kernel, with what the others do."""
    assert joins_alone(program), program.describe()
    segment, *joins = program.segments
    tiles = tiles_of(program, 0, config)
    kernel = GatheringKernel(tiles, segment, joins)
    text, stage = _counting_stage(
        kernel, tuple(kernel.buffers()), blocks_of_sm(tiles, device), ENTRY, kernel.counters
    )
    return f"namespace kernel0 {{\n{text}}}\n", stage


def _meeting_stage(
    program: Program, k: int, config: Schedule, device: DeviceSpec, entry: str, partials: int
) -> tuple[tuple[str, Stage], TensorSpec]:
    """A kernel whose blocks share walks, and what they leave in the buffer `partials`."""
    segment, tiles = program.segments[k], tiles_of(program, k, config)
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


def _tile_stage(
    program: Program, group: list[int], config: Schedule, device: DeviceSpec, entry: str
) -> tuple[str, Stage]:
    """Tile kernels side by side, each with its range of blocks."""
    texts, numbers, calls, codes = list[str](), list[str](), list[tuple[str, str]](), ""
    extents: list[int] = []
    tensors: dict[int, str] = {}
    first = 0
    every = [tiles_of(program, k, config) for k in group]
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
