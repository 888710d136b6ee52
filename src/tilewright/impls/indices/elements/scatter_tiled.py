"""Scatter with the scattered axis of a block of columns in shared memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tilewright.build import CompileTask
from tilewright.compile.cache import compiled
from tilewright.device import SECTOR_BYTES, DeviceSpec
from tilewright.impl import Executable, Implementation
from tilewright.impls.indices._indexed import (
    REDUCE,
    IndexedExecutable,
    Launch,
    Workspace,
    streamed_us,
)
from tilewright.impls.indices._integers import few_enough, few_in_long_columns, not_by_integers
from tilewright.impls.indices._tiles import (
    ALL,
    columns,
    none_fits,
    tiles,
    why_not,
    width,
)
from tilewright.impls.indices.elements._buckets import is_short, worth_buckets
from tilewright.impls.indices.elements._scatter import (
    OPERATORS,
    ScatterProblem,
    moved,
    scatter_problem,
    scatter_refusal,
    served_scatter,
)
from tilewright.impls.indices.elements._updates import (
    comes_first,
    counts,
    holds_small_tiles,
    resident,
    row_bytes,
    tile_bytes,
)
from tilewright.op import Workload
from tilewright.space import ConfigSpace, param

MAX_HELD = 16
MOST_PLACES_AN_INDEX = 8
"""Of a sum untuned: a tile moves all of its places. Columns of 1 and of 16 places an index were
timed (H200, scatter_crossover)."""
LONG_FOR_TILES = 512
"""Positions from which on a sum's tiles are of too few columns to stream: between the columns of
256 and of 1000 that were timed for the two rates of elements below."""
COLUMN_POSITION_US, ELEMENT_US, ELEMENT_OF_LONG_COLUMN_US = 0.07, 0.9e-5, 2.5e-5
"""What a sum takes untuned: a thread takes the positions of a column in turn, and all tiles move
their elements (H200, commit 4ad1c76: 5000 positions 361 us; 12.5 million elements 114 us in columns
of 256, 311 us in columns of 1000)."""
OTHERS_US, OTHERS_ELEMENT_US = 10.0, 1.8e-5
SORT_OUT_OF_PLACE_US, SORTED_ELEMENT_US = 35.0, 7e-5
"""What others take: integer_sums and bucket_sums of floats, scatter_sorted of the rest (4ad1c76:
3000 positions 10 us and 40 us, 25.6 million elements 470 us and 1700 us)."""


def max_held(device: DeviceSpec) -> int:
    """Elements that a thread holds in 64 registers; NVRTC 13.0 spills the last for sm_100."""
    return MAX_HELD if device.capability < 100 else MAX_HELD - 2


class ScatterTiled(Implementation):
    """One coalesced pass over index, src and out, and one launch. No workspace.

    An update lets the last position win by an integer maximum. For sums and the like each column is
    one thread's, which goes through the positions in their order, as the definition says.
    """

    name, backend, op = "scatter_tiled", "cuda", OPERATORS
    yields_to = ("rows_dealt", "rows_serial", "scatter_buckets", "scatter_strided")

    @dataclass(frozen=True)
    class Config:
        width: int = param(ALL, 8, 16, 32, 64, 128)  # columns of a tile; 8 of 4 bytes are a sector
        slabs: int = param(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # outer slices of a tile
        block_threads: int = param(32, 64, 128, 256, 512, 1024)
        batch: int = param(4, 8)  # accesses of a thread in flight
        held: bool = param(True, False)  # an update's indices and values stay in registers

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        if reason := scatter_refusal(w, device):
            return reason
        if next(iter(self.space(w, device)), None) is None:
            return none_fits(served_scatter(w).places, device)
        return None

    def suits(self, w: Workload, device: DeviceSpec) -> bool:
        p = served_scatter(w)
        moved = p.positions
        if p.reduce == "last":
            return holds_small_tiles(w, device) or not comes_first(w)
        if p.cells > MOST_PLACES_AN_INDEX * moved:
            return False
        element_us = ELEMENT_US if p.length <= LONG_FOR_TILES else ELEMENT_OF_LONG_COLUMN_US
        tiled_us = max(p.length * COLUMN_POSITION_US, streamed_us(moved * element_us, device))
        if _by_integers(p, w, device):
            if p.inner > 1 and few_in_long_columns(moved, p.length):
                return False
            return tiled_us <= OTHERS_US + streamed_us(moved * OTHERS_ELEMENT_US, device)
        return tiled_us <= SORT_OUT_OF_PLACE_US + streamed_us(moved * SORTED_ELEMENT_US, device)

    def space(self, w: Workload, device: DeviceSpec) -> ConfigSpace[Any]:
        p = served_scatter(w)

        def fits(c: ScatterTiled.Config) -> str | None:
            if reason := why_not(p, c, tile_bytes(p, c), device):
                return reason
            if p.reduce != "last" and c.block_threads >= 2 * max(columns(p, c), 32):
                return f"{c.block_threads} threads for {columns(p, c)} columns"
            if c.held and (p.reduce != "last" or each(p, c) > max_held(device)):
                return f"{each(p, c)} elements of a thread are too many to hold"
            if c.held and each(p, c) > MAX_HELD // 2 and p.inner % width(p, c):
                return f"{each(p, c)} elements of tiles with ragged edges spill"
            return None

        return ConfigSpace(self.Config, constraint=fits)

    def heuristic(self, w: Workload, device: DeviceSpec) -> Any:
        p = served_scatter(w)

        def merit(c: ScatterTiled.Config) -> tuple[float, ...]:
            # Every SM busy first; then rows of whole 32-byte sectors; then two blocks of an SM, of
            # which one moves data while the other waits; then few, large tiles.
            size = tile_bytes(p, c)
            return (
                min(tiles(p, c), device.sms),
                min(row_bytes(p, c, w), SECTOR_BYTES),
                c.held,
                min(device.blocks_by_shared(size), 2),
                columns(p, c),
                -abs(c.block_threads - self._threads(p, c)),
                -c.batch,
            )

        return max(self.space(w, device), key=merit)

    @staticmethod
    def _threads(p: ScatterProblem, c: ScatterTiled.Config) -> int:
        if p.reduce != "last":
            return columns(p, c)
        return min(512, columns(p, c) * max(p.length, p.places) // 8)

    def compile_key(self, config: Any, w: Workload) -> str:
        p = scatter_problem(w)
        return f"{config} {p}"

    def task(self, config: Any, w: Workload, device: DeviceSpec) -> CompileTask:
        p = served_scatter(w)
        macros = {
            "REDUCE": REDUCE.get(p.reduce, 0),
            "MEAN": p.reduce == "mean",
            "INCLUDE": p.include,
            "COUNTS": counts(p),
            "WIDTH": width(p, config),
            "SLABS": config.slabs,
            "THREADS": config.block_threads,
            "BATCH": config.batch,
            "HELD": config.held,
            "BLOCKS": resident(p, config, device),
        }
        return p.task(["tiles.cuh", "elements/tiled.cu"], entry(p), macros, device)

    def build(self, config: Any, w: Workload, device: DeviceSpec) -> Executable:
        p = served_scatter(w)
        source, number = moved(p)
        args = ("x", "index", source, "out", number, "fault")
        grid, size = (tiles(p, config), 1, 1), tile_bytes(p, config)
        launch = Launch(entry(p), "PPPPdP", grid, config.block_threads, size, args)
        built = compiled(self.task(config, w, device))
        return IndexedExecutable(
            w, built, launch.entry, p.with_beyond([launch], device), Workspace()
        )


def _by_integers(p: ScatterProblem, w: Workload, device: DeviceSpec) -> bool:
    """Whether untuned integer_sums or bucket_sums would take a sum."""
    if not_by_integers(p.dtype, p.reduce) is not None:
        return False
    few = few_enough(w["index"].numel, p.length, w.main.numel, p.dtype, device)
    return few or (is_short(p.dtype) and worth_buckets(w, device))


def entry(p: ScatterProblem) -> str:
    return "update" if p.reduce == "last" else "gathered"


def each(p: ScatterProblem, c: ScatterTiled.Config) -> int:
    """Elements of a tile for each thread."""
    return math.ceil(columns(p, c) * p.length / c.block_threads)
