"""Kernels generated from an operator's reference: one pass over memory, on CUDA and CPU."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from tilewright.compile.cache import cached, compiled
from tilewright.compile.resources import most
from tilewright.device import DeviceSpec
from tilewright.errors import CompileError, NoImplementation
from tilewright.fusion.counts import give_counts
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
from tilewright.fusion.staged import Staged, graphs_of, main_of
from tilewright.fusion.stored import Stored
from tilewright.impl import CompileTask, Executable, Implementation
from tilewright.op import Op, Workload
from tilewright.space import ConfigSpace, config_text
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
        module = target(device)
        return next(filter(None, (module.unsupported(g, device) for g in graphs_of(graph))), None)

    def space(self, w: Workload, device: DeviceSpec) -> ConfigSpace[Any]:
        return target(device).space(self.main(w), device)

    def heuristic(self, w: Workload, device: DeviceSpec) -> Any:
        return target(device).heuristic(self.main(w), device)

    def untuned(self, w: Workload, device: DeviceSpec) -> Any:
        return _untuned(w.operator, w, main_of(self.graph(w)), device)

    def promising(self, w: Workload, device: DeviceSpec) -> list[Any]:
        return target(device).promising(self.main(w), device)

    def describe(self, config: Any, w: Workload, device: DeviceSpec) -> list[str]:
        graph, configs = self.graph(w), self._configs(config, w, device)
        lines = [
            target(device).describe(own, c, device)
            for own, c in zip(graphs_of(graph), configs, strict=True)
        ]
        if not isinstance(graph, Staged):
            return lines[0]
        return graph.described(lines, [config_text(c) for c in configs])

    def task(self, config: Any, w: Workload, device: DeviceSpec) -> CompileTask:
        return _task(w.operator, w, main_of(self.graph(w)), config, device)

    def tasks(self, config: Any, w: Workload, device: DeviceSpec) -> tuple[CompileTask, ...]:
        configs = self._configs(config, w, device)
        return tuple(_task(w.operator, w, k, c, device) for k, c in enumerate(configs))

    def build(self, config: Any, w: Workload, device: DeviceSpec) -> Executable:
        graph, built = self.graph(w), list[Executable]()
        for k in range(len(graphs_of(graph))):
            own = config if k == main_of(graph) else _untuned(w.operator, w, k, device)
            built.append(_executable(w, k, own, device))
        return InStages(built, graph) if isinstance(graph, Staged) else built[0]

    def _configs(self, config: Any, w: Workload, device: DeviceSpec) -> list[Any]:
        """Of each graph: the main one's is given, the others' are what runs untuned, as far as that
        is known: a heuristic's is the first to be compiled, and gives way only if it spills."""
        graph, configs = self.graph(w), list[Any]()
        for k, each in enumerate(graphs_of(graph)):
            own = config if k == main_of(graph) else target(device).heuristic(each, device)
            if k != main_of(graph) and cached(_task(w.operator, w, k, own, device)):
                own = _untuned(w.operator, w, k, device)
            configs.append(own)
        return configs

    @staticmethod
    def graph(w: Workload) -> Graph | Staged:
        graph = graph_of(w)
        assert not isinstance(graph, str), f"{w}: {graph}"
        return graph

    @classmethod
    def main(cls, w: Workload) -> Graph:
        """The graph that schedules are for."""
        graph = cls.graph(w)
        return graphs_of(graph)[main_of(graph)]


@functools.lru_cache(maxsize=16)
def _task(op: Op, w: Workload, k: int, config: Any, device: DeviceSpec) -> CompileTask:
    """Of the k-th graph. Asked for twice in a row: whether it is compiled already, and to build
    it."""
    return target(device).task(graphs_of(Fused.graph(w))[k], config, device)


def _executable(w: Workload, k: int, config: Any, device: DeviceSpec) -> Executable:
    graph = graphs_of(Fused.graph(w))[k]
    built = compiled(_task(w.operator, w, k, config, device))
    executable: Stored = target(device).executable(graph, config, w, built, device)
    return ReadAgain(executable, graph) if is_read_again(graph) else executable


@functools.lru_cache(maxsize=1024)
def _untuned(op: Op, w: Workload, k: int, device: DeviceSpec) -> Any:
    """The heuristic's schedule, or if its kernel spills registers, of it and of a few that leave a
    thread more of them, and spill less, the one by which a simple model expects to lose least: see
    spills.py."""
    graph, module = graphs_of(Fused.graph(w))[k], target(device)

    def spilled(config: Any) -> int:
        found = compiled(_task(op, w, k, config, device)).resources
        return found.spill_bytes if found else 0

    def lost(config: Any) -> float:
        task = _task(op, w, k, config, device)
        executable = _executable(w, k, config, device)
        return spills.lost(executable, task.entry, compiled(task), device)

    best = module.heuristic(graph, device)
    spilled_first = spilled(best)
    if not spilled_first:
        return best
    least = lost(best)
    space, every = module.space(graph, device), module.roomier(graph, best, device)
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


class InStages(Executable):
    """Kernels of several graphs: what the earlier ones store the later ones are given, behind the
    tensors of the workload."""

    def __init__(self, stages: Sequence[Executable], graph: Staged):
        self.executables, self.specs = stages, [s for g in graph.graphs for s in g.stored]
        known = [stage.resources for stage in stages if stage.resources]
        self.resources = most(known) if known else None

    @property
    def workspace_bytes(self) -> int:  # type: ignore[override]
        stored = sum(spec.numel * spec.itemsize for spec in self.specs)
        return stored + max(stage.workspace_bytes for stage in self.executables)

    def __call__(self, *tensors: torch.Tensor, **scalars: Any) -> Any:
        *before, last = self.executables
        for stage in before:
            stored = stage(*tensors, **scalars)
            tensors += (stored,) if isinstance(stored, torch.Tensor) else stored
        return last(*tensors, **scalars)


def target(device: DeviceSpec) -> ModuleType:
    return cuda_target if device.kind == "cuda" else cpp_target


@ByOperator
def graph_of(w: Workload) -> Graph | Staged | str:
    """The optimised graph of a workload, or in words why there is none."""
    for name, spec in w.tensors.items():
        if spec.dtype in WHOLE and not w.operator.fused:
            return f"{name} is {spec.dtype}; kernels generated for {w.op} take floating tensors"
    try:
        found = lower(w)
    except (Unsupported, NoImplementation) as reason:
        return str(reason)

    def optimised(graph: Graph) -> Graph:
        whole = optimise(graph, relaxed="relaxed" in w.flags)
        return give_counts(in_pieces(whole), [n for t in w.tensors.values() for n in t.shape[:-1]])

    return optimised(found) if isinstance(found, Graph) else found.mapped(optimised)
