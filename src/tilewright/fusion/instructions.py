"""What steps cost the lanes of an SM."""

from __future__ import annotations

from tilewright.fusion.ir import Node

SPECIAL = (
    *("exp", "quick_exp", "raised_exp", "shifted_exp", "tanh", "erf", "erfc", "pow"),
    *("sin", "cos", "tan"),
    *("asin", "acos", "atan", "atan2", "sinh", "cosh", "asinh", "acosh", "atanh", "fmod"),
)
"""Steps that take the units for special functions, a quarter as wide as those for arithmetic."""
_SEVERAL = {
    **dict.fromkeys(("quick_exp", "raised_exp", "shifted_exp", "exp2"), 3),
    **dict.fromkeys(("exp", "reciprocal", "sqrt", "div"), 10),
    **dict.fromkeys(("tanh", "log", "log2", "log10", "log1p", "expm1", "sinh"), 20),
    **dict.fromkeys(("asin", "acos", "atan"), 20),
    **dict.fromkeys(("erf", "erfc", "acosh", "asinh", "atanh", "hypot"), 35),
    **dict.fromkeys(("sin", "cos", "tan", "cosh", "pow", "fmod", "atan2"), 60),
}


def of(n: Node) -> int:
    """How many a step takes, about, as compiled for sm_90 and of ordinary numbers; in fp64 it takes
    at least twice as many, and registers."""
    return _SEVERAL.get(n.op, 1) * (2 if n.dtype == "f64" else 1)
