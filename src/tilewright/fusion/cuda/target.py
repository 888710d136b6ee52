"""The fusion compiler's CUDA target: schedule spaces, NVRTC tasks, and launching."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from tilewright.compile import nvrtc
from tilewright.compile.cache import Compiled
from tilewright.compile.counters import counters
from tilewright.compile.launch import CudaKernel, Launcher, overlaps
from tilewright.device import DeviceSpec
from tilewright.fusion.cuda import launches, program_schedules, program_source, programs
from tilewright.fusion.cuda.column_graph import RowGraph, split
from tilewright.fusion.cuda.finishing import FINISH
from tilewright.fusion.cuda.kernel import ENTRY, Launch, prelude_of
from tilewright.fusion.cuda.pointwise.kernel import emit_pointwise
from tilewright.fusion.cuda.pointwise.schedule import (
    loads_bytes,
    pointwise_heuristic,
    pointwise_promising,
    pointwise_registers,
    pointwise_space,
    roomier_points,
)
from tilewright.fusion.cuda.rows.columns import emit_columns
from tilewright.fusion.cuda.rows.footprint import Footprint, estimated_registers
from tilewright.fusion.cuda.rows.heuristics import roomier_rows, row_heuristic, row_promising
from tilewright.fusion.cuda.rows.schedule import RowSchedule
from tilewright.fusion.cuda.rows.sharing import emit_rows
from tilewright.fusion.cuda.rows.space import SEARCHED, row_space
from tilewright.fusion.cuda.stages import Stage, fits_rows
from tilewright.fusion.cuda.tiles import tiling
from tilewright.fusion.cuda.tiles.schedule import TileSchedule
from tilewright.fusion.ir import Graph
from tilewright.fusion.program import Program
from tilewright.fusion.remembered import remembered
from tilewright.fusion.stored import Stored
from tilewright.fusion.subgraphs import main_axis
from tilewright.impl import CompileTask, Executable, Launched, Resources, Work, allocator
from tilewright.op import Workload
from tilewright.space import ConfigSpace
from tilewright.tensor_spec import DTYPES

ALIGN = 256
"""Bytes to which temporaries are aligned."""
_data_ptr = torch.Tensor.data_ptr


def unsupported(graph: Graph, device: DeviceSpec) -> str | None:
    for i, access in graph.outputs:
        shape = graph.nodes[i].shape
        if any(stride and n == 1 for stride, n in zip(access.strides, shape, strict=True)):
            return "an output repeats one value along a dim"
    return program_schedules.unsupported(graph, device) if one_pass(graph, device) is None else None


@remembered
def one_pass(graph: Graph, device: DeviceSpec) -> Graph | None:
    """What a pointwise or row kernel computes of the graph, if one does it all, or all but putting
    sums over rows together; else None. Its rows, if it has some, are the innermost axes."""
    if not graph.reductions:
        return graph if len({_shape(graph, i) for i, _ in graph.outputs}) == 1 else None
    rows = graph
    if len(graph.reduction_sets) > 1 or graph.space[-1] == 1 or not _innermost(graph):
        found = split(graph)
        if isinstance(found, str):
            return None
        rows = found
    elif math.prod(graph.space) > graph.largest_step:
        return None
    return rows if fits_rows(rows, device) else None


def _shape(graph: Graph, i: int) -> tuple[int, ...]:
    return graph.nodes[i].shape


def _innermost(graph: Graph) -> bool:
    rank = len(graph.space)
    lane = main_axis(graph, range(len(graph.nodes)))
    return lane == rank - 1 and graph.reduced == tuple(range(rank - len(graph.reduced), rank))


def space(graph: Graph, device: DeviceSpec) -> ConfigSpace[Any]:
    rows = one_pass(graph, device)
    if rows is None:
        return program_schedules.space(graph, device)
    return row_space(rows, device, SEARCHED) if rows.reduced else pointwise_space(graph, device)


def heuristic(graph: Graph, device: DeviceSpec) -> Any:
    rows = one_pass(graph, device)
    if rows is None:
        return program_schedules.heuristic(graph, device)
    return row_heuristic(rows, device) if rows.reduced else pointwise_heuristic(graph, device)


def promising(graph: Graph, device: DeviceSpec) -> list[Any]:
    rows = one_pass(graph, device)
    if rows is None:
        return program_schedules.promising(graph, device)
    return row_promising(rows, device) if rows.reduced else pointwise_promising(graph, device)


def roomier(graph: Graph, config: Any, device: DeviceSpec) -> Iterator[Any]:
    """Untuned schedules that leave a thread more registers, the best first: for a kernel that the
    compiler made to spill. Some may not fit."""
    rows = one_pass(graph, device)
    if rows is None:
        return program_schedules.roomier(graph, config, device)
    return roomier_rows(rows, config, device) if rows.reduced else roomier_points(config)


def emit(graph: Graph, config: Any, device: DeviceSpec) -> tuple[str, Launch]:
    """The source and launch of what one pass computes."""
    rows = one_pass(graph, device)
    assert rows is not None, graph
    if isinstance(rows, RowGraph):
        return emit_columns(graph, rows, config)
    if graph.reduced:
        return emit_rows(graph, config)
    return emit_pointwise(graph, config)


def describe(graph: Graph, config: Any, device: DeviceSpec) -> list[str]:
    rows = one_pass(graph, device)
    if rows is None:
        return launches.describe(graph, config, device)
    sets = ", ".join(str(list(axes)) for axes in graph.reduction_sets)
    reduced = f", reduces axes {sets}" if sets else ""
    lines = [f"kernel 0: space {list(graph.space)}{reduced}"]
    if isinstance(rows, RowGraph) and config.combine == "grid":
        lines[0] += "; its blocks meet, then join what each summed over rows"
    elif isinstance(rows, RowGraph):
        at = ", ".join(dict.fromkeys(filter(None, (graph.nodes[i].line for i in rows.columns))))
        lines.append("kernel 1: joins what blocks summed over rows; cut: no block sees all rows")
        lines[1] += f" ({at})" if at else ""
    return lines


def task(graph: Graph, config: Any, device: DeviceSpec) -> CompileTask:
    if one_pass(graph, device) is None:
        source, *_ = program_source.emit(graph, config, device)
    else:
        source, _ = emit(graph, config, device)
    flags = [*nvrtc.flags_for(device.arch), "--ptxas-options=-v"]
    if graph.meets_extremes:
        flags.append("--fmad=false")
    shared = prelude_of(source)
    return CompileTask("nvrtc", source, tuple(flags), ENTRY, len(shared))


def executable(
    graph: Graph, config: Any, w: Workload, built: Compiled, device: DeviceSpec
) -> Executable:
    rows = one_pass(graph, device)
    if rows is None:
        _, program, stages = program_source.emit(graph, config, device)
        several = ProgramKernels(built, program, stages, graph, w)
        first = launches.launches(program, config, device)[0][0]
        if isinstance(config, TileSchedule) and first == programs.main_kernel(program):
            assert several.work is not None
            several.work = replace(several.work, loads_bytes=tiling.loads_bytes(graph, config))
        return several
    _, launch = emit(graph, config, device)
    axes = rows.kept if rows.reduced else range(len(graph.space))
    count = math.prod(rows.space[a] for a in axes)
    kind = TwoKernels if launch.finish else MeetingKernel if launch.meets else FusedKernel
    kernel = kind(built, launch, graph, w, count)
    if isinstance(config, RowSchedule):
        footprint = Footprint(rows)
        estimated, loaded = estimated_registers(config, footprint), footprint.loads_bytes(config)
    else:
        estimated, loaded = pointwise_registers(graph, config), loads_bytes(graph, config)
    work = _work(launch, count)
    kernel.work = replace(work, loads_bytes=loaded, estimated_registers=estimated)
    return kernel


class Kernels(Stored):
    """Launches of generated kernels; outputs come fresh from the allocator."""

    any_device_current = True

    def __init__(self, graph: Graph, w: Workload):
        super().__init__(graph, w)
        self._runs: dict[int, Callable[..., Any]] = {}

    def __call__(
        self,
        *tensors: torch.Tensor,
        scalars: tuple[float, ...] | None = None,
        pointers: list[int] | None = None,
    ) -> Any:
        device = tensors[0].device
        run = self._runs.get(device.index) or self.by_addresses(device)
        inputs = pointers or map(_data_ptr, tensors)
        return run(*inputs) if scalars is None else run(*inputs, numbers=self.scalars_of(scalars))

    def by_addresses(self, device: torch.device) -> Callable[..., Any]:
        index = device.index
        if index not in self._runs:
            self._runs[index] = self.running(device)
        return self._runs[index]

    def running(self, device: torch.device) -> Callable[..., Any]:
        """What launches there, given addresses of inputs, and `numbers` where those are not
        `scalars`: what calls have in common may be looked up here, once."""
        raise NotImplementedError

    def fresh(self, device: torch.device) -> list[torch.Tensor]:
        empty = allocator.on(device)
        return [empty(shape, strides, dtype) for shape, strides, dtype in self.outputs]


class FusedKernel(Kernels):
    """One launch of a generated kernel."""

    def __init__(self, built: Compiled, launch: Launch, graph: Graph, w: Workload, count: int):
        super().__init__(graph, w)
        self.resources: Resources | None = built.resources
        self.kernel = CudaKernel(built, ENTRY, launch.signature)
        self.count, self.shape, self.counters = count, launch, launch.counters
        self.extents = launch.extents
        self.grids: dict[int, tuple[int, int, int]] = {}
        self.launchers: dict[int, Launcher] = {}
        self.block = (launch.block_threads, 1, 1)
        self.shared_bytes, self.cluster = launch.shared_bytes, launch.cluster
        self.block_threads = launch.block_threads

    def running(self, device: torch.device) -> Callable[..., Any]:
        index, stream_on = device.index, torch._C._cuda_getCurrentRawStream
        launch = self.launcher_on(index, stream_on(index))
        count, extents, words, scalars = self.count, self.extents, self.counters, self.scalars
        if words or len(self.outputs) > 1 or self.written is not None:

            def run(*inputs: int, numbers: tuple[float, ...] = scalars) -> Any:
                outs, stream = self.fresh(device), stream_on(index)
                counter = (counters.address(index, stream, words),) if words else ()
                addresses = self.addresses(outs)
                launch(stream, (*inputs, *addresses, count, *counter, *extents, *numbers))
                return outs[0] if len(outs) == 1 else tuple(outs)

            return run
        ((shape, strides, dtype),) = self.outputs

        def run_to_one(*inputs: int, numbers: tuple[float, ...] = scalars) -> torch.Tensor:
            out = allocator.on(device)(shape, strides, dtype)
            launch(stream_on(index), (*inputs, out.data_ptr(), count, *extents, *numbers))
            return out

        return run_to_one

    def launcher_on(self, device_index: int, stream: int) -> Launcher:
        grid = self.grids.get(device_index) or self.grid_on(device_index)
        self.launchers[device_index] = self.kernel.launcher(
            device_index, grid, self.block, self.shared_bytes, self.cluster, stream
        )
        return self.launchers[device_index]

    def grid_on(self, device_index: int) -> tuple[int, int, int]:
        blocks = _blocks(self.shape, self.count, self.kernel, device_index)
        self.grids[device_index] = (blocks, self.shape.samples, 1)
        return self.grids[device_index]


class SummingKernel(FusedKernel):
    """A row kernel that leaves partial results over rows, which `enqueue` sees joined."""

    def __init__(self, built: Compiled, launch: Launch, graph: Graph, w: Workload, count: int):
        super().__init__(built, launch, graph, w, count)
        assert launch.outputs is not None
        self.partials, self.dtype = launch.partials, DTYPES[launch.partial_dtype]
        self.first = launch.outputs

    @property
    def workspace_bytes(self) -> int:  # type: ignore[override]
        clusters = max((math.prod(g) for g in self.grids.values()), default=0) // self.cluster
        return clusters * self.partials * self.dtype.itemsize

    def running(self, device: torch.device) -> Callable[..., Any]:
        index = device.index

        def run(*inputs: int, numbers: tuple[float, ...] = self.scalars) -> Any:
            outs = self.fresh(device)
            grid = self.grids.get(index) or self.grid_on(index)
            size = math.prod(grid) // self.cluster * self.partials
            partials = allocator.on(device)((size,), (1,), self.dtype)
            self.enqueue(index, inputs, self.addresses(outs), partials.data_ptr(), numbers)
            return outs[0] if len(outs) == 1 else tuple(outs)

        return run

    def enqueue(
        self,
        index: int,
        inputs: Sequence[int],
        outputs: list[int],
        partials: int,
        numbers: tuple[float, ...],
    ) -> None:
        """Launch on device `index`, given addresses."""
        raise NotImplementedError


class MeetingKernel(SummingKernel):
    """Its blocks wait for one another, and join the partial results themselves."""

    def enqueue(
        self,
        index: int,
        inputs: Sequence[int],
        outputs: list[int],
        partials: int,
        numbers: tuple[float, ...],
    ) -> None:
        stream = torch._C._cuda_getCurrentRawStream(index)
        self.kernel.launch(
            self.grids[index],
            self.block,
            self.shared_bytes,
            stream,
            index,
            *inputs,
            *[outputs[k] for k in self.first],
            partials,
            self.count,
            counters.address(index, stream, self.counters),
            *self.extents,
            *numbers,
            cluster=self.cluster,
            cooperative=True,
        )


class TwoKernels(SummingKernel):
    """A row kernel that leaves partial results, and the kernel that joins them."""

    def __init__(self, built: Compiled, launch: Launch, graph: Graph, w: Workload, count: int):
        super().__init__(built, launch, graph, w, count)
        assert launch.finish is not None
        self.finish = launch.finish
        self.second = CudaKernel(built, FINISH, launch.finish.signature)
        self.joins: dict[int, Launcher] = {}
        joins = Work(launch.finish.blocks * launch.samples, False, None)
        self.later = (Launched(FINISH, launch.finish.block_threads, work=joins),)

    def enqueue(
        self,
        index: int,
        inputs: Sequence[int],
        outputs: list[int],
        partials: int,
        numbers: tuple[float, ...],
    ) -> None:
        stream = torch._C._cuda_getCurrentRawStream(index)
        launch = self.launchers.get(index) or self.launcher_on(index, stream)
        first = [outputs[k] for k in self.first]
        launch(stream, [*inputs, *first, partials, self.count, *self.extents, *numbers])
        join = self.joins.get(index) or self.join_on(index, stream)
        read = [inputs[i] for i in self.finish.inputs]
        written = [outputs[k] for k in self.finish.outputs]
        left = self.grids[index][0] // self.cluster
        join(stream, [partials, *read, *written, left, *numbers])

    def join_on(self, device_index: int, stream: int) -> Launcher:
        self.joins[device_index] = self.second.launcher(
            device_index,
            (self.finish.blocks, self.shape.samples, 1),
            (self.finish.block_threads, 1, 1),
            0,
            1,
            stream,
            overlapping=overlaps(device_index),
        )
        return self.joins[device_index]


class StageLaunch(NamedTuple):
    """A launch of a program on one device: what it is given beside addresses and scalars.

    Attributes:
        buffers: whose addresses come first.
        rows: their number, where the kernel is given it.
        counters: zeroed words that it takes.
        extents: clusters of the launch before, where this one joins what they left, and sizes.
    """

    launch: Launcher
    buffers: tuple[int, ...]
    rows: tuple[int, ...]
    counters: int
    extents: tuple[Any, ...]


class ProgramKernels(Kernels):
    """Several launches; what they pass on lies in one piece of workspace."""

    def __init__(
        self, built: Compiled, program: Program, stages: list[Stage], graph: Graph, w: Workload
    ):
        super().__init__(graph, w)
        self.resources: Resources | None = built.resources
        self.stages = [(s, CudaKernel(built, s.entry, s.signature)) for s in stages]
        first, *later = [
            Launched(
                s.entry,
                s.block_threads,
                s.shared_bytes,
                replace(
                    _work(s.launch, s.count)
                    if s.launch
                    else Work(s.blocks * s.samples, False, None),
                    estimated_registers=s.estimated_registers,
                ),
            )
            for s in stages
        ]
        self.block_threads, self.shared_bytes = first.block_threads, first.shared_bytes
        self.work = first.work
        self.later = tuple(later)
        self.offsets, size = [], 0
        for spec in program.temporaries:
            self.offsets.append(size)
            size += math.ceil(spec.numel * spec.itemsize / ALIGN) * ALIGN
        self.workspace_bytes = size
        self.launches: dict[int, list[StageLaunch]] = {}

    def running(self, device: torch.device) -> Callable[..., Any]:
        index = device.index

        def run(*inputs: int, numbers: tuple[float, ...] = self.scalars) -> Any:
            outs = self.fresh(device)
            pointers = [*inputs, *self.addresses(outs)]
            if self.workspace_bytes:
                memory = allocator.on(device)((self.workspace_bytes,), (1,), torch.uint8)
                start = memory.data_ptr()
                pointers += [start + offset for offset in self.offsets]
            self.enqueue(index, pointers, numbers)
            return outs[0] if len(outs) == 1 else tuple(outs)

        return run

    def enqueue(self, index: int, pointers: list[int], numbers: tuple[float, ...]) -> None:
        """Launch on device `index`, given addresses."""
        stream = torch._C._cuda_getCurrentRawStream(index)
        for each in self.launches.get(index) or self.launches_on(index, stream):
            words = [counters.address(index, stream, each.counters)] if each.counters else []
            buffers = [pointers[b] for b in each.buffers]
            each.launch(stream, [*buffers, *each.rows, *words, *each.extents, *numbers])

    def launches_on(self, device_index: int, stream: int) -> list[StageLaunch]:
        """Where `stream` is; a persistent kernel has as many blocks as run at once."""
        found, clusters = [], 0
        for stage, kernel in self.stages:
            shape, blocks, cluster = stage.launch, stage.blocks, 1
            if shape:
                blocks = _blocks(shape, stage.count, kernel, device_index)
                cluster = shape.cluster
            launch = kernel.launcher(
                device_index,
                (blocks, stage.samples, 1),
                (stage.block_threads, 1, 1),
                stage.shared_bytes,
                cluster,
                stream,
                cooperative=stage.meetings > 0,
                overlapping=stage.overlaps and overlaps(device_index),
            )
            rows = (stage.count,) if shape else ()
            words = shape.counters if shape else stage.counters
            extents = (*([clusters] if stage.finishes else []), *(shape or stage).extents)
            found.append(StageLaunch(launch, stage.buffers, rows, words, extents))
            clusters = blocks // cluster if shape else 0
        self.launches[device_index] = found
        return found


def _work(launch: Launch, count: int) -> Work:
    """What `_blocks` makes a grid of."""
    return Work(
        launch.blocks(count) * launch.samples,
        launch.persistent,
        launch.most_per_sm,
        most_blocks=launch.most_blocks and launch.most_blocks * launch.samples,
        multiple=launch.multiple,
        cluster=launch.cluster,
    )


def _blocks(launch: Launch, count: int, kernel: CudaKernel, device_index: int) -> int:
    """For each sample a block for every group of rows, or of a persistent kernel as many as run at
    once."""
    if not launch.persistent:
        return launch.blocks(count)
    resident = kernel.resident_blocks(
        device_index,
        launch.block_threads,
        launch.shared_bytes,
        launch.cluster,
        launch.most_per_sm,
    )
    return launch.walking(count, resident)
