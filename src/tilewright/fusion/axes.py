"""The axes of a graph that is being lowered: dims that run together are one axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class AxisTable:
    """Axes by number; `join` makes several of them one, known by its `root`.

    An axis has a size, and a home: the outermost dim that it was seen at, counted from the end
    (-1 is the last). Homes order the axes of a graph.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._homes: list[int] = []
        self._parents: list[int] = []

    def new(self, size: int, home: int) -> int:
        self._sizes.append(size)
        self._homes.append(home)
        self._parents.append(len(self._parents))
        return self._parents[-1]

    def root(self, axis: int) -> int:
        while self._parents[axis] != axis:
            axis = self._parents[axis]
        return axis

    def roots(self, axes: Iterable[int | None]) -> frozenset[int]:
        return frozenset(self.root(a) for a in axes if a is not None)

    def size(self, axis: int) -> int:
        return self._sizes[axis]

    def home(self, axis: int) -> int:
        return self._homes[self.root(axis)]

    def ordered(self, axes: Iterable[int]) -> list[int]:
        """The axes as roots, outermost first."""
        return sorted(self.roots(axes), key=lambda a: (self._homes[a], a))

    def place(self, axes: Sequence[int | None]) -> None:
        """Note that a value has these axes as its dims."""
        for dim, axis in enumerate(axes):
            if axis is not None:
                root = self.root(axis)
                self._homes[root] = min(self._homes[root], dim - len(axes))

    def join(self, pairs: Iterable[tuple[int, int]], apart: Iterable[Iterable[int]]) -> bool:
        """Make each pair one axis, unless one of `apart`, axes of one value each, then had an axis
        twice."""
        before = list(self._parents)
        for a, b in pairs:
            first, second = sorted((self.root(a), self.root(b)))
            self._parents[second] = first
        for axes in apart:
            listed = list(axes)
            if len(self.roots(listed)) != len(listed):
                self._parents = before
                return False
        for axis, root in enumerate(before):
            if root == axis:
                new = self.root(axis)
                self._homes[new] = min(self._homes[new], self._homes[axis])
        return True
