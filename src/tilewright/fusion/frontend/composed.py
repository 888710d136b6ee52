"""Operations that torch does not decompose, in steps of the graph."""

from __future__ import annotations

import math
from collections.abc import Callable

from tilewright.fusion.frontend.axes import Value
from tilewright.fusion.frontend.builder import GraphBuilder


def _is_infinite(b: GraphBuilder, x: Value) -> Value:
    return b.binary("eq", b.combine("abs", [x]), b.number(math.inf))


def _but_for_nan(name: str) -> Callable[..., Value]:
    """The greater or smaller of two, of which one may be NaN."""

    def step(b: GraphBuilder, x: Value, y: Value) -> Value:
        inner = b.combine("where", [b.combine("isnan", [y]), x, b.binary(name, x, y)])
        return b.combine("where", [b.combine("isnan", [x]), y, inner])

    return step


def _sigmoid(b: GraphBuilder, x: Value) -> Value:
    exponential = b.combine("exp", [b.combine("neg", [x])])
    return b.combine("reciprocal", [b.binary("add", exponential, b.number(1.0))])


def _signbit(b: GraphBuilder, x: Value) -> Value:
    return b.binary("lt", b.binary("copysign", b.number(1.0), x), b.number(0.0))


def _off_by_one_divisor(b: GraphBuilder, x: Value, y: Value) -> tuple[Value, Value]:
    """fmod(x, y), and whether it has not the sign of y, as a remainder of a floor has."""
    zero, rest = b.number(0.0), b.binary("fmod", x, y)
    apart = b.binary("ne", b.binary("lt", y, zero), b.binary("lt", rest, zero))
    return rest, b.binary("and", b.binary("ne", rest, zero), apart)


def _remainder(b: GraphBuilder, x: Value, y: Value) -> Value:
    rest, off = _off_by_one_divisor(b, x, y)
    return b.combine("where", [off, b.binary("add", rest, y), rest])


def _floor_divided(b: GraphBuilder, x: Value, y: Value) -> Value:
    """Python's x // y: floor(x / y) rounds where the quotient of what is divisible does not."""
    zero, one = b.number(0.0), b.number(1.0)
    quotient = b.binary("div", x, y)
    rest, off = _off_by_one_divisor(b, x, y)
    whole = b.binary("div", b.binary("sub", x, rest), y)
    whole = b.combine("where", [off, b.binary("sub", whole, one), whole])
    floor = b.combine("floor", [whole])
    far = b.binary("gt", b.binary("sub", whole, floor), b.number(0.5))
    floor = b.combine("where", [far, b.binary("add", floor, one), floor])
    signed = b.binary("copysign", zero, quotient)
    found = b.combine("where", [b.binary("ne", whole, zero), floor, signed])
    return b.combine("where", [b.binary("eq", y, zero), quotient, found])


COMPOSED: dict[str, Callable[..., Value]] = {
    "relu": lambda b, x: b.binary("maximum", x, b.number(0.0)),
    "square": lambda b, x: b.binary("mul", x, x),
    "sigmoid": _sigmoid,
    "isinf": _is_infinite,
    "signbit": _signbit,
    "fmax": _but_for_nan("maximum"),
    "fmin": _but_for_nan("minimum"),
    "remainder": _remainder,
    "div_floor": _floor_divided,
    "div_trunc": lambda b, x, y: b.combine("trunc", [b.binary("div", x, y)]),
}
"""By name of the operation, with the rounding mode of a division."""
