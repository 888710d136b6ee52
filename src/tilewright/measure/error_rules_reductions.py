"""How reductions carry rounding errors on: sums, products, means, variances, extremes.

A sum of K terms may be taken in any sensible order: log2(K) roundings for a tree, sqrt(K) / 8 for
sequential partial sums in eight or more lanes (roundings are as often up as down, so they add as a
random walk), times the sum of |terms|. A variance may be found in two passes or by Welford's
updates.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tilewright.measure.error_rules import (
    RULES,
    SAFETY,
    Arithmetic,
    Pair,
    Rule,
    magnitude,
    rule,
)


def _extremum(name: str, function: Rule) -> None:
    def apply(arithmetic: Arithmetic, x: Pair, dims: Any = (), keepdim: bool = False) -> Pair:
        return arithmetic.between(lambda t: function(t, dims, keepdim), x)

    RULES[name] = apply


_extremum("amax", torch.amax)
_extremum("amin", torch.amin)
_extremum("max", torch.amax)
_extremum("min", torch.amin)


def _over_booleans(name: str, function: Rule) -> None:
    def apply(arithmetic: Arithmetic, x: Pair, dims: Any = None, keepdim: bool = False) -> Pair:
        chosen = _dims(x.value, dims)
        if x.value.dtype != torch.bool:
            x = RULES["ne"](arithmetic, x, 0)
        return arithmetic.between(lambda t: function(t, chosen, keepdim), x)

    RULES[name] = apply


_over_booleans("any", torch.any)
_over_booleans("all", torch.all)


def sum_growth(terms: int) -> float:
    """Roundings of a sum, in units of u times the sum of |terms|; see the module's text."""
    return math.log2(terms) + math.sqrt(terms) / 8 if terms > 1 else 0.0


def _dims(x: Tensor, dims: Any) -> list[int]:
    chosen = range(x.dim()) if dims is None or dims == [] else dims
    return list(chosen) if isinstance(chosen, (list, tuple, range)) else [chosen]


@rule("sum")
def _sum(
    arithmetic: Arithmetic, x: Pair, dims: Any = None, keepdim: bool = False, **_: Any
) -> Pair:
    dims = _dims(x.value, dims)
    value = x.value.sum(dims, keepdim)
    growth = sum_growth(x.value.numel() // max(value.numel(), 1))
    if growth == 0.0 or not value.is_floating_point():
        return x.map(lambda t: t.sum(dims, keepdim))
    error = growth * magnitude(x.value).sum(dims, keepdim)
    if x.error is not None:
        error += x.error.sum(dims, keepdim)
    return Pair(value, error, exact=False)


@rule("prod")
def _prod(
    arithmetic: Arithmetic, x: Pair, dim: int | None = None, keepdim: bool = False, **_: Any
) -> Pair:
    """A rounding for each factor; a factor's error counts with the product of the others, and
    theirs."""
    if x.value.dtype == torch.bool:
        x = Pair(x.value.long(), x.error)
    t = x.value.movedim(dim, -1) if dim is not None else x.value.reshape(-1)
    value = t.prod(-1)
    error = max(t.shape[-1] - 1, 0) * arithmetic.sized(value)
    if x.error is not None:
        carried = x.error.movedim(dim, -1) if dim is not None else x.error.reshape(-1)
        t = t.abs() + SAFETY * arithmetic.u * carried
        ones = torch.ones_like(t[..., :1])
        before = torch.cat((ones, t[..., :-1].cumprod(-1)), -1)
        behind = torch.cat((t[..., 1:].flip(-1).cumprod(-1).flip(-1), ones), -1)
        error = error + (carried * magnitude(before * behind)).sum(-1)
    pair = Pair(value, error, exact=False)
    return pair.map(lambda t: t.unsqueeze(dim)) if keepdim and dim is not None else pair


@rule("mean")
def _mean(
    arithmetic: Arithmetic, x: Pair, dims: Any = None, keepdim: bool = False, **_: Any
) -> Pair:
    total = _sum(arithmetic, x, dims, keepdim)
    return RULES["div"](arithmetic, total, float(x.value.numel() // max(total.value.numel(), 1)))


@rule("var")
def _var(
    arithmetic: Arithmetic,
    x: Pair,
    dims: Any = None,
    correction: float | None = None,
    keepdim: bool = False,
    **_: Any,
) -> Pair:
    dims = _dims(x.value, dims)
    mean = _mean(arithmetic, x, dims, keepdim=True)
    d = x.value - mean.value
    terms = d.numel() // max(mean.value.numel(), 1)
    over = terms - (1.0 if correction is None else correction)
    value = d.square().sum(dims, keepdim) / over
    # One deviation: its own rounding, that of a running mean, and what x brings along.
    # The error of the mean itself is the same for all deviations, whose sum is zero: it counts
    # only squared.
    size = magnitude(d)
    each = size + magnitude(mean.value)
    if x.error is not None:
        each += x.error
        size = size + SAFETY * arithmetic.u * x.error
    error = 2 * (size * each).sum(dims, keepdim) / over + (sum_growth(terms) + 2) * value
    if mean.error is not None:
        squared = arithmetic.u * mean.error.square() * (terms / max(over, 1.0))
        error += squared if keepdim else squared.reshape(value.shape)
    return arithmetic.rounding(value, (Pair(value, exact=False),), error, 1.0)
