"""Scatter of whole rows: a pass that finds each place's last position, then copies of rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tilewright.device import DeviceSpec
from tilewright.impl import IMPLS
from tilewright.impls.indices._indexed import Launch, Workspace
from tilewright.impls.indices.elements._updates import writes_alone
from tilewright.impls.indices.rows._rows import (
    RowProblem,
    across,
    misfit,
    row_problem,
    served_rows,
    vectors,
)
from tilewright.impls.indices.rows._rows_kernels import RowKernels
from tilewright.op import Workload
from tilewright.space import ConfigSpace, param

THREADS = 256
BLOCKS_OF_PREPARE = 8
"""Blocks per SM of the kernel that strides over all places."""


class RowsWinner(RowKernels):
    """For an index that is expanded over the rows: it is read once a row, not once an element. Rows
    of src, or of one number.

    Workspace: 4 bytes for each place.
    """

    name, op = "rows_winner", "scatter"
    files, entry = ("rows/positions.cuh", "rows/rows_winner.cu"), "write"
    batches = True

    @dataclass(frozen=True)
    class Config:
        lanes: int = param(4, 8, 16, 32)  # threads of a row
        vec: int = param(1, 2, 4, 8)  # elements of one access
        unrolled: int = param(1, 2, 4)  # rows in flight of one group of lanes

    def suits(self, w: Workload, device: DeviceSpec) -> bool:
        p = row_problem(w)
        if writes_alone(w) and IMPLS["scatter_strided"].claims(w, device):
            return False
        return isinstance(p, RowProblem) and p.columns * w.main.itemsize >= 16

    def space(self, w: Workload, device: DeviceSpec) -> ConfigSpace[Any]:
        p = served_rows(w)

        def fits(c: RowsWinner.Config) -> str | None:
            return misfit(p, c)

        return ConfigSpace(self.Config, {"vec": vectors(p, w.main.itemsize)}, fits)

    def heuristic(self, w: Workload, device: DeviceSpec) -> Any:
        # The widest accesses; then rows that one group of threads moves in one piece.
        return max(self.space(w, device), key=lambda c: (c.vec, c.lanes, c.unrolled == 2))

    def macros(self, p: RowProblem, c: Any) -> dict[str, int | str]:
        return {
            "REDUCE": 0,
            "IN_PLACE": p.fill is None,
            "NUMBER": p.number is not None,
            "LANES": c.lanes,
            "VEC": c.vec,
            "UNROLLED": c.unrolled,
        }

    def launches(
        self, w: Workload, p: RowProblem, c: Any, device: DeviceSpec
    ) -> tuple[list[Launch], Workspace]:
        looked_at = p.count if p.fill is None else p.places
        blocks = min(math.ceil(looked_at / THREADS), BLOCKS_OF_PREPARE * device.sms)
        rows = THREADS // c.lanes * c.unrolled
        elects = (math.ceil(p.count / THREADS), 1, 1)
        writes = (math.ceil(looked_at / rows), across(p, c), p.outer)
        common: tuple[int | str, ...] = ("index", "winner", p.count, p.places, "fault", *p.batched)
        more = "i" * len(p.batched)
        strides = (*p.source, *(p.old or (0, 0)), *p.out)
        source, number = ("src", 0.0) if p.number is None else (0, p.number)
        sizes = (p.count, p.places, p.columns)
        moved = ("index", source, "x", "out", "winner", *sizes, *strides, number, *p.batched)
        launches = [
            Launch("prepare", f"PPiiP{more}", (blocks, 1, 1), THREADS, 0, common),
            Launch("elect", f"PPiiP{more}", elects, THREADS, 0, common, overlapping=True),
            Launch("write", f"PPPPPiiiqqqqqqd{more}", writes, THREADS, 0, moved, overlapping=True),
        ]
        return launches, Workspace(winner=4 * p.places)
