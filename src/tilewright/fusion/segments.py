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
from collections.abc import Iterable, Sequence
from dataclasses import replace

from tilewright.fusion.ir import REDUCTIONS, Access, Graph, Node
from tilewright.fusion.plan import expand_moments
from tilewright.fusion.program import Kernels, Program, Segment, filled, walking
from tilewright.fusion.remembered import remembered
from tilewright.fusion.subgraphs import (
    Known,
    Store,
    ancestor_space,
    ancestors,
    compact,
    largest,
    subgraph,
)
from tilewright.fusion.walks import Walks
from tilewright.fusion.ways import Hopeless, Met, Row, Way
from tilewright.tensor_spec import HALVES, TensorSpec, contiguous_strides

TEMPORARY_ALIGN = 16
LITTLE = 16
"""Times fewer elements than a kernel walks: sums over them are no pass that counts."""
MOST_TRIED = 1000
"""Programs, of which few are ever made: they are given up with the pass that is too many."""


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
    spaces = {ancestor_space(graph, i) for i, _ in graph.outputs}
    lane = main_axis(graph, range(len(graph.nodes)))
    simple = not graph.reductions or (graph.reduction_sets == (graph.reduced,) and not split_rows)
    simple = simple and math.prod(graph.space) <= graph.largest_step
    if len(spaces) == 1 and simple and (lane in graph.reduced or not graph.reductions):
        inputs, outputs = len(graph.inputs), len(graph.outputs)
        buffers = tuple(range(inputs + outputs))
        whole = Segment(graph, buffers[:inputs], buffers[inputs:])
        return Program((whole,), inputs, outputs, ())
    in_sums = _in_sums(graph, kernels)
    if not split_rows:
        return _Cutter(in_sums, kernels, _rows_of_fewest_passes(graph, kernels)).run(split_rows)
    program = _Cutter(in_sums, kernels).run(split_rows)
    other = cut(graph, splits, kernels=kernels)
    return other if program.large() > other.large() + kernels.extra else program


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
    for _ in range(MOST_TRIED):
        cutter = _Cutter(in_sums, kernels, rows, most, met)
        with contextlib.suppress(Hopeless):
            program = cutter.run(split_rows=False)
            if program.large() <= fewest:
                best = tuple(k for k, _ in cutter.chosen)
                fewest, most = program.large(), len(walking(program.segments))
        chosen = cutter.chosen
        while chosen and chosen[-1][0] + 1 == chosen[-1][1]:
            chosen.pop()
        if not chosen:
            break
        rows = [k for k, _ in chosen]
        rows[-1] += 1
    return best


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


_SOMEWHERE = Known(0, Access((), "f32", 1))
"""A value that has no buffer yet."""


class _Cutter:
    """Kernels, one after another, each of which walks the rows that get most done.

    Args:
        rows: which row each kernel walks instead: of those that get anything done, most first.
        most: passes that are too many.
        met: what other cutters of the graph have tried.
    """

    def __init__(
        self,
        graph: Graph,
        kernels: Kernels,
        rows: Sequence[int] = (),
        most: float = math.inf,
        met: Met | None = None,
    ):
        self.graph, self.kernels = graph, kernels
        self.rows, self.most = rows, most
        self.met = met or Met()
        self.chosen: list[tuple[int, int]] = []
        """Which row each kernel walks, and of how many."""
        self.lane = -1
        self.later: list[int] = []
        """Outputs of other spaces that are still to come."""
        self.walked: set[tuple[int, ...]] = set()
        """Rows of kernels that leave a partial for each: shorter ones than those of later
        results."""
        self.segments: list[Segment] = []
        self.temporaries: list[TensorSpec] = []
        self.awaited: dict[int, str] = {}
        """By buffer: why what reads it is a later kernel."""

    def run(self, split_rows: bool) -> Program:
        by_space: dict[tuple[int, ...], list[int]] = {}
        for k, (i, _) in enumerate(self.graph.outputs):
            by_space.setdefault(ancestor_space(self.graph, i), []).append(k)
        known: dict[int, Known] = {}
        self.later = list(range(len(self.graph.outputs)))
        for space in sorted(by_space, key=sum):  # what is within another comes first
            self.later = [k for k in self.later if k not in by_space[space]]
            known = self.group(by_space[space], space, known, split_rows)
        sizes = len(self.graph.inputs), len(self.graph.outputs)
        return filled(Program(tuple(self.segments), *sizes, tuple(self.temporaries)))

    def group(
        self,
        remaining: list[int],
        space: tuple[int, ...],
        known: dict[int, Known],
        split_rows: bool,
    ) -> dict[int, Known]:
        """Kernels for outputs that depend on values of one iteration space; returns what is known
        then."""
        last = self.graph.outputs[remaining[0]][0]
        reason = self.at(last, "it reads other dims than the kernels before")
        beside = self.beside(remaining, space)
        while remaining:
            needed = self.needed(remaining, known, beside)
            self.lane = main_axis(self.graph, needed)
            _, _, row, now, added = self.best_row(remaining, needed, known, split_rows)
            if row and self.kernels.row_partials:
                self.walked.add(row)
            columns = [i for i in added if self.completes(i, row)]
            now_or_then = now | self.following(columns, added, remaining, known)
            outputs = [k for k in remaining if self.graph.outputs[k][0] in now_or_then]
            remaining = [k for k in remaining if k not in outputs]
            if columns:
                wanted = self.wanted(remaining, {**known, **dict.fromkeys(added, _SOMEWHERE)})
                added = [i for i in added if i in wanted]
            sums = {i: self.temporary(i) for i in added}
            behind = self.wanted(remaining, {**known, **sums})
            done = [i for i in behind if self.crosses(i, now, known)]
            behind = self.wanted(remaining, {**known, **sums, **dict.fromkeys(done, _SOMEWHERE)})
            crossing = {i: self.temporary(i) for i in done if i in behind}
            by_row = bool(row) and self.kernels.row_partials
            partials = self.partials_of_rows(sums, row) if by_row else _kept(sums)
            self.add([*self.stored(outputs), *_kept(crossing), *partials], known, row, reason)
            across = (i for i in crossing if self.lane not in self.graph.axes(i))
            self.awaited |= {crossing[i].buffer: self.needs(i) for i in across}
            divided = self.joined_by_row(sums, row) if by_row else self.divide(sums)
            known = {**known, **crossing, **divided}
            remaining, known = self.small_sums(remaining, known, added)
            remaining, known = self.combine(remaining, known, added)
            if self.kernels.joins_apart:
                remaining, known = self.join_apart(remaining, known)
            later = [i for i in self.needed(remaining, known) if i not in known]
            left = [i for i in later if self.graph.nodes[i].op in REDUCTIONS]
            if left:
                reason = self.at(left[0], "it reduces other dims than the kernels before")
            elif later:
                reason = self.at(later[0], "it has other dims than the rows before")
        return known

    def beside(self, outputs: Sequence[int], space: tuple[int, ...]) -> list[int]:
        """The reductions of the same space that outputs of others need, of what these read."""
        nodes = self.graph.nodes

        def read(i: int) -> set[int]:
            return {a for a in ancestors(self.graph, [i], {}) if nodes[a].op == "load"}

        here = set[int]().union(*(read(self.graph.outputs[k][0]) for k in outputs))
        return [
            i
            for i in self.needed(self.later, {})
            if nodes[i].op in REDUCTIONS and read(i) <= here
            if largest([space, ancestor_space(self.graph, i)]) == space
        ]

    # ---- which rows ----

    def best_row(
        self,
        outputs: Sequence[int],
        needed: Sequence[int],
        known: dict[int, Known],
        split_rows: bool,
    ) -> Row:
        """Of the rows that complete most, unless `rows` says otherwise."""
        rows = tuple(k for k, _ in self.chosen)
        spaces = [math.prod(self.segments[k].graph.space) for k in walking(self.segments)]
        space = max(spaces, default=0)
        way = Way(rows, len(spaces), space, spaces.count(space))
        values = frozenset(known).intersection(self.wanted(outputs, known))
        left = (tuple(outputs), values, frozenset(self.walked))
        if len(spaces) + 1 >= self.most or self.met.costs_no_more(left, way):
            raise Hopeless
        if left not in self.met.rows:
            self.met.rows[left] = self.ranked(outputs, needed, known, split_rows)
        found = self.met.rows[left]
        at = self.rows[len(rows)] if len(rows) < len(self.rows) else 0
        self.chosen.append((at, max(sum(row.useful for row in found), 1)))
        return found[at]

    def ranked(
        self,
        outputs: Sequence[int],
        needed: Sequence[int],
        known: dict[int, Known],
        split_rows: bool,
    ) -> list[Row]:
        """The rows that the next kernel may walk; those that get most done come first."""
        sets = {self.graph.axes(i) for i in needed if self.graph.nodes[i].op in REDUCTIONS}
        sets |= self.walked if self.kernels.row_partials else {(self.lane,)}
        if self.kernels.set_rows:
            most, sizes = self.kernels.set_rows, self.graph.space
            few = [b for b in sets if math.prod(sizes[a] for a in b) <= most]
            along = [a for a in sets if self.lane in a]
            sets |= {tuple(sorted((*a, *b))) for a in along for b in few if not {*a} & {*b}}
        space = largest(self.graph.nodes[i].shape for i in needed)
        sets = {row for row in sets if any(space[a] > 1 for a in row)}  # not what is known by now
        found = []
        for row in (*sets, ()):
            now, added = self.walks.reach(row, needed, known)
            done = [i for i in now if self.graph.nodes[i].op in REDUCTIONS and i not in known]
            written = self.completed(outputs, now, added, known)
            contiguous = not row or self.lane in row or self.kernels.across
            by_row = bool(row) and self.kernels.row_partials
            whole = len(done) + by_row * len(added)
            suits = self.kernels.suits(space, row, self.lane) if split_rows else whole
            progress = len(done) + len(added) + written
            useful, reduces = progress > 0 <= suits, bool(done or by_row or not row)
            merit = (reduces, progress, contiguous, suits)
            found.append(Row(useful, merit, row, now, added))
        return sorted(found, key=lambda f: f[:3], reverse=True)

    def completed(
        self,
        outputs: Sequence[int],
        now: set[int],
        added: Sequence[int],
        known: dict[int, Known],
    ) -> int:
        """How many outputs are written then, by this kernel or by the one that combines
        partials."""
        shapes = {self.graph.nodes[i].shape for i in added}
        ends = {**known, **dict.fromkeys(added, _SOMEWHERE)}
        count = 0
        for k in outputs:
            behind = [i for i in self.needed([k], ends) if i not in now and i not in added]
            fits = any(
                all(a in (1, b) for i in behind for a, b in _pairs(self.graph, i, shape))
                for shape in shapes
            )
            reduces = any(self.graph.nodes[i].op in REDUCTIONS for i in behind)
            count += not behind and self.graph.outputs[k][0] in now
            count += self.graph.outputs[k][0] not in now and fits and not reduces
        return count

    @property
    def walks(self) -> Walks:
        return Walks(self.graph, self.kernels, self.lane)

    # ---- kernels ----

    def add(
        self,
        stores: list[Store],
        known: dict[int, Known],
        row: tuple[int, ...] | None,
        reason: str,
    ) -> None:
        graph, reads = subgraph(self.graph, stores, known)
        writes = tuple(buffer for _, buffer, _ in stores)
        if row is not None:
            reason = next((self.awaited[b] for b in reads if b in self.awaited), reason)
        reason = reason if self.segments else ""
        lane = self.lane if row is not None else None
        nested = self.kernels.set_rows > 0 and row is not None
        self.segments.append(
            compact(Segment(graph, reads, writes, row, lane, nested, reason=reason))
        )

    def needs(self, i: int) -> str:
        """Why what needs reduction `i` is a later kernel, if no row of this one holds it."""
        axes = set(self.graph.axes(i))
        along = self.lane in axes and not any(set(row) < axes for row in self.walked)
        rows = "a whole row" if along else "all rows"
        return self.at(self.asks(i), f"a step needs a result of {rows}")

    def asks(self, i: int) -> int:
        """The first step that takes a result of reduction `i` to other dims than it has."""
        behind = {i}
        for j, n in enumerate(self.graph.nodes):
            if behind.intersection(n.args):
                if n.shape != self.graph.nodes[i].shape:
                    return j
                behind.add(j)
        return i

    def at(self, i: int, reason: str) -> str:
        line = self.graph.nodes[i].line
        return f"{reason} ({line})" if line else reason

    def divide(self, sums: dict[int, Known]) -> dict[int, Known]:
        """Room for the partials that the last kernel leaves of these results."""
        if not sums:
            return {}
        segment = self.segments[-1]
        counts = {segment.writes[k]: n for k, n in self.kernels.divided(segment).items()}
        self.segments[-1] = replace(segment, partials=max(counts.values()))
        return {i: self.in_partials(k, counts[k.buffer]) for i, k in sums.items()}

    def in_partials(self, known: Known, partials: int) -> Known:
        """The value as so many partials, with room for them."""
        at = known.buffer - len(self.graph.inputs) - len(self.graph.outputs)
        whole = self.temporaries[at]
        self.temporaries[at] = replace(whole, shape=(partials * whole.numel,))
        return replace(known, partials=partials)

    # ---- rows that leave a partial each ----

    def completes(self, i: int, row: tuple[int, ...]) -> bool:
        """Whether the kernel itself completes reduction `i`: over all rows, not along them."""
        return bool(row) and self.kernels.row_partials and not set(row) < set(self.graph.axes(i))

    def following(
        self,
        columns: list[int],
        added: Sequence[int],
        remaining: Sequence[int],
        known: dict[int, Known],
    ) -> set[int]:
        """The steps that follow from what the kernel completes of all rows, which it does, too."""
        if not columns:
            return set()
        ends = {**known, **dict.fromkeys(added, _SOMEWHERE)}
        return self.epilogue(self.needed(remaining, ends), ends, columns)

    def partials_of_rows(self, sums: dict[int, Known], row: tuple[int, ...]) -> list[Store]:
        """The reductions over one row each, in their places among the partials."""
        stores: list[Store] = []
        for i, known in sums.items():
            if self.completes(i, row):
                stores.append((i, known.buffer, known.access))
                continue
            n = self.graph.nodes[i]
            operand = self.graph.nodes[n.args[0]].shape
            shape = tuple(1 if a in row else size for a, size in enumerate(operand))
            strides, step = list(known.access.strides), math.prod(n.shape)
            for a in reversed(self.graph.axes(i)):
                if a not in row:
                    strides[a], step = step, step * shape[a]
            access = known.access.along(tuple(strides))
            stores.append((len(self.graph.nodes), known.buffer, access))
            self.graph = replace(self.graph, nodes=(*self.graph.nodes, replace(n, shape=shape)))
        return stores

    def joined_by_row(self, sums: dict[int, Known], row: tuple[int, ...]) -> dict[int, Known]:
        """Those results in a partial for each row, or in fewer where rows are many."""
        found = {}
        for i, known in sums.items():
            across = [self.graph.space[a] for a in self.graph.axes(i) if a not in row]
            found[i] = self.in_partials(known, 1 if self.completes(i, row) else math.prod(across))
        numbers = [i for i in sums if math.prod(self.graph.nodes[i].shape) == 1]
        many = [i for i in numbers if found[i].partials > self.kernels.most_joined]
        return {**found, **self.fewer(many, found)} if many else found

    def fewer(self, sums: list[int], partials: dict[int, Known]) -> dict[int, Known]:
        """A kernel whose blocks each join a share of the partials of these numbers."""
        count = partials[sums[0]].partials
        shares = {i: self.temporary(i) for i in sums}
        nodes: list[Node] = []
        for n in (self.graph.nodes[i] for i in sums):
            nodes.append(Node("load", (), n.dtype, (count,), len(nodes) // 2))
            nodes.append(n.moved((len(nodes) - 1,), (1,)))
        inputs = tuple(partials[i].access.along((1,)) for i in sums)
        ends = enumerate(shares.values())
        outputs = tuple((2 * k + 1, known.access.along((0,))) for k, known in ends)
        graph = Graph(tuple(nodes), (count,), inputs, outputs, self.graph.scalars).check()
        reads, writes = (tuple(known[i].buffer for i in sums) for known in (partials, shares))
        reason = self.at(sums[0], "blocks share the partials of a result")
        self.segments.append(Segment(graph, reads, writes, (), 0, reason=reason))
        return self.divide(shares)

    def combine(
        self, remaining: list[int], known: dict[int, Known], added: list[int]
    ) -> tuple[list[int], dict[int, Known]]:
        """Kernels that put partials together, one for all results of the same dims; returns the
        outputs that are still to be computed, and what is known then."""
        by_shape: dict[tuple[int, ...], list[int]] = {}
        for i in added:
            by_shape.setdefault(self.graph.nodes[i].shape, []).append(i)
        for sums in by_shape.values():
            here = self.epilogue(self.needed(remaining, known), known, sums)
            outputs = [k for k in remaining if self.graph.outputs[k][0] in here]
            remaining = [k for k in remaining if k not in outputs]
            needed = self.wanted(remaining, known)
            whole = {i: replace(known[i], partials=0) for i in sums if known[i].partials == 1}
            joined = {i: self.temporary(i) for i in sums if i in needed and i not in whole}
            single = len(whole) == len(sums)
            joins = self.at(sums[0], "the partials of a result are put together")
            reason = self.needs(sums[0]) if single else joins
            if single and (own := self.places_in(outputs, whole)):
                self.store_at_once({whole[i].buffer: known for i, known in own.items()})
                whole |= own
            elif stores := [*self.stored(outputs), *_kept(joined)]:
                self.add(stores, known, None, reason)
            whole |= joined
            self.awaited |= {k.buffer: self.needs(i) for i, k in whole.items()}
            known = {**known, **whole}
        return remaining, known

    def small_sums(
        self, remaining: list[int], known: dict[int, Known], added: Sequence[int]
    ) -> tuple[list[int], dict[int, Known]]:
        """Kernels for sums over little, which outputs need beside those that were just added up: so
        that one kernel puts partials together and computes what follows from both."""
        nodes, most = self.graph.nodes, math.prod(self.segments[-1].graph.space) // LITTLE
        outputs = [k for k in remaining if not {*added}.isdisjoint(self.needed([k], known))]
        at_hand, little = set[int](), dict[tuple[int, ...], list[int]]()
        for i in self.needed(outputs, known):
            if i in added or not (i in known or at_hand.issuperset(nodes[i].args)):
                continue
            if i in known or nodes[i].op not in REDUCTIONS:
                at_hand.add(i)
            elif math.prod(space := ancestor_space(self.graph, i)) <= most:
                little.setdefault(space, []).append(i)
        for sums in little.values():
            needed = ancestors(self.graph, sums, known)
            self.lane = main_axis(self.graph, needed)
            found = [i for i in self.walks.reach((), needed, known)[1] if i in sums]
            if found:
                here = {i: self.temporary(i) for i in found}
                reason = self.at(found[0], "it reads other dims than the kernels before")
                self.add(_kept(here), known, (), reason)
                remaining, known = self.combine(remaining, {**known, **self.divide(here)}, found)
        return remaining, known

    def places_in(self, outputs: list[int], whole: dict[int, Known]) -> dict[int, Known]:
        """Those of these sums that are outputs, as they lie there, or that an output rounds; none
        where some output follows from sums, or is one in another order: a kernel of its own stores
        them."""
        found = {}
        for i, buffer, access in self.stored(outputs):
            i = self.rounded_sum(i)
            here = whole.get(i)
            if i in found or here is None or not self.kernels.stores_sums:
                return {}
            shape = self.graph.nodes[i].shape
            lie = zip(shape, here.access.strides, access.strides, strict=True)
            if access.align < here.access.align or any(n > 1 and a != b for n, a, b in lie):
                return {}
            found[i] = replace(here, buffer=buffer, access=access)
        return found

    def rounded_sum(self, i: int) -> int:
        """What an output is a rounding of, if nothing else asks for that and kernels store it so;
        else the output itself."""
        n = self.graph.nodes[i]
        if n.op != "cast" or not self.kernels.rounds_sums or n.dtype not in HALVES:
            return i
        (j,) = n.args
        alone = self.graph.users(j) == [i] and j not in [k for k, _ in self.graph.outputs]
        return j if alone and self.graph.nodes[j].op in REDUCTIONS else i

    def store_at_once(self, places: dict[int, Known]) -> None:
        """Let kernels write these outputs instead of the temporaries that they have filled."""
        for k, s in enumerate(self.segments):
            outputs = list(s.graph.outputs)
            for n, b in enumerate(s.writes):
                if b in places:
                    (i, access), own = outputs[n], places[b].access
                    outputs[n] = i, replace(access, dtype=own.dtype, align=own.align)
            writes = tuple(places[b].buffer if b in places else b for b in s.writes)
            graph = replace(s.graph, outputs=tuple(outputs))
            self.segments[k] = replace(s, graph=graph, writes=writes)

    def join_apart(
        self, remaining: list[int], known: dict[int, Known]
    ) -> tuple[list[int], dict[int, Known]]:
        """A kernel for what reduces nothing but results of earlier ones; returns the outputs that
        are still to be computed, and what is known then."""
        nodes, here = self.graph.nodes, set[int]()
        needed = self.needed(remaining, known)
        for i in needed:
            if i in known or (nodes[i].op != "load" and here.issuperset(nodes[i].args)):
                here.add(i)
        new = [i for i in needed if i in here and i not in known and nodes[i].op != "const"]
        sums = [i for i in new if nodes[i].op in REDUCTIONS]
        if not sums:
            return remaining, known
        outputs = [k for k in remaining if self.graph.outputs[k][0] in new]
        used = {a for i in self.wanted(remaining, known) if i not in here for a in nodes[i].args}
        joined = {i: self.temporary(i) for i in new if i in used}
        reason = self.at(sums[0], "the partials of a result are put together")
        self.add([*self.stored(outputs), *_kept(joined)], known, None, reason)
        self.awaited |= dict.fromkeys((k.buffer for k in joined.values()), self.needs(sums[0]))
        return [k for k in remaining if k not in outputs], {**known, **joined}

    def epilogue(
        self, needed: Sequence[int], known: dict[int, Known], sums: Sequence[int]
    ) -> set[int]:
        """Steps that follow from these results and from parameters of their shape alone."""
        shape = self.graph.nodes[sums[0]].shape
        here: set[int] = set()
        follows: set[int] = set()
        for i in needed:
            n = self.graph.nodes[i]
            within = all(a in (1, b) for a, b in zip(n.shape, shape, strict=True))
            if i in known:
                can = known[i].partials == 0 or i in sums
            else:
                can = n.op not in REDUCTIONS and all(a in here for a in n.args)
            if within and can:
                here.add(i)
                if i in sums or (i not in known and any(a in follows for a in n.args)):
                    follows.add(i)
        return follows

    # ---- values ----

    def needed(
        self, outputs: Iterable[int], known: dict[int, Known], values: Iterable[int] = ()
    ) -> list[int]:
        """The steps behind outputs, and behind other values."""
        ends = (self.graph.outputs[k][0] for k in outputs)
        return ancestors(self.graph, (*ends, *(i for i in values if i not in known)), known)

    def wanted(self, outputs: Sequence[int], known: dict[int, Known]) -> list[int]:
        """The steps behind outputs and those of other spaces that are still to come."""
        return self.needed((*outputs, *self.later), known)

    def crosses(self, i: int, now: set[int], known: dict[int, Known]) -> bool:
        return self.graph.nodes[i].op in REDUCTIONS and i in now and i not in known

    def stored(self, outputs: list[int]) -> list[Store]:
        given = [self.graph.outputs[k] for k in outputs]
        first = len(self.graph.inputs)
        return [(i, first + k, a) for k, (i, a) in zip(outputs, given, strict=True)]

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


def _kept(known: dict[int, Known]) -> list[Store]:
    return [(i, k.buffer, k.access) for i, k in known.items()]


def _pairs(graph: Graph, i: int, shape: tuple[int, ...]) -> Iterable[tuple[int, int]]:
    return zip(graph.nodes[i].shape, shape, strict=True)
