"""Rows reduced into rows on a GPU in one launch, whose blocks have the places dealt out to them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tilewright.device import DeviceSpec
from tilewright.fusion.extents import reciprocal
from tilewright.impls.indices._indexed import Launch, Workspace, sum_bytes
from tilewright.impls.indices.rows._rows import (
    OPERATORS,
    RowProblem,
    across,
    items,
    misfit,
    named_old,
    named_source,
    served_rows,
    vectors,
)
from tilewright.impls.indices.rows._rows_kernels import RowKernels
from tilewright.op import Workload
from tilewright.space import ConfigSpace, param

MOST_BLOCK_THREADS = 512
"""Each has up to 128 registers."""
MOST_ITEMS = 32
"""Indices of a thread."""
MOST_INDICES = MOST_ITEMS * MOST_BLOCK_THREADS
MOST_THREADS = 1024
"""Of an SM: with 64 registers each, as many run at once."""
MOST_IN_FLIGHT = 32
"""Elements of a thread."""
MOST_PLACES = 2**16
"""Of a block: 16 bits of an entry."""
NARROWEST_UNTUNED, SHARE_OF_L2_UNTUNED = 64, 6
"""Bytes of a row; and all terms take at most one part of the L2 cache in so many: of an H200's 10.5
MB, where 8.4 MB were the most that was timed (see `suits`)."""
FEW_INDICES = 2048
"""Of which each of 256 threads has eight; untuned, more take all threads that a block may have: 512
indices are best by 256 threads (H200, rows_small), 4096 by 512 (scatter_crossover)."""


class RowsDealt(RowKernels):
    """For some thousand indices: one launch, no workspace.

    A block owns every so many-th place, and finds and sorts all positions that name one of its own.
    The same bits in every run: the order of a sum depends on the indices alone.
    """

    name, op = "rows_dealt", OPERATORS
    files = "entry.cuh", "rows/owned_rows.cuh", "rows/rows_dealt.cu"
    entry = "reduce_rows"
    yields_to = ("rows_bins", "rows_balanced")

    @dataclass(frozen=True)
    class Config:
        block_threads: int = param(256, MOST_BLOCK_THREADS)
        blocks: int = param(1, 2, 4)  # of an SM; each reads the whole index
        lanes: int = param(4, 8, 16, 32)  # threads of a row
        vec: int = param(1, 2, 4, 8)  # elements of one access
        unrolled: int = param(2, 4, 8)  # rows in flight of one group of lanes

    def suits(self, w: Workload, device: DeviceSpec) -> bool:
        """Where one block may be left with all terms at no great loss. H200, commit 1ad094a,
        2026-11-22, uniform and equal indices: 1000 rows of 128 fp32 7.8 and 15.6 us, by
        integer_sums 10.9 and 22.8; 16384 of 64 18.1 and 124, 20.5 and 163; 4096 of 1024 bf16 14.8
        and 50, by rows_sorted 33 and 32."""
        p = served_rows(w)
        row_bytes = p.columns * w.main.itemsize
        few = p.outer * p.count * row_bytes <= device.l2_bytes // SHARE_OF_L2_UNTUNED
        return row_bytes >= NARROWEST_UNTUNED and few

    def space(self, w: Workload, device: DeviceSpec) -> ConfigSpace[Any]:
        p = served_rows(w)

        def fits(c: RowsDealt.Config) -> str | None:
            if reason := misfit(p, c):
                return reason
            if p.count > MOST_ITEMS * c.block_threads:
                return f"{p.count} indices are more than {MOST_ITEMS} for each thread"
            if c.blocks * c.block_threads > MOST_THREADS:
                return f"{c.blocks * c.block_threads} threads of an SM, more than {MOST_THREADS}"
            if c.unrolled * c.vec > MOST_IN_FLIGHT:
                return f"{c.unrolled} accesses of {c.vec} elements would spill"
            if (most := places_of_block(p, c, device)) > MOST_PLACES:
                return f"{most} places of a block exceed {MOST_PLACES}"
            if (taken := shared_bytes(p, c, device)) > device.shared_bytes_per_block:
                return f"{taken} bytes exceed {device.shared_bytes_per_block}, which a block has"
            return None

        return ConfigSpace(self.Config, {"vec": vectors(p, w.main.itemsize)}, fits)

    def refused(self, p: RowProblem, w: Workload) -> str | None:
        if p.count > MOST_INDICES:
            return f"each block would read {p.count} indices, more than {MOST_INDICES}"
        return None

    def heuristic(self, w: Workload, device: DeviceSpec) -> Any:
        # Two lines of memory at once; wider pieces of rows leave a place that is named by all to
        # fewer blocks.
        p = served_rows(w)
        wide = 256 // w.main.itemsize

        def merit(c: RowsDealt.Config) -> tuple[float, ...]:
            return (
                c.vec,
                -abs(math.log2(c.lanes * c.vec / min(wide, p.columns))),
                (c.block_threads == 256) == (p.count <= FEW_INDICES),
                -abs(c.blocks * c.block_threads - MOST_BLOCK_THREADS),
                -abs(c.unrolled - 4),
            )

        return max(self.space(w, device), key=merit)

    def macros(self, p: RowProblem, c: Any) -> dict[str, int | str]:
        return {
            **p.meaning,
            "IN_ORDER": p.in_order,
            "FILLED": p.fill is not None,
            "THREADS": c.block_threads,
            "BLOCKS": MOST_BLOCK_THREADS // c.block_threads,
            "ITEMS": items(p, c.block_threads),
            "LANES": c.lanes,
            "VEC": c.vec,
            "UNROLLED": c.unrolled,
        }

    def launches(
        self, w: Workload, p: RowProblem, c: Any, device: DeviceSpec
    ) -> tuple[list[Launch], Workspace]:
        owners = owners_of(p, c, device)
        tensors = ("index", named_source(w), named_old(p), "out")
        sizes = (p.count, p.places, p.columns, places_of_block(p, c, device), *reciprocal(owners))
        strides = (*p.source, *(p.old or (0, 0)), *p.out)
        launch = Launch(
            "reduce_rows",
            "PPPPiiiiqiqqqqqqqdP",
            (owners, across(p, c), p.outer),
            c.block_threads,
            shared_bytes(p, c, device),
            (*tensors, *sizes, *strides, p.skipped, p.alpha, "fault"),
        )
        return [launch], Workspace()


def owners_of(p: RowProblem, c: RowsDealt.Config, device: DeviceSpec) -> int:
    """Blocks that places are dealt out to, for each piece of a row: as many as run at once."""
    return min(p.places, max(1, c.blocks * device.sms // (across(p, c) * p.outer)))


def places_of_block(p: RowProblem, c: RowsDealt.Config, device: DeviceSpec) -> int:
    return math.ceil(p.places / owners_of(p, c, device))


def shared_bytes(p: RowProblem, c: RowsDealt.Config, device: DeviceSpec) -> int:
    """A sum of each thread, the entries, and for each place its first and what warps have seen."""
    most, warps = places_of_block(p, c, device), c.block_threads // 32
    sums = c.block_threads * c.vec * sum_bytes(p.dtype)
    return (
        sums
        + 4 * (c.block_threads * items(p, c.block_threads) + most + 1 + warps)
        + 2 * warps * most
    )
