"""Rows reduced into rows on a GPU in one launch, whose blocks have equally many of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tilewright.compile.counters import COUNTERS
from tilewright.device import DeviceSpec
from tilewright.impl import IMPLS
from tilewright.impls.indices._indexed import (
    WORKSPACE_PER_INDEX,
    Launch,
    Workspace,
    most_bytes,
    sum_bytes,
)
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

MOST_THREADS, WITH_MOST_REGISTERS = 1024, 512
"""Of an SM: with 64 registers each, and with 128."""
MOST_ITEMS = {512: 64, 1024: 32}
"""Indices of a thread, by threads of an SM; their places take half as many registers."""
MOST_IN_FLIGHT = {(512, 4): 32, (512, 8): 8, (1024, 4): 8, (1024, 8): 2}
"""Elements of a thread, by threads of an SM and bytes of a sum."""
MOST_INDICES, MOST_PLACES = 2**15, 2**16 - 1
"""A key has 16 bits for a place, of which one number stands for none."""
LEAST_WHOLE, SHARE_WHOLE = 16, 4
"""Positions of a run that is never cut: some, and one of a block's in so many."""
RANGE_WORDS = 7
FEW_UNTUNED = 1024
"""Indices that are rows_dealt's untuned: see `suits`."""
FEW_INDICES = 4096
"""Untuned, more take all threads that a block may have: 4096 are best by 512, 16384 by 1024 (H200,
rows_small)."""


class RowsBalanced(RowKernels):
    """For some thousand indices however often they repeat: one launch.

    Every block reads the whole index, counts all places, and takes an equal range of the positions
    in the order of their places. The same bits in every run: the order of a sum depends on the
    indices alone. Workspace: two partial rows of each block.
    """

    name, op = "rows_balanced", OPERATORS
    files = "entry.cuh", "rows/owned_rows.cuh", "rows/rows_balanced.cu"
    entry = "reduce_rows"
    yields_to = ("rows_bins",)

    @dataclass(frozen=True)
    class Config:
        block_threads: int = param(256, 512, 1024)
        blocks: int = param(1, 2, 4)  # of an SM; each reads the whole index
        lanes: int = param(4, 8, 16, 32)  # threads of a row
        vec: int = param(1, 2, 4, 8)  # elements of one access
        unrolled: int = param(2, 4, 8)  # rows in flight of one group of lanes

    def suits(self, w: Workload, device: DeviceSpec) -> bool:
        """What rows_dealt would take, of more indices than few: skew costs these less. H200, commit
        d280a3a, uniform, zipf and equal indices: 16384 rows of 64 fp32 15.7, 23.1 and 23.4 us, by
        rows_dealt 18.0, 50.3 and 145; 4096 of 1024 bf16 16.9, 19.8 and 18.2, by rows_dealt 14.9,
        26.6 and 49.5; 1000 of 128 fp32 8.8, 12.0 and 11.8, by rows_dealt 7.9, 11.7 and 18.9."""
        dealt = IMPLS["rows_dealt"].claims(w, device)
        return dealt and served_rows(w).count > FEW_UNTUNED

    def space(self, w: Workload, device: DeviceSpec) -> ConfigSpace[Any]:
        p = served_rows(w)

        def fits(c: RowsBalanced.Config) -> str | None:
            if reason := misfit(p, c):
                return reason
            if (threads := c.blocks * c.block_threads) > MOST_THREADS:
                return f"{threads} threads of an SM, more than {MOST_THREADS}"
            threads = max(threads, WITH_MOST_REGISTERS)
            if p.count > MOST_ITEMS[threads] * c.block_threads:
                return f"{p.count} indices are more than {MOST_ITEMS[threads]} for each thread"
            if c.unrolled * c.vec > MOST_IN_FLIGHT[threads, sum_bytes(p.dtype)]:
                return f"{c.unrolled} accesses of {c.vec} elements would spill"
            if (blocks := math.prod(grid(p, c, device))) > COUNTERS:
                return f"{blocks} blocks exceed {COUNTERS} counters"
            allowed = most_bytes(WORKSPACE_PER_INDEX, p.count)
            if (taken := partial_bytes(p, c, device)) > allowed:
                return f"{taken} bytes of partial rows exceed {allowed}"
            if (taken := shared_bytes(p, c, device)) > device.shared_bytes_per_block:
                return f"{taken} bytes exceed {device.shared_bytes_per_block}, which a block has"
            return None

        return ConfigSpace(self.Config, {"vec": vectors(p, w.main.itemsize)}, fits)

    def refused(self, p: RowProblem, w: Workload) -> str | None:
        if p.in_order:
            return "a product of floats goes over its terms in one chain, which no block cuts"
        if p.count > MOST_INDICES:
            return f"each block would read {p.count} indices, more than {MOST_INDICES}"
        if p.places > MOST_PLACES:
            return f"each block would count {p.places} places, more than {MOST_PLACES}"
        return None

    def heuristic(self, w: Workload, device: DeviceSpec) -> Any:
        # As rows_dealt, with one block of an SM, as each reads the index and counts all places.
        p = served_rows(w)
        wide = 256 // w.main.itemsize

        def merit(c: RowsBalanced.Config) -> tuple[float, ...]:
            return (
                c.vec,
                -abs(math.log2(c.lanes * c.vec / min(wide, p.columns))),
                -c.blocks,
                c.block_threads == (512 if p.count <= FEW_INDICES else MOST_THREADS),
                -abs(c.unrolled - 4),
            )

        return max(self.space(w, device), key=merit)

    def macros(self, p: RowProblem, c: Any) -> dict[str, int | str]:
        return {
            **p.meaning,
            "IN_ORDER": False,
            "FILLED": p.fill is not None,
            "THREADS": c.block_threads,
            "BLOCKS": max(c.blocks, WITH_MOST_REGISTERS // c.block_threads),
            "ITEMS": items(p, c.block_threads),
            "LANES": c.lanes,
            "VEC": c.vec,
            "UNROLLED": c.unrolled,
        }

    def launches(
        self, w: Workload, p: RowProblem, c: Any, device: DeviceSpec
    ) -> tuple[list[Launch], Workspace]:
        blocks = grid(p, c, device)
        tensors = ("index", named_source(w), named_old(p), "out", "partials", "counter")
        sizes = (p.count, p.places, p.columns, whole(p, c, device), most_of_range(p, c, device))
        strides = (*p.source, *(p.old or (0, 0)), *p.out)
        launch = Launch(
            "reduce_rows",
            "PPPPPPiiiiiqqqqqqqdP",
            blocks,
            c.block_threads,
            shared_bytes(p, c, device),
            (*tensors, *sizes, *strides, p.skipped, p.alpha, "fault"),
            counters=math.prod(blocks),
        )
        return [launch], Workspace(partials=partial_bytes(p, c, device))


def grid(p: RowProblem, c: RowsBalanced.Config, device: DeviceSpec) -> tuple[int, int, int]:
    """Blocks that share the positions, for each piece of a row: as many as run at once, if there
    may be partial rows of so many."""
    pieces = across(p, c) * p.outer
    leaving = most_bytes(WORKSPACE_PER_INDEX, p.count) // (pieces * bytes_left(p, c))
    return max(1, min(p.count, c.blocks * device.sms // pieces, leaving)), across(p, c), p.outer


def bytes_left(p: RowProblem, c: RowsBalanced.Config) -> int:
    """Of a block's two partial rows."""
    return 2 * c.lanes * c.vec * sum_bytes(p.dtype)


def share(p: RowProblem, c: RowsBalanced.Config, device: DeviceSpec) -> int:
    """Positions of a block at most, but for runs that are not cut."""
    return math.ceil(p.count / grid(p, c, device)[0])


def whole(p: RowProblem, c: RowsBalanced.Config, device: DeviceSpec) -> int:
    return max(LEAST_WHOLE, share(p, c, device) // SHARE_WHOLE)


def most_of_range(p: RowProblem, c: RowsBalanced.Config, device: DeviceSpec) -> int:
    return min(p.count, share(p, c, device) + whole(p, c, device))


def partial_bytes(p: RowProblem, c: RowsBalanced.Config, device: DeviceSpec) -> int:
    return math.prod(grid(p, c, device)) * bytes_left(p, c)


def shared_bytes(p: RowProblem, c: RowsBalanced.Config, device: DeviceSpec) -> int:
    """A sum of each thread; counters of all places, of warps and of a range's ends; and, for each
    position of a range, its key, one in order, and a counter."""
    sums = c.block_threads * c.vec * sum_bytes(p.dtype)
    counters = p.places + 1 + 2 * (c.block_threads // 32) + 2 + RANGE_WORDS
    return sums + 4 * (counters + 3 * most_of_range(p, c, device))
