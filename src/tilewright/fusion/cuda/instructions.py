"""What steps cost the lanes of an SM."""

from __future__ import annotations

SPECIAL = (
    *("exp", "quick_exp", "shifted_exp", "tanh", "erf", "erfc", "pow", "sin", "cos", "tan"),
    *("asin", "acos", "atan", "atan2", "sinh", "cosh", "asinh", "acosh", "atanh", "fmod"),
)
"""Steps that take the units for special functions, a quarter as wide as those for arithmetic."""
BRANCHING = ("div", "reciprocal", "sqrt", "pow", "fmod", "atan2", "hypot", "sin", "cos", "tan")
"""Steps that leave their way for numbers out of the ordinary: the compiler orders none across."""
_SEVERAL = {
    **dict.fromkeys(("quick_exp", "shifted_exp"), 3),
    **dict.fromkeys(("exp", "reciprocal", "sqrt", "div"), 10),
    **dict.fromkeys(("tanh", "log", "log1p", "expm1", "sinh", "asin", "acos", "atan"), 20),
    **dict.fromkeys(("erf", "erfc", "acosh", "asinh", "atanh", "hypot"), 35),
    **dict.fromkeys(("sin", "cos", "tan", "cosh", "pow", "fmod", "atan2"), 60),
}


def of(op: str) -> int:
    """How many a step in fp32 takes, about, as compiled for sm_90 and of ordinary numbers."""
    return _SEVERAL.get(op, 1)
