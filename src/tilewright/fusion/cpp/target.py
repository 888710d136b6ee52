"""The fusion compiler's CPU target: schedule space, compiler tasks, and calling."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from tilewright.compile.cache import Compiled
from tilewright.compile.cxx import DEFAULT_FLAGS, WITHOUT_CXX_LIBRARY
from tilewright.compile.launch import PackedCppFunction
from tilewright.device import DeviceSpec
from tilewright.fusion.cpp.emit import emit, loops_of, program_of
from tilewright.fusion.cpp.entry import ENTRY, signature
from tilewright.fusion.cpp.schedule import LoopSchedule, loop_heuristic, loop_space
from tilewright.fusion.ir import Graph
from tilewright.fusion.stored import Stored
from tilewright.impl import CPU, CompileTask, Executable, allocator
from tilewright.op import Workload
from tilewright.space import ConfigSpace

FLAGS = (
    *DEFAULT_FLAGS,
    "-ffp-contract=fast",  # a * b + c rounds once; every rounding the program wrote is explicit
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fwrapv",
    "-fno-exceptions",
    WITHOUT_CXX_LIBRARY,
)

ALIGN = 64
"""Bytes to which temporaries are aligned: a cache line."""
_data_ptr = torch.Tensor.data_ptr


def unsupported(graph: Graph, device: DeviceSpec) -> str | None:
    for i, access in graph.outputs:
        shape = graph.nodes[i].shape
        if any(stride and n == 1 for stride, n in zip(access.strides, shape, strict=True)):
            return "an output repeats one value along a dim"
    return None


def space(graph: Graph, device: DeviceSpec) -> ConfigSpace[LoopSchedule]:
    return loop_space(graph, device)


def heuristic(graph: Graph, device: DeviceSpec) -> LoopSchedule:
    return loop_heuristic(graph, device)


def promising(graph: Graph, device: DeviceSpec) -> list[LoopSchedule]:
    return []


def roomier(graph: Graph, config: LoopSchedule, device: DeviceSpec) -> Iterator[LoopSchedule]:
    return iter(())  # nor does its compiler tell of registers


def describe(graph: Graph, config: LoopSchedule, device: DeviceSpec) -> list[str]:
    return program_of(graph, config).describe()


def task(graph: Graph, config: LoopSchedule, device: DeviceSpec) -> CompileTask:
    flags = (*FLAGS, "-ffp-contract=off") if graph.meets_extremes else FLAGS
    return CompileTask("cxx", emit(graph, config), flags, ENTRY)


def executable(
    graph: Graph, config: LoopSchedule, w: Workload, built: Compiled, device: DeviceSpec
) -> Executable:
    return FusedLoops(graph, config, w, built)


class LoopKernels:
    """The kernels of a graph as one function of pointers, with memory for what they pass on."""

    def __init__(self, graph: Graph, config: LoopSchedule, built: Compiled):
        program = program_of(graph, config)
        self.extents = [n for loops, _ in loops_of(program, config) for n in loops.extents.values()]
        codes = signature(program, len(self.extents), graph.scalars)
        self.function = PackedCppFunction(built, ENTRY, codes)
        self.offsets, size = [], 0
        for spec in program.temporaries:
            self.offsets.append(size)
            size += math.ceil(spec.numel * spec.itemsize / ALIGN) * ALIGN
        self.workspace_bytes = size + ALIGN if size else 0

    def __call__(
        self, pointers: list[int], scalars: Sequence[float], threads: int, huge_pages: bool
    ) -> None:
        if self.workspace_bytes:
            size = (self.workspace_bytes,)
            memory = allocator.on(CPU)(size, (1,), torch.uint8)
            start = -(-memory.data_ptr() // ALIGN) * ALIGN
            pointers += [start + offset for offset in self.offsets]
        self.function(*pointers, *self.extents, *scalars, threads, huge_pages)


class FusedLoops(Stored):
    """One call of a generated function; outputs come fresh from the allocator."""

    def __init__(self, graph: Graph, config: LoopSchedule, w: Workload, built: Compiled):
        super().__init__(graph, w)
        self.kernels = LoopKernels(graph, config, built)
        self.workspace_bytes = self.kernels.workspace_bytes
        self.parallel, self.huge_pages = config.threads == "all", config.huge_pages
        one = len(self.outputs) == 1 and self.written is None and not self.workspace_bytes
        self.run = self.run_to_one() if one else None

    def __call__(
        self,
        *tensors: torch.Tensor,
        scalars: tuple[float, ...] | None = None,
        pointers: list[int] | None = None,
    ) -> Any:
        inputs = pointers or map(_data_ptr, tensors)
        if scalars is not None:
            return self.launch(inputs, self.scalars_of(scalars))
        return (self.run or self.run_to_several)(*inputs)

    def by_addresses(self, device: torch.device) -> Callable[..., Any]:
        return self.run or self.run_to_several

    def run_to_several(self, *inputs: int) -> Any:
        return self.launch(inputs, self.scalars)

    def launch(self, inputs: Iterable[int], scalars: tuple[float, ...]) -> Any:
        empty = allocator.on(CPU)
        outs = [empty(*output) for output in self.outputs]
        threads = torch.get_num_threads() if self.parallel else 1
        self.kernels([*inputs, *self.addresses(outs)], scalars, threads, self.huge_pages)
        return outs[0] if len(outs) == 1 else tuple(outs)

    def run_to_one(self) -> Callable[..., Any]:
        """The same for one output and no temporaries, where the lists above are most of a small
        call."""
        ((shape, strides, dtype),) = self.outputs
        function, numbers = self.kernels.function, (*self.kernels.extents, *self.scalars)
        parallel, huge_pages = self.parallel, self.huge_pages

        def run(*inputs: int) -> torch.Tensor:
            out = allocator.on(CPU)(shape, strides, dtype)
            threads = torch.get_num_threads() if parallel else 1
            function(*inputs, out.data_ptr(), *numbers, threads, huge_pages)
            return out

        return run
