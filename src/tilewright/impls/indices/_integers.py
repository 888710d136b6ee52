"""Sums of floats as sums of integers: what kernels/indices/integers.cuh can take."""

from __future__ import annotations

from tilewright.device import DeviceSpec
from tilewright.impls.indices._indexed import most_bytes

MARK_BYTES = 4
SUM_BYTES = {"f16": 8, "bf16": 8, "f32": 8, "f64": 16}
"""Of a place, by the dtype of the terms: one integer of 64 bits, or two, of which the second takes
what is below the first's unit."""
MOST_TERMS = 2**20
"""Of a place. Where it takes b bits to count them, each is rounded to 2^(b - 62) of the largest; so
many are together off by 2^-21 of the largest at most, by far less as a rule, and of two integers by
2^-62. Blocks of bucket_sums have lists of a few for each slot, and units for as many."""
MOST_ELEMENTS_UNTUNED, MOST_TERMS_UNTUNED = 2**21, 2**15
"""Of rows, or without tables of blocks: H200, commit 693d132, 64 us for four million, rows_sorted
33 us. Terms of one place queue up. A million of fp64: 63 us, rows_sorted 114 us (48ee703)."""
FEW, LONG_FOR_INTEGERS = 2**12, 64
"""Elements, and positions of a column. H200, commit 4f86109, uniform indices and the slowest of six
distributions: 64 positions of each of 64 columns into 64 places 11.3 and 11.5 us, by scatter_tiled
14.8 and 15.1, by scatter_serial 17.4 and 38.0; into 4 places 10.4 and 11.1, 12.8 and 13.8, 24.1 and
38.4; fp64 10.6 and 11.9, 13.8 and 14.6, 16.4 and 37.3."""
WORKSPACE_PER_ELEMENT = 48
"""Bytes for each element of src."""
MOST_BYTES = 2**30
"""Whatever is added: a table many times as large as a cache loses to a sort, and leaves no memory
to others (of a vocabulary of 128256 x 4096 it would be 6.3 GB)."""

TERMS_FOR_TABLES, TERMS_FOR_FEW_TABLES = 64, 32
"""Of a place, from which on it pays untuned that each block has a table of all places: as many
blocks add theirs up; and of up to `FEW_FOR_TABLES` elements, which are fewer blocks'."""
FEW_FOR_TABLES = 2**14
"""32 of each of 512 places take 11.3 us so and 13.5 without, 16 of 1024 11.6 and 12.0, 8 of 2048
13.0 and 10.9 (H100, scatter_thresholds, 1d8565a). That of more elements 64 are enough is a
guess."""


def table_bytes(places: int, dtype: str) -> int:
    """Of marks and integers."""
    return (MARK_BYTES + SUM_BYTES[dtype]) * places


def too_large(places: int, elements: int, dtype: str) -> str | None:
    """Why so many elements are not added in a table of all places in device memory, or None."""
    allowed = most_bytes(WORKSPACE_PER_ELEMENT, elements)
    if (taken := table_bytes(places, dtype)) > allowed:
        return f"{taken} bytes exceed {WORKSPACE_PER_ELEMENT} for each of {elements} elements"
    if taken > MOST_BYTES:
        return f"a table of {taken} bytes exceeds {MOST_BYTES}, as large as it may be"
    return None


def takes_tables(terms: int, places: int, dtype: str, device: DeviceSpec) -> bool:
    """Whether so many terms in all are best added in tables of so many places in shared memory."""
    fits = table_bytes(places, dtype) <= device.shared_bytes_per_block
    least = TERMS_FOR_FEW_TABLES if terms <= FEW_FOR_TABLES else TERMS_FOR_TABLES
    return fits and terms >= least * places


def unit_bits(terms: int) -> int:
    """A term of a place with so many is below two to the power of this."""
    return 62 - terms.bit_length()


def few_enough(elements: int, terms: int, places: int, dtype: str, device: DeviceSpec) -> bool:
    """Whether untuned so many elements, `terms` of which may share one of the places, go to them
    by atomic operations."""
    if elements <= MOST_ELEMENTS_UNTUNED and terms <= MOST_TERMS_UNTUNED:
        return True
    return in_tables(elements, terms, places, dtype, device)


def few_in_long_columns(elements: int, length: int) -> bool:
    """Whether untuned so few elements of several columns are added by atomic operations sooner than
    by threads that go through the positions of a column."""
    return elements <= FEW and length >= LONG_FOR_INTEGERS


def in_tables(elements: int, terms: int, places: int, dtype: str, device: DeviceSpec) -> bool:
    """Whether that is because blocks have tables of all places."""
    return terms <= MOST_TERMS and takes_tables(elements, places, dtype, device)


def not_by_integers(dtype: str, reduce: str, terms: int = 1) -> str | None:
    """Why such sums are none of integers, or None."""
    if reduce != "sum":
        return f"{reduce} is no sum"
    if dtype not in SUM_BYTES:
        return f"{dtype} is none of {', '.join(SUM_BYTES)}"
    if terms > MOST_TERMS:
        return f"up to {terms} terms of a place, more than {MOST_TERMS}, would lose bits"
    return None
