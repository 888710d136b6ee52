"""How functions that jump or bend carry rounding errors on: floor, comparisons, maxima, remainders.

Near a step, an operand that is known within +-e may be on either side of it. What the function is
at both ends tells what it may be; what chooses by it may choose either.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    plus,
    rule,
    times,
)


def _lifted(arithmetic: Arithmetic, operands: Sequence[Any]) -> tuple[list[Pair], bool]:
    """Pairs, and whether any of them has an error."""
    pairs = [arithmetic.lift(p) for p in operands]
    return pairs, any(p.error is not None for p in pairs)


def _stepped(name: str, function: Rule) -> None:
    def apply(arithmetic: Arithmetic, x: Any) -> Pair:
        found = arithmetic.between(function, arithmetic.lift(x))
        return arithmetic.chosen(name, found.value, found.error)

    RULES[name] = apply


for _name in ("sign", "floor", "ceil", "round", "trunc"):
    _stepped(_name, getattr(torch, _name))


def _bent(name: str, function: Rule) -> None:
    def apply(arithmetic: Arithmetic, *operands: Any) -> Pair:
        return arithmetic.between(function, *_lifted(arithmetic, operands)[0])

    RULES[name] = apply


for _name in ("relu", "maximum", "minimum", "fmax", "fmin"):
    _bent(_name, getattr(torch, _name))


def _ordered(name: str, function: Rule) -> None:
    """True or False, or either where the ends of the operands disagree."""

    def apply(arithmetic: Arithmetic, *operands: Any) -> Pair:
        pairs, inexact = _lifted(arithmetic, operands)
        y = function(*(p.value for p in pairs))
        return arithmetic.chosen(
            name, y, arithmetic.tried(function, y, *pairs) if inexact else None
        )

    RULES[name] = apply


for _name in ("lt", "le", "gt", "ge", "signbit"):
    _ordered(_name, getattr(torch, _name))


def _of_bits(name: str, function: Rule) -> None:
    """Of what is true or false, or of integers. Those may be fp64 here, and open: NaN, inf."""

    def whole(*operands: Tensor) -> Tensor:
        return function(*(t.long() if t.is_floating_point() else t for t in operands))

    own = whole if name.startswith("bitwise") else function

    def apply(arithmetic: Arithmetic, *operands: Any) -> Pair:
        pairs, inexact = _lifted(arithmetic, operands)
        y = own(*(p.value for p in pairs))
        error = arithmetic.tried(own, y, *pairs) if inexact else None
        for p in pairs:
            if own is whole and p.value.is_floating_point() and not p.value.isfinite().all():
                error = torch.zeros_like(y, dtype=torch.float64) if error is None else error
                error = error.masked_fill(~p.value.isfinite(), math.inf)
        return Pair(y, error)

    RULES[name] = apply


for _name in ("and", "or", "xor", "not"):
    for _kind in ("logical", "bitwise"):
        _of_bits(f"{_kind}_{_name}", getattr(torch, f"{_kind}_{_name}"))


def _equal(name: str, function: Rule) -> None:
    """Numbers whose ends overlap may be equal. Of two that both are inexact their values tell: one
    that has been handed on, as to a maximum, is still equal to itself."""

    def apply(arithmetic: Arithmetic, *operands: Any) -> Pair:
        pairs, inexact = _lifted(arithmetic, operands)
        y = function(*(p.value for p in pairs))
        if not inexact or all(p.value.is_floating_point() and p.error is not None for p in pairs):
            return Pair(y)
        (low, *_, high), (least, *_, most) = (2 * arithmetic.ends(p) for p in pairs)
        overlap = (low <= most) & (least <= high)
        sure = (low == high) & (least == most)
        return arithmetic.chosen(name, y, (overlap & ~sure).double() / (SAFETY * arithmetic.u))

    RULES[name] = apply


for _name in ("eq", "ne"):
    _equal(_name, getattr(torch, _name))


@rule("isnan")
def _isnan(arithmetic: Arithmetic, x: Any) -> Pair:
    return Pair(torch.isnan(arithmetic.lift(x).value))


@rule("isinf")
def _isinf(arithmetic: Arithmetic, x: Any) -> Pair:
    return Pair(torch.isinf(arithmetic.lift(x).value))


@rule("where")
def _where(arithmetic: Arithmetic, condition: Pair, a: Any, b: Any) -> Pair:
    a, b = arithmetic.lift(a), arithmetic.lift(b)
    value = torch.where(condition.value, a.value, b.value)
    if a.error is b.error is condition.error is None:
        return Pair(value)
    zero = torch.zeros((), dtype=torch.float64, device=value.device)
    ea, eb = (zero if e is None else e for e in (a.error, b.error))
    error = torch.where(condition.value, ea, eb)
    if condition.error is not None:
        other = torch.where(condition.value, b.value, a.value)
        either = torch.maximum(ea, eb) + arithmetic.reaching(value, [other])
        # Of an infinity or NaN and something else: no error reaches from one to the other.
        same = (value == other) | (value.isnan() & other.isnan())
        apart = ~(value.isfinite() & other.isfinite()) & ~same
        error = torch.where(condition.error > 0, either.masked_fill(apart, math.inf), error)
    return Pair(value, error.expand(value.shape), a.exact and b.exact)


def _interval(arithmetic: Arithmetic, quotient: Tensor, error: Tensor | None) -> list[Tensor]:
    """The ends of what a quotient may be in the arithmetic, which rounds it."""
    scale = SAFETY * arithmetic.u
    width = scale * (magnitude(quotient) if error is None else magnitude(quotient) + error)
    return [quotient - width, quotient + width]


def _quotient_error(a: Pair, b: Pair, quotient: Tensor) -> Tensor | None:
    error = plus(times(1 / b.value, a.error), times(quotient / b.value, b.error))
    return None if error is None else error.nan_to_num(0.0, 0.0, 0.0)


def _remainder(name: str, function: Rule, whole: Rule) -> None:
    """x - n y for the whole part n of x / y: at a step of n it jumps by |y|."""

    def apply(arithmetic: Arithmetic, a: Any, b: Any) -> Pair:
        a, b = arithmetic.lift(a), arithmetic.lift(b)
        y, quotient = function(a.value, b.value), a.value / b.value
        n = whole(quotient)
        error = plus(a.error, times(n, b.error))
        if error is not None:
            low, high = _interval(arithmetic, quotient, _quotient_error(a, b, quotient))
            jump = magnitude(b.value) / (SAFETY * arithmetic.u)
            jumps = arithmetic.chosen(name, y, (whole(low) != whole(high)) * jump).error
            error = (error if jumps is None else error + jumps).expand(y.shape)
        return arithmetic.rounding(y, (a, b), error, 1.0)

    RULES[name] = apply


_remainder("fmod", torch.fmod, torch.trunc)
_remainder("remainder", torch.remainder, torch.floor)


@rule("div_floor", "div_trunc")
def _div_rounded(arithmetic: Arithmetic, a: Any, b: Any, rounding_mode: str) -> Pair:
    """A quotient that is rounded to a whole number, of what may be on either side of one."""
    a, b = arithmetic.lift(a), arithmetic.lift(b)
    y = torch.div(a.value, b.value, rounding_mode=rounding_mode)
    quotient = a.value / b.value
    error = _quotient_error(a, b, quotient)
    exact = a.error is b.error is None and rounding_mode == "floor"
    whole = torch.floor if rounding_mode == "floor" else torch.trunc
    ends = [whole(end) for end in _interval(arithmetic, quotient, error)]
    return arithmetic.chosen("div", y, None if exact else arithmetic.reaching(y, ends))


_div = RULES["div"]


@rule("div")
def _div_of_any_mode(
    arithmetic: Arithmetic, a: Any, b: Any, rounding_mode: str | None = None
) -> Pair:
    if rounding_mode is None:
        return _div(arithmetic, a, b)
    return _div_rounded(arithmetic, a, b, rounding_mode)
