"""A graph as it grows: steps along axes that are found to be one, then put in order."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
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
    """A tensor of the workload, by its place, as a step reads it; or a mask, which a seed there
    decides."""

    place: int
    spec: TensorSpec
    axes: Axes
    draw: Draw | None = None


class GraphBuilder:
    """The steps that are known so far. What runs along the same dim of a result is one axis.

    Attributes:
        line: of the reference's source, in which steps stand that are added now.
    """

    def __init__(self, w: Workload):
        self.w = w
        self.arithmetic = w.arithmetic
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
        behind = self.ancestors([value.node])
        if len(self.steps) + len(behind) > MOST_STEPS:
            raise Unsupported(f"transposes of transposes need more than {MOST_STEPS} steps")
        fresh: dict[int, int] = {}

        def other(axis: int) -> int:
            root = self.axes.root(axis)
            if root not in fresh:
                fresh[root] = self.axes.new(self.axes.size(root), self.axes.home(root))
            return fresh[root]

        new: dict[int, int] = {}
        for i in behind:
            step = self.steps[i]
            attr = step.attr
            if not step.axes:
                new[i] = i
                continue
            if step.op == "load":
                load = self.loads[attr]
                along = tuple(a if a is None else other(a) for a in load.axes)
                self.loads.append(replace(load, axes=along))
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

    def finish(self, outputs: list[Value], scalars: int) -> Graph:
        shared = self.share(self.ancestors(v.node for v in outputs))
        given = zip(outputs, self.w.outputs, strict=True)
        stores = [(*self.stored(value, spec, shared), spec) for value, spec in given]
        live = self.ancestors(out for out, _, _ in stores)
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
        written = tuple((new[out], self.access(spec, axes, space)) for out, axes, spec in stores)
        sizes = tuple(map(self.axes.size, space))
        numbers = (self.arithmetic,) * scalars
        return Graph(tuple(nodes), sizes, tuple(accesses), written, numbers, again).check()

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
            access = replace(self.access(load.spec, load.axes, space), draw=load.draw)
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


def _of_rank(rank: int, axes: Axes) -> Axes:
    return (None,) * (rank - len(axes)) + axes
