"""What a search for the fewest kernels of a graph tries, and what it need not try again."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """The axes of a row that a kernel may walk, and what it gets done.

    Attributes:
        useful: it gets anything done.
        now: what is known then.
        added: what is added up.
    """

    useful: bool
    merit: tuple[float, ...]
    axes: tuple[int, ...]
    now: set[int]
    added: list[int]


Left = tuple[tuple[int, ...], frozenset[int], frozenset[tuple[int, ...]]]
"""What the kernels that are still to be found depend on: outputs to be written, values that are
known by now and needed, and rows that were walked."""


class Way(NamedTuple):
    """Which rows kernels walk to get somewhere, and what that costs.

    Attributes:
        passes: kernels that walk.
        space: the largest that one of them walks.
        large: how many walk one as large.
    """

    rows: tuple[int, ...]
    passes: int
    space: int
    large: int


class Met:
    """What cutters of a graph that share it know by what was left to compute.

    They try rows in order, so every way on from there was tried before another way there is.
    """

    def __init__(self) -> None:
        self.rows: dict[Left, list[Row]] = {}
        self._ways: dict[Left, list[Way]] = {}

    def costs_no_more(self, left: Left, way: Way) -> bool:
        """Whether another way there costs no more than this, which is noted otherwise."""
        ways = self._ways.setdefault(left, [])
        if way in ways:
            return False
        same = (w for w in ways if w.space == way.space)
        if any(w.passes <= way.passes and w.large <= way.large for w in same):
            return True
        ways.append(way)
        return False


class Hopeless(Exception):
    """Another program takes no more passes."""
