"""Sums of rows by atomic additions, for who allows them to differ from run to run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.device import DeviceSpec
from tilewright.errors import NoImplementation
from tilewright.impls.indices._indexed import IndexedExecutable, Launch, Workspace
from tilewright.impls.indices._sort import THREADS, chunk_bytes
from tilewright.impls.indices.rows._rows import (
    OPERATORS,
    RowProblem,
    across,
    misfit,
    named_old,
    named_source,
    served_rows,
    vectors,
)
from tilewright.impls.indices.rows._rows_kernels import RowKernels
from tilewright.op import Workload
from tilewright.space import ConfigSpace, param
from tilewright.tensor_spec import HALVES

DIGIT_BITS = 8
"""Of the hash of a place."""

SLOTS = 4
"""Pieces of rows of a warp on their way to the copy engine."""
ADDED = {"f32": "f32", "f64": "f64", "i32": "u32", "i64": "u64"}

BLOCKS_OF_PREPARE = 8
"""Blocks per SM of the kernel that strides over all places."""


class AtomicExecutable(IndexedExecutable):
    def __call__(
        self, *tensors: torch.Tensor, pointers: Sequence[int] | None = None
    ) -> torch.Tensor:
        floating = tensors[0].is_floating_point()
        if floating and torch.are_deterministic_algorithms_enabled():
            raise NoImplementation(
                f"{self._w}: rows_atomic adds in no fixed order, and "
                "torch.use_deterministic_algorithms is on; leave the choice to the records"
            )
        return super().__call__(*tensors, pointers=pointers)


class RowsAtomic(RowKernels):
    """No workspace: each row of the source is read once, summed with those of its place that the
    block meets, and added where it belongs.

    Integers have one sum in any order. Floating sums have not: they are for workloads that say
    `!nondeterministic`, whose records serve calls where TILEWRIGHT_NONDETERMINISTIC is set, and for
    calls under `use("rows_atomic")`, never under PyTorch's deterministic mode. Halves, which each
    addition would round, are refused.
    """

    name, op = "rows_atomic", OPERATORS
    files, entry = ("entry.cuh", "rows/chunk.cuh", "rows/rows_atomic.cu"), "accumulate"
    executable = AtomicExecutable
    races = True

    @dataclass(frozen=True)
    class Config:
        lanes: int = param(1, 4, 8, 16, 32)  # threads of a row
        vec: int = param(1, 2, 4)  # elements of one access
        items: int = param(1, 4, 16)  # indices of a thread: a block sorts 256 times as many
        unrolled: int = param(2, 4, 8)  # rows of a group of lanes in flight
        bulk: bool = param(False, True)  # a warp's piece of a row is added by the copy engine

    def refused(self, p: RowProblem, w: Workload) -> str | None:
        if p.reduce != "sum" or not (p.include or p.fill == "zero"):
            return "it adds to the rows that are there; other reductions are rows_sorted's"
        if p.dtype in HALVES:
            return f"each addition would be rounded to {p.dtype}"
        if p.dtype in ("i32", "i64") and not float(p.alpha).is_integer():
            return f"alpha={p.alpha} is no integer"
        if p.dtype in ("f32", "f64") and "nondeterministic" not in w.flags:
            return "its sums differ from run to run: say !nondeterministic, or ask for it by use()"
        return None

    def suits(self, w: Workload, device: DeviceSpec) -> bool:
        return False  # sums have the same bits in every run unless someone asks for others

    def space(self, w: Workload, device: DeviceSpec) -> ConfigSpace[Any]:
        p = served_rows(w)

        def fits(c: RowsAtomic.Config) -> str | None:
            if reason := misfit(p, c, narrowest=1):
                return reason
            if c.bulk and device.capability < 90:
                return f"{device.name} cannot add in bulk"
            if c.bulk and (c.lanes < 32 or c.vec * w.main.itemsize < 16):
                return "what is added in bulk is a warp's, of 16 bytes a thread"
            return None

        narrow = [v for v in vectors(p, w.main.itemsize) if v <= 4]
        return ConfigSpace(self.Config, {"vec": narrow}, fits)

    def heuristic(self, w: Workload, device: DeviceSpec) -> Any:
        # The widest accesses; rows that one group moves in one piece; 64 bytes in flight; and
        # chunks, in which rows are summed, as long as leave two blocks to an SM.
        def rank(c: RowsAtomic.Config) -> tuple[float, ...]:
            idle = blocks(p, c) * across(p, c) * p.outer < 2 * device.sms
            in_flight = c.unrolled * c.vec * w.main.itemsize
            items = -c.items if idle else c.items
            return c.vec, c.lanes, -abs(in_flight - 64), items, not c.bulk

        p = served_rows(w)
        return max(self.space(w, device), key=rank)

    def macros(self, p: RowProblem, c: Any) -> dict[str, int | str]:
        return {
            "REDUCE": 0,
            "KEEPS_OLD": p.fill == "old",
            "SCALED": p.alpha != 1.0,
            "LANES": c.lanes,
            "VEC": c.vec,
            "ITEMS": c.items,
            "UNROLLED": c.unrolled,
            "DIGIT_BITS": DIGIT_BITS,
            "BULK": c.bulk,
            "ADDED": f'"{ADDED[p.dtype]}"',
            "SLOTS": SLOTS if c.bulk else 0,
        }

    def launches(
        self, w: Workload, p: RowProblem, c: Any, device: DeviceSpec
    ) -> tuple[list[Launch], Workspace]:
        launches = []
        if p.fill is not None:
            pieces = p.places * p.columns // c.vec
            grid = min(math.ceil(pieces / THREADS), BLOCKS_OF_PREPARE * device.sms), 1, p.outer
            args = (named_old(p), "out", p.places, p.columns, *(p.old or (0, 0)), *p.out)
            launches.append(Launch("prepare", "PPiiqqqq", grid, THREADS, 0, args))
        grid = blocks(p, c), across(p, c), p.outer
        piece_bytes = c.lanes * c.vec * w.main.itemsize
        slots_bytes = THREADS // 32 * SLOTS * piece_bytes if c.bulk else 0
        size = slots_bytes + chunk_bytes(DIGIT_BITS, c.items)
        sizes = (p.count, p.places, p.columns, *p.source, *p.out, p.skipped, p.alpha)
        added = ("index", named_source(w), "out", *sizes, "fault")
        follows = p.fill is not None
        launches.append(Launch("accumulate", "PPPiiiqqqqqdP", grid, THREADS, size, added, follows))
        return launches, Workspace()


def blocks(p: RowProblem, c: RowsAtomic.Config) -> int:
    """Chunks of positions."""
    return math.ceil(p.count / (THREADS * c.items))
