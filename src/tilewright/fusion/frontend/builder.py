"""A graph as it grows: steps along axes that are found to be one, or several."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from tilewright.fusion.frontend.axes import Dim, Dims, Factor, Value, constant, grouped, refined
from tilewright.fusion.frontend.pieces import Pieces, boxed, view_of
from tilewright.fusion.frontend.steps import Load, Steps, TooManySteps, Unsupported
from tilewright.fusion.ir import COMPARISONS
from tilewright.op import Workload

MOST_STEPS = 2000
"""Each sum with its own transpose doubles the steps of what is transposed, until it is stored."""


class GraphBuilder(Steps):
    """Values of steps that broadcast, of views of others, and of slices.

    Attributes:
        copies: of each step those that compute it anew.
        origins: of each of those the step.
        taken: the steps that were computed anew with what is behind them.
        kept_at: how many steps there were when something was stored last.
    """

    def __init__(self, w: Workload):
        super().__init__(w)
        self.copies: dict[int, list[int]] = {}
        self.origins: dict[int, int] = {}
        self.taken: set[int] = set()
        self.kept_at = 0

    def keep(self, held: Value | Pieces, reason: str) -> Value:
        self.kept_at = len(self.steps)
        return super().keep(held, reason)

    def combine(self, name: str, values: list[Value]) -> Value:
        """One step of values that broadcast. A value that cannot run along the axes of those before
        it, as a tensor beside its transpose, is computed again along axes of its own."""
        if name in _LOGIC and all(self.steps[v.node].dtype == "bool" for v in values):
            return _LOGIC[name](self, *values)
        dims, placed = values[0].dims, values[:1]
        for value in values[1:]:
            joined = self.joined(dims, value.dims)
            if joined is None:
                value = self.again(value)
                joined = self.joined(dims, value.dims)
            if joined is None:
                raise Unsupported(f"{name} of dims that views merged of sizes that do not fit")
            dims = joined
            placed.append(value)
        dtype = "bool" if name in (*COMPARISONS, "isnan") else self.steps[placed[-1].node].dtype
        along = self.axes.along(dims)
        return Value(self.add(name, tuple(v.node for v in placed), dtype, along), dims)

    def binary(self, name: str, a: Value, b: Value) -> Value:
        return self.combine(name, [a, b])

    def number(self, value: bool | float) -> Value:
        dtype = "bool" if isinstance(value, bool) else self.arithmetic
        return Value(self.add("const", (), dtype, (), value), ())

    def joined(self, a: Dims, b: Dims) -> Dims | None:
        """The dims of two values broadcast together; None if a value would have an axis twice, or
        if merged dims do not fit each other."""
        rank = max(len(a), len(b))
        factors: list[list[tuple[Factor, Factor]]] = []
        for both in zip(_of_rank(rank, a), _of_rank(rank, b), strict=True):
            sides = [self.axes.factors(dim) for dim in both]
            sizes = refined(*([f.size for f in dim] for dim in sides if dim)) if any(sides) else ()
            if sizes is None:
                return None
            for k, dim in enumerate(sides):
                known = len(self.axes)
                sides[k] = self.axes.cut(dim, sizes) if dim else _constant(sizes)
                if len(self.axes) > known:  # other dims may run along what was cut
                    return self.joined(a, b)
            factors.append([*zip(*sides, strict=True)])
        joined = tuple(tuple(g if f.axis is None else f for f, g in dim) for dim in factors)
        pairs = [
            (f.axis, g.axis)
            for dim in factors
            for f, g in dim
            if f.axis is not None and g.axis is not None
        ]
        axes = [f.axis for dim in joined for f in dim if f.axis is not None]
        if not self.axes.join(pairs, axes, self.runs):
            return None
        self.axes.place(joined)
        return joined

    def again(self, value: Value) -> Value:
        """The value, computed once more along axes that no other step has: of a dim along one, if
        all that was made of a tensor runs along the dim as a whole."""
        for d in range(len(value.dims)):
            run = self.run(value, d)
            if run is not None and len(run) > 1:
                value = self.remade_along(value, run, range(value.shape[d]))
        fresh: dict[int, int] = {}

        def other(axis: int) -> int:
            if axis not in fresh:
                fresh[axis] = self.axes.new(self.axes.size(axis), self.axes.home(axis))
            return fresh[axis]

        def along(dim: Dim) -> Dim:
            return tuple(f if f.axis is None else Factor(f.size, other(f.axis)) for f in dim)

        def elsewhere(load: Load) -> Load:
            return replace(load, dims=tuple(map(along, load.dims)))

        others = functools.partial(map, other)
        return self.remade(value, bool, others, along, elsewhere, "transposes of transposes")

    def view(self, value: Value, shape: Sequence[int]) -> Value:
        """The value's elements, in row-major order, along other dims."""
        sizes = [n for n in shape if n != 1]
        for again in (False, True):
            value = self.again(value) if again else value
            factors = tuple(f for dim in value.dims for f in self.axes.factors(dim))
            fine = refined([f.size for f in factors], sizes)
            if fine is not None:
                cut = self.axes.cut(factors, fine)
                return Value(value.node, tuple(grouped(fine, cut, shape)))
        if (found := self.read_along(value, shape)) is not None:
            return found
        raise Unsupported(
            f"a view from {list(value.shape)} to {list(shape)} of what runs along dims of "
            f"{[f.size for f in factors]}: sizes do not fit each other"
        )

    def read_along(self, value: Value, shape: Sequence[int]) -> Value | None:
        """The value along dims that do not fit its own, if it is made element by element of tensors
        whose strides allow to read them so."""
        factors = tuple(f for dim in value.dims for f in self.axes.factors(dim))
        whole = self.axes.along(value.dims)
        if not whole:
            return Value(value.node, constant(shape))
        dims = tuple(
            (Factor(n, self.axes.new(n, d - len(shape))),) if n != 1 else ()
            for d, n in enumerate(shape)
        )

        def along(load: Load) -> Load | None:
            load = replace(load, dims=tuple(map(self.axes.factors, load.dims))).split()
            if {*load.dims} != {(f,) for f in factors}:
                return None
            spec = view_of(load.spec, shape, [load.dims.index((f,)) for f in factors])
            return None if spec is None else replace(load, spec=spec, dims=dims)

        behind = map(self.steps.__getitem__, self.ancestors([value.node]))
        for step in [s for s in behind if self.axes.roots(s.axes) == whole]:
            given = {self.axes.roots(self.steps[i].axes) for i in step.args}
            if not given <= {whole, frozenset()}:
                return None
            if step.op == "load" and along(self.loads[step.attr]) is None:
                return None

        def elsewhere(load: Load) -> Load:
            found = along(load)
            assert found is not None
            return found

        new = self.axes.along(dims)
        found = self.remade(
            value, whole.__eq__, lambda _: new, lambda dim: dim, elsewhere, "views of views"
        )
        return Value(found.node, dims)

    def broadcast(self, value: Value, shape: Sequence[int]) -> Value:
        """The value repeated along dims of size 1 and new leading ones."""
        pairs = zip(shape, _of_rank(len(shape), value.dims), strict=True)
        return Value(value.node, tuple(dim or constant([n])[0] for n, dim in pairs))

    def sliced(self, value: Value, d: int, elements: range) -> Value:
        """Some elements of a dim of a value: what varies along it is computed of slices of the
        tensors."""
        if elements == range(value.shape[d]):
            return value
        before, behind = value.dims[:d], value.dims[d + 1 :]
        dim = self.axes.factors(value.dims[d])
        if all(f.axis is None for f in dim):
            return Value(value.node, (*before, *constant([len(elements)]), *behind))
        run = self.run(value, d)
        if run is not None:
            return self.remade_along(value, run, elements)
        outer, *rest = dim
        box = boxed(elements, [outer.size, math.prod(f.size for f in rest)])
        if box is None:
            raise Unsupported(f"a slice of dims of {[f.size for f in dim]} that are merged")
        found = Value(value.node, (*before, (outer,), tuple(rest), *behind))
        for k, inside in enumerate(box):
            found = self.sliced(found, d + k, inside)
        merged = found.dims[d] + found.dims[d + 1]
        return Value(found.node, (*found.dims[:d], merged, *found.dims[d + 2 :]))

    def run(self, value: Value, d: int) -> tuple[int, ...] | None:
        """The axes of a dim, if whatever the value is made of runs along all of them, as one dim of
        each tensor, or along none."""
        dim = self.axes.factors(value.dims[d])
        axes = tuple(f.axis for f in dim if f.axis is not None)
        if len(axes) < len(dim):
            return None
        if len(axes) < 2:
            return axes
        for step in map(self.steps.__getitem__, self.ancestors([value.node])):
            along = self.axes.roots(step.axes).intersection(axes)
            if along and len(along) < len(axes):
                return None
            if along and step.op == "load":
                dims = map(self.axes.factors, self.loads[step.attr].dims)
                if axes not in [tuple(f.axis for f in dim) for dim in dims]:
                    return None
        return axes

    def remade_along(self, value: Value, run: tuple[int, ...], elements: range) -> Value:
        """Some elements of a dim that has these axes, along an axis of their own."""
        count = len(elements)
        fresh = None if count == 1 else self.axes.new(count, self.axes.home(run[0]))

        def along(dim: Dim) -> Dim:
            axes = [f.axis for f in dim]
            if run[0] not in axes:
                return dim
            first = axes.index(run[0])
            new = (Factor(count, fresh),) if count != 1 else ()
            return (*dim[:first], *new, *dim[first + len(run) :])

        def narrowed(load: Load) -> Load:
            whole = [tuple(f.axis for f in dim) for dim in load.dims]
            if run not in whole:
                load = load.split()
                whole = [tuple(f.axis for f in dim) for dim in load.dims]
            d = whole.index(run)
            return load.sliced(d, elements, along(load.dims[d]))

        def other(axis: int) -> int | None:
            return fresh if axis in run else axis

        changes, others = set(run).intersection, functools.partial(map, other)
        return self.remade(value, changes, others, along, narrowed, "slices of slices")

    def remade(
        self,
        value: Value,
        changes: Callable[[frozenset[int]], Any],
        others: Callable[[frozenset[int]], Iterable[int | None]],
        along: Callable[[Dim], Dim],
        elsewhere: Callable[[Load], Load],
        what: str,
    ) -> Value:
        """The value, computed once more from what is read elsewhere.

        Args:
            changes: whether what varies along these axes becomes another.
            others: the axes that take the place of some that change.
            along: the dim that takes the place of one.
        """
        behind = self.ancestors([value.node])
        taken = self.origins.get(value.node, value.node)
        self.taken.add(taken)
        if len(self.steps) - self.kept_at + len(behind) > MOST_STEPS:
            self.copies.setdefault(taken, []).append(value.node)
            raise TooManySteps(
                f"{what} need more than {MOST_STEPS} steps: each computes anew what it is of; "
                "fuse what is sliced, or what follows the slices, as a function of its own"
            )
        new: dict[int, int] = {}
        for i in behind:
            step = self.steps[i]
            attr, axes = step.attr, self.axes.roots(step.axes)
            if not changes(axes):
                new[i] = i
                continue
            if step.op == "load":
                load = self.loads[attr]
                load = replace(load, dims=tuple(map(self.axes.factors, load.dims)))
                self.loads.append(elsewhere(load))
                attr = len(self.loads) - 1
            args = tuple(new[a] for a in step.args)
            new[i] = self.add(step.op, args, step.dtype, others(axes), attr)
            origin = self.origins[new[i]] = self.origins.get(i, i)
            self.copies.setdefault(origin, []).append(new[i])
        return Value(new[value.node], tuple(along(self.axes.factors(dim)) for dim in value.dims))


def _logic(joined: str, negated: int) -> Callable[..., Value]:
    def step(b: GraphBuilder, *both: Value) -> Value:
        values = list(both)
        values[negated] = b.combine("not", [values[negated]])
        return b.combine(joined, values)

    return step


def _chosen(b: GraphBuilder, mask: Value, x: Value, y: Value) -> Value:
    beside = b.combine("not", [mask])
    return b.binary("or", b.binary("and", mask, x), b.binary("and", beside, y))


_LOGIC: dict[str, Callable[..., Value]] = {
    "maximum": lambda b, x, y: b.binary("or", x, y),
    "minimum": lambda b, x, y: b.binary("and", x, y),
    **{"lt": _logic("and", 0), "le": _logic("or", 0)},
    **{"gt": _logic("and", 1), "ge": _logic("or", 1)},
    "where": _chosen,
}
"""What steps of numbers are of booleans, which in vectors are masks: all bits or none."""


def _constant(sizes: Iterable[int]) -> Dim:
    return tuple(Factor(n, None) for n in sizes)


def _of_rank(rank: int, dims: Dims) -> Dims:
    return ((),) * (rank - len(dims)) + dims
