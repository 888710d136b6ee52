"""What may be done with a row's exponentials below its greatest value, as softmax has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright.fusion.ir import Graph, Node, Rewriter
from tilewright.tensor_spec import HALVES

OF_DIFFERENCES = ("raised_exp", "shifted_exp")
EXPONENTIALS = ("exp", "quick_exp", *OF_DIFFERENCES)


def quick_exponentials(graph: Graph) -> Graph:
    """Of exp(v - max v), what only its sums divide before it is rounded to halves need be good to
    no more than 17 bits, six more than f16 has: a third of exp's instructions.

    A product with log2(e), rounded to fp32, is at most 2^-17 off, and so is its power of two,
    relatively. What is no normal number in fp32 becomes zero; nothing else multiplies it. In bf16
    it would be some number, unless those powers are divided by their own sum, and may be raised.
    There 17 bits are as good as it gets far from zero, where distances of positions lead.
    """
    nodes = graph.nodes
    stored = {i for i, _ in graph.outputs}
    shifted = {
        i for i, n in enumerate(nodes)
        if n.op == "exp" and n.dtype == "f32" and is_below_its_greatest(nodes, nodes[n.args[0]])
    }  # fmt: skip
    positive = set(shifted)  # and what sums and reciprocals make of them
    for i, n in enumerate(nodes):
        if n.op in ("sum", "reciprocal") and n.args[0] in positive:
            positive.add(i)

    def is_rounded(i: int, halves: Sequence[str]) -> bool:
        users = graph.users(i)
        return i not in stored and bool(users) and all(rounds(k, halves) for k in users)

    def rounds(k: int, halves: Sequence[str]) -> bool:
        n = nodes[k]
        if n.op == "cast":
            return n.dtype in halves
        among_themselves = n.op in ("mul", "div") and positive.issuperset(n.args)
        return (k in positive or among_themselves) and is_rounded(k, halves)

    counted = set[int]()  # what is computed from whole numbers
    for i, n in enumerate(nodes):
        whole = n.op == "cast" and nodes[n.args[0]].dtype in ("i32", "i64")
        if whole or counted.intersection(n.args):
            counted.add(i)

    def halves(i: int) -> Sequence[str]:
        return HALVES if _is_normalised(graph, i) and i not in counted else ("f16",)

    quick = {i for i in shifted if is_rounded(i, halves(i))}

    def rule(r: Rewriter, i: int, n: Node) -> int | None:
        return r.add(replace(n, op="quick_exp")) if i in quick else None

    return graph.rewritten(rule)


def shifted_exponentials(graph: Graph) -> Graph:
    """A factor that exp(v - max v) of a row have in common is taken out where they are divided by
    their own sum.

    Of v from f16 one fused multiply-add does for difference and product with log2(e): that of max v
    is rounded, by up to 2^-24 of it, and does not overflow. Others are raised by 2^16, so that what
    bf16 holds below the normal numbers, down to 2^-133, is none of the powers that become zero.
    """

    def from_f16(r: Rewriter, i: int) -> bool:
        return r[i].op == "cast" and r[r[i].args[0]].dtype == "f16"

    def rule(r: Rewriter, i: int, n: Node) -> int | None:
        if n.op != "quick_exp" or not _is_normalised(graph, i):
            return None
        below = r[n.args[0]]
        op = "shifted_exp" if from_f16(r, below.args[0]) else "raised_exp"
        return r.add(replace(n, op=op, args=below.args))

    return graph.rewritten(rule)


def _is_normalised(graph: Graph, i: int) -> bool:
    """Whether exponentials are only divided by their row's sum of them."""
    nodes = graph.nodes
    stored = {i for i, _ in graph.outputs}
    greatest = nodes[nodes[i].args[0]].args[1]
    sums = [k for k in graph.users(i) if nodes[k].op == "sum"]
    inverses = [k for s in sums for k in graph.users(s) if nodes[k].op == "reciprocal"]
    divisors = {"mul": inverses, "div": sums}
    quotients = [
        k for k in graph.users(i)
        if nodes[k].args[0] == i and nodes[k].args[-1] in divisors.get(nodes[k].op, ())
    ]  # fmt: skip
    follow = {*sums, *inverses, *quotients}
    return (
        follow.issuperset(k for j in (i, *sums, *inverses) for k in graph.users(j))
        and stored.isdisjoint((i, *sums, *inverses))
        and all(nodes[s].shape == nodes[greatest].shape for s in sums)
    )


def merge_exponentials(graph: Graph) -> Graph:
    """Write sum(exp(v - amax(v))) as one reduction of v: it need not wait for the whole amax."""
    merged = exponentials_of_greatest(graph)

    def rule(r: Rewriter, i: int, n: Node) -> int | None:
        if i not in merged:
            return None
        value, how = merged[i]
        return r.add(replace(n, op="sum_exp", args=(r.map[value],), attr=how))

    return graph.rewritten(rule) if merged else graph


def exponentials_of_greatest(graph: Graph) -> dict[int, tuple[int, str]]:
    """The sums of exp(v - amax(v)), over the same axes: each one's v, and operator for exp."""
    nodes, found = graph.nodes, {}
    for i in graph.reductions:
        power = nodes[nodes[i].args[0]]
        if nodes[i].op != "sum" or power.op not in EXPONENTIALS:
            continue
        below = power if power.op in OF_DIFFERENCES else nodes[power.args[0]]
        if is_below_its_greatest(nodes, below) and nodes[below.args[1]].shape == nodes[i].shape:
            found[i] = (below.args[0], power.op)
    return found


def is_below_its_greatest(nodes: Sequence[Node], n: Node) -> bool:
    """Whether a step is v - max v, or computed from these two."""
    if n.op not in ("sub", *OF_DIFFERENCES):
        return False
    return nodes[n.args[1]].op == "amax" and nodes[n.args[1]].args == n.args[:1]
