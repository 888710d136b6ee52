"""What was rounded of a mean is found where it shows: of rows whose mean is far from zero.

The mean of 999 times 1000.1 is not 1000.1 in fp32: a deviation is what was rounded of the mean, and
a layer norm takes it by 316. What the deviations add up to tells how far off the mean is (Chan,
Golub and LeVeque, The American Statistician 37, 1983). Sums of them are a sweep and a join more,
which a kernel of rows leaves out unless some row that it has at hand is so far from zero.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from tilewright.fusion.ir import Graph, Node, Rewriter
from tilewright.fusion.passes import merge_common, remove_dead
from tilewright.fusion.subgraphs import ancestors
from tilewright.tensor_spec import DTYPES

RARELY = "rarely"
"""The attr of what chooses between a row's deviations, if it is far from zero, and zeros."""
FAR = 1024.0
"""Deviations of a mean from zero, from which what is rounded of it shows: of fp32 a few times
2^-24 of the mean, and so of less some thousandths of a deviation, at most."""
ROUNDINGS = 256
"""Of sums of squares that are all the rounding of a mean, what is no more may be their own: chains
of as many additions leave that."""


def corrected_far_means(graph: Graph) -> Graph:
    """The graph with means of rows corrected, and their m2, where rows are not of halves."""
    nodes = graph.nodes
    rows = {(n.args[0], n.shape) for n in nodes if n.op == "m2" and _are_wide(graph, n.args[0])}
    if not rows:
        return graph
    found: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}

    def rule(r: Rewriter, i: int, n: Node) -> int | None:
        key = nodes[i].args[0] if n.op in ("mean", "m2") else -1, n.shape
        if key not in rows:
            return None
        if key not in found:
            found[key] = _corrected(r, n, graph.count(i))
        return found[key][n.op == "m2"]

    return remove_dead(merge_common(graph.rewritten(rule)))


def _are_wide(graph: Graph, value: int) -> bool:
    """Whether some numbers that a value follows from are fp32 or fp64 in memory, of as many
    elements: sums of halves, and of what two of them add up to, are exact enough."""
    shape = graph.nodes[value].shape
    behind = (graph.nodes[i] for i in ancestors(graph, [value]))
    return any(n.op == "load" and n.shape == shape and n.dtype in ("f32", "f64") for n in behind)


def _corrected(r: Rewriter, moments: Node, count: int) -> tuple[int, int]:
    """Mean and m2 of what `moments` reduces. An m2 that may be rounding of its squares is 0."""
    (value,) = moments.args
    whole = r[value]

    def step(op: str, *args: int, dtype: str = moments.dtype, attr: object = None) -> int:
        return r.add(Node(op, args, dtype, moments.shape, attr))

    def number(x: float) -> int:
        return r.add(Node("const", (), moments.dtype, (1,) * len(moments.shape), x))

    mean, m2 = step("mean", value), step("m2", value)
    near = step("mul", step("mul", mean, mean), number(count / FAR**2))
    is_far = step("lt", m2, near, dtype="bool")
    apart = r.add(replace(whole, op="sub", args=(value, mean), attr=None))
    chosen = r.add(replace(whole, op="where", args=(is_far, apart, number(0.0)), attr=RARELY))
    rest = step("sum", chosen)
    missed = step("mul", rest, number(1.0 / count))
    left = step("sub", m2, step("mul", missed, rest))
    least = step("mul", m2, number(ROUNDINGS * torch.finfo(DTYPES[moments.dtype]).eps))
    is_rounding = step("lt", left, least, dtype="bool")
    return step("add", mean, missed), step("where", is_rounding, number(0.0), left)
