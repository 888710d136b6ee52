"""Numbers in emitted text."""

from __future__ import annotations

import ctypes
import math


def literal(value: float, dtype: str, nan: str, infinity: str) -> str:
    """A floating constant as text that is read exactly, rounded once to what registers hold: fp64
    of that dtype, else fp32. Decimals of an fp64 number, read as fp32, may be another than it
    rounds to.

    Args:
        nan, infinity: as the target spells them.
    """
    kind = "double" if dtype == "f64" else "float"
    value = value if dtype == "f64" else ctypes.c_float(value).value
    if math.isnan(value):
        return f"({kind}){nan}"
    if math.isinf(value):
        return f"({kind}){'-' if value < 0 else ''}{infinity}"
    return f"({kind}){value.hex()}"
