"""Sums of floats as sums of integers: what kernels/scatter/integers.cuh can take."""

from __future__ import annotations

from tilewright.device import DeviceSpec

MARK_BYTES, SUM_BYTES = 4, 8
DTYPES_SUMMED = ("f16", "bf16", "f32")
MOST_TERMS = 2**20
"""Of a place. Where it takes b bits to count them, each is rounded to 2^(b - 62) of the largest; so
many are together off by 2^-22 of the largest at most, and by far less as a rule."""

TERMS_FOR_TABLES = 16
"""Of a place, from which on it pays untuned that each block has a table of all places."""


def table_bytes(places: int) -> int:
    """Of shared memory."""
    return (MARK_BYTES + SUM_BYTES) * places


def takes_tables(terms: int, places: int, device: DeviceSpec) -> bool:
    """Whether so many terms in all are best added in tables of so many places in shared memory."""
    fits = table_bytes(places) <= device.shared_bytes_per_block
    return fits and terms >= TERMS_FOR_TABLES * places


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
