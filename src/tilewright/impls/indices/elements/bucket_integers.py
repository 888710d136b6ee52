"""Elementwise sums of integers by buckets of neighbouring places."""

from __future__ import annotations

from tilewright.device import DeviceSpec
from tilewright.impls.indices.elements._buckets import ReducedBuckets, has_large_tiles, is_sparse
from tilewright.impls.indices.elements._scatter import (
    ScatterProblem,
    scatter_problem,
    served_scatter,
)
from tilewright.op import Workload

MEASURED = 1_000_000
"""Elements of the one workload that was timed: see `suits`."""


class BucketIntegers(ReducedBuckets):
    """For more places than fit in shared memory; an entry takes 8 bytes, or 12 of int64."""

    name, op = "bucket_integers", ("scatter_add", "scatter_reduce")
    yields_to = ("scatter_tiled", "scatter_serial")
    files = (
        "elements/added.cuh",
        "elements/whole_numbers.cuh",
        "elements/summed_slots.cuh",
        "elements/bucket_reduced.cu",
    )

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        p = scatter_problem(w)
        if isinstance(p, ScatterProblem):
            if p.reduce != "sum":
                return f"{p.reduce} is no sum"
            if not p.dtype.startswith("i"):
                return f"{p.dtype} is no integer"
        return super().unsupported(w, device)

    def suits(self, w: Workload, device: DeviceSpec) -> bool:
        """From the one size on that was timed: H200, commit 3d3c0d0, a million int64 by uniform
        indices 25 us, by the slowest of six distributions 45, by scatter_sorted 116 and 125."""
        p = served_scatter(w)
        large = has_large_tiles(p) and p.positions >= MEASURED
        return large and not (p.in_place and is_sparse(p, device))
