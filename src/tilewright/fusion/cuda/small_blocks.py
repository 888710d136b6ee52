"""Schedules in blocks so small that several share an SM: while some store, others load."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tilewright.device import DeviceSpec
from tilewright.fusion.cuda.few_rows import MANY_ROWS, WIDE_ROW_BYTES, one_exchange
from tilewright.fusion.cuda.schedule import (
    Footprint,
    RowSchedule,
    estimated_registers,
    register_cap,
)
from tilewright.space import ConfigSpace

SHAPES = ((64, 256, 128), (128, 128, 256))
"""Threads of a block, from and to, and bytes of a row that each of them keeps, at most: 32 KiB."""
MOST_THREADS = 768
"""On an SM: with more of them there are too few registers for what they keep."""
ROWS_OF_WARPS = 4
"""Of a block whose warps have a row each."""


def small_block_candidates(
    space: ConfigSpace[RowSchedule], footprint: Footprint, device: DeviceSpec, vector: int
) -> Iterator[RowSchedule]:
    """A row by the fewest blocks whose registers hold it, as a cluster; a narrow one by a warp.

    What is costly to compute again is kept if that leaves more than one block an SM. With 512 rows
    on an H200, such blocks of 128 threads, with 256 bytes each, took 37.0 us for softmax of 65536
    halves and 13.7 us of 20480, persistent kernels 52.6 and 16.4 us (9461804).
    """
    row_bytes = footprint.width * footprint.itemsize
    narrow = row_bytes < 4096
    many = footprint.rows >= MANY_ROWS * device.sms
    if footprint.columns or footprint.rows <= device.sms:
        return
    if narrow and many:
        yield from _of_warps(space, footprint, device, vector)
    if row_bytes <= WIDE_ROW_BYTES:
        return
    for keeps in dict.fromkeys((footprint.keeps_costly_steps, False)):
        for least, most, most_bytes in SHAPES:
            fits = (k for k in space.values["cluster"] if k * most * most_bytes >= row_bytes)
            cluster = next(fits, None)
            if cluster is None:
                continue
            least = max(least, row_bytes / cluster / most_bytes)
            threads = next(t for t in space.values["row_threads"] if t >= least)
            c = RowSchedule(vector, threads, 1, 1, "registers", "two_pass", cluster, 1)
            yield from _filling(c, keeps, space, footprint, device)


def small_block_variations(
    c: RowSchedule, space: ConfigSpace[RowSchedule]
) -> Iterator[RowSchedule]:
    yield c
    if c.cluster > 1:
        merged = replace(c, moments=one_exchange(space), recompute=True)
        yield replace(merged, rematerialize=True in space.values["rematerialize"])


def _of_warps(
    space: ConfigSpace[RowSchedule], footprint: Footprint, device: DeviceSpec, vector: int
) -> Iterator[RowSchedule]:
    """A row by a warp, which needs no barrier."""
    c = RowSchedule(vector, device.warp, ROWS_OF_WARPS, 1, "registers", "two_pass", 1, 1)
    for keeps in dict.fromkeys((footprint.keeps_costly_steps, False)):
        yield from _filling(c, keeps, space, footprint, device)


def _filling(
    c: RowSchedule,
    keeps: bool,
    space: ConfigSpace[RowSchedule],
    footprint: Footprint,
    device: DeviceSpec,
) -> Iterator[RowSchedule]:
    """As many blocks on an SM as registers allow."""
    packed = True in space.values["rematerialize"] and not keeps
    c = replace(c, recompute=not keeps, rematerialize=packed)
    for blocks in reversed(space.values["min_blocks"]):
        filled = replace(c, min_blocks=blocks)
        few = blocks * c.block_threads <= MOST_THREADS
        if few and estimated_registers(filled, footprint) <= register_cap(filled, device):
            if filled in space:
                yield filled
            return
