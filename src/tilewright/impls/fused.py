"""Kernels generated from an operator's reference: one pass over memory, on CUDA and CPU."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import ModuleType
from typing import Any

from tilewright.compile.cache import compiled
from tilewright.device import DeviceSpec
from tilewright.fusion import cpp_target
from tilewright.fusion.cuda import target as cuda_target
from tilewright.fusion.ir import Graph
from tilewright.fusion.lower import Unsupported, lower
from tilewright.fusion.passes import optimise
from tilewright.impl import CompileTask, Executable, Implementation
from tilewright.op import Workload
from tilewright.space import ConfigSpace


class Fused(Implementation):
    """The fusion compiler: any reference made of pointwise, broadcast, cast and reduction steps.

    The config is the target's schedule: fusion/cuda/schedule.py for CUDA,
    fusion/cpp_schedule.py for the CPU.
    """

    name = "fused"
    backend = "fused"
    takes_scalars = True

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        if any(o.numel == 0 for o in w.outputs) or any(t.numel == 0 for t in w.tensors.values()):
            return "a tensor is empty: there is nothing to compute"
        graph = graph_of(w)
        if isinstance(graph, str):
            return graph
        return target(device).unsupported(graph, device)

    def space(self, w: Workload, device: DeviceSpec) -> ConfigSpace[Any]:
        return target(device).space(self.graph(w), device)

    def heuristic(self, w: Workload, device: DeviceSpec) -> Any:
        return target(device).heuristic(self.graph(w), device)

    def promising(self, w: Workload, device: DeviceSpec) -> list[Any]:
        return target(device).promising(self.graph(w), device)

    def describe(self, config: Any, w: Workload, device: DeviceSpec) -> list[str]:
        return target(device).describe(self.graph(w), config, device)

    def compile_key(self, config: Any, w: Workload) -> str:
        """Sizes of rows and strides are baked in; the row count and run-time scalars are not."""
        return f"{config} {_without_rows(self.graph(w))}"

    def task(self, config: Any, w: Workload, device: DeviceSpec) -> CompileTask:
        return target(device).task(self.graph(w), config, device)

    def build(self, config: Any, w: Workload, device: DeviceSpec) -> Executable:
        built = compiled(self.task(config, w, device))
        return target(device).executable(self.graph(w), config, w, built, device)

    def graph(self, w: Workload) -> Graph:
        graph = graph_of(w)
        assert isinstance(graph, Graph), f"{w}: {graph}"
        return graph


def target(device: DeviceSpec) -> ModuleType:
    return cuda_target if device.kind == "cuda" else cpp_target


@functools.lru_cache(maxsize=1024)
def graph_of(w: Workload) -> Graph | str:
    """The optimised graph of a workload, or in words why there is none."""
    for name, spec in w.tensors.items():
        if not spec.torch_dtype.is_floating_point and spec.dtype != "bool":
            return f"{name} is {spec.dtype}; generated kernels take floating and boolean tensors"
    try:
        return optimise(lower(w), relaxed="relaxed" in w.flags)
    except Unsupported as reason:
        return str(reason)


def _without_rows(graph: Graph) -> Graph:
    """The graph with an outermost axis of rows set to 2: kernels take its size at run time."""
    if not graph.space or 0 in graph.reduced:
        return graph
    nodes = tuple(replace(n, shape=(min(n.shape[0], 2), *n.shape[1:])) for n in graph.nodes)
    return replace(graph, nodes=nodes, space=(min(graph.space[0], 2), *graph.space[1:]))
