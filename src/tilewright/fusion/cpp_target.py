"""The fusion compiler's CPU target: schedule space, compiler tasks, and calling."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.compile.cache import Compiled
from tilewright.compile.cxx import DEFAULT_FLAGS
from tilewright.compile.launch import CppFunction
from tilewright.device import DeviceSpec
from tilewright.fusion.cpp_entry import ENTRY, signature
from tilewright.fusion.cpp_schedule import LoopSchedule, loop_heuristic, loop_space
from tilewright.fusion.emit_cpp import emit
from tilewright.fusion.ir import Graph
from tilewright.impl import CompileTask, Executable, allocator
from tilewright.op import Workload
from tilewright.space import ConfigSpace

FLAGS = (
    *DEFAULT_FLAGS,
    "-ffp-contract=fast",  # a * b + c rounds once; every rounding the program wrote is explicit
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fwrapv",
)

_CPU = torch.device("cpu")


def unsupported(graph: Graph, device: DeviceSpec) -> str | None:
    if len(graph.reduction_sets) > 1:
        return f"reductions over {len(graph.reduction_sets)} different sets of dims in one kernel"
    for i, access in graph.outputs:
        shape = graph.nodes[i].shape
        if any(stride and n == 1 for stride, n in zip(access.strides, shape, strict=True)):
            return "an output repeats one value along a dim"
    return None


def space(graph: Graph, device: DeviceSpec) -> ConfigSpace[LoopSchedule]:
    return loop_space(graph, device)


def heuristic(graph: Graph, device: DeviceSpec) -> LoopSchedule:
    return loop_heuristic(graph, device)


def task(graph: Graph, config: LoopSchedule, device: DeviceSpec) -> CompileTask:
    return CompileTask("cxx", emit(graph, config), FLAGS, ENTRY)


def executable(graph: Graph, config: LoopSchedule, w: Workload, built: Compiled) -> Executable:
    return FusedLoops(graph, config, w, built)


class FusedLoops(Executable):
    """One call of a generated function; outputs come fresh from the allocator."""

    def __init__(self, graph: Graph, config: LoopSchedule, w: Workload, built: Compiled):
        self.function = CppFunction(built, ENTRY, signature(graph))
        self.outputs = [(o.shape, o.real_strides, o.torch_dtype) for o in w.outputs]
        self.scalars = tuple(w.scalars.values())
        self.count = graph.space[0] if graph.space else 1
        self.parallel, self.huge_pages = config.threads == "all", config.huge_pages

    def __call__(self, *tensors: torch.Tensor, scalars: tuple[float, ...] | None = None) -> Any:
        outs = [
            allocator.empty_strided(shape, strides, dtype=dtype, device=_CPU)
            for shape, strides, dtype in self.outputs
        ]
        self.function(
            *[t.data_ptr() for t in tensors],
            *[o.data_ptr() for o in outs],
            self.count,
            *(self.scalars if scalars is None else scalars),
            torch.get_num_threads() if self.parallel else 1,
            self.huge_pages,
        )
        return outs[0] if len(outs) == 1 else tuple(outs)
