"""Elementwise reductions on a GPU: a counting sort of places, then sums over sorted runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tilewright.device import DeviceSpec
from tilewright.impl import IMPLS
from tilewright.impls.indices._indexed import Launch, sum_bytes
from tilewright.impls.indices._sort import CountingSort
from tilewright.impls.indices.elements._elements import OPERATORS, ElementProblem, element_problem
from tilewright.impls.indices.rows._counting_sorted_rows import CountingSortedRows
from tilewright.impls.indices.rows._rows import RowProblem, row_problem
from tilewright.op import Workload


class ScatterSorted(CountingSortedRows):
    """For any indices and any number of places; index and src may be smaller than x and strided.

    Elements of up to four bytes are sorted themselves, in place of their positions: src is read in
    its order, and the sums read nothing else.
    """

    name, op = "scatter_sorted", OPERATORS
    files = (
        "entry.cuh",
        "elements/elements.cuh",
        "elements/elements_sorted.cuh",
        *CountingSortedRows.files[1:],
    )
    any_shape = True
    yields_to = (
        *("scatter_tiled", "scatter_serial"),
        *("bucket_sums", "bucket_products", "bucket_extremes", "bucket_integers"),
        "integer_sums",
    )

    def suits(self, w: Workload, device: DeviceSpec) -> bool:
        p = row_problem(w)
        one_dim = w["x"].rank == 1 and isinstance(p, RowProblem)
        return not (one_dim and IMPLS["rows_sorted"].claims(w, device))

    def problem(self, w: Workload) -> ElementProblem | str:
        return element_problem(w)

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        p = row_problem(w)
        if isinstance(p, RowProblem) and p.columns > 1:
            return "its index sends whole rows, which rows_sorted moves as such"
        return super().unsupported(w, device)

    def carries(self, p: RowProblem) -> bool:
        return sum_bytes(p.dtype) <= 4

    def marks(self, p: RowProblem) -> bool:
        return False  # neighbours are copied together, which is less than to mark and look at each

    def filled(self, w: Workload, p: RowProblem, rows: Launch, device: DeviceSpec) -> Launch:
        assert isinstance(p, ElementProblem)
        return p.copied(device)

    def sort(self, p: RowProblem, c: Any) -> CountingSort:
        assert isinstance(p, ElementProblem)
        return replace(super().sort(p, c), more=p.arguments)

    def sort_macros(self, p: RowProblem, c: Any) -> dict[str, int | str]:
        assert isinstance(p, ElementProblem)
        return {**super().sort_macros(p, c), **p.macros}
