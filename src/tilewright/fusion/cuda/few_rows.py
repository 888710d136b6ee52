"""Schedules for few rows: fewer than SMs, or so few that all of them can be on chip at once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from tilewright.device import DeviceSpec
from tilewright.fusion.cuda.schedule import (
    Footprint,
    RowSchedule,
    estimated_registers,
    register_cap,
)
from tilewright.space import ConfigSpace

MANY_ROWS = 8
"""For each SM: so many keep a persistent kernel busy, fewer may all be on chip at once."""
WIDE_ROW_BYTES = 1 << 14
"""Beyond it a row takes more than 256 threads with 64 bytes each."""
NARROW_ROW_BYTES = 1 << 13
"""Up to here a row is no more than a small block's."""
BLOCK_SHAPES = ((1, 256), (2, 256), (4, 1024), (8, 1024))
"""Vectors of a thread, and the threads that a block may then have: the shortest work first."""
RESIDENT_THREADS = (1024, 768, 640, 512)
"""On an SM: the fewer, the more of its registers are left for rows."""
PARAMETER_REGISTERS = 8
"""For what is read of each parameter when the row is known: two vectors."""
MOST_KEPT_BYTES, MOST_BESIDE_PARAMETERS = 256, 192
"""Of a row, by a thread: half of the registers of one of 512 on an SM, or three eighths."""


def few_row_candidates(
    space: ConfigSpace[RowSchedule], footprint: Footprint, device: DeviceSpec, vector: int
) -> Iterator[RowSchedule]:
    """What a search begins with where rows are few."""
    if footprint.rows <= device.sms:
        yield from latency_candidates(space, footprint, device, vector)
    elif footprint.rows < MANY_ROWS * device.sms:
        yield from one_wave_candidates(space, footprint, device, vector)


def few_row_heuristic(
    space: ConfigSpace[RowSchedule], footprint: Footprint, device: DeviceSpec, vector: int
) -> Iterator[RowSchedule]:
    """The same, for rows that registers hold: what they do not hold, small blocks share. Narrow
    rows that are not fewer than SMs are as fast with few threads, but for parameters beside them.
    """
    row_bytes = footprint.width * footprint.itemsize
    found = few_row_candidates(space, footprint, device, vector)
    if footprint.rows <= device.sms:
        yield from found
    elif row_bytes > WIDE_ROW_BYTES or (footprint.parameters and row_bytes <= NARROW_ROW_BYTES):
        yield from (c for c in found if c.storage == "registers")


def latency_candidates(
    space: ConfigSpace[RowSchedule], footprint: Footprint, device: DeviceSpec, vector: int
) -> Iterator[RowSchedule]:
    """Rows that leave SMs idle: what counts is how long one of them takes.

    So a thread has one vector if a block of 256 threads then holds the row, and up to eight else,
    and parameters come beside the row. Rows wider than a small block holds are shared by clusters
    on SMs that would be idle: to hear from the others takes less than to work on all of the row.
    With 16 rows of 5140 halves on an H200, RMS norm took 2.2 us in clusters of four blocks of 96
    threads, and 2.7 us in one block (9461804).
    """
    vectors = footprint.width / vector
    if footprint.columns or vectors <= 64:
        return
    row_bytes = footprint.width * footprint.itemsize
    free = [c for c in space.values["cluster"] if c * footprint.rows <= device.sms]
    clusters = sorted(free, reverse=row_bytes > NARROW_ROW_BYTES)
    shapes = BLOCK_SHAPES
    if NARROW_ROW_BYTES < row_bytes <= WIDE_ROW_BYTES:
        clusters = [c for c in clusters if c <= 4]
        shapes = BLOCK_SHAPES[2:] + BLOCK_SHAPES[:2]
    for cluster in clusters:
        fitting = [
            threads
            for turns, most in shapes
            for threads in [_threads(space, vectors / cluster / turns)]
            if threads is not None and threads <= most
        ]
        for threads in fitting[:2]:
            c = RowSchedule(vector, threads, 1, 1, "registers", "two_pass", cluster, 1)
            if cluster > 1:
                c = replace(c, moments=one_exchange(space))
            yield _with_parameters(keeping(c, space) if cluster == 1 else c, space)


def one_wave_candidates(
    space: ConfigSpace[RowSchedule], footprint: Footprint, device: DeviceSpec, vector: int
) -> Iterator[RowSchedule]:
    """A block for each row, and all blocks at once on the device: a second round would wait until
    the slowest of the first has left. Where registers do not hold the rows, shared memory may."""
    vectors = footprint.width / vector
    if footprint.columns or vectors <= 64:
        return
    blocks = min(b for b in space.values["min_blocks"] if b * device.sms >= footprint.rows)
    most_kept = MOST_BESIDE_PARAMETERS if footprint.parameters else MOST_KEPT_BYTES
    for resident in (*RESIDENT_THREADS, None):
        turns = math.ceil(vectors / ((resident or max(RESIDENT_THREADS)) // blocks))
        threads = _threads(space, vectors / turns)
        if threads is None or (resident and turns * vector * footprint.itemsize > most_kept):
            continue
        storage = "registers" if resident else "shared"
        packed = True in space.values["rematerialize"] and storage == "registers"
        c = RowSchedule(
            vector, threads, 1, 1, storage, "two_pass", 1, blocks,
            stream_loads=False, rematerialize=packed,
        )  # fmt: skip
        on_the_way = PARAMETER_REGISTERS * len(footprint.parameters)
        if estimated_registers(c, footprint) + on_the_way <= register_cap(c, device):
            yield _with_parameters(keeping(c, space), space)


def keeping(c: RowSchedule, space: ConfigSpace[RowSchedule]) -> RowSchedule:
    """With what is costly to compute again in registers, if it fits."""
    kept = replace(c, recompute=False, rematerialize=False)
    return kept if kept in space else c


def one_exchange(space: ConfigSpace[RowSchedule]) -> str:
    """How the blocks of a cluster find moments: mean and m2 at once, or the greatest element and
    the sum of exponentials below it."""
    return "merge" if "merge" in space.values["moments"] else "two_pass"


def _with_parameters(c: RowSchedule, space: ConfigSpace[RowSchedule]) -> RowSchedule:
    """Their parameters beside the row, if there are registers for them."""
    ahead = replace(c, parameters="ahead")
    return ahead if ahead in space else c


def _threads(space: ConfigSpace[RowSchedule], least: float) -> int | None:
    """Whole warps of a block that takes part in a row."""
    return next((t for t in space.values["row_threads"] if t >= max(least, 64)), None)
