"""A row that is also used in pieces, as those pieces side by side.

Queries are normalised over a head, and then its halves are rotated: the row has an axis of 128, and
what follows from it one of 64. With an axis for each a kernel would walk the row for every place of
a half. Here the row is what its pieces are together, on the axis of one of them: each step of the
row is one step for each piece, and a reduction joins these before it runs along the piece. Of a
head whose first half alone is rotated, by quarters, the other half is two of them.

A row of a few elements more than the piece, as a sequence beside the same one shifted by a token,
is that piece and single elements: a reduction runs along the piece, and is then joined with those.
Rows that nothing reduces are cut, too, where that is worth it.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

from tilewright.fusion.ir import REDUCTIONS, Access, Graph, Node
from tilewright.fusion.passes import collapse_dims, merge_common, remove_dead
from tilewright.fusion.plan import expand_moments
from tilewright.fusion.subgraphs import ancestors

MOST_PIECES = 8
"""Of a row, each of which a thread loads for itself."""
MOST_SINGLE = 4
"""Elements that a row has beside one piece, which is twice as long at least: a convolution of four
taps leaves three."""
MOST_GROWTH = 12
"""Times as many steps, at most: pieces of pieces multiply."""
_JOINS = {"sum": "add", "prod": "mul", "amax": "maximum", "amin": "minimum"}


def in_pieces(graph: Graph) -> Graph:
    """The graph with rows cut as later steps cut them, where no step would have all of its axes.

    Single elements beside a piece are kernels of their own: where these do not spare a walk, since
    other axes stand in the way, too, no row is cut so.
    """
    found = _cut(graph, MOST_SINGLE)
    return found if math.prod(found.space) <= found.largest_step else _cut(graph, 0)


def _cut(graph: Graph, most_single: int) -> Graph:
    most_steps = MOST_GROWTH * len(graph.nodes)
    while math.prod(graph.space) > graph.largest_step:
        pairs = itertools.permutations(range(len(graph.space)), 2)
        pair = next((p for p in pairs if _can_be_cut(graph, *p, most_single)), None)
        if pair is None:
            break
        ops = {graph.nodes[i].op for i in graph.reductions if pair[0] in graph.axes(i)}
        whole = graph if ops <= _JOINS.keys() else expand_moments(graph, corrected=True)
        found = _Cutting(whole, *pair).graph()
        if len(found.nodes) > most_steps:
            break
        graph = found
    return graph


def _can_be_cut(graph: Graph, row: int, piece: int, most_single: int) -> bool:
    """Whether a row is as long as a few pieces, or as one and so many single elements, no step
    varies along both, and what reduces the row can join pieces, too."""
    whole, size = graph.space[row], graph.space[piece]
    few = whole % size == 0 and 1 < whole // size <= MOST_PIECES
    if size < 2 or not (few or 0 < whole - size <= min(most_single, size // 2)):
        return False
    if graph.joined & {row, piece} or any(a.generator is not None for a in graph.inputs):
        return False
    over_row = [i for i in graph.reductions if row in graph.axes(i)]
    ops = (*_JOINS, "mean", "m2")
    return (
        (_is_worth_pieces if few else _is_worth_singles)(graph, row, piece, over_row)
        and all(graph.nodes[i].op in ops for i in over_row)
        and all(graph.nodes[i].dtype != "bool" for i in over_row)
        and all(n.shape[row] == 1 or n.shape[piece] == 1 for n in graph.nodes)
        and any(n.shape[piece] > 1 for n in graph.nodes)
        and _have_something_in_common(graph, row, piece)
    )


def _is_worth_pieces(graph: Graph, row: int, piece: int, over_row: list[int]) -> bool:
    """Whether the row is reduced, alone, or what varies along pieces moves half as much memory: a
    narrow slice would have the whole row accessed by vectors as narrow."""
    if over_row:
        return all(graph.axes(i) == (row,) for i in over_row)
    accesses = [*graph.memory, *(a for _, a in graph.outputs)]

    def moved_bytes(axis: int) -> int:
        return sum(a.itemsize * graph.space[axis] for a in accesses if a.strides[axis])

    return 2 * moved_bytes(piece) >= moved_bytes(row)


def _is_worth_singles(graph: Graph, row: int, piece: int, over_row: list[int]) -> bool:
    """Whether vectors run along another axis, or each row is reduced: where they run along the row,
    one shifted by an element is read one by one."""
    accesses = [*graph.memory, *(a for _, a in graph.outputs)]
    along = any(a.strides[b] == 1 for a in accesses for b in (row, piece))
    alone = bool(over_row) and all(graph.axes(i) == (row,) for i in over_row)
    return alone or not along


def _have_something_in_common(graph: Graph, row: int, piece: int) -> bool:
    """Whether what varies along one of them follows from what varies along the other, or lies in
    one tensor with it: else they are rows of two tensors, which no kernel should walk at once."""
    along = [{i for i, n in enumerate(graph.nodes) if n.shape[a] > 1} for a in (row, piece)]
    of_rows, of_pieces = along
    if not of_rows.isdisjoint(ancestors(graph, of_pieces)):
        return True
    if not of_pieces.isdisjoint(ancestors(graph, of_rows)):
        return True
    read = [
        {_tensor(graph, graph.nodes[i].attr) for i in on if graph.nodes[i].op == "load"}
        for on in along
    ]
    tensors = graph.tensors or range(len(graph.outputs))
    ends = [(i, t) for (i, _), t in zip(graph.outputs, tensors, strict=True)]
    written = [{t for i, t in ends if i in on} for on in along]
    return not set.isdisjoint(*read) or not set.isdisjoint(*written)


def _tensor(graph: Graph, place: int) -> int:
    """Which tensor the input in this place reads."""
    tensors = len(graph.inputs) - len(graph.again)
    return place if place < tensors else graph.again[place - tensors]


@dataclass(frozen=True)
class _Part:
    """Of a row: `size` elements from `first` on, `step` apart."""

    first: int
    size: int
    step: int = 1


class _Cutting:
    """The graph with axis `row` cut into parts, each along axis `piece` or a single element."""

    def __init__(self, graph: Graph, row: int, piece: int):
        self.old, self.row, self.piece = graph, row, piece
        self.size = graph.space[piece]
        self.parts = self._parts(graph.space[row])
        self.nodes: list[Node] = []
        tensors = range(len(graph.inputs) - len(graph.again))
        self.read: list[list[Access]] = [[] for _ in tensors]
        """By tensor: how it is read."""

    def graph(self) -> Graph:
        new: dict[int, list[int]] = {}
        """Of each old node the new one, or one for each part."""
        for i, n in enumerate(self.old.nodes):
            if n.op in REDUCTIONS and self.row in self.old.axes(i):
                new[i] = [self._reduced(n, new[n.args[0]])]
                continue
            cut = n.shape[self.row] > 1
            parts = self.parts if cut else [None]
            new[i] = [
                self._load(n, part) if n.op == "load"
                else self._add(n.moved(self._operands(n, new, k), self._shape(n.shape, part)))
                for k, part in enumerate(parts)
            ]  # fmt: skip
        found = self._with_inputs(self._with_outputs(new))
        return collapse_dims(remove_dead(merge_common(found.check()))).check()

    def _parts(self, whole: int) -> list[_Part]:
        rest = whole - self.size
        if rest % self.size == 0:
            count = whole // self.size
            if self._taken_in_turn(count):
                return [_Part(k, self.size, count) for k in range(count)]
            return [_Part(k * self.size, self.size) for k in range(count)]
        before = max(range(rest + 1), key=self._shared_reads)
        behind = range(before + self.size, whole)
        singles = [_Part(k, 1) for k in (*range(before), *behind)]
        return [*singles[:before], _Part(before, self.size), *singles[before:]]

    def _taken_in_turn(self, count: int) -> bool:
        """Whether later steps read every n-th element of the row, not a stretch of it."""
        every = [(_tensor(self.old, p), a.strides) for p, a in enumerate(self.old.inputs)]
        rows = {(t, strides[self.row] * count) for t, strides in every if strides[self.row]}
        return any((t, strides[self.piece]) in rows for t, strides in every)

    def _shared_reads(self, before: int) -> int:
        """How many reads of the row's piece, behind so many elements, other steps have, too."""
        every = {(_tensor(self.old, p), a.strides, a.offset) for p, a in enumerate(self.old.inputs)}
        part = _Part(before, self.size)
        reads = [(t, self._strides(s, part), o + before * s[self.row]) for t, s, o in every]
        return sum(r in every for r, (_, s, _) in zip(reads, every, strict=True) if s[self.row])

    def _operands(self, node: Node, new: dict[int, list[int]], k: int) -> tuple[int, ...]:
        return tuple(new[a][k % len(new[a])] for a in node.args)

    def _shape(self, shape: tuple[int, ...], part: _Part | None) -> tuple[int, ...]:
        sizes = {self.row: 1, self.piece: part.size} if part else {}
        return tuple(sizes.get(a, n) for a, n in enumerate(shape))

    def _strides(self, strides: tuple[int, ...], part: _Part) -> tuple[int, ...]:
        along = strides[self.row] * part.step if part.size > 1 else 0
        own = {self.row: 0, self.piece: along}
        return tuple(own.get(a, s) for a, s in enumerate(strides))

    def _part(self, access: Access, part: _Part) -> Access:
        """How a part of what a row's tensor holds is addressed."""
        before = part.first * access.strides[self.row]
        return replace(
            access,
            strides=self._strides(access.strides, part),
            align=math.gcd(access.align, before * access.itemsize),
            offset=access.offset + before,
        )

    def _add(self, node: Node) -> int:
        self.nodes.append(node)
        return len(self.nodes) - 1

    def _load(self, node: Node, part: _Part | None) -> int:
        """Of a part, or of all; the tensor and the access stand for the place of the input."""
        access = self.old.inputs[node.attr]
        access = self._part(access, part) if part else access
        tensor = _tensor(self.old, node.attr)
        if access not in self.read[tensor]:
            self.read[tensor].append(access)
        shape = self._shape(node.shape, part)
        return self._add(replace(node, shape=shape, attr=(tensor, access)))

    def _reduced(self, reduction: Node, parts: list[int]) -> int:
        """Pieces are joined and then reduced; single elements, of other shapes, join the result."""
        along = [i for i, part in zip(parts, self.parts, strict=True) if part.size > 1]
        found = self._add(reduction.moved((self._joined(reduction, along),), reduction.shape))
        single = [i for i in parts if i not in along]
        return self._joined(reduction, [found, *(self._of_one(reduction, i) for i in single)])

    def _of_one(self, reduction: Node, i: int) -> int:
        """What is left of a reduction for one element of the row."""
        given = self.nodes[i]
        if given.shape != reduction.shape:
            return self._add(reduction.moved((i,), reduction.shape))
        same = given.dtype == reduction.dtype
        return i if same else self._add(replace(reduction, op="cast", args=(i,), attr=None))

    def _joined(self, reduction: Node, values: list[int]) -> int:
        joined = values[0]
        step = replace(self.nodes[joined], op=_JOINS[reduction.op], attr=None)
        for other in values[1:]:
            joined = self._add(replace(step, args=(joined, other)))
        return joined

    def _with_outputs(self, new: dict[int, list[int]]) -> Graph:
        tensors = self.old.tensors or range(len(self.old.outputs))
        stores = [
            (i, self._part(access, self.parts[k]) if len(new[old]) > 1 else access, tensor)
            for (old, access), tensor in zip(self.old.outputs, tensors, strict=True)
            for k, i in enumerate(new[old])
        ]
        several = self.old.tensors or len(stores) > len(self.old.outputs)
        return replace(
            self.old,
            space=tuple(1 if a == self.row else n for a, n in enumerate(self.old.space)),
            outputs=tuple((i, access) for i, access, _ in stores),
            tensors=tuple(tensor for *_, tensor in stores) if several else (),
        )

    def _with_inputs(self, graph: Graph) -> Graph:
        """Each tensor as it is read first, and behind all of them those that are read again."""
        unread = [
            a.along(tuple(0 if k == self.row else s for k, s in enumerate(a.strides)))
            for a in self.old.inputs[: len(self.read)]
        ]
        inputs = [read[0] if read else a for read, a in zip(self.read, unread, strict=True)]
        places = {(t, a): t for t, a in enumerate(inputs)}
        again = [(t, a) for t, read in enumerate(self.read) for a in read[1:]]
        places |= {key: len(inputs) + k for k, key in enumerate(again)}
        nodes = (replace(n, attr=places[n.attr]) if n.op == "load" else n for n in self.nodes)
        return replace(
            graph,
            nodes=tuple(nodes),
            inputs=(*inputs, *(a for _, a in again)),
            again=tuple(t for t, _ in again),
        )
