"""Few rows reduced into rows on a GPU: one launch, in which every block reads the whole index."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tilewright.device import DeviceSpec
from tilewright.impl import IMPLS
from tilewright.impls.indices._indexed import Launch, Workspace, sum_bytes
from tilewright.impls.indices._integers import MOST_ELEMENTS_UNTUNED
from tilewright.impls.indices._sort import THREADS, chunk_bytes
from tilewright.impls.indices.rows._rows import (
    MOST_FILLED,
    OPERATORS,
    RowProblem,
    across,
    is_tiny,
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

MOST_INDICES = 2048
"""That a block sorts."""
MOST_BESIDE_INTEGERS = 400
"""Indices, untuned, where integer_sums takes the sum: H200, commit 4ad1c76, 2026-11-22, 7.3 us and
its 9.2 for 50 rows of 64, 14.1 and 11.3 for 1000 rows of 128, lines through which meet at 430
rows."""
BLOCKS_OF_SM = 2
"""Each reads the whole index: more take longer over that than they gain."""
VECTORS_FILLED = 8
"""By each thread of a block that fills rows."""


class RowsSerial(RowKernels):
    """For few indices, however often they repeat: one launch, no workspace.

    A block owns the places that are named first at some of the positions, and goes through all
    positions of these. The same bits in every run: the order of a sum depends on the indices alone.
    """

    name, op = "rows_serial", OPERATORS
    files = "entry.cuh", "rows/chunk.cuh", "rows/owned_rows.cuh", "rows/rows_serial.cu"
    entry = "reduce_rows"
    yields_to = ("rows_dealt",)

    @dataclass(frozen=True)
    class Config:
        lanes: int = param(4, 8, 16, 32)  # threads of a row
        vec: int = param(1, 2, 4, 8)  # elements of one access
        unrolled: int = param(2, 4, 8)  # rows in flight of one group of lanes
        positions: int = param(16, 32, 64, 128)  # whose places a block owns

    def refused(self, p: RowProblem, w: Workload) -> str | None:
        if p.count > MOST_INDICES:
            return f"each block would read {p.count} indices, more than {MOST_INDICES}"
        if p.fill and p.places > MOST_FILLED:
            return f"out of place it takes up to {MOST_FILLED} places, not {p.places}"
        return None

    def suits(self, w: Workload, device: DeviceSpec) -> bool:
        p = served_rows(w)
        if not is_tiny(p, w.main.itemsize, device):
            return False
        return p.count <= MOST_BESIDE_INTEGERS or not _by_integers(p, w, device)

    def space(self, w: Workload, device: DeviceSpec) -> ConfigSpace[Any]:
        p = served_rows(w)

        def fits(c: RowsSerial.Config) -> str | None:
            if reason := misfit(p, c):
                return reason
            if c.positions > 16 and c.positions >= 2 * p.count:
                return f"{c.positions} positions are twice the {p.count} there are"
            return None

        return ConfigSpace(self.Config, {"vec": vectors(p, w.main.itemsize)}, fits)

    def heuristic(self, w: Workload, device: DeviceSpec) -> Any:
        # The widest accesses, and as many blocks as run at once. Of narrow pieces of rows rather
        # than of few positions: where one place is named by all, one block has it for each piece.
        p, at_once = served_rows(w), BLOCKS_OF_SM * device.sms

        def merit(c: RowsSerial.Config) -> tuple[int, ...]:
            wanted = max(owners(p, c) * across(p, c) * p.outer, at_once)
            return -c.vec, wanted, c.lanes, c.positions, -c.unrolled

        return min(self.space(w, device), key=merit)

    def macros(self, p: RowProblem, c: Any) -> dict[str, int | str]:
        return {
            **p.meaning,
            "IN_ORDER": p.in_order,
            "ITEMS": items(p, THREADS),
            "DIGIT_BITS": digit_bits(c),
            "POSITIONS": c.positions,
            "LANES": c.lanes,
            "VEC": c.vec,
            "UNROLLED": c.unrolled,
        }

    def launches(
        self, w: Workload, p: RowProblem, c: Any, device: DeviceSpec
    ) -> tuple[list[Launch], Workspace]:
        filled = rows_filled(p, c, device) if p.fill else 0
        filling = math.ceil(p.places / filled / across(p, c)) if p.fill else 0
        tensors = ("index", named_source(w), named_old(p), "out")
        sizes = (p.count, p.places, p.columns, owners(p, c), filled)
        strides = (*p.source, *(p.old or (0, 0)), *p.out)
        launch = Launch(
            "reduce_rows",
            "PPPPiiiiiqqqqqqqdP",
            (owners(p, c) + filling, across(p, c), p.outer),
            THREADS,
            max(owned_bytes(p, c), filled),
            (*tensors, *sizes, *strides, p.skipped, p.alpha, "fault"),
        )
        return [launch], Workspace()


def _by_integers(p: RowProblem, w: Workload, device: DeviceSpec) -> bool:
    """Whether untuned integer_sums takes what this leaves."""
    other = IMPLS["integer_sums"]
    if p.outer * p.count * p.columns > MOST_ELEMENTS_UNTUNED or not other.serves(w.op):
        return False
    return other.unsupported(w, device) is None


def owners(p: RowProblem, c: RowsSerial.Config) -> int:
    """Blocks that own places, for each piece of a row."""
    return math.ceil(p.count / c.positions)


def digit_bits(c: RowsSerial.Config) -> int:
    """To number the positions of a block, and one more for what it does not own."""
    return int(c.positions).bit_length()


def owned_bytes(p: RowProblem, c: RowsSerial.Config) -> int:
    """Shared memory: the sorted positions, a sum of each thread, and a table of places."""
    bins = 2 ** digit_bits(c)
    sums = THREADS * c.vec * sum_bytes(p.dtype)
    return chunk_bytes(digit_bits(c), items(p, THREADS)) + sums + 4 * (c.positions + 2 * bins)


def rows_filled(p: RowProblem, c: RowsSerial.Config, device: DeviceSpec) -> int:
    """By a block, which reads all indices to know which."""
    enough = math.ceil(VECTORS_FILLED * THREADS * c.vec / p.columns)
    resident = device.sms * device.threads_per_sm // THREADS
    return min(max(enough, math.ceil(p.places / resident)), p.places)
