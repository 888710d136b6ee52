"""Constants that follow from how many rows there are: kernels are given them at launch.

A mean over rows divides by their number, its gradient is divided by it, and the sum of a gradient
that all rows share is so many times that. Written into the source they would be a kernel for each
number of rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from tilewright.fusion.ir import Graph, Node, Rewriter
from tilewright.fusion.numbers import Numbers

FEWEST = 8
"""Rows: smaller numbers are often no count, as the 2 of a square's derivative."""
EPSILONS = {torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64)}
"""That of RMS norm is one of 8192 rows of 1024 by chance."""


def give_counts(graph: Graph, sizes: Iterable[int]) -> Graph:
    """What divides or multiplies by a number of rows, or elements of all of them, is given it, and
    so is what means and variances over them divide by, once they are sums (`expand_moments`).

    The width of a row is compiled in, and so is what equals it. Bits stay as they are: a kernel is
    given what would be written into it.

    Args:
        sizes: of tensors' dims, if they are more than the graph's space tells.
    """
    counts = _counts(graph, sizes)
    given: dict[tuple[str, float], int] = {}

    def place_of(dtype: str, number: float) -> int:
        return given.setdefault((dtype, number), len(graph.scalars) + len(given))

    def rule(r: Rewriter, i: int, n: Node) -> int | None:
        if n.op == "const" and n.dtype in ("f32", "f64") and n.attr in counts:
            return r.add(replace(n, op="scalar", attr=place_of(n.dtype, float(n.attr))))
        if n.op in ("mean", "m2") and graph.count(i) in counts:
            return r.add(replace(n, attr=place_of(n.dtype, 1.0 / graph.count(i))))
        return None

    found = graph.rewritten(rule)
    if not given:
        return graph
    constants = [Node("const", (), dtype, (), number) for dtype, number in given]
    numbers = graph.numbers or Numbers.unchanged(graph.scalars)
    return replace(
        found,
        scalars=(*graph.scalars, *(n.dtype for n in constants)),
        numbers=numbers.beside(constants),
    )


def _counts(graph: Graph, sizes: Iterable[int]) -> set[float]:
    """Of elements along dims, and what formulas of means, variances and their derivatives make of
    them; but not what they make of the width, or an epsilon."""
    axes = range(len(graph.space))
    several = (along for k in axes for along in itertools.combinations(axes, k + 1))
    counts = {*sizes, *(math.prod(graph.space[a] for a in along) for along in several)}
    found = {x for n in counts for x in _made_of(n)}
    has_rows = len(axes) > 1 or (graph.reductions and not graph.is_total)
    return found.difference(_made_of(graph.space[-1]) if has_rows else (), EPSILONS)


def _made_of(count: int) -> Iterator[float]:
    """By one less for a variance, inverses, the 2 of a square."""
    for n in (count, count - 1):
        if n >= FEWEST:
            yield from (n, 1 / n, 2 / n)
