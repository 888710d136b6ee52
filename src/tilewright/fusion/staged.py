"""Graphs one after another: what one stores, later ones read at any elements, in any order.

A slice of what was computed is computed anew, of slices of the tensors. Where that multiplies, as
where stencils follow stencils, a value is stored, and slices of it are read.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from tilewright.fusion.ir import Graph


@dataclass(frozen=True)
class Staged:
    """The tensors of a graph are those of the workload, then what the graphs before it stored.

    Attributes:
        reasons: why each graph is one of its own, for people; empty for the first.
    """

    graphs: tuple[Graph, ...]
    reasons: tuple[str, ...]

    @classmethod
    def of(cls, graphs: tuple[Graph, ...], reasons: tuple[str, ...]) -> Staged:
        """Where one has extremes, another may compare with them what it computes anew."""
        extremes = any(n.op in ("amax", "amin") for graph in graphs for n in graph.nodes)
        return cls(tuple(replace(graph, as_written=extremes) for graph in graphs), reasons)

    def mapped(self, change: Callable[[Graph], Graph]) -> Staged:
        return replace(self, graphs=tuple(map(change, self.graphs)))

    @functools.cached_property
    def main(self) -> int:
        """Which graph a schedule is for: that of most arithmetic."""
        steps = [sum(math.prod(n.shape) for n in graph.nodes) for graph in self.graphs]
        return steps.index(max(steps))

    def described(self, lines: Iterable[list[str]], schedules: Sequence[str]) -> list[str]:
        """The schedule of each graph, then one line for each of its kernels, given its own."""
        found, kernels = list[str](), 0
        for k, (own, reason) in enumerate(zip(lines, self.reasons, strict=True)):
            first, *others = [_later(line, kernels) for line in own]
            found += [f"{stage(k, len(schedules))}: {schedules[k]}"]
            found += [f"{first}; cut: {reason}" if reason else first, *others]
            kernels += len(own)
        return found


def stage(k: int, stages: int) -> str:
    """What the k-th graph of several is called where people read of it."""
    return f"stage {k + 1} of {stages}"


def _later(line: str, kernels: int) -> str:
    """The same line behind those of so many kernels."""
    return re.sub(r"\bkernel (\d+)", lambda m: f"kernel {int(m[1]) + kernels}", line)


def graphs_of(graph: Graph | Staged) -> tuple[Graph, ...]:
    return graph.graphs if isinstance(graph, Staged) else (graph,)


def main_of(graph: Graph | Staged) -> int:
    """Which of these a schedule is for."""
    return graph.main if isinstance(graph, Staged) else 0
