"""The fusion compiler's CUDA target: schedule spaces, NVRTC tasks, and launching."""

from __future__ import annotations

import math
from typing import Any

import torch

from tilewright.compile.cache import Compiled
from tilewright.compile.launch import CudaKernel
from tilewright.device import DeviceSpec
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
from tilewright.op import Workload
from tilewright.space import ConfigSpace

MAX_GRID = 2**31 - 1
_data_ptr = torch.Tensor.data_ptr


def unsupported(graph: Graph) -> str | None:
    rank = len(graph.space)
    if len(graph.reduction_sets) > 1:
        return f"reductions over {len(graph.reduction_sets)} different sets of dims in one kernel"
    if any(n.op == "broadcast" for n in graph.nodes):
        return "an output repeats one value along a dim"
    if graph.reduced and graph.reduced != tuple(range(rank - len(graph.reduced), rank)):
        return "the reduction is not over the innermost dims in memory order"
    blocks = math.prod(graph.space[a] for a in graph.kept) if graph.reduced else 0
    if blocks > MAX_GRID:
        return f"{blocks} rows exceed a grid of {MAX_GRID} blocks"
    return None


def space(graph: Graph, device: DeviceSpec) -> ConfigSpace[Any]:
    return row_space(graph, device) if graph.reduced else pointwise_space(graph, device)


def heuristic(graph: Graph, device: DeviceSpec) -> Any:
    return row_heuristic(graph, device) if graph.reduced else pointwise_heuristic(graph, device)


def emit(graph: Graph, config: Any) -> tuple[str, Launch]:
    if graph.reduced:
        return emit_rows(plan_rows(graph, config.moments), config)
    return emit_pointwise(graph, config)


def task(graph: Graph, config: Any, device: DeviceSpec) -> CompileTask:
    source, _ = emit(graph, config)
    flags = (f"--gpu-architecture={device.arch}", "--std=c++17", "--ptxas-options=-v")
    return CompileTask("nvrtc", source, flags, ENTRY)


def executable(graph: Graph, config: Any, w: Workload, built: Compiled) -> Executable:
    _, launch = emit(graph, config)
    axes = graph.kept if graph.reduced else range(len(graph.space))
    return FusedKernel(built, launch, w, math.prod(graph.space[a] for a in axes))


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
