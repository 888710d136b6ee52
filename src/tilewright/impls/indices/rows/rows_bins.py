"""Rows reduced into a few places on a GPU: each group of threads has bins of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tilewright.device import DeviceSpec
from tilewright.impls.indices._indexed import Launch, Workspace, most_bytes, sum_bytes
from tilewright.impls.indices.rows._rows import (
    OPERATORS,
    RowProblem,
    across,
    is_tiny,
    misfit,
    named_old,
    named_source,
    served_rows,
    vectors,
)
from tilewright.impls.indices.rows._rows_kernels import RowKernels
from tilewright.op import Workload
from tilewright.space import ConfigSpace, param

MOST_PLACES_UNTUNED = 20
"""So many were timed with two blocks on an SM: a million rows of 32 floats into 16 places took 47
us on an H200, 71 us by rows_sorted; into 64, with one block on an SM, 117 and 73 us (632da8c)."""
WORKSPACE_PER_INDEX = 24
"""Bytes, of all partial tables."""
RESIDENT = 512
"""Threads of an SM, which have 128 registers each."""


class RowsBins(RowKernels):
    """No sort: the source is read once, in its order. For so few places that a table of them fits
    in shared memory for each group of threads.

    The same bits in every run: positions are shared out by their number alone. Workspace: a partial
    table for each block, at most 24 bytes an index.
    """

    name, op = "rows_bins", OPERATORS
    files, entry = ("rows/rows_bins.cu",), "accumulate"

    @dataclass(frozen=True)
    class Config:
        lanes: int = param(4, 8, 16, 32)  # threads of a row
        vec: int = param(1, 2, 4, 8)  # elements of one access
        unrolled: int = param(4, 8)  # rows of a group in flight
        block_threads: int = param(64, 128, 256)
        blocks: int = param(1, 2, 4, 8)  # of an SM, of 512 threads together at most

    def refused(self, p: RowProblem, w: Workload) -> str | None:
        if p.reduce not in ("sum", "amax", "amin"):
            return (
                f"reduce={p.reduce}: it does not count terms, and products may overflow in ranges"
            )
        if not (p.include or p.fill == "zero"):
            return "it does not tell which rows are hit; rows_sorted does"
        return None

    def suits(self, w: Workload, device: DeviceSpec) -> bool:
        p = served_rows(w)
        if p.places > MOST_PLACES_UNTUNED or is_tiny(p, w.main.itemsize, device):
            return False
        return bool(self.heuristic(w, device).blocks > 1)

    def space(self, w: Workload, device: DeviceSpec) -> ConfigSpace[Any]:
        p = served_rows(w)

        def fits(c: RowsBins.Config) -> str | None:
            if reason := misfit(p, c):
                return reason
            if c.unrolled > c.lanes or c.unrolled * c.vec > 32:
                return f"unrolled={c.unrolled} exceeds lanes={c.lanes} or 32 elements"
            if c.blocks * c.block_threads > RESIDENT:
                return f"{c.blocks} blocks have more than {RESIDENT} threads"
            if device.blocks_by_shared(bins_bytes(p, c)) < c.blocks:
                return f"{c.blocks} blocks of {bins_bytes(p, c)} bytes, an SM has fewer"
            if bins_bytes(p, c) > device.shared_bytes_per_block:
                return f"{bins_bytes(p, c)} bytes, a block has {device.shared_bytes_per_block}"
            if table_bytes(p) > most_bytes(WORKSPACE_PER_INDEX, p.count):
                return f"a table exceeds {WORKSPACE_PER_INDEX} bytes for each index"
            return None

        return ConfigSpace(self.Config, {"vec": vectors(p, w.main.itemsize)}, fits)

    def heuristic(self, w: Workload, device: DeviceSpec) -> Any:
        # The widest accesses and groups, and as many threads as there is room for bins.
        return max(
            self.space(w, device),
            key=lambda c: (c.vec, c.lanes, c.blocks * c.block_threads, c.unrolled, c.block_threads),
        )

    def macros(self, p: RowProblem, c: Any) -> dict[str, int | str]:
        return {
            **p.meaning,
            "LANES": c.lanes,
            "VEC": c.vec,
            "UNROLLED": c.unrolled,
            "THREADS": c.block_threads,
            "RESIDENT": RESIDENT,
        }

    def launches(
        self, w: Workload, p: RowProblem, c: Any, device: DeviceSpec
    ) -> tuple[list[Launch], Workspace]:
        threads, shared_bytes, number = c.block_threads, bins_bytes(p, c), tables(p, c, device)
        length = math.ceil(p.count / (number * threads // c.lanes))
        read = ("index", named_source(w), "partials", p.count, p.places, p.columns, length)
        joined = ("partials", named_old(p), "out", number, p.columns, *(p.old or (0, 0)), *p.out)
        launches = [
            Launch(
                "accumulate",
                "PPPiiiiqqqdP",
                (number, across(p, c), p.outer),
                threads,
                shared_bytes,
                (*read, *p.source, p.skipped, p.alpha, "fault"),
            ),
            Launch(
                "combine",
                "PPPiiqqqq",
                (p.places, across(p, c), p.outer),
                threads,
                shared_bytes // p.places,
                joined,
                overlapping=True,
            ),
        ]
        return launches, Workspace(partials=number * table_bytes(p))


def bins_bytes(p: RowProblem, c: RowsBins.Config) -> int:
    """Shared memory of a block; `combine` needs that of one place."""
    return p.places * c.block_threads * c.vec * sum_bytes(p.dtype)


def tables(p: RowProblem, c: RowsBins.Config, device: DeviceSpec) -> int:
    """Partial tables: as many blocks as are resident at once, if each thread has some positions and
    the workspace's bound allows."""
    resident = device.sms * c.blocks // (across(p, c) * p.outer)
    allowed = most_bytes(WORKSPACE_PER_INDEX, p.count) // table_bytes(p)
    return max(min(resident, p.count // c.block_threads, allowed), 1)


def table_bytes(p: RowProblem) -> int:
    return p.outer * p.places * p.columns * sum_bytes(p.dtype)
