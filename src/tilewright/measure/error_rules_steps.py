"""How functions of steps carry rounding errors on: floor, sign, remainders, divisions that round.

Near a step, an operand that is known within +-e may be on either side of it.
"""

from __future__ import annotations

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


def _stepped(name: str, function: Rule) -> None:
    """A function of steps: near one, an operand that is known within +-e may be on either side."""

    def apply(arithmetic: Arithmetic, x: Any) -> Pair:
        x = arithmetic.lift(x)
        y = function(x.value)
        if x.error is None:
            return Pair(y)
        scale = SAFETY * arithmetic.u
        ends = [function(x.value + s * scale * x.error) for s in (-1, 1)]
        return Pair(y, torch.maximum(*(magnitude(y - end) for end in ends)) / scale)

    RULES[name] = apply


for _name in ("sign", "floor", "ceil", "round", "trunc"):
    _stepped(_name, getattr(torch, _name))


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
