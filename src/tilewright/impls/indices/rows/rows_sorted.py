"""Rows reduced into rows on a GPU: a counting sort of the indices, then sums over sorted runs."""

from __future__ import annotations

from tilewright.device import DeviceSpec
from tilewright.impl import IMPLS
from tilewright.impls.indices.rows._counting_sorted_rows import CountingSortedRows
from tilewright.impls.indices.rows._rows import OPERATORS, sorts_positions
from tilewright.op import Workload


class RowsSorted(CountingSortedRows):
    """For any indices, however often they repeat."""

    name, op = "rows_sorted", OPERATORS
    any_shape = True
    yields_to = ("rows_bins", "rows_balanced", "rows_dealt", "rows_serial", "integer_sums")

    def suits(self, w: Workload, device: DeviceSpec) -> bool:
        p = self.served(w)
        # rows_serial takes no batches with an index of their own each.
        if p.batch and IMPLS["scatter_serial"].takes_untuned(w, device):
            return False
        if p.columns > 1 or w.op == "embedding_backward":
            return True
        if w["x"].rank > 1:
            return not w.op.startswith("scatter")  # else scatter_sorted
        first = (IMPLS[name] for name in IMPLS["scatter_sorted"].yields_to)
        copied = p.places if p.fill else 0
        of_positions = sorts_positions(p.count, copied, p.dtype, p.reduce)
        return of_positions and not any(i.claims(w, device) for i in first)
