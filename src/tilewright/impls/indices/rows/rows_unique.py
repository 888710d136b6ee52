"""Rows added straight to places that are named once, after a look at whether any is named again."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tilewright.build import CompileTask
from tilewright.device import MAX_GRID, DeviceSpec
from tilewright.impl import Implementation
from tilewright.impls.indices._indexed import NONE_SKIPPED, Launch, Step, Workspace, cuda_task
from tilewright.impls.indices.rows._counting_sorted_rows import CountingSortedRows
from tilewright.impls.indices.rows._rows import (
    OPERATORS,
    RowProblem,
    across,
    misfit,
    served_rows,
    vectors,
)
from tilewright.impls.indices.rows._rows_kernels import RowKernels
from tilewright.impls.indices.rows._sorted_rows import ARGUMENTS, slices
from tilewright.op import Workload
from tilewright.space import ConfigSpace, param

THREADS, POSITION_BYTES = 256, 4
BLOCKS_OF_PREPARE = 8
"""Blocks per SM of the kernel that strides over all places."""
SORTED = CountingSortedRows()
"""What rows_sorted launches."""


class RowsUnique(RowKernels):
    """For indices that do not repeat: no sort, and each row is moved once.

    Right for any others, too: where an index repeats, no row is added but by the kernels of
    `rows_sorted`, with its heuristic's config and to the same bits. They are launched in any case,
    since nobody on the host knows, and return at once where they are not wanted.

    Workspace: 4 bytes for each place, or what `rows_sorted` takes if that is more.
    """

    name, op = "rows_unique", OPERATORS
    files = (*SORTED.files, "rows/positions.cuh", "rows/rows_unique.cu")
    entry, most_outer = "add", MAX_GRID

    @dataclass(frozen=True)
    class Config:
        lanes: int = param(4, 8, 16, 32)  # threads of a row
        vec: int = param(1, 2, 4, 8)  # elements of one access
        unrolled: int = param(1, 2, 4, 8)  # rows in flight of one group of lanes
        block_threads: int = param(128, 256, 512)

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        return SORTED.unsupported(w, device) or super().unsupported(w, device)

    def refused(self, p: RowProblem, w: Workload) -> str | None:
        if p.count > p.places and p.skipped == NONE_SKIPPED:
            return f"of {p.count} indices of {p.places} places some repeat"
        return None

    def suits(self, w: Workload, device: DeviceSpec) -> bool:
        """Only by a record: a call does not tell whether its indices repeat."""
        return False

    def space(self, w: Workload, device: DeviceSpec) -> ConfigSpace[Any]:
        p = served_rows(w)

        def fits(c: RowsUnique.Config) -> str | None:
            if reason := misfit(p, c, most=MAX_GRID):
                return reason
            if c.unrolled * c.vec > 32:
                return f"{c.unrolled} x {c.vec} elements in flight, and their old ones, spill"
            if (pieces := blocks(p, c) * across(p, c)) > MAX_GRID:
                return f"{pieces} blocks exceed a grid of {MAX_GRID}"
            return None

        # The general kernels, of the same source, are compiled for the widest accesses.
        return ConfigSpace(self.Config, {"vec": vectors(p, w.main.itemsize)[-1:]}, fits)

    def heuristic(self, w: Workload, device: DeviceSpec) -> Any:
        # Rows that one group moves in one piece, and two of them, each with its old one, in flight.
        return max(
            self.space(w, device), key=lambda c: (c.lanes, c.unrolled == 2, c.block_threads == 256)
        )

    def compile_key(self, config: Any, w: Workload) -> str:
        return Implementation.compile_key(self, config, w)  # all of what the general kernels go by

    def task(self, config: Any, w: Workload, device: DeviceSpec) -> CompileTask:
        p = served_rows(w)
        macros = {
            **SORTED.macros(p, SORTED.heuristic(w, device)),
            "IN_PLACE": p.fill is None,
            "ADD_LANES": config.lanes,
            "ADD_UNROLLED": config.unrolled,
            "ADD_THREADS": config.block_threads,
        }
        return cuda_task(self.files, self.entry, p.dtype, p.index, macros, device)

    def launches(
        self, w: Workload, p: RowProblem, c: Any, device: DeviceSpec
    ) -> tuple[list[Step], Workspace]:
        general, repeats = SORTED.heuristic(w, device), "repeats"
        otherwise, workspace = SORTED.launches(w, p, general, device, wanted=repeats)
        looked_at = p.count if p.fill is None else p.places
        prepares = min(math.ceil(looked_at / THREADS), BLOCKS_OF_PREPARE * device.sms), 1, 1
        looks = math.ceil(p.count / THREADS), 1, 1
        adds = blocks(p, c) * across(p, c), *slices(p)
        found = ("index", "positions", p.count, p.places, p.skipped, "fault", repeats)
        looked_up = ("index", "positions", p.skipped, "fault")
        added = (*SORTED.arguments(w, p, general, repeats), *looked_up)
        launches = [
            Launch("prepare", "PPiiqPP", prepares, THREADS, 0, found),
            Launch("look", "PPiiqPP", looks, THREADS, 0, found, overlapping=True),
            Launch("add", ARGUMENTS + "PPqP", adds, c.block_threads, 0, added, overlapping=True),
        ]
        # Where rows are added straight, the general kernels touch nothing, and else positions are
        # read no more: they share memory.
        memory = Workspace(workspace, Workspace(positions=POSITION_BYTES * p.places), repeats=4)
        return [*launches, *otherwise], memory


def blocks(p: RowProblem, c: RowsUnique.Config) -> int:
    """For each piece of a row: of positions in place, else of places."""
    rows = p.count if p.fill is None else p.places
    return math.ceil(rows * c.lanes / (c.block_threads * c.unrolled))
