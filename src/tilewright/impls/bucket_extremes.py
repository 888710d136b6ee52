"""The greatest or the least element of each place, by buckets of neighbouring places."""

from __future__ import annotations

from typing import Any

from tilewright.device import DeviceSpec
from tilewright.impls._buckets import Buckets, Sizes, sizes
from tilewright.impls._indexed import REDUCE
from tilewright.impls._scatter import ScatterProblem, scatter_problem
from tilewright.op import Workload


class BucketExtremes(Buckets):
    """For more places than fit in shared memory; an entry takes 8 bytes, or 12 of 64 bits."""

    name, op = "bucket_extremes", "scatter_reduce"
    files = ("added.cuh", "extremes.cuh", "bucket_reduced.cu")
    settle_registers, joined_zeros = 64, 2

    def sizes(self, w: Workload, p: ScatterProblem, c: Any) -> Sizes:
        return sizes(p, c, carried=True, slot_words=3, joined_bytes=16)

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
        own = {"INCLUDE": p.include, "REDUCE": REDUCE[p.reduce]}
        return {**super().more_macros(p, c), **own}

    def settle(self, p: ScatterProblem) -> tuple[str, tuple[float | str, ...]]:
        return "PPPPPP", ("x", "out", "entries", "runs", "common", "done")
