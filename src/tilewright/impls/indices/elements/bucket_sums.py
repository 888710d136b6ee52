"""Elementwise sums of floats by buckets of neighbouring places, as sums of integers."""

from __future__ import annotations

from typing import Any

from tilewright.device import DeviceSpec
from tilewright.impls.indices._integers import in_tables, not_by_integers, table_bytes
from tilewright.impls.indices.elements._buckets import Buckets, Sizes, sizes, worth_buckets
from tilewright.impls.indices.elements._scatter import (
    ScatterProblem,
    scatter_problem,
    served_scatter,
)
from tilewright.op import Workload


class BucketSums(Buckets):
    """For more places than fit in shared memory or stay in the L2 cache."""

    name, op = "bucket_sums", ("scatter_add", "scatter_reduce", "index_add")
    files = ("elements/added.cuh", "integers.cuh", "elements/bucket_sums.cu")
    settle_registers, joined_zeros = 64, 0
    yields_to = ("scatter_tiled",)

    def sizes(self, w: Workload, p: ScatterProblem, c: Any) -> Sizes:
        return sizes(p, c, carried=True, slot_words=table_bytes(1, p.dtype) // 4, joined_bytes=16)

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        p = scatter_problem(w)
        if isinstance(p, ScatterProblem):
            if not p.include:
                return "the old element is no term"
            if reason := not_by_integers(p.dtype, p.reduce):
                return reason
        return super().unsupported(w, device)

    def suits(self, w: Workload, device: DeviceSpec) -> bool:
        p = served_scatter(w)
        tables = in_tables(w["index"].numel, p.length, w.main.numel, p.dtype, device)
        return worth_buckets(w, device) and not tables

    def settle(self, p: ScatterProblem) -> tuple[str, tuple[float | str, ...]]:
        return "PPPPPPd", ("x", "out", "entries", "runs", "common", "done", p.alpha)

    def more_macros(self, p: ScatterProblem, c: Any) -> dict[str, int | str]:
        return {**super().more_macros(p, c), "SCALED": p.alpha != 1}
