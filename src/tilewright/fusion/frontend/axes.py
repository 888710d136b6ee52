"""The axes of a graph that is being lowered: dims that run together are one axis, and a dim that a
view splits or merges runs along several."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar


class Factor(NamedTuple):
    """What a dim, or a factor of one, runs along: an axis, or None where nothing varies."""

    size: int
    axis: int | None


Dim = tuple[Factor, ...]
"""Outermost first; a dim of size 1 has no factors."""
Dims = tuple[Dim, ...]
T = TypeVar("T")


def constant(shape: Iterable[int]) -> Dims:
    """Dims along which nothing varies."""
    return tuple((Factor(n, None),) if n != 1 else () for n in shape)


def refined(*factorisations: Iterable[int]) -> tuple[int, ...] | None:
    """The coarsest factors, outermost first, of which those of each are products; None where a
    dim that is (2, 3) here is (3, 2) there."""
    listed = {tuple(sizes) for sizes in factorisations}
    if len(listed) == 1 or any(0 in sizes for sizes in listed):
        return listed.pop() if len(listed) == 1 else None
    strides = {
        stride
        for sizes in listed
        for stride in itertools.accumulate(reversed(sizes), operator.mul, initial=1)
    }
    pairs = list(itertools.pairwise(sorted(strides)))
    if any(outer % inner for inner, outer in pairs):
        return None
    return tuple(outer // inner for inner, outer in reversed(pairs))


def grouped(sizes: Sequence[int], things: Sequence[T], shape: Iterable[int]) -> list[tuple[T, ...]]:
    """One thing for each factor, dealt to the dims that are products of these factors."""
    found, first = [], 0
    for n in shape:
        last = first + (n != 1)
        while math.prod(sizes[first:last]) < n:
            last += 1
        found.append(tuple(things[first:last]))
        first = last
    return found


@dataclass(frozen=True)
class Value:
    """A value of the trace: a step, and for each of its own dims what it runs along."""

    node: int
    dims: Dims

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(math.prod(f.size for f in dim) for dim in self.dims)


class AxisTable:
    """Axes by number; `join` makes several of them one, `cut` one several. What is left of an axis
    are its `roots`.

    An axis has a size, and a home: the outermost dim that it was seen at, counted from the end
    (-1 is the last). Homes order the axes of a graph.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._homes: list[int] = []
        self._became: list[tuple[int, ...]] = []

    def new(self, size: int, home: int) -> int:
        self._sizes.append(size)
        self._homes.append(home)
        self._became.append((len(self._became),))
        return len(self._became) - 1

    def copied(self) -> AxisTable:
        """The same axes, to be joined and cut apart from these."""
        other = AxisTable()
        other._sizes, other._homes = [*self._sizes], [*self._homes]
        other._became = [*self._became]
        return other

    def __len__(self) -> int:
        return len(self._became)

    def listed(self, axis: int) -> tuple[int, ...]:
        """What the axis has become, outermost first."""
        became = self._became[axis]
        if became[0] == axis:
            return became
        if len(became) == 1:
            return self.listed(became[0])
        return tuple(r for own in became for r in self.listed(own))

    def roots(self, axes: Iterable[int | None]) -> frozenset[int]:
        return frozenset(r for a in axes if a is not None for r in self.listed(a))

    def size(self, root: int) -> int:
        return self._sizes[root]

    def home(self, root: int) -> int:
        return self._homes[root]

    def ordered(self, axes: Iterable[int]) -> list[int]:
        """The axes as roots, outermost first."""
        return sorted(self.roots(axes), key=lambda a: (self._homes[a], a))

    def factors(self, dim: Dim) -> Dim:
        """The dim along roots."""
        return tuple(
            each
            for f in dim
            for each in (
                [f] if f.axis is None else (Factor(self._sizes[r], r) for r in self.listed(f.axis))
            )
        )

    def along(self, dims: Dims) -> frozenset[int]:
        """The roots along which dims vary."""
        return self.roots(f.axis for dim in dims for f in dim)

    def along_only(self, dim: Dim, roots: frozenset[int]) -> Dim:
        """The dim of what does not vary along other roots."""
        return tuple(Factor(n, axis if axis in roots else None) for n, axis in self.factors(dim))

    def place(self, dims: Dims) -> None:
        """Note that a value has these dims."""
        for d, dim in enumerate(dims):
            for root in self.along((dim,)):
                self._homes[root] = min(self._homes[root], d - len(dims))

    def cut(self, factors: Dim, sizes: Sequence[int]) -> Dim:
        """The factors, roots, as factors of these sizes, of which theirs are products."""
        found: list[Factor] = []
        groups = grouped(sizes, sizes, [f.size for f in factors])
        for (size, axis), into in zip(factors, groups, strict=True):
            if len(into) == 1:
                found.append(Factor(size, axis))
            elif axis is None:
                found += [Factor(n, None) for n in into]
            else:
                self._became[axis] = tuple(self.new(n, self._homes[axis]) for n in into)
                found += self.factors((Factor(size, axis),))
        return tuple(found)

    def join(
        self, pairs: Iterable[tuple[int, int]], axes: Sequence[int], others: Iterable[Iterable[int]]
    ) -> bool:
        """Make each pair of roots one axis, unless a value then had one twice: that of `axes`, or
        one of `others`."""
        before, joined = list(self._became), set[int]()
        for a, b in pairs:
            (a,), (b,) = self.listed(a), self.listed(b)
            if a != b:
                self._became[max(a, b)] = (min(a, b),)
                joined |= {a, b}
        for own in (axes, *(others if joined else ())):
            listed = [r for a in own for r in self.listed(a)]
            if len(set(listed)) != len(listed):
                self._became = before
                return False
        for axis in joined:
            (new,) = self.listed(axis)
            self._homes[new] = min(self._homes[new], self._homes[axis])
        return True
