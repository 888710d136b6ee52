"""What follows from sizes, found from two results that differ in them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from fractions import Fraction
from typing import Any

from tilewright.op import told_apart

MOST_SIZES = 4
Maker = Callable[[Sequence[Any]], Any]
"""Makes a result of sizes, whole numbers or torch.SymInt."""


class NotOfSizes(Exception):
    """Two results differ in more than products of sizes."""


class Sizes:
    """Those that differ between two workloads.

    A whole number in results that differ is taken to be a product of some, each once, and of a
    constant: which, is told by how much it grows.

    Raises:
        NotOfSizes: it is not, since two products grow alike, or one stays the same.
    """

    def __init__(self, pairs: Sequence[tuple[int, int]]):
        if not 0 < len(pairs) <= MOST_SIZES:
            raise NotOfSizes
        self.products: dict[Fraction, tuple[int, tuple[int, ...]]] = {}
        for count in range(len(pairs) + 1):
            for which in itertools.combinations(range(len(pairs)), count):
                one, other = (math.prod(pairs[k][side] for k in which) for side in (0, 1))
                growth = Fraction(other, one)
                if growth in self.products:
                    raise NotOfSizes
                self.products[growth] = one, which

    def varying(self, one: Any, other: Any) -> Maker:
        """What makes each result of the sizes of its workload, and others of other sizes.

        Raises:
            NotOfSizes: they differ in something else.
        """
        return self._maker(one, other) or (lambda sizes: one)

    def _maker(self, one: Any, other: Any) -> Maker | None:
        """None for what does not vary."""
        kind = type(one)
        if kind is not type(other):
            raise NotOfSizes
        if kind is int:
            return None if one == other else self._product(one, other)
        if kind is float and one != other and one.is_integer() and other.is_integer():
            whole = self._product(int(one), int(other))
            return lambda sizes: float(whole(sizes))
        if kind is tuple:
            if len(one) != len(other):
                raise NotOfSizes
            parts = [*zip(one, map(self._maker, one, other), strict=True)]
            if not any(make for _, make in parts):
                return None
            return lambda sizes: tuple([make(sizes) if make else part for part, make in parts])
        if is_dataclass(kind):
            of = {f.name: getattr(one, f.name) for f in fields(one)}
            compared = [f.name for f in fields(one) if f.compare]
            makers = {n: self._maker(of[n], getattr(other, n)) for n in compared}
            varying = {n: make for n, make in makers.items() if make is not None}
            if not varying:
                return None
            return lambda sizes: kind(**{**of, **{n: make(sizes) for n, make in varying.items()}})
        if told_apart(one) != told_apart(other):
            raise NotOfSizes
        return None

    def _product(self, one: int, other: int) -> Maker:
        least, which = self.products.get(Fraction(other, one) if one else Fraction(0), (0, ()))
        if not which or one % least:
            raise NotOfSizes
        factor = one // least
        return lambda sizes: factor * math.prod(sizes[k] for k in which)
