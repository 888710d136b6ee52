"""The rows that a kernel may walk: what it has at hand then, what it can add up on the way, and how
much that gets done."""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass

from tilewright.fusion.ir import REDUCTIONS, Graph
from tilewright.fusion.program import Kernels
from tilewright.fusion.subgraphs import ancestors, largest, within
from tilewright.fusion.ways import Row


@dataclass(frozen=True)
class Walks:
    """Of a graph, by kernels of a target whose vectors run along the axis `lane`."""

    graph: Graph
    kernels: Kernels
    lane: int

    def ranked(
        self,
        outputs: Sequence[int],
        needed: Sequence[int],
        known: Collection[int],
        walked: set[tuple[int, ...]],
        split_rows: bool,
    ) -> list[Row]:
        """The rows that the next kernel may walk; those that get most done come first."""
        space, by_row = self.space(needed), self.kernels.row_partials
        found = []
        for row in (*self.candidates(needed, walked), ()):
            now, added = self.reach(row, needed, known)
            done = [i for i in now if self.graph.nodes[i].op in REDUCTIONS and i not in known]
            leaves = bool(row) and by_row
            whole = len(done) + leaves * len(added)
            suits = self.kernels.suits(space, row, self.lane) if split_rows else whole
            progress = len(done) + len(added) + self.written(outputs, now, added, known)
            contiguous = not row or self.lane in row or self.kernels.across
            reduces = bool(done) or leaves or not row
            merit = (reduces, progress, contiguous, suits)
            found.append(Row(progress > 0 <= suits, merit, row, now, added))
        return sorted(found, key=lambda f: f[:3], reverse=True)

    def candidates(
        self, needed: Sequence[int], walked: set[tuple[int, ...]]
    ) -> set[tuple[int, ...]]:
        """The axes of rows that may get more done than single elements."""
        sets = self.reduced(needed)
        sets |= walked if self.kernels.row_partials else {(self.lane,)}
        if self.kernels.set_rows:
            most, sizes = self.kernels.set_rows, self.graph.space
            few = [b for b in sets if math.prod(sizes[a] for a in b) <= most]
            along = [a for a in sets if self.lane in a]
            sets |= {tuple(sorted((*a, *b))) for a in along for b in few if not {*a} & {*b}}
        space = self.space(needed)
        return {row for row in sets if any(space[a] > 1 for a in row)}  # not what is known by now

    def written(
        self, outputs: Sequence[int], now: set[int], added: Sequence[int], known: Collection[int]
    ) -> int:
        """How many outputs are written then, by this kernel or by the one that combines
        partials."""
        nodes, ends = self.graph.nodes, {*known, *added}
        shapes = {nodes[i].shape for i in added}
        count = 0
        for end in (self.graph.outputs[k][0] for k in outputs):
            needed = ancestors(self.graph, [end], ends)
            behind = [nodes[i] for i in needed if i not in now and i not in added]
            if end in now:
                count += not behind
            elif not any(n.op in REDUCTIONS for n in behind):
                count += any(all(within(n.shape, shape) for n in behind) for shape in shapes)
        return count

    def reach(
        self, row: tuple[int, ...], needed: Sequence[int], known: Container[int]
    ) -> tuple[set[int], list[int]]:
        """What a kernel that walks these rows has at hand, and which reductions it adds up.

        A step that takes a result of a row to dims that the row's elements do not have would have
        it walk the row again for each place in those (`x.sum(-1, keepdim=True) * y`, halves of
        normalised rows). It is a later kernel's, unless that is no more than the largest step.
        """
        nodes, most = self.graph.nodes, self.graph.largest_step
        now, added = self.walk(row, needed, known)
        walked: dict[int, tuple[int, ...]] = {}
        """By step that follows from results of rows: the dims of these rows' elements."""
        beyond = set()
        for i in needed:
            if i in now and i not in known:
                n = nodes[i]
                of_rows = [walked[a] for a in n.args if a in walked]
                of_rows += [nodes[n.args[0]].shape] if n.op in REDUCTIONS else []
                if of_rows:
                    walked[i] = largest(of_rows)
                    if math.prod(largest([walked[i], n.shape])) > most:
                        beyond.add(i)
        if beyond:
            now, added = self.walk(row, [i for i in needed if i not in beyond], known)
        return now, added

    def walk(
        self, row: tuple[int, ...], needed: Sequence[int], known: Container[int]
    ) -> tuple[set[int], list[int]]:
        """The same wherever that leads."""
        space = self.space(needed)
        completed = self.complete_dims(row, needed)
        now: set[int] = set()
        added: list[int] = []
        of_rows: set[int] = set()  # what varies along a row, or follows from what does
        for i in needed:
            n = self.graph.nodes[i]
            behind = () if i in known else n.args
            if any(n.shape[a] > 1 for a in row) or of_rows.intersection(behind):
                of_rows.add(i)
            if i in known:
                now.add(i)
            elif all(a in now for a in n.args):
                if n.op not in REDUCTIONS or self.graph.axes(i) in completed:
                    now.add(i)
                elif (
                    (not row or n.args[0] in of_rows)  # else there would be no row to walk
                    and self.can_add(i, row, space)
                    and self.kernels.adds(self.graph, row, self.lane, [*added, i])
                ):
                    added.append(i)
        return now, added

    def complete_dims(self, row: tuple[int, ...], needed: Sequence[int]) -> set[tuple[int, ...]]:
        """The dims of reductions that have what they need at hand at once in a kernel that walks
        these rows: their own, or, of a set of rows, those of one and those of the others."""
        sets = self.reduced(needed)
        along = min((s for s in sets if self.lane in s and {*s} < {*row}), key=len, default=row)
        over = tuple(a for a in row if a not in along)
        if math.prod(self.graph.space[a] for a in over) > self.kernels.set_rows:
            return {row}
        return {row, along, over}

    def space(self, needed: Sequence[int]) -> tuple[int, ...]:
        return largest(self.graph.nodes[i].shape for i in needed)

    def reduced(self, needed: Sequence[int]) -> set[tuple[int, ...]]:
        """The sets of axes that reductions among these steps run over."""
        return {self.graph.axes(i) for i in needed if self.graph.nodes[i].op in REDUCTIONS}

    def can_add(self, i: int, row: tuple[int, ...], space: tuple[int, ...]) -> bool:
        """Whether a kernel that walks these rows meets each element of the operand once."""
        operand = self.graph.nodes[self.graph.nodes[i].args[0]].shape
        swept = row or (self.lane,)
        if self.lane not in swept and self.kernels.adds_across:  # along memory, apart from its rows
            axes = self.graph.axes(i)
            return operand == space and self.lane in axes and not {*row} & {*axes}
        if self.lane not in swept or operand[self.lane] == 1 != max(operand[a] for a in swept):
            return False
        full = [a for a, (n, whole) in enumerate(zip(operand, space, strict=True)) if n == whole]
        if not all(a in full for a in range(len(space)) if a not in swept):
            return False
        if all(operand[a] == 1 for a in swept):
            return bool(row)  # one value for each row
        axes = self.graph.axes(i)
        return all(a in full for a in swept) and (self.lane not in axes or set(swept) <= set(axes))
