"""A part of a graph as a kernel's: the steps behind some values, on as few axes as they need."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from dataclasses import dataclass, replace

from tilewright.fusion.ir import Access, Graph, Node
from tilewright.fusion.passes import axis_groups, collapsed
from tilewright.fusion.program import Segment


@dataclass(frozen=True)
class Known:
    """A value that an earlier kernel left in a buffer, as so many `partials` to be combined."""

    buffer: int
    access: Access
    partials: int = 0


Store = tuple[int, int, Access]
"""A node, the buffer it is written to, and how."""


def subgraph(
    old: Graph, stores: list[Store], known: dict[int, Known]
) -> tuple[Graph, tuple[int, ...]]:
    """The steps behind `stores`, as a graph with a leading axis of partials, and what it reads."""
    needed = ancestors(old, (i for i, _, _ in stores), known)
    partials = max((known[i].partials for i in needed if i in known), default=1)
    nodes: list[Node] = []
    inputs: dict[int, Access] = {}
    new: dict[int, int] = {}

    def load(dtype: str, shape: tuple[int, ...], buffer: int, access: Access, step: int) -> None:
        inputs.setdefault(buffer, access.along((step, *access.strides)))
        nodes.append(Node("load", (), dtype, shape, list(inputs).index(buffer)))

    for i in needed:
        n = old.nodes[i]
        if i in known:
            k = known[i]
            several = k.partials > 1
            step = math.prod(n.shape) if several else 0
            load(n.dtype, (max(k.partials, 1), *n.shape), k.buffer, k.access, step)
            if several:
                nodes.append(n.moved((len(nodes) - 1,), (1, *n.shape)))
        elif n.op == "load":
            load(n.dtype, (1, *n.shape), n.attr, old.inputs[n.attr], 0)
        else:
            args = tuple(new[a] for a in n.args)
            nodes.append(n.moved(args, (1, *n.shape)))
        new[i] = len(nodes) - 1
    outputs = [(new[i], a.along((0, *a.strides))) for i, _, a in stores]
    space = (max(partials, 1), *largest(old.nodes[i].shape for i in needed))
    accesses = tuple(inputs.values())
    joined = frozenset(a + 1 for a in old.joined)
    graph = Graph(tuple(nodes), space, accesses, tuple(outputs), old.scalars, joined=joined)
    return graph.check(), tuple(inputs)


def compact(segment: Segment) -> Segment:
    """The same on as few axes as its tensors and rows need; `row` and `lane` were given without the
    leading axis of partials."""
    swept = segment.row if segment.row and segment.graph.reductions else ()
    groups = axis_groups(segment.graph, {a + 1 for a in swept})
    graph, row, lane = collapsed(segment.graph, groups), segment.row, segment.lane
    if row is not None:
        row = tuple(k for k, group in enumerate(groups) if group[0] - 1 in row)
        lanes = [k for k, group in enumerate(groups) if lane in [a - 1 for a in group]]
        lane = lanes[0] if lanes else None
    return replace(segment, graph=graph, row=row, lane=lane)


def ancestors(graph: Graph, of: Iterable[int], known: Container[int] = ()) -> list[int]:
    """The steps that `of` need, themselves included, in order; what is known needs no others."""
    found: set[int] = set()
    stack = list(of)
    while stack:
        i = stack.pop()
        if i not in found:
            found.add(i)
            if i not in known:
                stack += graph.nodes[i].args
    return sorted(found)


def ancestor_space(graph: Graph, i: int) -> tuple[int, ...]:
    return largest(graph.nodes[a].shape for a in ancestors(graph, [i]))


def largest(shapes: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(max(sizes) for sizes in zip(*shapes, strict=True))


def within(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether a value of this shape has no dims but those of one of the other shape."""
    return all(a in (1, b) for a, b in zip(shape, other, strict=True))


def main_axis(graph: Graph, needed: Iterable[int]) -> int:
    """The axis along which most bytes of `needed` steps are contiguous, those of every n-th element
    counted as an n-th; of equals the last."""
    contiguous = [0] * len(graph.space)
    for n in (graph.nodes[i] for i in needed):
        if n.op == "load":
            access, size = graph.inputs[n.attr], math.prod(n.shape)
            for a, stride in enumerate(access.strides):
                if stride and n.shape[a] != 1:
                    contiguous[a] += size * access.itemsize // stride
    return max(range(len(contiguous)), key=lambda a: (contiguous[a], a), default=-1)
