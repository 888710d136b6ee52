"""Cut a graph into kernels: what one sweep over memory can know goes into one kernel.

A kernel walks rows: a set of axes, one row after another. It completes every reduction over those
axes, since a row is at hand as a whole, and it adds its share to reductions over others, as long as
nothing in the kernel needs their result: `splits` groups of rows add up a partial each, and a small
kernel combines the partials, always in the same order. A graph is cut where a step needs such a
result, or where a reduction fits neither way. Only reduced values cross a cut; what is as large as
the inputs is computed again from them (but see staged.py).

Outputs that depend on other dims are kernels of their own, the smaller dims first. What kernels
leave is known to all later ones, and they leave what those need that they have at hand.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

from tilewright.fusion.draft import Draft, kept
from tilewright.fusion.ir import REDUCTIONS, Graph
from tilewright.fusion.joins import (
    add_up_little,
    combine,
    completes,
    epilogue,
    join_apart,
    joined_by_row,
    partials_of_rows,
)
from tilewright.fusion.plan import expand_moments
from tilewright.fusion.program import Kernels, Program, Segment, walking
from tilewright.fusion.remembered import remembered
from tilewright.fusion.subgraphs import ancestor_space, ancestors, largest, main_axis
from tilewright.fusion.walks import Walks
from tilewright.fusion.ways import Hopeless, Met, Row, Way

MOST_STEPS = 100_000
"""Of a graph, once for each kernel of every program that is tried. Programs of fewer passes than
the first were found within 2100, of gradients of mixed_norm in benchmarks/, and no search there or
in suites took more than 7000 (9973617). Gradients of a layer norm that is rolled over two dims, 365
steps of which a walk takes milliseconds to plan, would take two millions for nothing."""


def cut(
    graph: Graph, splits: int = 1, split_rows: bool = False, kernels: Kernels | None = None
) -> Program:
    """The kernels of a graph.

    Args:
        splits: into how many splits reductions over other axes than the row's are divided.
        split_rows: let rows be single stretches of the lane axis where that costs no pass over
            large tensors more (or few: `kernels.extra`), so that even one long row has work for
            many threads.
        kernels: what the target can do; None is the C++ target with so many `splits`.
    """
    kernels = kernels or Kernels(splits)
    if _is_one_kernel(graph, split_rows):
        inputs, outputs = len(graph.inputs), len(graph.outputs)
        buffers = tuple(range(inputs + outputs))
        whole = Segment(graph, buffers[:inputs], buffers[inputs:])
        return Program((whole,), inputs, outputs, ())
    in_sums = _in_sums(graph, kernels)
    if not split_rows:
        return Cutter(in_sums, kernels, _rows_of_fewest_passes(graph, kernels)).run()
    program = Cutter(in_sums, kernels, split_rows=True).run()
    other = cut(graph, kernels=kernels)
    return other if program.large() > other.large() + kernels.extra else program


def _is_one_kernel(graph: Graph, split_rows: bool) -> bool:
    """Whether it is nothing but steps of elements, or rows along memory that are not split."""
    spaces = {ancestor_space(graph, i) for i, _ in graph.outputs}
    if len(spaces) != 1 or math.prod(graph.space) > graph.largest_step:
        return False
    if not graph.reductions:
        return True
    alike = graph.reduction_sets == (graph.reduced,) and not split_rows
    return alike and main_axis(graph, range(len(graph.nodes))) in graph.reduced


def _in_sums(graph: Graph, kernels: Kernels) -> Graph:
    return expand_moments(graph, corrected=True, means=True, halves=kernels.corrects_halves)


@remembered
def _rows_of_fewest_passes(graph: Graph, kernels: Kernels) -> tuple[int, ...]:
    """Which row each kernel walks: what gets most done now may leave more for later."""
    in_sums = _in_sums(graph, kernels)
    best: tuple[int, ...] = ()
    rows: list[int] = []
    fewest = most = math.inf
    met = Met()
    steps = 0
    while steps < MOST_STEPS:
        cutter = Cutter(in_sums, kernels, rows, most, met)
        with contextlib.suppress(Hopeless):
            program = cutter.run()
            if program.large() <= fewest:
                best = tuple(k for k, _ in cutter.chosen)
                fewest, most = program.large(), len(walking(program.segments))
        chosen = cutter.chosen
        steps += len(chosen) * len(in_sums.nodes)
        while chosen and chosen[-1][0] + 1 == chosen[-1][1]:
            chosen.pop()
        if not chosen:
            break
        rows = [k for k, _ in chosen]
        rows[-1] += 1
    return best


class Cutter:
    """Kernels, one after another, each of which walks the rows that get most done.

    Args:
        rows: which row each kernel walks instead: of those that get anything done, most first.
        most: passes that are too many.
        met: what other cutters of the graph have tried.
        split_rows: rows may be single stretches of the lane axis.
    """

    def __init__(
        self,
        graph: Graph,
        kernels: Kernels,
        rows: Sequence[int] = (),
        most: float = math.inf,
        met: Met | None = None,
        split_rows: bool = False,
    ):
        self.graph, self.kernels = graph, kernels
        self.rows, self.most, self.split_rows = rows, most, split_rows
        self.met = met or Met()
        self.draft = Draft(graph, kernels)
        self.chosen: list[tuple[int, int]] = []
        """Which row each kernel walks, and of how many."""

    def run(self) -> Program:
        by_space: dict[tuple[int, ...], list[int]] = {}
        for k, (i, _) in enumerate(self.graph.outputs):
            by_space.setdefault(ancestor_space(self.graph, i), []).append(k)
        spaces = sorted(by_space, key=sum)  # what is within another comes first
        for n, space in enumerate(spaces):
            later = {k for s in spaces[n + 1 :] for k in by_space[s]}
            self.draft.remaining, self.draft.later = by_space[space], sorted(later)
            self.group(space)
        return self.draft.program()

    def group(self, space: tuple[int, ...]) -> None:
        """Kernels for the remaining outputs, which depend on values of one iteration space."""
        draft = self.draft
        first, _ = self.graph.outputs[draft.remaining[0]]
        reason = draft.at(first, "it reads other dims than the kernels before")
        beside = self.beside(space)
        while draft.remaining:
            self.walk(beside, reason)
            reason = self.why_another() or reason

    def beside(self, space: tuple[int, ...]) -> list[int]:
        """The reductions of the same space that outputs of others need, of what these read."""
        nodes, outputs = self.graph.nodes, self.graph.outputs

        def read(*steps: int) -> set[int]:
            return {a for a in ancestors(self.graph, steps) if nodes[a].op == "load"}

        here = read(*(outputs[k][0] for k in self.draft.remaining))
        return [
            i
            for i in ancestors(self.graph, (outputs[k][0] for k in self.draft.later))
            if nodes[i].op in REDUCTIONS and read(i) <= here
            if largest([space, ancestor_space(self.graph, i)]) == space
        ]

    def walk(self, beside: Sequence[int], reason: str) -> None:
        """A kernel that walks rows, and those that put together what it leaves in partials."""
        draft, graph = self.draft, self.graph
        unknown = [i for i in beside if i not in draft.known]
        needed = sorted({*draft.needed(draft.remaining), *ancestors(graph, unknown, draft.known)})
        draft.lane = main_axis(graph, needed)
        _, _, row, now, added = self.best_row(needed)
        by_row = bool(row) and self.kernels.row_partials
        if by_row:
            draft.walked.add(row)
        columns = [i for i in added if by_row and completes(graph, i, row)]
        follows = epilogue(draft, columns, added) if columns else set()
        stores = draft.write(now | follows)
        if columns:
            wanted = draft.wanted(added)
            added = [i for i in added if i in wanted]
        sums = {i: draft.temporary(i) for i in added}
        crossing = {i: draft.temporary(i) for i in self.crossing(now, added)}
        extended, partials = partials_of_rows(graph, sums, row) if by_row else (graph, kept(sums))
        draft.add([*stores, *kept(crossing), *partials], row, reason, extended)
        across = (i for i in crossing if draft.lane not in graph.axes(i))
        draft.awaited |= {crossing[i].buffer: draft.needs(i) for i in across}
        left = joined_by_row(draft, sums, row) if by_row else draft.divide(sums)
        draft.known = {**draft.known, **crossing, **left}
        add_up_little(draft, added)
        combine(draft, added)
        if self.kernels.joins_apart:
            join_apart(draft)

    def crossing(self, now: set[int], added: Sequence[int]) -> list[int]:
        """The reductions that the next kernel completes and later ones need."""
        nodes, known = self.graph.nodes, self.draft.known
        wanted = self.draft.wanted(added)
        done = [i for i in wanted if nodes[i].op in REDUCTIONS and i in now and i not in known]
        wanted = self.draft.wanted([*added, *done])
        return [i for i in done if i in wanted]

    def why_another(self) -> str:
        """Why what remains is left to later kernels; empty where nothing does."""
        draft = self.draft
        later = [i for i in draft.needed(draft.remaining) if i not in draft.known]
        left = [i for i in later if self.graph.nodes[i].op in REDUCTIONS]
        if left:
            return draft.at(left[0], "it reduces other dims than the kernels before")
        return draft.at(later[0], "it has other dims than the rows before") if later else ""

    def best_row(self, needed: Sequence[int]) -> Row:
        """Of the rows that complete most, unless `rows` says otherwise."""
        draft, rows = self.draft, tuple(k for k, _ in self.chosen)
        spaces = [math.prod(draft.segments[k].graph.space) for k in walking(draft.segments)]
        space = max(spaces, default=0)
        way = Way(rows, len(spaces), space, spaces.count(space))
        values = frozenset(draft.known).intersection(draft.wanted())
        left = (tuple(draft.remaining), values, frozenset(draft.walked))
        if len(spaces) + 1 >= self.most or self.met.costs_no_more(left, way):
            raise Hopeless
        if left not in self.met.rows:
            self.met.rows[left] = self.ranked(needed)
        found = self.met.rows[left]
        at = self.rows[len(rows)] if len(rows) < len(self.rows) else 0
        self.chosen.append((at, max(sum(row.useful for row in found), 1)))
        return found[at]

    def ranked(self, needed: Sequence[int]) -> list[Row]:
        draft = self.draft
        walks = Walks(self.graph, self.kernels, draft.lane)
        return walks.ranked(draft.remaining, needed, draft.known, draft.walked, self.split_rows)
