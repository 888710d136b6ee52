"""A graph as it grows: steps along axes that are found to be one, then put in order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from tilewright.fusion.axes import AxisTable
from tilewright.fusion.ir import COMPARISONS, Access, Draw, Graph, Node
from tilewright.op import Workload
from tilewright.tensor_spec import DEFAULT_ALIGN, HALVES, TensorSpec


class Unsupported(Exception):
    """The graph holds a step that the fusion compiler cannot take; the message names it."""


Axes = tuple[int | None, ...]
MOST_STEPS = 2000
"""Each sum with its own transpose doubles the steps of what is transposed."""


@dataclass(frozen=True)
class Value:
    """A value of the trace: a step, and for each of its own dims the axis it runs along.

    None stands for a dim along which it does not vary.
    """

    node: int
    axes: Axes


@dataclass(frozen=True)
class _Step:
    """A node to be: `axes` are those along which it varies."""

    op: str
    args: tuple[int, ...]
    dtype: str
    axes: frozenset[int]
    attr: Any = None
    line: str | None = None


@dataclass(frozen=True)
class _Load:
    """A tensor of the workload, by its place, or a part of it from `offset` on, as a step reads
    it; or a mask, which a seed there decides."""

    place: int
    spec: TensorSpec
    axes: Axes
    draw: Draw | None = None
    offset: int = 0

    def part(self, dim: int, start: int, count: int, step: int, axis: int | None) -> _Load:
        """So many elements of a dim, which run along another axis."""
        spec, offset = _part_of(self.spec, dim, start, count, step)
        axes = (*self.axes[:dim], axis, *self.axes[dim + 1 :])
        return replace(self, spec=spec, axes=axes, offset=self.offset + offset)


@dataclass(frozen=True)
class Pieces:
    """Values one after another along a dim, which are stored as one tensor."""

    dim: int
    values: tuple[Value, ...]
    sizes: tuple[int, ...]

    def of(self, whole: TensorSpec) -> Iterator[tuple[Value, TensorSpec, int]]:
        """Each with the part of the tensor that it is, and where that begins."""
        start = 0
        for value, size in zip(self.values, self.sizes, strict=True):
            yield value, *_part_of(whole, self.dim, start, size)
            start += size


class GraphBuilder:
    """The steps that are known so far. What runs along the same dim of a result is one axis.

    Attributes:
        line: of the reference's source, in which steps stand that are added now.
        arithmetic: the dtype in which they are computed.
        scalar: that of the run-time scalars.
    """

    def __init__(self, w: Workload):
        self.w = w
        self.arithmetic = self.scalar = w.arithmetic
        self.steps: list[_Step] = []
        self.loads: list[_Load] = []
        self.axes = AxisTable()
        self.line: str | None = None

    def add(
        self,
        op: str,
        args: tuple[int, ...],
        dtype: str,
        axes: Iterable[int | None],
        attr: Any = None,
    ) -> int:
        self.steps.append(_Step(op, args, dtype, self.axes.roots(axes), attr, self.line))
        return len(self.steps) - 1

    def load(self, place: int, spec: TensorSpec, draw: Draw | None = None) -> Value:
        """An input; it does not vary along dims that it was expanded along, of stride 0."""
        sizes_and_strides = zip(spec.shape, spec.real_strides, strict=True)
        axes = tuple(
            self.axes.new(n, d - spec.rank) if n != 1 and stride else None
            for d, (n, stride) in enumerate(sizes_and_strides)
        )
        self.loads.append(_Load(place, spec, axes, draw))
        step = self.add("load", (), spec.dtype, axes, len(self.loads) - 1)
        return Value(self.upcast(step), axes)

    def upcast(self, i: int) -> int:
        step = self.steps[i]
        narrow = step.dtype in HALVES or (step.dtype, self.arithmetic) == ("f32", "f64")
        return self.add("cast", (i,), self.arithmetic, step.axes) if narrow else i

    def combine(self, name: str, values: list[Value]) -> Value:
        """One step of values that broadcast. A value that cannot run along the axes of those before
        it, as a tensor beside its transpose, is computed again along axes of its own."""
        axes, placed = values[0].axes, values[:1]
        for value in values[1:]:
            joined = self.joined(axes, value.axes)
            if joined is None:
                value = self.again(value)
                joined = self.joined(axes, value.axes)
            assert joined is not None
            axes = joined
            placed.append(value)
        dtype = "bool" if name in (*COMPARISONS, "isnan") else self.steps[placed[-1].node].dtype
        return Value(self.add(name, tuple(v.node for v in placed), dtype, axes), axes)

    def binary(self, name: str, a: Value, b: Value) -> Value:
        return self.combine(name, [a, b])

    def number(self, value: bool | float) -> Value:
        dtype = "bool" if isinstance(value, bool) else self.arithmetic
        return Value(self.add("const", (), dtype, (), value), ())

    def joined(self, a: Axes, b: Axes) -> Axes | None:
        """The axes of two values broadcast together; None if a value would have one twice."""
        rank = max(len(a), len(b))
        dims = list(zip(_of_rank(rank, a), _of_rank(rank, b), strict=True))
        axes = tuple(q if p is None else p for p, q in dims)
        pairs = [(p, q) for p, q in dims if p is not None and q is not None]
        apart = [[p for p in axes if p is not None], *(s.axes for s in self.steps)]
        if not self.axes.join(pairs, apart):
            return None
        self.axes.place(axes)
        return axes

    def again(self, value: Value) -> Value:
        """The value, computed once more along axes that no other step has."""
        fresh: dict[int, int] = {}

        def other(axis: int) -> int:
            root = self.axes.root(axis)
            if root not in fresh:
                fresh[root] = self.axes.new(self.axes.size(root), self.axes.home(root))
            return fresh[root]

        def elsewhere(load: _Load) -> _Load:
            return replace(load, axes=tuple(a if a is None else other(a) for a in load.axes))

        return self.remade(value, bool, other, elsewhere, "transposes of transposes")

    def part(self, value: Value, dim: int, start: int, count: int, step: int = 1) -> Value:
        """Elements `start`, `start` + `step`, ... of a dim of a value: what varies along it is
        computed of parts of the tensors."""
        axis = value.axes[dim]
        if axis is None:
            return value
        whole = self.axes.root(axis)
        fresh = None if count == 1 else self.axes.new(count, self.axes.home(whole))

        def other(axis: int) -> int | None:
            return fresh if self.axes.root(axis) == whole else axis

        def narrowed(load: _Load) -> _Load:
            if load.draw is not None:
                raise Unsupported("a part of what holds a random mask")
            at = [a is not None and self.axes.root(a) == whole for a in load.axes].index(True)
            return load.part(at, start, count, step, fresh)

        return self.remade(value, lambda axes: whole in axes, other, narrowed, "parts of parts")

    def remade(
        self,
        value: Value,
        changes: Callable[[frozenset[int]], bool],
        other: Callable[[int], int | None],
        elsewhere: Callable[[_Load], _Load],
        what: str,
    ) -> Value:
        """The value, computed once more from what is read elsewhere.

        Args:
            changes: whether what varies along these axes becomes another.
            other: the axis that takes the place of one.
        """
        behind = self.ancestors([value.node])
        if len(self.steps) + len(behind) > MOST_STEPS:
            raise Unsupported(f"{what} need more than {MOST_STEPS} steps")
        new: dict[int, int] = {}
        for i in behind:
            step = self.steps[i]
            attr = step.attr
            if not changes(self.axes.roots(step.axes)):
                new[i] = i
                continue
            if step.op == "load":
                self.loads.append(elsewhere(self.loads[attr]))
                attr = len(self.loads) - 1
            args = tuple(new[a] for a in step.args)
            new[i] = self.add(step.op, args, step.dtype, map(other, step.axes), attr)
        return Value(new[value.node], tuple(a if a is None else other(a) for a in value.axes))

    def ancestors(self, of: Iterable[int]) -> list[int]:
        """The steps that `of` need, themselves included, in order."""
        needed = set(of)
        for i in reversed(range(len(self.steps))):
            if i in needed:
                needed.update(self.steps[i].args)
        return sorted(needed)

    def finish(self, outputs: list[Value | Pieces], scalars: int) -> Graph:
        given = [
            (k, *part)
            for k, (out, spec) in enumerate(zip(outputs, self.w.outputs, strict=True))
            for part in (out.of(spec) if isinstance(out, Pieces) else [(out, spec, 0)])
        ]
        shared = self.share(self.ancestors(v.node for _, v, *_ in given))
        stores = [(*self.stored(v, spec, shared), spec, offset) for _, v, spec, offset in given]
        live = self.ancestors(out for out, *_ in stores)
        space = self.axes.ordered(a for i in live for a in self.steps[i].axes)
        accesses, again, slots = self.inputs(live, space)
        new = {i: k for k, i in enumerate(live)}
        nodes = []
        for step in map(self.steps.__getitem__, live):
            varies = self.axes.roots(step.axes)
            shape = tuple(self.axes.size(a) if a in varies else 1 for a in space)
            attr = slots[step.attr] if step.op == "load" else step.attr
            args = tuple(new[a] for a in step.args)
            nodes.append(Node(step.op, args, step.dtype, shape, attr, step.line))
        written = tuple(
            (new[out], replace(self.access(spec, axes, space), offset=offset))
            for out, axes, spec, offset in stores
        )
        tensors = tuple(k for k, *_ in given) if len(given) > len(outputs) else ()
        sizes = tuple(map(self.axes.size, space))
        numbers = (self.scalar,) * scalars
        found = Graph(tuple(nodes), sizes, tuple(accesses), written, numbers, again, tensors)
        return found.check()

    def share(self, live: list[int]) -> list[int]:
        """Make axes one that no step runs along both of, first those at one place: what reads
        different tensors may then be one sweep. Returns those that are left."""
        along = [self.steps[i].axes for i in live]
        every = list(itertools.chain(*along))
        for anywhere in (False, True):
            for a, b in itertools.combinations(self.axes.ordered(every), 2):
                near = anywhere or self.axes.home(a) == self.axes.home(b)
                if near and self.axes.size(a) == self.axes.size(b):
                    self.axes.join([(a, b)], along)
        return self.axes.ordered(every)

    def stored(self, value: Value, spec: TensorSpec, shared: list[int]) -> tuple[int, Axes]:
        """The output's last steps: to its dtype, and along dims on which it does not vary, for
        which it takes the axes of others."""
        out = value.node
        axes = [a if a is None else self.axes.root(a) for a in value.axes or (None,) * spec.rank]
        for d, (n, stride) in enumerate(zip(spec.shape, spec.real_strides, strict=True)):
            if axes[d] is None and n != 1 and stride:  # PyTorch too expands what holds one value
                free = [a for a in shared if self.axes.size(a) == n and a not in axes]
                free.sort(key=lambda a: self.axes.home(a) != d - spec.rank, reverse=True)
                if not free:
                    free = [self.axes.new(n, d - spec.rank)]
                    shared += free
                axes[d] = free[-1]
        if self.steps[out].dtype != spec.dtype:
            out = self.add("cast", (out,), spec.dtype, self.steps[out].axes)
        if self.axes.roots(axes) != self.axes.roots(self.steps[out].axes):
            out = self.add("broadcast", (out,), spec.dtype, axes)
        return out, tuple(axes)

    def inputs(
        self, live: list[int], space: list[int]
    ) -> tuple[list[Access], tuple[int, ...], dict[int, int]]:
        """How each tensor is read, then how some are read besides, of which tensors that is, and
        the place in the list of each of `self.loads`."""
        accesses = [Access((0,) * len(space), s.dtype, s.align) for s in self.w.tensors.values()]
        if self.w.seed is not None:
            accesses[self.w.seed] = Access((0,) * len(space), "bool", DEFAULT_ALIGN, Draw(0, 0))
        again: list[int] = []
        known: dict[tuple[int, Access], int] = {}
        slots: dict[int, int] = {}
        for number in (self.steps[i].attr for i in live if self.steps[i].op == "load"):
            load = self.loads[number]
            plain = self.access(load.spec, load.axes, space)
            access = replace(plain, draw=load.draw, offset=load.offset)
            if (load.place, access) not in known:
                slot = load.place
                if slot in known.values():
                    slot = len(accesses)
                    again.append(load.place)
                accesses[slot : slot + 1] = [access]
                known[load.place, access] = slot
            slots[number] = known[load.place, access]
        return accesses, tuple(again), slots

    def access(self, spec: TensorSpec, axes: Axes, space: list[int]) -> Access:
        strides = dict.fromkeys(space, 0)
        for axis, stride, n in zip(axes, spec.real_strides, spec.shape, strict=True):
            if axis is not None and n != 1 and stride:
                strides[self.axes.root(axis)] = stride
        return Access(tuple(strides.values()), spec.dtype, spec.align)


def _part_of(
    spec: TensorSpec, dim: int, start: int, count: int, step: int = 1
) -> tuple[TensorSpec, int]:
    """So many elements of a dim of a tensor, and the offset of the first."""
    shape, strides = list(spec.shape), list(spec.real_strides)
    offset = start * strides[dim]
    shape[dim], strides[dim] = count, strides[dim] * step
    align = math.gcd(spec.align, offset * spec.itemsize)
    return TensorSpec(spec.dtype, tuple(shape), tuple(strides), align), offset


def _of_rank(rank: int, axes: Axes) -> Axes:
    return (None,) * (rank - len(axes)) + axes
