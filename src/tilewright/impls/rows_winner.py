"""Scatter of whole rows: a pass that finds each place's last position, then copies of rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tilewright.build import CompileTask
from tilewright.compile.cache import compiled
from tilewright.device import DeviceSpec
from tilewright.impl import Executable, Implementation
from tilewright.impls._indexed import (
    MAX_GRID_YZ,
    IndexedExecutable,
    Launch,
    Workspace,
    cuda_task,
    no_cuda,
)
from tilewright.impls._rows import (
    RowProblem,
    across,
    row_problem,
    served_rows,
    too_many_pieces,
    vectors,
)
from tilewright.op import Workload
from tilewright.space import ConfigSpace, param

THREADS = 256
BLOCKS_OF_PREPARE = 8
"""Blocks per SM of the kernel that strides over all places."""


class RowsWinner(Implementation):
    """For an index that is expanded over the rows: it is read once a row, not once an element.

    Workspace: 4 bytes for each place.
    """

    name, backend, op = "rows_winner", "cuda", "scatter"

    @dataclass(frozen=True)
    class Config:
        lanes: int = param(4, 8, 16, 32)  # threads of a row
        vec: int = param(1, 2, 4, 8)  # elements of one access
        unrolled: int = param(1, 2, 4)  # rows in flight of one group of lanes

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        if reason := no_cuda(w, device):
            return reason
        p = row_problem(w)
        if isinstance(p, str):
            return p
        if max(p.count, p.places) >= 2**31 - 1:
            return f"{p.count} indices of {p.places} places exceed 32 bits"
        if p.outer > MAX_GRID_YZ or next(iter(self.space(w, device)), None) is None:
            return f"{p.outer} x {p.columns} columns exceed a grid"
        return None

    def suits(self, w: Workload, device: DeviceSpec) -> bool:
        p = row_problem(w)
        return isinstance(p, RowProblem) and p.columns * w.main.itemsize >= 16

    def space(self, w: Workload, device: DeviceSpec) -> ConfigSpace[Any]:
        p = served_rows(w)

        def fits(c: RowsWinner.Config) -> str | None:
            if c.lanes > 4 and c.lanes * c.vec >= 2 * p.columns:
                return f"{c.lanes} threads of {c.vec} are twice a row of {p.columns} columns"
            if reason := too_many_pieces(p, c):
                return reason
            return None

        return ConfigSpace(self.Config, {"vec": vectors(p, w.main.itemsize)}, fits)

    def heuristic(self, w: Workload, device: DeviceSpec) -> Any:
        # The widest accesses; then rows that one group of threads moves in one piece.
        return max(self.space(w, device), key=lambda c: (c.vec, c.lanes, c.unrolled == 2))

    def compile_key(self, config: Any, w: Workload) -> str:
        p = served_rows(w)
        return f"{macros(p, config)} {p.dtype} {p.index}"

    def task(self, config: Any, w: Workload, device: DeviceSpec) -> CompileTask:
        p = served_rows(w)
        given = macros(p, config)
        return cuda_task(["rows_winner.cu"], "write", p.dtype, p.index, given, device)

    def build(self, config: Any, w: Workload, device: DeviceSpec) -> Executable:
        p = served_rows(w)
        built, launches = compiled(self.task(config, w, device)), launches_of(p, config, device)
        return IndexedExecutable(w, built, "write", launches, Workspace(winner=4 * p.places))


def macros(p: RowProblem, c: RowsWinner.Config) -> dict[str, int | str]:
    return {
        "REDUCE": 0,
        "IN_PLACE": p.fill is None,
        "LANES": c.lanes,
        "VEC": c.vec,
        "UNROLLED": c.unrolled,
    }


def launches_of(p: RowProblem, c: RowsWinner.Config, device: DeviceSpec) -> list[Launch]:
    looked_at = p.count if p.fill is None else p.places
    blocks = min(math.ceil(looked_at / THREADS), BLOCKS_OF_PREPARE * device.sms)
    rows = THREADS // c.lanes * c.unrolled
    elects = (math.ceil(p.count / THREADS), 1, 1)
    writes = (math.ceil(looked_at / rows), across(p, c), p.outer)
    common = ("index", "winner", p.count, p.places, "fault")
    strides = (*p.source, *(p.old or (0, 0)), *p.out)
    moved = ("index", "src", "x", "out", "winner", p.count, p.places, p.columns, *strides)
    return [
        Launch("prepare", "PPiiP", (blocks, 1, 1), THREADS, 0, common),
        Launch("elect", "PPiiP", elects, THREADS, 0, common, overlapping=True),
        Launch("write", "PPPPPiiiqqqqqq", writes, THREADS, 0, moved, overlapping=True),
    ]
