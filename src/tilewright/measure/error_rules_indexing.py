"""How positions, and elements that an index names, carry rounding errors on: as they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewright.measure.error_rules import RULES, Arithmetic, Pair, rule


@rule("arange")
def _arange(arithmetic: Arithmetic, *ends: Any, dtype: torch.dtype | None = None, **_: Any) -> Pair:
    floating = dtype.is_floating_point if dtype else any(isinstance(n, float) for n in ends)
    wide = torch.float64 if floating else torch.int64
    return Pair(torch.arange(*ends, dtype=wide, device=arithmetic.device))


@rule("gather")
def _gather(arithmetic: Arithmetic, x: Pair, dim: int, index: Pair, **_: Any) -> Pair:
    found = x.map(lambda t: t.gather(dim, index.value.long()))
    return _whichever(found, index)


@rule("scatter")
def _scatter(arithmetic: Arithmetic, into: Pair, dim: int, index: Pair, src: Any, **_: Any) -> Pair:
    put = _placed(arithmetic, into, dim, index, src)
    return _where_named(arithmetic, into, dim, index, put)


@rule("scatter_add")
def _scatter_add(arithmetic: Arithmetic, into: Pair, dim: int, index: Pair, src: Any) -> Pair:
    put = _placed(arithmetic, into, dim, index, src)
    return _where_named(arithmetic, into, dim, index, RULES["add"](arithmetic, into, put))


def _placed(arithmetic: Arithmetic, into: Pair, dim: int, index: Pair, src: Any) -> Pair:
    """The other elements where an index of one for each row names them, among zeros."""
    places = index.value.long()

    def place(t: Tensor) -> Tensor:
        zeros = t.new_zeros(into.value.shape)
        return zeros.scatter(dim, places, t.expand(places.shape))

    return arithmetic.lift(src).map(place)


def _where_named(arithmetic: Arithmetic, into: Pair, dim: int, index: Pair, put: Pair) -> Pair:
    named = into.value.new_zeros(into.value.shape, dtype=torch.bool)
    named = named.scatter(dim, index.value.long(), True)
    return _whichever(RULES["where"](arithmetic, Pair(named), put, into), index)


def _whichever(found: Pair, index: Pair) -> Pair:
    """Anything goes where rounding decides what an index is."""
    if index.error is None:
        return found
    return Pair(found.value, torch.full_like(found.value, torch.inf, dtype=torch.float64))
