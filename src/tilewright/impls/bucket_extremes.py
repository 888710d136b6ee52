"""The greatest or the least element of each place, by buckets of neighbouring places."""

from __future__ import annotations

from typing import Any

from tilewright.device import DeviceSpec
from tilewright.impls._buckets import ReducedBuckets
from tilewright.impls._indexed import REDUCE
from tilewright.impls._scatter import ScatterProblem, scatter_problem
from tilewright.op import Workload


class BucketExtremes(ReducedBuckets):
    """For more places than fit in shared memory; an entry takes 8 bytes, or 12 of 64 bits."""

    name, op = "bucket_extremes", "scatter_reduce"
    files = ("added.cuh", "extremes.cuh", "bucket_reduced.cu")

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        p = scatter_problem(w)
        if isinstance(p, ScatterProblem) and p.reduce not in ("amax", "amin"):
            return f"{p.reduce} is neither amax nor amin"
        return super().unsupported(w, device)

    def suits(self, w: Workload, device: DeviceSpec) -> bool:
        """Only by a record: one size was timed (H200, cc32358, 100000 x 64 into 30000 x 64: 83 us,
        torch 204), and nothing says from which on it pays."""
        return False

    def more_macros(self, p: ScatterProblem, c: Any) -> dict[str, int | str]:
        return {**super().more_macros(p, c), "REDUCE": REDUCE[p.reduce]}
