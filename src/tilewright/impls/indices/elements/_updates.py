"""Updates of separate elements: what their tiles take, and which kernel is theirs untuned where
several would do."""

from __future__ import annotations

from tilewright.device import SECTOR_BYTES, DeviceSpec
from tilewright.impl import IMPLS
from tilewright.impls.indices._indexed import sum_bytes
from tilewright.impls.indices._tiles import Tile, columns, tiles, width
from tilewright.impls.indices.elements._buckets import is_short
from tilewright.impls.indices.elements._elements import element_problem
from tilewright.impls.indices.elements._scatter import ScatterProblem, served_scatter
from tilewright.op import Workload

FEWEST_FIRST, MOST_FIRST, CELLS_FIRST = 2**12, 2**16, 2**19
"""Positions and places of all columns for which untuned scatter_winner comes before buckets, and
before tiles of many elements; of one column with a place or two for each, any number of positions.
H200, uniform indices and the slowest of six distributions: 32768 positions into 524288 places 10.5
and 13.1 us, by scatter_buckets 11.8 and 22.7; into 2048 9.8 and 10.0, 12.4 and 14.8; 262144 into
16384 11.7 and 26.3, 16.2 and 22.2; 4096 into 65536 of 64 columns 8.9 and 9.2, by scatter_tiled 13.8
and 14.0 (4f86109). Of one column into as many places 50000 9.9 and 12.3, by scatter_buckets 10.5
and 15.2, 100000 11.0 and 15.6, 10.4 and 15.2, 500000 15.8 and 29.3, 20.5 and 33.6, but a million
24.3 and 47.3, 21.9 and 41.4 (1462c2b)."""
SMALL_TILE = 2**12
"""Elements that an untuned tile of an update has at most where nothing else comes before it. H200,
4f86109, uniform indices and the slowest of six distributions: 512 positions of each of 64 columns
into 512 places 8.6 and 8.7 us, by buckets 9.9 and 10.8, into 32 places 7.8 and 8.2, 9.8 and 10.4;
fp64 8.8 and 8.8, 9.9 and 10.7, and 7.0 and 7.2, 10.0 and 10.2; one column of 4096 8.4 and 10.8, 9.9
and 11.4, by scatter_winner 8.7 and 9.7."""
MOST_ALONE = 2**16
"""Elements of an expanded index that has one position a column, written in place by one launch.
H200, commit 9b8614d: one row of 8 x 128 in each of 64 batches, bf16, 6.1 us, by uniform indices and
the slowest 6.2; by the three launches of rows_winner 8.5 and 9.3."""


def counts(p: ScatterProblem) -> bool:
    """Whether the number of terms of each place is needed."""
    return p.reduce == "mean" or not p.include


def row_bytes(p: ScatterProblem, c: Tile, w: Workload) -> int:
    """That lie side by side in a tile."""
    return w.main.itemsize * (columns(p, c) if p.inner == 1 else width(p, c))


def resident(p: ScatterProblem, c: Tile, device: DeviceSpec) -> int:
    """Blocks of an SM, with 64 registers for each thread."""
    fit = device.blocks_by_shared(tile_bytes(p, c))
    return max(1, min(fit, device.registers_per_sm // 64 // c.block_threads, device.blocks_per_sm))


def tile_bytes(p: ScatterProblem, c: Tile) -> int:
    """A position and a value for each place, or a sum and perhaps a count."""
    itemsize = {"f16": 2, "bf16": 2, "f64": 8, "i64": 8}.get(p.dtype, 4)
    if p.reduce == "last":
        each = 4 + (0 if p.number is not None else itemsize)
        return -(-4 * columns(p, c) * p.places // 8) * 8 + (each - 4) * columns(p, c) * p.places
    else:
        each = sum_bytes(p.dtype) + (4 if counts(p) else 0)
    return each * columns(p, c) * p.places


def comes_first(w: Workload) -> bool:
    """Whether untuned an update of values that keys carry is scatter_winner's, where that takes
    less than buckets and large tiles do."""
    p = served_scatter(w)
    if p.reduce != "last" or p.number is not None or not is_short(p.dtype):
        return False
    whole = p.x.dense and p.src.dense and p.beyond is None
    of_a_column = p.outer * p.inner == 1 and p.positions <= p.places <= 2 * p.positions
    few = p.positions <= MOST_FIRST or of_a_column
    return whole and few and p.positions >= FEWEST_FIRST and p.cells <= CELLS_FIRST


def holds_small_tiles(w: Workload, device: DeviceSpec) -> bool:
    """Whether untuned a block moves so little of an update that one launch is quickest."""
    tiled = IMPLS["scatter_tiled"]
    if tiled.unsupported(w, device) is not None:
        return False
    p, c = served_scatter(w), tiled.heuristic(w, device)
    return columns(p, c) * max(p.length, p.places) <= SMALL_TILE


def streams(w: Workload, device: DeviceSpec) -> bool:
    """Whether untuned an update is one pass at the speed of memory: threads hold its tiles, rows
    of tiles are whole sectors, and of an SM's two blocks one moves data while the other waits.

    H200, commit 1462c2b: (1000, 256, 7, 7) along dim 0 take 100 us so, and 175 us by buckets.
    """
    tiled = IMPLS["scatter_tiled"]
    if tiled.unsupported(w, device) is not None:
        return False
    p, c = served_scatter(w), tiled.heuristic(w, device)
    busy = resident(p, c, device) >= 2 and tiles(p, c) >= 2 * device.sms
    return busy and c.held and row_bytes(p, c, w) >= SECTOR_BYTES


def writes_alone(w: Workload) -> bool:
    """Whether untuned one launch in place writes all there is, of an index that is expanded."""
    p, strides = element_problem(w), w["index"].strides
    if isinstance(p, str) or strides is None or 0 not in strides:
        return False
    return p.fill is None and p.length == 1 and p.count <= MOST_ALONE
