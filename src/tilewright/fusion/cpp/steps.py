"""One step of a graph as a C++ expression, of scalars or of vectors alike."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.fusion.cpp.entry import C_TYPES
from tilewright.fusion.exponentials import OF_DIFFERENCES
from tilewright.fusion.ir import Node
from tilewright.fusion.literals import literal
from tilewright.tensor_spec import HALVES

_OPERATORS = {
    **{"add": "+", "sub": "-", "mul": "*", "div": "/"},
    **{"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="},
}
_EXPRESSIONS = {
    "neg": "-{0}",
    "rsqrt": "1 / square_root({0})",
    "reciprocal": "1 / {0}",
    **dict.fromkeys(OF_DIFFERENCES, "exponential({0} - {1})"),
    "isnan": "{0} != {0}",
}
_FUNCTIONS = {
    **{"pow": "power", "maximum": "maximum", "minimum": "minimum", "and": "both", "or": "either"},
    **{"not": "negated", "where": "where", "abs": "absolute", "sqrt": "square_root"},
    **{"exp": "exponential", "exp2": "exponential2", "expm1": "exponential_m1"},
    "quick_exp": "exponential",
    **{"log": "logarithm", "log2": "logarithm2", "log1p": "logarithm1p"},
    **{"tanh": "hyperbolic_tangent", "erf": "error_function", "sin": "sine", "cos": "cosine"},
    **{"floor": "rounded_down", "ceil": "rounded_up", "round": "rounded_even"},
    **{"trunc": "truncated", "sign": "sign_of", "log10": "logarithm10"},
    **{"erfc": "complementary_error_function", "hypot": "hypotenuse", "copysign": "with_sign_of"},
    **{"tan": "tangent", "asin": "arc_sine", "acos": "arc_cosine", "atan": "arc_tangent"},
    **{"sinh": "hyperbolic_sine", "cosh": "hyperbolic_cosine", "atan2": "arc_tangent_of"},
    **{"asinh": "area_sine", "acosh": "area_cosine", "atanh": "area_tangent"},
    "fmod": "remainder_of_truncated",
}


def expression(n: Node, args: Sequence[str], from_mask: bool) -> str:
    """The step on its operands' names; `from_mask`: a cast of a vector of booleans."""
    if n.op == "cast":
        return f"{'cast_mask' if from_mask else 'cast'}<{C_TYPES[n.dtype]}>({args[0]})"
    if n.op == "broadcast":
        return args[0]
    if n.op in _OPERATORS:
        value = f"{args[0]} {_OPERATORS[n.op]} {args[1]}"
    elif n.op in _EXPRESSIONS:
        value = _EXPRESSIONS[n.op].format(*args)
    else:
        value = f"{_FUNCTIONS[n.op]}({', '.join(args)})"
    return f"rounded<{n.dtype}>({value})" if n.dtype in HALVES else value


def constant(n: Node) -> str:
    """A constant of a graph as exact C++ text."""
    kind = C_TYPES[n.dtype]
    if n.dtype == "bool":
        return "true" if n.attr else "false"
    if n.dtype in ("i32", "i64"):
        return f"({kind}){int(n.attr)}"
    return literal(float(n.attr), n.dtype, '__builtin_nan("")', "__builtin_inf()")
