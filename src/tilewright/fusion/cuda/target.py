"""The fusion compiler's CUDA target: schedule spaces, NVRTC tasks, and launching."""

from __future__ import annotations

import math
from typing import Any

import torch

from tilewright.compile.cache import Compiled
from tilewright.compile.launch import CudaKernel, overlaps
from tilewright.device import DeviceSpec
from tilewright.fusion.cuda.columns import FINISH, RowGraph, emit_columns, split
from tilewright.fusion.cuda.kernel import ENTRY, Launch
from tilewright.fusion.cuda.pointwise import emit_pointwise
from tilewright.fusion.cuda.rows import emit_rows
from tilewright.fusion.cuda.schedule import (
    pointwise_heuristic,
    pointwise_space,
    row_heuristic,
    row_space,
)
from tilewright.fusion.ir import Graph
from tilewright.fusion.plan import plan_rows
from tilewright.impl import CompileTask, Executable, Resources, allocator
from tilewright.op import DTYPES, Workload
from tilewright.space import ConfigSpace

MAX_GRID = 2**31 - 1
_data_ptr = torch.Tensor.data_ptr


def unsupported(graph: Graph, device: DeviceSpec) -> str | None:
    rank = len(graph.space)
    if any(n.op == "broadcast" for n in graph.nodes):
        return "an output repeats one value along a dim"
    rows = row_graph(graph)
    if isinstance(rows, str):
        return rows
    if rows.reduced and rows.reduced != tuple(range(rank - len(rows.reduced), rank)):
        return "the reduction is not over the innermost dims in memory order"
    blocks = math.prod(rows.space[a] for a in rows.kept) if rows.reduced else 0
    if blocks > MAX_GRID:
        return f"{blocks} rows exceed a grid of {MAX_GRID} blocks"
    if rows.reduced and row_heuristic(rows, device) is None:
        return f"rows of {rows.reduced_size} elements fit no schedule on {device.name}"
    return None


def row_graph(graph: Graph) -> Graph | str:
    """What a row kernel computes: the graph, or its part before the sums over rows."""
    innermost = len(graph.space) - 1
    if all(innermost in axes for axes in graph.reduction_sets) and len(graph.reduction_sets) < 2:
        return graph
    return split(graph)


def space(graph: Graph, device: DeviceSpec) -> ConfigSpace[Any]:
    rows = _rows(graph)
    return row_space(rows, device) if rows.reduced else pointwise_space(graph, device)


def heuristic(graph: Graph, device: DeviceSpec) -> Any:
    rows = _rows(graph)
    return row_heuristic(rows, device) if rows.reduced else pointwise_heuristic(graph, device)


def emit(graph: Graph, config: Any) -> tuple[str, Launch]:
    rows = _rows(graph)
    if isinstance(rows, RowGraph):
        return emit_columns(graph, rows, config)
    if graph.reduced:
        return emit_rows(plan_rows(graph, config.moments), config)
    return emit_pointwise(graph, config)


def describe(graph: Graph, config: Any) -> list[str]:
    sets = ", ".join(str(list(axes)) for axes in graph.reduction_sets)
    reduced = f", reduces axes {sets}" if sets else ""
    lines = [f"kernel 0: space {list(graph.space)}{reduced}"]
    if isinstance(row_graph(graph), RowGraph):
        lines.append("kernel 1: joins what blocks summed over rows; cut: no block sees all rows")
    return lines


def task(graph: Graph, config: Any, device: DeviceSpec) -> CompileTask:
    source, _ = emit(graph, config)
    flags = (f"--gpu-architecture={device.arch}", "--std=c++17", "--ptxas-options=-v")
    return CompileTask("nvrtc", source, flags, ENTRY)


def executable(graph: Graph, config: Any, w: Workload, built: Compiled) -> Executable:
    _, launch = emit(graph, config)
    rows = _rows(graph)
    axes = rows.kept if rows.reduced else range(len(graph.space))
    count = math.prod(graph.space[a] for a in axes)
    return (TwoKernels if launch.finish else FusedKernel)(built, launch, w, count)


def _rows(graph: Graph) -> Graph:
    rows = row_graph(graph)
    assert isinstance(rows, Graph), rows
    return rows


class FusedKernel(Executable):
    """One launch of a generated kernel; outputs come fresh from the allocator."""

    def __init__(self, built: Compiled, launch: Launch, w: Workload, count: int):
        self.resources: Resources | None = built.resources
        self.kernel = CudaKernel(built, ENTRY, launch.signature)
        self.outputs = [(o.shape, o.real_strides, o.torch_dtype) for o in w.outputs]
        self.scalars = tuple(w.scalars.values())
        self.count = count
        self.blocks = math.ceil(count / launch.per_block) * launch.cluster
        self.persistent = launch.persistent
        self.grids: dict[int, tuple[int, int, int]] = {}
        self.block = (launch.block_threads, 1, 1)
        self.shared_bytes, self.cluster = launch.shared_bytes, launch.cluster
        self.block_threads = launch.block_threads

    def __call__(
        self, *tensors: torch.Tensor, scalars: tuple[float, ...] | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        device = tensors[0].device
        index = device.index
        empty = allocator.empty_strided
        outs = [
            empty(shape, strides, dtype=dtype, device=device)
            for shape, strides, dtype in self.outputs
        ]
        self.kernel.launch(
            self.grids.get(index) or self.grid_on(index),
            self.block,
            self.shared_bytes,
            torch._C._cuda_getCurrentRawStream(index),
            index,
            *map(_data_ptr, tensors),
            *map(_data_ptr, outs),
            self.count,
            *(self.scalars if scalars is None else scalars),
            cluster=self.cluster,
        )
        return outs[0] if len(outs) == 1 else tuple(outs)

    def grid_on(self, device_index: int) -> tuple[int, int, int]:
        """A block for every group of rows, or of a persistent kernel as many as run at once."""
        blocks = self.blocks
        if self.persistent:
            resident = self.kernel.resident_blocks(
                device_index, self.block_threads, self.shared_bytes, self.cluster
            )
            blocks = min(blocks, max(resident, self.cluster))
        self.grids[device_index] = (blocks, 1, 1)
        return self.grids[device_index]


class TwoKernels(FusedKernel):
    """A row kernel that leaves partial results over rows, and the kernel that joins them."""

    def __init__(self, built: Compiled, launch: Launch, w: Workload, count: int):
        super().__init__(built, launch, w, count)
        assert launch.finish is not None
        assert launch.outputs is not None
        self.finish, self.partials, self.first = launch.finish, launch.partials, launch.outputs
        self.second = CudaKernel(built, FINISH, launch.finish.signature)

    @property
    def workspace_bytes(self) -> int:  # type: ignore[override]
        clusters = max((grid[0] for grid in self.grids.values()), default=0) // self.cluster
        return clusters * self.partials * DTYPES[self.finish.dtype].itemsize

    def __call__(self, *tensors: torch.Tensor, scalars: tuple[float, ...] | None = None) -> Any:
        device = tensors[0].device
        index, empty = device.index, allocator.empty_strided
        outs = [
            empty(shape, strides, dtype=dtype, device=device)
            for shape, strides, dtype in self.outputs
        ]
        grid = self.grids.get(index) or self.grid_on(index)
        clusters = grid[0] // self.cluster
        partials = empty(
            (clusters * self.partials,), (1,), dtype=DTYPES[self.finish.dtype], device=device
        )
        stream = torch._C._cuda_getCurrentRawStream(index)
        numbers = self.scalars if scalars is None else scalars
        self.kernel.launch(
            grid,
            self.block,
            self.shared_bytes,
            stream,
            index,
            *map(_data_ptr, tensors),
            *[outs[k].data_ptr() for k in self.first],
            partials.data_ptr(),
            self.count,
            *numbers,
            cluster=self.cluster,
        )
        self.second.launch(
            (self.finish.blocks, 1, 1),
            (self.finish.block_threads, 1, 1),
            0,
            stream,
            index,
            partials.data_ptr(),
            *[tensors[i].data_ptr() for i in self.finish.inputs],
            *[outs[k].data_ptr() for k in self.finish.outputs],
            clusters,
            *numbers,
            overlapping=overlaps(index),
        )
        return outs[0] if len(outs) == 1 else tuple(outs)
