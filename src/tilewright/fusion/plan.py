"""From a graph to phases: which reductions share a sweep over the row, and what is kept between.

A row kernel sweeps the row once per phase. Phase p computes every reduction whose operand is known
by then; the last sweeps store. A value that a later sweep needs is either kept from an earlier one
or computed again from what was kept: `carried` is the cheapest set of values, in bytes per
element, that cuts later sweeps off from the row's loads (a minimum vertex cut). Parameter
vectors, which do not vary over rows, are never kept: they are read again from cache.

Reductions over other axes than the row's (layer norm's dweight: a sum over all rows) are added up
by the sweep that knows their operand. Nothing in the kernel reads them: each block or thread adds
up its own rows, and their partial results are combined afterwards.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, replace

import torch

from tilewright.fusion import instructions
from tilewright.fusion.cheapest_cut import cheapest_cut
from tilewright.fusion.exponentials import merge_exponentials
from tilewright.fusion.ir import REDUCTIONS, Graph, Node, Rewriter
from tilewright.fusion.passes import merge_common, remove_dead
from tilewright.tensor_spec import DTYPES, HALVES

DRAWN_BYTES = 4
"""What keeping a random boolean is reckoned at: it takes a register, and drawing it again a
quarter of a Philox block."""

ROUNDINGS = 16
"""Of squared deviations that are all the rounding of a mean, what sums leave of them at most."""

KEPT, AGAIN = 4096, 128
"""What keeping a value costs, or a byte of it, and an instruction that a later sweep takes again:
a value is worth 32."""


@dataclass(frozen=True)
class Phase:
    """One sweep over the row.

    Attributes:
        reductions: reduction nodes that this sweep completes.
        stores: positions in `Graph.outputs` of full outputs that this sweep writes.
        carried_in: values kept by earlier sweeps that this one reads.
        carried_out: values that this sweep computes and keeps.
        added: reductions over other axes than the row's, to which this sweep adds its share.
    """

    reductions: tuple[int, ...]
    stores: tuple[int, ...]
    carried_in: frozenset[int] = frozenset()
    carried_out: frozenset[int] = frozenset()
    added: tuple[int, ...] = ()


@dataclass(frozen=True)
class Plan:
    """A graph with its phases.

    Attributes:
        inner: per node, whether it varies along the row.
        ready: per node, the first phase that can know it.
        row: the axes of one row.
    """

    graph: Graph
    phases: tuple[Phase, ...]
    inner: tuple[bool, ...]
    ready: tuple[int, ...]
    row: tuple[int, ...]

    @functools.cached_property
    def slots(self) -> dict[int, int]:
        """Where each carried value is kept: in the place of one of its dtype that no later sweep
        reads, if there is one, so that a sweep overwrites what it has just read. One that finds
        moments goes over what it has read once more, and overwrites nothing."""
        slots: dict[int, int] = {}
        free: list[int] = []
        for phase in self.phases:
            gone = sorted(phase.carried_in - phase.carried_out, reverse=True)
            reads_again = any(self.graph.nodes[i].op in ("m2", "sum_exp") for i in phase.reductions)
            free += [] if reads_again else gone
            for i in sorted(phase.carried_out - phase.carried_in):
                dtype = self.graph.nodes[i].dtype
                old = next((j for j in free if self.graph.nodes[j].dtype == dtype), None)
                if old is not None:
                    free.remove(old)
                slots[i] = i if old is None else slots[old]
            free += gone if reads_again else []
        return slots

    def ends(self, phase: Phase) -> set[int]:
        """The values that a sweep is for: what it reduces or adds up, and what it stores."""
        operands = {self.graph.nodes[i].args[0] for i in (*phase.reductions, *phase.added)}
        return operands | {self.graph.outputs[k][0] for k in phase.stores}

    @property
    def kept(self) -> tuple[int, ...]:
        """The axes that number the rows."""
        return tuple(a for a in range(len(self.graph.space)) if a not in self.row)

    @property
    def rows(self) -> int:
        return math.prod(self.graph.space[a] for a in self.kept)

    @property
    def width(self) -> int:
        """Elements of one row."""
        return math.prod(self.graph.space[a] for a in self.row)


def plan_rows(
    graph: Graph,
    moments: str,
    recompute: bool = True,
    row: tuple[int, ...] | None = None,
    packed: bool = False,
) -> Plan:
    """Plan a graph with reductions.

    Args:
        moments: "two_pass" finds the mean in one sweep and the squared deviations in the next, and
            "corrected" there also what was rounded of the mean;
            "merge" finds both in one sweep, each warp (or thread) in two passes over what it
            holds, merged with Chan, Golub and LeVeque's formula (The American Statistician 37,
            1983); likewise the greatest value and the sum of exponentials below it (Milakov and
            Gimelshein, Online normalizer calculation for softmax, 2018). "lanes" merges what each
            lane of a warp found by that formula, too. "tensor_cores" does so in one pass, where
            the values are halves.
        recompute: keep the fewest bytes and compute again from them; otherwise keep the values
            that later sweeps use directly, and more where that spares these many instructions.
        row: the axes of a row; None where all reductions run over the same ones. No step may use
            the result of a reduction over others.
        packed: of values that later sweeps use directly, keep widened halves as halves.
    """
    if moments in ("two_pass", "corrected"):
        corrected = moments == "corrected"
        graph = expand_moments(graph, corrected, means=corrected)
    elif moments in ("merge", "lanes"):
        graph = remove_dead(merge_exponentials(graph))
    row = graph.reduced if row is None else row
    inner = tuple(any(n.shape[a] != 1 for a in row) for n in graph.nodes)
    over_row = [i for i in graph.reductions if graph.axes(i) == row]
    others = [i for i in graph.reductions if graph.axes(i) != row]
    assert not any(graph.users(i) for i in others), "a step uses what is known after all rows"
    ready = _first_phase(graph, over_row)
    reduced_in = {i: ready[graph.nodes[i].args[0]] for i in graph.reductions}
    full = {k: i for k, (i, _) in enumerate(graph.outputs) if inner[i] and i not in others}
    last = max((*reduced_in.values(), *(ready[i] for i in full.values())), default=0)
    phases = tuple(
        Phase(
            reductions=tuple(i for i in over_row if reduced_in[i] == p),
            stores=tuple(k for k, i in full.items() if ready[i] == p),
            added=tuple(i for i in others if reduced_in[i] == p),
        )
        for p in range(last + 1)
    )
    return _carrying(Plan(graph, phases, inner, tuple(ready), row), recompute, packed)


def _carrying(plan: Plan, recompute: bool, packed: bool) -> Plan:
    """The same plan with what each sweep keeps for later ones."""
    ends = [plan.ends(phase) for phase in plan.phases]
    kept = [frozenset[int]()]
    for p in range(len(plan.phases) - 1):
        values = _kept_after(plan, p, set().union(*ends[p + 1 :]), recompute)
        kept.append(frozenset(_narrowest(plan.graph, i) for i in values) if packed else values)
    kept.append(frozenset())
    phases = (
        replace(phase, carried_in=before, carried_out=after)
        for phase, (before, after) in zip(plan.phases, itertools.pairwise(kept), strict=True)
    )
    return replace(plan, phases=tuple(phases))


def with_stores_last(plan: Plan) -> Plan:
    """The same plan of one sweep, with all stores in a second one, from what the first has kept."""
    (phase,) = plan.phases
    later = {plan.graph.outputs[k][0] for k in phase.stores}
    if not later:
        return plan
    kept = _kept_after(plan, 0, later, True)
    first = replace(phase, stores=(), carried_out=kept)
    return replace(plan, phases=(first, Phase((), phase.stores, kept)))


def expand_moments(
    graph: Graph, corrected: bool = False, means: bool = False, halves: bool = True
) -> Graph:
    """Write mean and m2 as sums: m2(x) = sum(d^2) of d = x - mean(x).

    If `corrected`, less sum(d)^2 / n, which is zero but for what was rounded of the mean (Chan,
    Golub and LeVeque, The American Statistician 37, 1983): equal values have an m2 of 0. If `means`
    is, too, sum(d) / n is added to the mean: these have deviations of 0. Otherwise m2 is as it is
    where other steps take deviations from the same mean, as in layer norm: those have its rounding,
    too, and lose more by it. Means of widened halves may be left as they are, if not `halves`: fp32
    sums of equal ones are exact.
    """
    if not any(n.op in ("mean", "m2") for n in graph.nodes):
        return graph
    spread = {(n.args[0], n.shape) for n in graph.nodes if n.op == "m2"}
    centred_elsewhere = {
        n.args[0]
        for n in graph.nodes
        if n.op == "sub" and graph.nodes[n.args[1]].op == "mean"
        and graph.nodes[n.args[1]].args[0] == n.args[0]
    }  # fmt: skip

    def with_means(i: int) -> bool:
        return means and (halves or not is_widened(graph, graph.nodes[i].args[0]))

    def step(r: Rewriter, n: Node, op: str, *args: int, dtype: str | None = None) -> int:
        return r.add(replace(n, op=op, args=args, dtype=dtype or n.dtype, attr=None))

    def times(r: Rewriter, n: Node, i: int, number: float) -> int:
        return step(r, n, "mul", i, constant(r, n, number))

    def constant(r: Rewriter, n: Node, number: float) -> int:
        return r.add(Node("const", (), n.dtype, (1,) * len(n.shape), number))

    def averaged(r: Rewriter, i: int, n: Node, total: int) -> int:
        """What is over all elements of moment `n`, or over as many as are known at launch."""
        if n.attr is None:
            return times(r, n, total, 1.0 / graph.count(i))
        given = Node("scalar", (), n.dtype, (1,) * len(n.shape), n.attr)
        return step(r, n, "mul", total, r.add(given))

    def first_mean(r: Rewriter, i: int, n: Node) -> int:
        total = step(r, n, "sum", n.args[0])
        if corrected:
            return averaged(r, i, n, total)
        return r.add(replace(n, op="average", args=(total,), attr=graph.count(i)))

    def deviations(r: Rewriter, i: int, n: Node) -> int:
        return step(r, r[n.args[0]], "sub", n.args[0], first_mean(r, i, n))

    def squares(r: Rewriter, i: int, n: Node) -> int:
        apart = deviations(r, i, n)
        return step(r, n, "sum", step(r, r[n.args[0]], "mul", apart, apart))

    def missed(r: Rewriter, i: int, n: Node) -> tuple[int, int]:
        """Of the mean, and of the sum: what is more than the deviations themselves were rounded by,
        all of a size alike. Beside infinities, and where squares overflow, nothing is."""
        rest = step(r, n, "sum", deviations(r, i, n))
        excess = step(r, n, "mul", averaged(r, i, n, rest), rest)
        least = times(r, n, squares(r, i, n), torch.finfo(DTYPES[n.dtype]).eps ** 2)
        is_more = step(r, n, "lt", least, excess, dtype="bool")
        rest = step(r, n, "where", is_more, rest, constant(r, n, 0.0))
        return averaged(r, i, n, rest), rest

    def m2(r: Rewriter, i: int, n: Node) -> int:
        """0 where what is left of the squares may be rounding of their own."""
        total = squares(r, i, n)
        if not corrected or (not with_means(i) and graph.nodes[i].args[0] in centred_elsewhere):
            return total
        found = step(r, n, "sub", total, step(r, n, "mul", *missed(r, i, n)))
        least = times(r, n, total, ROUNDINGS * torch.finfo(DTYPES[n.dtype]).eps)
        is_rounding = step(r, n, "lt", found, least, dtype="bool")
        return step(r, n, "where", is_rounding, constant(r, n, 0.0), found)

    def rule(r: Rewriter, i: int, n: Node) -> int | None:
        if n.op == "m2":
            return m2(r, i, n)
        if n.op == "mean":
            mean = first_mean(r, i, n)
            if not with_means(i) or (graph.nodes[i].args[0], n.shape) not in spread:
                return mean
            return step(r, n, "add", mean, missed(r, i, n)[0])
        return None

    return remove_dead(merge_common(graph.rewritten(rule)))


def is_widened(graph: Graph, i: int) -> bool:
    """Whether node `i` is a half, as a wider number."""
    n = graph.nodes[i]
    return n.op == "cast" and graph.nodes[n.args[0]].dtype in HALVES


def _narrowest(graph: Graph, i: int) -> int:
    """What node `i` is a widened copy of, if it is one."""
    return graph.nodes[i].args[0] if is_widened(graph, i) else i


def halves_of_moments(graph: Graph) -> int | None:
    """The node of halves whose mean and m2 a graph asks for in fp32: tensor cores can add it up."""
    operands = {n.args[0] for n in graph.nodes if n.op == "m2" and n.dtype == "f32"}
    if len(operands) != 1:
        return None
    value = operands.pop()
    return graph.nodes[value].args[0] if is_widened(graph, value) else None


def needed_in(plan_graph: Graph, wanted: set[int], known: frozenset[int]) -> list[int]:
    """The nodes to evaluate, in order, for `wanted`, given that `known` ones are at hand."""
    needed: set[int] = set()
    stack = [i for i in wanted if i not in known]
    while stack:
        i = stack.pop()
        if i not in needed:
            needed.add(i)
            if plan_graph.nodes[i].op not in REDUCTIONS:
                stack += [a for a in plan_graph.nodes[i].args if a not in known]
    return sorted(needed)


def _first_phase(graph: Graph, over_row: list[int]) -> list[int]:
    """For each node the first sweep that can know it; a row's reduction is known from the next."""
    ready: list[int] = []
    for i, n in enumerate(graph.nodes):
        at = max((ready[a] for a in n.args), default=0)
        ready.append(at + 1 if i in over_row else at)
    return ready


def _kept_after(plan: Plan, phase: int, later: set[int], recompute: bool) -> frozenset[int]:
    """What to keep after `phase` so that `later` values need no row-varying load."""
    graph, inner, ready = plan.graph, plan.inner, plan.ready
    wanted = [i for i in needed_in(graph, later, frozenset()) if inner[i]]
    over_rows = _depends_on_row_loads(plan)
    used_later = {a for i in wanted if ready[i] > phase for a in graph.nodes[i].args}
    costs: dict[int, int] = {}
    uses: list[tuple[int, int]] = []
    for i in wanted:
        if ready[i] > phase or not over_rows[i]:
            continue
        size = DTYPES[graph.nodes[i].dtype].itemsize if recompute else 1
        if graph.generated(i):
            size = DRAWN_BYTES
        # The small term prefers the latest of equally cheap cuts: it saves recomputation.
        costs[i] = size * KEPT - i
        uses += [(a, i) for a in graph.nodes[i].args if inner[a] and over_rows[a]]
    loads = [i for i in costs if graph.nodes[i].op == "load"]
    last = [i for i in costs if i in later or i in used_later]
    again = {} if recompute else {i: instructions.of(graph.nodes[i]) * AGAIN for i in costs}
    return cheapest_cut(costs, uses, loads, last, again)


def _depends_on_row_loads(plan: Plan) -> list[bool]:
    """Per node: it varies along the row, through loads of the row itself and not of parameters.

    In a graph of one row nothing tells the two apart, and every load counts as the row's.
    """
    graph, inner, kept = plan.graph, plan.inner, plan.kept
    found: list[bool] = []
    for i, n in enumerate(graph.nodes):
        if n.op == "load":
            strides = [graph.inputs[n.attr].strides[a] for a in kept]
            found.append(inner[i] and (not strides or any(strides)))
        elif n.op in REDUCTIONS:
            found.append(False)
        else:
            found.append(inner[i] and any(found[a] for a in n.args))
    return found
