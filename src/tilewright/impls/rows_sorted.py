"""Rows reduced into rows on a GPU: a counting sort of the indices, then sums over sorted runs."""

from __future__ import annotations

from tilewright.impls._rows import OPERATORS
from tilewright.impls._sorted_rows import SortedRows


class RowsSorted(SortedRows):
    """For any indices, however often they repeat."""

    name, op = "rows_sorted", OPERATORS
