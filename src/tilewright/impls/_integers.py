"""Sums of floats as sums of integers: what kernels/scatter/integers.cuh can take."""

from __future__ import annotations

MARK_BYTES, SUM_BYTES = 4, 8
DTYPES_SUMMED = ("f16", "bf16", "f32")
MOST_TERMS = 2**20
"""Of a place. Where it takes b bits to count them, each is rounded to 2^(b - 62) of the largest; so
many are together off by 2^-22 of the largest at most, and by far less as a rule."""


def unit_bits(terms: int) -> int:
    """A term of a place with so many is below two to the power of this."""
    return 62 - terms.bit_length()


def not_by_integers(dtype: str, reduce: str, terms: int) -> str | None:
    """Why such sums are none of integers, or None."""
    if reduce != "sum":
        return f"{reduce} is no sum"
    if dtype not in DTYPES_SUMMED:
        return f"{dtype} is none of {', '.join(DTYPES_SUMMED)}, whose terms 64 bits hold"
    if terms > MOST_TERMS:
        return f"up to {terms} terms of a place, more than {MOST_TERMS}, would lose bits"
    return None
