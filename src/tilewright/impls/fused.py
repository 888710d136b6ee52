"""Kernels generated from an operator's reference: one pass over memory, on CUDA and CPU."""

from __future__ import annotations

import contextlib
import functools
import itertools
from types import ModuleType
from typing import Any

import torch

from tilewright.compile.cache import compiled
from tilewright.device import DeviceSpec
from tilewright.errors import CompileError, NoImplementation
from tilewright.fusion.cpp import target as cpp_target
from tilewright.fusion.cuda import spills
from tilewright.fusion.cuda import target as cuda_target
from tilewright.fusion.frontend.families import outputs_of
from tilewright.fusion.frontend.lower import lower
from tilewright.fusion.frontend.steps import Unsupported
from tilewright.fusion.ir import Graph
from tilewright.fusion.passes import optimise
from tilewright.fusion.remembered import ByOperator
from tilewright.fusion.row_pieces import in_pieces
from tilewright.fusion.stored import Stored
from tilewright.impl import IMPLS, CompileTask, Executable, Implementation
from tilewright.op import Op, Workload
from tilewright.space import ConfigSpace
from tilewright.tensor_spec import WHOLE

EMPTY = "a tensor is empty: there is nothing to compute"
MOST_ROOMIER = 4
"""Kernels that are compiled beside one that spills, of about a second each."""


class Fused(Implementation):
    """The fusion compiler: any reference made of pointwise, broadcast, cast and reduction steps.

    The config is the target's schedule: one of fusion/cuda/*/schedule.py for CUDA,
    fusion/cpp/schedule.py for the CPU.
    """

    name = "fused"
    backend = "fused"
    takes_scalars = True

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        if any(t.numel == 0 for t in w.tensors.values()):
            return EMPTY
        if w.operator.training_of is not None:
            return (
                "a training step is no one kernel: its gradients start when the forward has ended; "
                "fused_training runs a generated kernel for each"
            )
        graph = graph_of(w)
        if isinstance(graph, str):
            return graph
        if any(o.numel == 0 for o in outputs_of(w)):
            return EMPTY
        return target(device).unsupported(graph, device)

    def space(self, w: Workload, device: DeviceSpec) -> ConfigSpace[Any]:
        return target(device).space(self.graph(w), device)

    def heuristic(self, w: Workload, device: DeviceSpec) -> Any:
        return target(device).heuristic(self.graph(w), device)

    def untuned(self, w: Workload, device: DeviceSpec) -> Any:
        return _untuned(w.operator, w, device)

    def promising(self, w: Workload, device: DeviceSpec) -> list[Any]:
        return target(device).promising(self.graph(w), device)

    def describe(self, config: Any, w: Workload, device: DeviceSpec) -> list[str]:
        return target(device).describe(self.graph(w), config, device)

    def task(self, config: Any, w: Workload, device: DeviceSpec) -> CompileTask:
        return _task(w.operator, w, config, device)

    def build(self, config: Any, w: Workload, device: DeviceSpec) -> Executable:
        built = compiled(self.task(config, w, device))
        graph = self.graph(w)
        executable: Stored = target(device).executable(graph, config, w, built, device)
        return ReadAgain(executable, graph) if is_read_again(graph) else executable

    @staticmethod
    def graph(w: Workload) -> Graph:
        graph = graph_of(w)
        assert isinstance(graph, Graph), f"{w}: {graph}"
        return graph


@functools.lru_cache(maxsize=16)
def _task(op: Op, w: Workload, config: Any, device: DeviceSpec) -> CompileTask:
    """Asked for twice in a row: whether it is compiled already, and to build it."""
    return target(device).task(Fused.graph(w), config, device)


@functools.lru_cache(maxsize=1024)
def _untuned(op: Op, w: Workload, device: DeviceSpec) -> Any:
    """The heuristic's schedule, or if its kernel spills registers, of it and of a few that leave a
    thread more of them, and spill less, the one by which a simple model expects to lose least: see
    spills.py."""
    fused = IMPLS["fused"]

    def spilled(config: Any) -> int:
        found = compiled(_task(op, w, config, device)).resources
        return found.spill_bytes if found else 0

    def lost(config: Any) -> float:
        task = _task(op, w, config, device)
        return spills.lost(fused.build(config, w, device), task.entry, compiled(task), device)

    best = fused.heuristic(w, device)
    spilled_first = spilled(best)
    if not spilled_first:
        return best
    least = lost(best)
    space, every = fused.space(w, device), target(device).roomier(Fused.graph(w), best, device)
    for c in itertools.islice((c for c in every if c in space), MOST_ROOMIER):
        with contextlib.suppress(CompileError):  # nobody has asked for it
            fewer = spilled(c) < spilled_first
            if fewer and (found := lost(c)) < least:
                best, least = c, found
        if not least:
            break
    return best


def is_read_again(graph: Graph) -> bool:
    """Whether its inputs are not just the tensors."""
    return bool(graph.again) or any(graph.offsets_bytes)


class ReadAgain(Executable):
    """A kernel that reads tensors in several ways, or slices of them, or draws several masks from a
    seed: each is an input of its own."""

    def __init__(self, kernel: Stored, graph: Graph):
        self.kernel, self.again, self.offsets = kernel, graph.again, graph.offsets_bytes
        self.resources = kernel.resources
        self.block_threads, self.shared_bytes = kernel.block_threads, kernel.shared_bytes
        self.later = kernel.later
        self.work = kernel.work

    @property
    def workspace_bytes(self) -> int:  # type: ignore[override]
        return self.kernel.workspace_bytes

    def __call__(self, *tensors: torch.Tensor, **scalars: Any) -> Any:
        every = (*tensors, *(tensors[i] for i in self.again))
        addresses = map(int.__add__, map(torch.Tensor.data_ptr, every), self.offsets)
        return self.kernel(*tensors, pointers=[*addresses], **scalars)


def target(device: DeviceSpec) -> ModuleType:
    return cuda_target if device.kind == "cuda" else cpp_target


@ByOperator
def graph_of(w: Workload) -> Graph | str:
    """The optimised graph of a workload, or in words why there is none."""
    for name, spec in w.tensors.items():
        if spec.dtype in WHOLE and not w.operator.fused:
            return f"{name} is {spec.dtype}; kernels generated for {w.op} take floating tensors"
    try:
        return in_pieces(optimise(lower(w), relaxed="relaxed" in w.flags))
    except (Unsupported, NoImplementation) as reason:
        return str(reason)
