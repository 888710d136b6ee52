"""Elementwise products of floats by buckets of neighbouring places, as sums of logarithms."""

from __future__ import annotations

from typing import Any

from tilewright.device import DeviceSpec
from tilewright.impls.indices.elements._buckets import (
    MIN_TILE,
    ReducedBuckets,
    has_large_tiles,
    is_short,
    is_sparse,
)
from tilewright.impls.indices.elements._scatter import (
    ScatterProblem,
    scatter_problem,
    served_scatter,
)
from tilewright.op import Workload

MOST_FACTORS = 2**22
"""Of a place. Where it takes b bits to count them, logarithms are rounded to 2^(b - 55), so that
each factor is off by 2^-32 of itself at most. So products of integers that fp32 holds are exact."""


def unit_bits(factors: int) -> int:
    """Logarithms of so many floats, each below 2^8, are together below two to 62 less this."""
    return 54 - factors.bit_length()


class BucketProducts(ReducedBuckets):
    """For more places than fit in shared memory; an entry takes 8 bytes."""

    name, op = "bucket_products", "scatter_reduce"
    files = (
        *("elements/added.cuh", "integers.cuh", "elements/logarithms.cuh"),
        *("elements/summed_slots.cuh", "elements/bucket_reduced.cu"),
    )
    yields_to = ("scatter_tiled", "scatter_serial")

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        p = scatter_problem(w)
        if isinstance(p, ScatterProblem):
            if p.reduce != "prod":
                return f"{p.reduce} is no product"
            if p.dtype.startswith("i") or not is_short(p.dtype):
                return f"{p.dtype} is no float of up to 32 bits"
            if p.length > MOST_FACTORS:
                return f"up to {p.length} factors of a place, more than {MOST_FACTORS}"
        return super().unsupported(w, device)

    def suits(self, w: Workload, device: DeviceSpec) -> bool:
        """Of 6.4 million elements 117 us, scatter_sorted 431 (H200, commit 3d3c0d0); of 8192 into
        as many places 11.1 us and 59.5, of 262144 17.3 and 103 (H100, scatter_thresholds,
        1d8565a)."""
        p = served_scatter(w)
        return has_large_tiles(p) and p.positions >= MIN_TILE and not is_sparse(p, device)

    def more_macros(self, p: ScatterProblem, c: Any) -> dict[str, int | str]:
        return {**super().more_macros(p, c), "UNIT_BITS": unit_bits(p.length)}
