"""The greatest or the least element of each place, by buckets of neighbouring places."""

from __future__ import annotations

from typing import Any

from tilewright.device import DeviceSpec
from tilewright.impls.indices._indexed import REDUCE
from tilewright.impls.indices.elements._buckets import ReducedBuckets, has_large_tiles, is_sparse
from tilewright.impls.indices.elements._scatter import (
    ScatterProblem,
    scatter_problem,
    served_scatter,
)
from tilewright.op import Workload

MEASURED = 100_000 * 64
"""Elements of the one workload that was timed: see `suits`."""


class BucketExtremes(ReducedBuckets):
    """For more places than fit in shared memory; an entry takes 8 bytes, or 12 of 64 bits."""

    name, op = "bucket_extremes", "scatter_reduce"
    yields_to = ("scatter_tiled", "scatter_serial")
    files = ("elements/added.cuh", "elements/extremes.cuh", "elements/bucket_reduced.cu")

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        p = scatter_problem(w)
        if isinstance(p, ScatterProblem) and p.reduce not in ("amax", "amin"):
            return f"{p.reduce} is neither amax nor amin"
        return super().unsupported(w, device)

    def suits(self, w: Workload, device: DeviceSpec) -> bool:
        """From the one size on that was timed: H200, commit 3d3c0d0, 100000 x 64 into 30000 x 64 by
        uniform indices 89 us, by the slowest of six distributions 110, by scatter_sorted 453 and
        459."""
        p = served_scatter(w)
        large = has_large_tiles(p) and p.positions >= MEASURED
        return large and not (p.in_place and is_sparse(p, device))

    def more_macros(self, p: ScatterProblem, c: Any) -> dict[str, int | str]:
        return {**super().more_macros(p, c), "REDUCE": REDUCE[p.reduce]}
