"""Workloads that differ in sizes alone, and results that follow from those of others.

What a function of a workload finds out by calling the reference takes tens of milliseconds, for
each new number of rows again. Where the reference takes the same steps at all sizes, a result
differs from another in sizes alone, and that of a third follows from two.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, TypeVar

from tilewright.errors import TilewrightError
from tilewright.fakes import tracing_lock
from tilewright.fusion.frontend.symbolic import same_at_all_sizes
from tilewright.fusion.frontend.trace import Layouts
from tilewright.fusion.frontend.varying import Maker, NotOfSizes, Sizes
from tilewright.fusion.remembered import ByOperator
from tilewright.op import Op, Workload, told_apart
from tilewright.tensor_spec import TensorSpec

P = ParamSpec("P")
R = TypeVar("R")

Dim = tuple[int, int]
"""Which tensor's, and which of it."""

SEEN_BEFORE = 3
"""So many workloads of a family come before its reference is traced with symbols for sizes, which
takes as long as one to four traces, and 0.4 s more for the first in a process. The next is traced,
too, and held against what follows."""
MOST_FAMILIES = 16
"""Of an operator and one set of dtypes; each new workload is held against them."""
LONGEST = 2**24
"""Dims that are this long are not of a family: beside whole numbers fp32 holds no greater size, and
what asks for one is refused when it is lowered."""
MOST_ELEMENTS = 2**31
"""Nor are tensors of so many elements: positions along a dim that they become are 32 bits wide."""


class AcrossSizes(ByOperator[P, R]):
    """A function of a workload that calls its reference: from the fifth workload of a family on,
    its results follow from those of two others, as that of the fourth was found to do.

    They are tuples and dataclasses of what is equal for all, and of numbers.
    """

    def __init__(self, function: Callable[Concatenate[Workload, P], R]):
        def of(w: Workload, *args: P.args, **kwargs: P.kwargs) -> R:
            found = _family_of(w)
            if found is None:
                return function(w, *args, **kwargs)
            family, sizes = found
            key = self, args, *kwargs.items()
            if key not in family.makers:
                right = function(w, *args, **kwargs)
                family.makers[key] = family.maker(lambda v: self(v, *args, **kwargs), sizes, right)
                return right
            make = family.makers[key]
            return function(w, *args, **kwargs) if make is None else make(sizes)

        super().__init__(of)
        functools.update_wrapper(self, function)


class Family:
    """The workloads that two are of, where products of sizes are all that varies.

    Raises:
        NotOfSizes: the two differ in something else.
    """

    def __init__(self, one: Workload, other: Workload):
        self.two = one, other
        sizes = _dims(other)
        differ = {k: (n, sizes[k]) for k, n in _dims(one).items() if n != sizes[k]}
        self.dims = frozenset(differ)
        """Which tensors' dims vary."""
        self.others = {n for k, n in _dims(one).items() if k not in differ}
        """Sizes that stay."""
        by_sizes = {pair: k for k, pair in differ.items()}
        self.places = [*by_sizes.values()]
        if not all(map(self.tells_apart, zip(*by_sizes, strict=True))):
            raise NotOfSizes
        self.sizes = Sizes([*by_sizes])
        self.layouts = self.sizes.varying(_layouts(one), _layouts(other))
        self.makers: dict[Hashable, Maker | None] = {}
        """Of each function's results."""

    def tells_apart(self, sizes: Sequence[int]) -> bool:
        """Whether they and what stays differ: what is equal by chance may be lowered to less."""
        return len({*sizes, *self.others}) == len(sizes) + len(self.others)

    def sizes_of(self, w: Workload) -> tuple[int, ...] | None:
        """The sizes of one that is in the family; None for one of the two."""
        sizes = self.sizes_at(w)
        if not self.tells_apart(sizes) or w in self.two or _is_vast(w):
            return None
        return sizes if self.layouts(sizes) == _layouts(w) else None

    def sizes_at(self, w: Workload) -> tuple[int, ...]:
        dims = _dims(w)
        return tuple(dims[k] for k in self.places)

    def takes_the_same_steps(self) -> bool:
        other = self.two[1]
        return same_at_all_sizes(other, self.sizes_at(other), self.layouts)

    def maker(
        self, of: Callable[[Workload], Any], sizes: Sequence[int], right: Any
    ) -> Maker | None:
        """Of a function's results, from those of the two, if it makes the right one of other sizes;
        None where they differ in more than sizes."""
        with contextlib.suppress(NotOfSizes, TilewrightError):
            make = self.sizes.varying(*map(of, self.two))
            return make if make(sizes) == right else None
        return None


@dataclass
class _Outline:
    """Workloads that differ in sizes and strides, at most."""

    seen: list[Workload] = field(default_factory=list)
    families: list[Family] = field(default_factory=list)
    asked: list[frozenset[Dim]] = field(default_factory=list)
    """Dims of which the reference takes other steps at other sizes."""

    def family_of(self, w: Workload) -> tuple[Family, tuple[int, ...]] | None:
        found = _among(self.families, w)
        if found is not None or w in self.seen:
            return found
        with tracing_lock():
            if len(self.seen) >= SEEN_BEFORE:
                found = _among(self.possible(), w)
                if found is not None and self.is_one(found[0]):
                    return found
            self.seen = [*self.seen, w][-SEEN_BEFORE:]
        return None

    def possible(self) -> Iterator[Family]:
        for two in itertools.combinations(reversed(self.seen), 2):
            with contextlib.suppress(NotOfSizes):
                family = Family(*two)
                if not any(dims <= family.dims for dims in self.asked):
                    yield family

    def is_one(self, family: Family) -> bool:
        if family.takes_the_same_steps():
            self.families = [family, *self.families][:MOST_FAMILIES]
            return True
        self.asked = [*self.asked, family.dims]
        return False


def _among(families: Iterable[Family], w: Workload) -> tuple[Family, tuple[int, ...]] | None:
    found = ((family, family.sizes_of(w)) for family in families)
    return next(((family, sizes) for family, sizes in found if sizes is not None), None)


@functools.lru_cache(maxsize=256)
def _outline(op: Op, told: Hashable) -> _Outline:
    return _Outline()


def _family_of(w: Workload) -> tuple[Family, tuple[int, ...]] | None:
    told = tuple(_told(v) if isinstance(v, TensorSpec) else told_apart(v) for _, v in w.args)
    return _outline(w.operator, (told, w.flags)).family_of(w)


@AcrossSizes
def outputs_of(w: Workload) -> tuple[TensorSpec, ...]:
    """Shape, dtype and layout of each output."""
    return w.outputs


def forget() -> None:
    """The families that are known: an operator of theirs may be gone."""
    _outline.cache_clear()


def _told(spec: TensorSpec) -> Hashable:
    """All but sizes and strides; what has a size of 0 or 1 is broadcast, or empty."""
    small = tuple(n if n < 2 else None for n in spec.shape)
    return spec.dtype, small, spec.strides is None, spec.align


def _dims(w: Workload) -> dict[Dim, int]:
    specs = enumerate(w.tensors.values())
    return {(t, d): n for t, spec in specs for d, n in enumerate(spec.shape)}


def _is_vast(w: Workload) -> bool:
    shapes = [s.shape for s in w.tensors.values()]
    return any(max(s, default=1) >= LONGEST or math.prod(s) >= MOST_ELEMENTS for s in shapes)


def _layouts(w: Workload) -> Layouts:
    return tuple((s.shape, s.real_strides) for s in w.tensors.values())
