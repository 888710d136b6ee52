"""Elementwise sums of integers by buckets of neighbouring places."""

from __future__ import annotations

from tilewright.device import DeviceSpec
from tilewright.impls._buckets import ReducedBuckets
from tilewright.impls._scatter import ScatterProblem, scatter_problem
from tilewright.op import Workload


class BucketIntegers(ReducedBuckets):
    """For more places than fit in shared memory; an entry takes 8 bytes, or 12 of int64."""

    name, op = "bucket_integers", ("scatter_add", "scatter_reduce")
    files = ("added.cuh", "whole_numbers.cuh", "summed_slots.cuh", "bucket_reduced.cu")

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        p = scatter_problem(w)
        if isinstance(p, ScatterProblem):
            if p.reduce != "sum":
                return f"{p.reduce} is no sum"
            if not p.dtype.startswith("i"):
                return f"{p.dtype} is no integer"
        return super().unsupported(w, device)

    def suits(self, w: Workload, device: DeviceSpec) -> bool:
        """Only by a record: one size was timed (H200, 3d3c0d0, a million int64: 25.3 us, torch
        26.6), and nothing says from which on it pays."""
        return False
