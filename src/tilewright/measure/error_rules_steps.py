"""How functions that jump or bend carry rounding errors on: floor, comparisons, maxima, remainders.

Near a step, an operand that is known within +-e may be on either side of it. What the function is
at both ends tells what it may be; what chooses by it may choose either.
"""

from __future__ import annotations

import itertools
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


def _monotone(name: str, function: Rule) -> None:
    """A function that never falls: it is between what it is at the ends of its operands."""

    def apply(arithmetic: Arithmetic, *operands: Any) -> Pair:
        pairs = [arithmetic.lift(p) for p in operands]
        y = function(*(p.value for p in pairs))
        if all(p.error is None for p in pairs):
            return Pair(y)
        ends = [arithmetic.ends(p) for p in pairs]
        extremes = [function(*(of[at] for of in ends)) for at in (0, -1)]
        error = arithmetic.reaching(y, extremes)
        return Pair(y, error, all(p.exact for p in pairs))

    RULES[name] = apply


STEPS = ("sign", "floor", "ceil", "round", "trunc")
BENDS = ("relu", "maximum", "minimum", "fmax", "fmin")
for _name in STEPS + BENDS:
    _monotone(_name, getattr(torch, _name))


def _compare(name: str, function: Rule) -> None:
    """True or False, or either where the ends of the operands disagree."""

    def apply(arithmetic: Arithmetic, *operands: Any) -> Pair:
        pairs = [arithmetic.lift(p) for p in operands]
        y = function(*(p.value for p in pairs))
        if arithmetic.decided or all(p.error is None for p in pairs):
            return Pair(y)
        ends = itertools.product(*map(arithmetic.ends, pairs))
        error = arithmetic.reaching(y, [function(*end) for end in ends])
        return Pair(y, error) if error.any() else Pair(y)

    RULES[name] = apply


COMPARISONS = ("lt", "le", "gt", "ge", "signbit")
for _name in COMPARISONS:
    _compare(_name, getattr(torch, _name))
for _name in ("and", "or", "xor", "not"):
    for _kind in ("logical", "bitwise"):
        _compare(f"{_kind}_{_name}", getattr(torch, f"{_kind}_{_name}"))


def _tell(name: str, function: Rule) -> None:
    """What is true of a number or two whatever their errors are: what has been handed on, as to a
    maximum, is still equal to itself."""

    def apply(arithmetic: Arithmetic, *operands: Any) -> Pair:
        return Pair(function(*(arithmetic.lift(p).value for p in operands)))

    RULES[name] = apply


for _name in ("eq", "ne", "isnan", "isinf"):
    _tell(_name, getattr(torch, _name))


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
        error = torch.where(condition.error > 0, either, error)
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
            error = torch.where(whole(low) == whole(high), error, error + jump).expand(y.shape)
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
    scale = SAFETY * arithmetic.u
    found = torch.maximum(*(magnitude(y - end) for end in ends)) / scale
    return Pair(y) if exact else Pair(y, found)


_div = RULES["div"]


@rule("div")
def _div_of_any_mode(
    arithmetic: Arithmetic, a: Any, b: Any, rounding_mode: str | None = None
) -> Pair:
    if rounding_mode is None:
        return _div(arithmetic, a, b)
    return _div_rounded(arithmetic, a, b, rounding_mode)
