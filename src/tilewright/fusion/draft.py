"""A program in the making: kernels so far, the buffers they fill, and what is left to compute."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from dataclasses import replace

from tilewright.fusion.ir import Access, Graph
from tilewright.fusion.program import Kernels, Program, Segment, filled
from tilewright.fusion.subgraphs import Known, Store, ancestors, compact, subgraph
from tilewright.tensor_spec import TensorSpec, contiguous_strides

TEMPORARY_ALIGN = 16


class Draft:
    """Of a graph, for the kernels of a target.

    Attributes:
        remaining: outputs that the next kernels are for.
        later: outputs of other spaces, which come after those.
        known: values that kernels have left.
        lane: the axis that vectors of the next kernel run along.
        walked: rows of kernels that leave a partial for each: shorter ones than those of later
            results.
        awaited: by buffer: why what reads it is a later kernel.
    """

    def __init__(self, graph: Graph, kernels: Kernels):
        self.graph, self.kernels = graph, kernels
        self.remaining: list[int] = []
        self.later: list[int] = []
        self.known: dict[int, Known] = {}
        self.lane = -1
        self.walked: set[tuple[int, ...]] = set()
        self.segments: list[Segment] = []
        self.temporaries: list[TensorSpec] = []
        self.awaited: dict[int, str] = {}

    def program(self) -> Program:
        sizes = len(self.graph.inputs), len(self.graph.outputs)
        return filled(Program(tuple(self.segments), *sizes, tuple(self.temporaries)))

    # ---- what is left to compute ----

    def needed(self, outputs: Iterable[int], left: Iterable[int] = ()) -> list[int]:
        """The steps behind outputs, given what is known and what the next kernel has left."""
        ends = (self.graph.outputs[k][0] for k in outputs)
        return ancestors(self.graph, ends, self.known.keys() | left)

    def wanted(self, left: Iterable[int] = ()) -> list[int]:
        """The same of all outputs that are still to come."""
        return self.needed((*self.remaining, *self.later), left)

    def write(self, steps: Container[int]) -> list[Store]:
        """Where the remaining outputs that are among these steps are stored; they are done then."""
        given, first = self.graph.outputs, len(self.graph.inputs)
        done = [k for k in self.remaining if given[k][0] in steps]
        self.remaining = [k for k in self.remaining if k not in done]
        return [(given[k][0], first + k, given[k][1]) for k in done]

    # ---- buffers ----

    def temporary(self, i: int) -> Known:
        """A buffer for node `i`, contiguous along the lane axis."""
        n = self.graph.nodes[i]
        inside = [a for a in range(len(n.shape)) if n.shape[a] != 1]
        inside.sort(key=lambda a: a == self.lane)
        strides = [0] * len(n.shape)
        for a, step in zip(inside, contiguous_strides([n.shape[a] for a in inside]), strict=True):
            strides[a] = step
        buffer = len(self.graph.inputs) + len(self.graph.outputs) + len(self.temporaries)
        self.temporaries.append(TensorSpec(n.dtype, (math.prod(n.shape),)))
        return Known(buffer, Access(tuple(strides), n.dtype, TEMPORARY_ALIGN))

    def in_partials(self, known: Known, partials: int) -> Known:
        """The value as so many partials, with room for them."""
        at = known.buffer - len(self.graph.inputs) - len(self.graph.outputs)
        whole = self.temporaries[at]
        self.temporaries[at] = replace(whole, shape=(partials * whole.numel,))
        return replace(known, partials=partials)

    def divide(self, sums: dict[int, Known]) -> dict[int, Known]:
        """Room for the partials that the last kernel leaves of these results."""
        if not sums:
            return {}
        segment = self.segments[-1]
        counts = {segment.writes[k]: n for k, n in self.kernels.divided(segment).items()}
        self.segments[-1] = replace(segment, partials=max(counts.values()))
        return {i: self.in_partials(k, counts[k.buffer]) for i, k in sums.items()}

    def redirect(self, places: dict[int, Known]) -> None:
        """Let kernels fill these places instead of the buffers that they have filled."""
        for k, s in enumerate(self.segments):
            outputs = list(s.graph.outputs)
            for n, b in enumerate(s.writes):
                if b in places:
                    (i, access), own = outputs[n], places[b].access
                    outputs[n] = i, replace(access, dtype=own.dtype, align=own.align)
            writes = tuple(places[b].buffer if b in places else b for b in s.writes)
            graph = replace(s.graph, outputs=tuple(outputs))
            self.segments[k] = replace(s, graph=graph, writes=writes)

    # ---- kernels ----

    def add(
        self,
        stores: list[Store],
        row: tuple[int, ...] | None,
        reason: str,
        graph: Graph | None = None,
    ) -> None:
        """A kernel that stores these nodes, of `graph` if that has more than the graph itself."""
        found, reads = subgraph(graph or self.graph, stores, self.known)
        writes = tuple(buffer for _, buffer, _ in stores)
        if row is not None:
            reason = next((self.awaited[b] for b in reads if b in self.awaited), reason)
        reason = reason if self.segments else ""
        lane = self.lane if row is not None else None
        nested = self.kernels.set_rows > 0 and row is not None
        segment = Segment(found, reads, writes, row, lane, nested, reason=reason)
        self.segments.append(compact(segment))

    def at(self, i: int, reason: str) -> str:
        line = self.graph.nodes[i].line
        return f"{reason} ({line})" if line else reason

    def needs(self, i: int) -> str:
        """Why what needs reduction `i` is a later kernel, if no row of this one holds it."""
        axes = set(self.graph.axes(i))
        along = self.lane in axes and not any(set(row) < axes for row in self.walked)
        rows = "a whole row" if along else "all rows"
        return self.at(self._asks(i), f"a step needs a result of {rows}")

    def _asks(self, i: int) -> int:
        """The first step that takes a result of reduction `i` to other dims than it has."""
        behind = {i}
        for j, n in enumerate(self.graph.nodes):
            if behind.intersection(n.args):
                if n.shape != self.graph.nodes[i].shape:
                    return j
                behind.add(j)
        return i


def kept(known: dict[int, Known]) -> list[Store]:
    return [(i, k.buffer, k.access) for i, k in known.items()]
