"""Moments of rows that are divided among blocks: those of each part, and what joins them. Sums and
extremes that the graph reduces the rows to beside them are found alike.

m2 of a row is the sum of m2 of its parts, and the size of a part times m2 of their means (Chan,
Golub and LeVeque, The American Statistician 37, 1983). A block finds mean and m2 of a part that it
keeps, where a mean that all blocks have to know first would take one pass, and m2 another.

Each mean comes with what fp32 rounded of it, the mean of the deviations from it: of values of 1e6
and a deviation of 1, means of parts would differ by roundings of 0.03. It is a sum of fractions:
compilers contract what multiplies a sum with what follows, here so and there otherwise. Beside
infinities, and where squares overflow, nothing is taken out: inf - inf is none of it.
"""

from __future__ import annotations

import math
from dataclasses import replace

from tilewright.fusion.ir import Access, Graph, Node, Rewriter
from tilewright.fusion.passes import merge_common, remove_dead

JOINED = ("sum", "amax", "amin", "prod")
"""Reductions that are those of the parts' results."""
LEAST_PARTS = 32
"""Rows that have no so many equal parts are not divided so: fewer blocks leave a device idle."""


def most_parts(graph: Graph) -> int:
    """The largest power of two of equal parts, of two elements or more, that a graph with moments
    of its only reduced axis has; 1 where these are too few, or it needs what parts do not join."""
    ops = {graph.nodes[i].op for i in graph.reductions}
    if "m2" not in ops or not ops <= {"mean", "m2", *JOINED} or len(graph.reduced) > 1:
        return 1
    size = graph.space[graph.reduced[0]]
    parts = min(size & -size, size // 2)
    return parts if parts >= LEAST_PARTS else 1


def split_moments(graph: Graph, parts: int) -> Graph:
    """The graph with that axis as so many parts."""
    (axis,) = graph.reduced
    steps = graph.space[axis] // parts

    def rule(r: Rewriter, i: int, n: Node) -> int | None:
        if n.op not in ("mean", "m2", *JOINED):
            return None
        values = r[n.args[0]]
        shape = list(values.shape)
        shape[axis + 1] = 1

        def of_part(op: str, *args: int) -> int:
            return r.add(Node(op, args, n.dtype, tuple(shape)))

        def of_row(op: str, *args: int) -> int:
            return r.add(replace(n, op=op, args=args, attr=None))  # of fewer elements

        if n.op in JOINED:
            return of_row(n.op, of_part(n.op, *n.args))

        def number(value: float) -> int:
            return r.add(Node("const", (), n.dtype, (1,) * len(shape), value))

        def of_values(op: str, *args: int) -> int:
            return r.add(Node(op, args, n.dtype, values.shape))

        def if_finite(value: int, found: int, otherwise: int) -> int:
            kind = r[otherwise]
            size = r.add(replace(kind, op="abs", args=(value,)))
            finite = r.add(replace(kind, op="lt", args=(size, number(math.inf)), dtype="bool"))
            return r.add(replace(kind, op="where", args=(finite, found, otherwise)))

        mean = of_part("sum", of_values("mul", *n.args, number(1.0 / steps)))
        centred = of_values("sub", *n.args, mean)
        rest = of_part("mean", centred)
        middle = of_row("sum", of_part("mul", mean, number(1.0 / parts)))
        apart = of_part("add", of_part("sub", mean, middle), rest)
        if n.op == "mean":
            rounded = of_row("mean", apart)
            return if_finite(rounded, of_row("add", middle, rounded), middle)
        size = number(float(steps))
        squares = of_part("sum", of_values("mul", centred, centred))
        excess = of_part("mul", of_part("mul", rest, rest), size)
        less = of_part("maximum", of_part("sub", squares, excess), number(0.0))
        inside = of_row("sum", if_finite(squares, less, squares))
        return of_row("add", inside, of_row("mul", of_row("m2", apart), size))

    divided = _divided(graph, axis, parts)
    return remove_dead(merge_common(divided.rewritten(rule))).check()


def _divided(graph: Graph, axis: int, parts: int) -> Graph:
    """The graph with an axis as two: parts, and the steps of a part."""
    steps = graph.space[axis] // parts

    def around(values: tuple[int, ...], outer: int, inner: int) -> tuple[int, ...]:
        return (*values[:axis], outer, inner, *values[axis + 1 :])

    def shape(n: Node) -> tuple[int, ...]:
        return around(n.shape, 1, 1) if n.shape[axis] == 1 else around(n.shape, parts, steps)

    def along(access: Access) -> Access:
        stride = access.strides[axis]
        return access.along(around(access.strides, stride * steps, stride))

    return replace(
        graph,
        space=around(graph.space, parts, steps),
        nodes=tuple(n.moved(n.args, shape(n)) for n in graph.nodes),
        inputs=tuple(map(along, graph.inputs)),
        outputs=tuple((i, along(a)) for i, a in graph.outputs),
        joined=frozenset(a + (a > axis) for a in graph.joined - {axis}),
    )
