"""The compiler's rewrites, in the order they run. Each takes a graph and returns a graph.

Most of PASSES are exact: the value stored is the one the program wrote, bit for bit, or differs
only in how a sum is ordered. `multiply_by_reciprocals` rounds twice where a division rounds once,
and the exponentials of softmax are as good as the dtype that is stored needs them. The policy
`relaxed` (flag `!relaxed` of a workload) adds one that drops roundings.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch

from tilewright.fusion.exponentials import (
    is_below_its_greatest,
    quick_exponentials,
    shifted_exponentials,
)
from tilewright.fusion.ir import REDUCTIONS, Access, Graph, Node, Rewriter
from tilewright.fusion.numbers import hoist_numbers
from tilewright.tensor_spec import DTYPES, HALVES


def optimise(graph: Graph, relaxed: bool = False) -> Graph:
    """Run every pass of PASSES in order; if `relaxed`, drop intermediate roundings first."""
    for run in ((drop_roundings,) if relaxed else ()) + PASSES:
        before, graph = graph, run(graph)
        if graph is not before:
            graph.check()
    return graph


_POWERS = {0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}


def fold_constants(graph: Graph) -> Graph:
    """Powers become products and roots, as in PyTorch; identities with constants vanish."""

    def rule(r: Rewriter, i: int, n: Node) -> int | None:
        if n.op == "pow" and r[n.args[1]].op == "const":
            base, exponent = n.args[0], r[n.args[1]].attr
            if exponent == 2:
                return r.add(replace(n, op="mul", args=(base, base)))
            if exponent == 3:
                square = r.add(replace(n, op="mul", args=(base, base)))
                return r.add(replace(n, op="mul", args=(square, base)))
            if exponent == 1:
                return base
            if exponent in _POWERS:
                return r.add(replace(n, op=_POWERS[exponent], args=(base,)))
        if n.op in ("mul", "div") and _is_const(r, n.args[1], 1.0):
            return n.args[0]
        return None

    return graph.rewritten(rule)


def choose_constants(graph: Graph) -> Graph:
    """Arithmetic of a boolean as 0 or 1 with a constant is a choice between two constants.

    Dropout divides a mask by the probability to keep an element; a division takes ten steps.
    """

    def rule(r: Rewriter, i: int, n: Node) -> int | None:
        if n.op not in ("add", "sub", "mul", "div") or n.dtype not in ("f32", "f64"):
            return None
        operands = [r[a] for a in n.args]
        chosen = [o.op == "cast" and r[o.args[0]].dtype == "bool" for o in operands]
        constant = [o.op == "const" for o in operands]
        if sorted(zip(chosen, constant, strict=True)) != [(False, True), (True, False)]:
            return None
        at = chosen.index(True)
        found = []
        for value in (1.0, 0.0):
            values = [value if k == at else o.attr for k, o in enumerate(operands)]
            a, b = (torch.tensor(v, dtype=DTYPES[n.dtype]) for v in values)
            attr = float(getattr(torch, n.op)(a, b))
            found.append(r.add(replace(operands[1 - at], attr=attr)))
        return r.add(replace(n, op="where", args=(operands[at].args[0], *found)))

    return graph.rewritten(rule)


def fold_casts(graph: Graph) -> Graph:
    """A cast to the type a value has, or back to what it was widened from, is the value itself.

    A cast that narrows is always kept: it rounds, and the program wrote it. One of halves to
    another dtype than a wider float goes through fp32, on a GPU as well.
    """

    def rule(r: Rewriter, i: int, n: Node) -> int | None:
        if n.op != "cast":
            return None
        inner = r[n.args[0]]
        if inner.dtype == n.dtype:
            return n.args[0]
        if inner.op == "cast" and _widens(r[inner.args[0]].dtype, inner.dtype):
            source = inner.args[0]
            if r[source].dtype == n.dtype:
                return source
            if r[source].dtype not in HALVES or n.dtype in ("f32", "f64"):
                return r.add(replace(n, args=(source,)))
        return None

    return graph.rewritten(rule)


def widen_reductions(graph: Graph) -> Graph:
    """Beside a reduction in fp64 the others are so, too: what joins them knows one dtype."""
    if not {"f32", "f64"} <= {graph.nodes[i].dtype for i in graph.reductions}:
        return graph

    def rule(r: Rewriter, i: int, n: Node) -> int | None:
        if n.op not in REDUCTIONS or n.dtype != "f32":
            return None
        wide = [r.add(replace(r[a], op="cast", args=(a,), dtype="f64", attr=None)) for a in n.args]
        return r.add(
            replace(n, op="cast", args=(r.add(replace(n, args=tuple(wide), dtype="f64")),))
        )

    return graph.rewritten(rule)


def drop_roundings(graph: Graph) -> Graph:
    """A value that is narrowed and widened back stays as it was. Not exact: the policy `relaxed`.

    What is stored narrow is still rounded, and a narrow value that steps use as such stays.
    """

    def rule(r: Rewriter, i: int, n: Node) -> int | None:
        if n.op != "cast" or r[n.args[0]].op != "cast":
            return None
        narrow = r[n.args[0]]
        source = narrow.args[0]
        return source if r[source].dtype == n.dtype and _widens(narrow.dtype, n.dtype) else None

    return graph.rewritten(rule)


def merge_common(graph: Graph) -> Graph:
    """Equal steps on equal operands are computed once; so are equal reductions."""
    seen: dict[tuple[Any, ...], int] = {}

    def rule(r: Rewriter, i: int, n: Node) -> int | None:
        # 1, 1.0 and True are equal in Python, and so are 0.0 and -0.0, but they are written apart.
        key = (n.op, n.args, n.dtype, n.shape, repr(n.attr))
        if key not in seen:
            seen[key] = r.add(n)
        return seen[key]

    return graph.rewritten(rule)


def merge_moments(graph: Graph) -> Graph:
    """Where a value's m2 is wanted, sum / count becomes its mean: both come from one sweep."""
    m2 = [i for i in graph.reductions if graph.nodes[i].op == "m2"]
    with_m2 = {(graph.nodes[i].args[0], graph.axes(i)) for i in m2}

    def rule(r: Rewriter, i: int, n: Node) -> int | None:
        if n.op == "div" and r[n.args[0]].op == "sum":
            old = graph.nodes[i].args[0]
            counted = _is_const(r, n.args[1], float(graph.count(old)))
            if counted and (graph.nodes[old].args[0], graph.axes(old)) in with_m2:
                return r.add(replace(n, op="mean", args=r[n.args[0]].args))
        return None

    return graph.rewritten(rule)


def multiply_by_reciprocals(graph: Graph) -> Graph:
    """Division by a row's sum of exp(v - max v) becomes a product with its reciprocal.

    That sum is at least 1 (or NaN), so the reciprocal neither overflows nor loses range; a
    division costs about ten times a product. Division by a constant power of two is exact, unless
    its reciprocal is out of range.
    """

    def is_exact(divisor: Node) -> bool:
        if divisor.op != "const" or not divisor.attr or abs(math.frexp(divisor.attr)[0]) != 0.5:
            return False
        range_ = torch.finfo(DTYPES[divisor.dtype])
        return range_.tiny <= abs(1.0 / divisor.attr) <= range_.max

    def at_least_one(nodes: list[Node], i: int) -> bool:
        total = nodes[i]
        if total.op != "sum" or nodes[total.args[0]].op != "exp":
            return False
        shifted = nodes[total.args[0]].args[0]
        if not is_below_its_greatest(nodes, nodes[shifted]):
            return False
        return nodes[nodes[shifted].args[1]].shape == total.shape

    def rule(r: Rewriter, i: int, n: Node) -> int | None:
        if n.op != "div":
            return None
        divisor = r[n.args[1]]
        if is_exact(divisor):
            inverse = r.add(replace(divisor, attr=1.0 / divisor.attr))
            return r.add(replace(n, op="mul", args=(n.args[0], inverse)))
        if at_least_one(r.nodes, n.args[1]):
            inverse = r.add(Node("reciprocal", (n.args[1],), n.dtype, divisor.shape))
            return r.add(replace(n, op="mul", args=(n.args[0], inverse)))
        return None

    return graph.rewritten(rule)


def narrow_arithmetic(graph: Graph) -> Graph:
    """A sum, difference or product of two upcast halves, rounded back, is the native half step.

    fp32 holds the sum or product of two halves well enough that rounding twice equals rounding
    once (24 >= 2 * 11 + 2 bits; Figueroa, When is double rounding innocuous?, 1995).
    """

    def rule(r: Rewriter, i: int, n: Node) -> int | None:
        if n.op != "cast" or n.dtype not in HALVES:
            return None
        step = r[n.args[0]]
        if step.op not in ("add", "sub", "mul") or step.dtype != "f32":
            return None
        operands = [r[a] for a in step.args]
        if all(o.op == "cast" and r[o.args[0]].dtype == n.dtype for o in operands):
            return r.add(replace(step, dtype=n.dtype, args=tuple(o.args[0] for o in operands)))
        return None

    return graph.rewritten(rule)


def remove_dead(graph: Graph) -> Graph:
    """Drop steps that no output needs."""
    needed = {i for i, _ in graph.outputs}
    for i in reversed(range(len(graph.nodes))):
        if i in needed:
            needed.update(graph.nodes[i].args)
    if len(needed) == len(graph.nodes):
        return graph
    new = {old: k for k, old in enumerate(sorted(needed))}
    nodes = tuple(
        n.moved(tuple(new[a] for a in n.args), n.shape) for n in map(graph.nodes.__getitem__, new)
    )
    return replace(graph, nodes=nodes, outputs=tuple((new[i], a) for i, a in graph.outputs))


def order_dims(graph: Graph) -> Graph:
    """Axes in the order in which the largest tensor lies in memory, the contiguous one last.

    Axes along which that tensor does not vary stay where they are.
    """
    accesses = [*(a for _, a in graph.outputs), *graph.inputs]

    def size_bytes(access: Access) -> int:
        varies = zip(graph.space, access.strides, strict=True)
        return access.itemsize * math.prod(n for n, stride in varies if stride)

    strides = max(accesses, key=size_bytes).strides
    moving = [a for a, stride in enumerate(strides) if stride and graph.space[a] != 1]
    ordered = iter(sorted(moving, key=lambda a: -strides[a]))
    order = [next(ordered) if a in moving else a for a in range(len(graph.space))]
    return permuted(graph, order)


def collapse_dims(graph: Graph) -> Graph:
    """Merge neighbouring axes that every tensor walks as one; axes of size 1 vanish."""
    return collapsed(graph, axis_groups(graph))


def axis_groups(graph: Graph, row: Collection[int] = ()) -> list[list[int]]:
    """The axes, in groups that can be walked as one, those of a row apart from others."""
    accesses = [*graph.inputs, *(a for _, a in graph.outputs)]
    groups: list[list[int]] = []
    for axis, n in enumerate(graph.space):
        if n == 1:
            continue
        before = groups[-1][-1] if groups else axis
        alike = (before in row) == (axis in row)
        if groups and alike and _mergeable(graph, accesses, before, axis):
            groups[-1].append(axis)
        else:
            groups.append([axis])
    return groups


def collapsed(graph: Graph, groups: list[list[int]]) -> Graph:
    """The graph with one axis for each group."""
    if groups == [[a] for a in range(len(graph.space))]:
        return graph

    def merged(sizes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(math.prod(sizes[a] for a in group) for group in groups)

    def access(old: Access) -> Access:
        return old.along(tuple(old.strides[group[-1]] for group in groups))

    shapes = {old: merged(old) for old in {n.shape for n in graph.nodes}}
    return replace(
        graph,
        nodes=tuple(n.moved(n.args, shapes[n.shape]) for n in graph.nodes),
        space=merged(graph.space),
        inputs=tuple(access(a) for a in graph.inputs),
        outputs=tuple((i, access(a)) for i, a in graph.outputs),
        joined=frozenset(
            k for k, group in enumerate(groups) if len(group) > 1 or graph.joined & {*group}
        ),
    )


def permuted(graph: Graph, order: Sequence[int]) -> Graph:
    """The graph with its axes in another order: the old ones, outermost first."""

    if list(order) == list(range(len(graph.space))):
        return graph

    def moved(sizes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sizes[a] for a in order)

    return replace(
        graph,
        nodes=tuple(n.moved(n.args, moved(n.shape)) for n in graph.nodes),
        space=moved(graph.space),
        inputs=tuple(a.along(moved(a.strides)) for a in graph.inputs),
        outputs=tuple((i, a.along(moved(a.strides))) for i, a in graph.outputs),
        joined=frozenset(k for k, a in enumerate(order) if a in graph.joined),
    )


def with_axis(graph: Graph) -> Graph:
    """The graph with an axis of size 1 behind the others, for kernels that need one."""

    return replace(
        graph,
        space=(*graph.space, 1),
        nodes=tuple(n.moved(n.args, (*n.shape, 1)) for n in graph.nodes),
        inputs=tuple(a.along((*a.strides, 0)) for a in graph.inputs),
        outputs=tuple((i, a.along((*a.strides, 0))) for i, a in graph.outputs),
    )


PASSES = (
    hoist_numbers,
    fold_constants,
    choose_constants,
    fold_casts,
    widen_reductions,
    merge_common,
    merge_moments,
    multiply_by_reciprocals,
    narrow_arithmetic,
    fold_casts,
    merge_common,
    remove_dead,
    quick_exponentials,
    shifted_exponentials,
    remove_dead,
    order_dims,
    collapse_dims,
)


def _mergeable(graph: Graph, accesses: list[Access], outer: int, inner: int) -> bool:
    if any((outer in axes) != (inner in axes) for axes in graph.reduction_sets):
        return False
    between = range(outer + 1, inner)
    assert all(graph.space[a] == 1 for a in between)
    for n in graph.nodes:
        varies = [n.shape[a] != 1 for a in (outer, inner)]
        if varies[0] != varies[1]:
            return False
    return all(a.strides[outer] == a.strides[inner] * graph.space[inner] for a in accesses)


def _widens(narrow: str, wide: str) -> bool:
    return (narrow in HALVES and wide in ("f32", "f64")) or (narrow, wide) == ("f32", "f64")


def _is_const(r: Rewriter, i: int, value: float) -> bool:
    return r[i].op == "const" and not isinstance(r[i].attr, bool) and r[i].attr == value
