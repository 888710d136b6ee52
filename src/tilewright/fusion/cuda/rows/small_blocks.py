"""Schedules in blocks so small that several share an SM: while some store, others load."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from tilewright.device import DeviceSpec
from tilewright.fusion.cuda.rows.few_rows import (
    FULL_ROW_BYTES,
    MANY_ROWS,
    WIDE_ROW_BYTES,
    is_streamed,
    moments_at_once,
    one_exchange,
)
from tilewright.fusion.cuda.rows.footprint import (
    Footprint,
    estimated_registers,
    register_cap,
    widened_registers,
)
from tilewright.fusion.cuda.rows.schedule import RowSchedule
from tilewright.space import ConfigSpace

SHAPES = ((64, 256, 128), (128, 128, 256))
"""Threads of a block, from and to, and bytes of a row that each of them keeps, at most: 32 KiB."""
MOST_THREADS = 768
"""On an SM: with more of them there are too few registers for what they keep."""
WIDENING_REGISTERS = 8
"""For a vector of halves as fp32, where the compiler widens the next one ahead: for sm_100a."""
WIDENING_SEVERAL_REGISTERS = 40
"""The same where several tensors of a row are kept: softmax's gradient of 16384 halves takes 145 of
sm_100a's, where 104 are reckoned."""
ROWS_OF_WARPS = 4
"""Of a block whose warps have a row each."""
WEIGHED_ROW_BYTES = 1536
"""Of one of many rows that a warp has to itself, its weights ahead, at most."""
SM_BYTES_PER_S = 30e9
"""Of memory, for each SM, from which on those are faster than a persistent kernel."""
EXCHANGED_VECTOR = 4
"""Elements of an access, at most, where clusters exchange once and compute costly steps twice."""


def small_block_candidates(
    space: ConfigSpace[RowSchedule], footprint: Footprint, device: DeviceSpec, vector: int
) -> Iterator[RowSchedule]:
    """A row by the fewest blocks whose registers hold it, as a cluster; a narrow one by a warp.

    What is costly to compute again is kept if that leaves more than one block an SM: with 8192 rows
    of 16384 halves on an H200, softmax took 131 us, 143 us by a persistent kernel. A few hundred
    rows that clusters share are not, by 128 threads with 256 bytes each: with 512 rows of 20480
    halves 12.3 us, 12.9 us if kept, 15.0 us by a persistent kernel (c4d3930). In clusters of four
    those exchange what they need once: 65536 halves took 35.7 us, in two passes 35.9. RMS norm of
    32768 took 19.6 us by 256 threads with half of the bytes, 20.5 us by 128 (2c7c317). Four of the
    65536 in an access took 35.2 us, eight 35.6 (1a5ce5c).
    """
    row_bytes = footprint.width * footprint.itemsize
    many = footprint.rows >= MANY_ROWS * device.sms
    if footprint.columns or footprint.rows <= device.sms:
        return
    if many:
        yield from rows_of_warps(space, footprint, device, vector)
    if row_bytes <= WIDE_ROW_BYTES:
        return
    ways = dict.fromkeys((footprint.keeps_costly_steps, False))
    shaped = [(keeps, c) for keeps in ways for c in _of_shapes(space, footprint, vector)]
    if not many and not footprint.parameters:
        shaped.sort(key=lambda each: each[0] or each[1].cluster == 1 or each[1].row_threads > 128)
    for keeps, c in shaped:
        if c.cluster > 2 and not (many or keeps or footprint.has_moments):
            narrower = min(c.vector, EXCHANGED_VECTOR if footprint.keeps_costly_steps else c.vector)
            c = replace(c, moments=one_exchange(space), vector=narrower)
        yield from _filling(c, keeps, space, footprint, device)


def small_block_variations(
    c: RowSchedule, space: ConfigSpace[RowSchedule]
) -> Iterator[RowSchedule]:
    yield c
    yield replace(c, stream_loads=not c.stream_loads)
    if c.cluster > 1:
        merged = replace(c, moments=one_exchange(space), recompute=True)
        yield replace(merged, rematerialize=True in space.values["rematerialize"])


def _of_shapes(
    space: ConfigSpace[RowSchedule], footprint: Footprint, vector: int
) -> Iterator[RowSchedule]:
    way = moments_at_once(footprint)
    kept = footprint.kept_at_once(way) if footprint.widens(way) else footprint.itemsize
    row_bytes = footprint.width * kept
    for least, most, most_bytes in SHAPES:
        fits = (k for k in space.values["cluster"] if k * most * most_bytes >= row_bytes)
        cluster = next(fits, None)
        if cluster is None:
            continue
        needed = max(least, row_bytes / cluster / most_bytes)
        threads = next(t for t in space.values["row_threads"] if t >= needed)
        yield RowSchedule(vector, threads, 1, 1, "registers", way, cluster, 1)


def rows_of_warps(
    space: ConfigSpace[RowSchedule], footprint: Footprint, device: DeviceSpec, vector: int
) -> Iterator[RowSchedule]:
    """A row by a warp, which needs no barrier. With 8192 rows of 1600 halves on an H200, softmax
    took 15.2 us, 16.1 us with exponentials kept, 15.9 us by a persistent kernel (c4d3930). Of 768
    bf16 RMS norm took 7.82 us with its weights ahead, 8.04 us by a persistent kernel (e2ab544).
    Gradients of 16384 rows of 512 fp32 that were divided by their norms took 31.7 us on an H100
    (755376d), 39.1 us by a persistent kernel (2675026)."""
    if footprint.width * footprint.itemsize >= FULL_ROW_BYTES:
        return
    c = RowSchedule(vector, device.warp, ROWS_OF_WARPS, 1, "registers", "two_pass", 1, 1)
    for keeps in dict.fromkeys((False, footprint.keeps_costly_steps)):
        yield from _filling(c, keeps, space, footprint, device)
    if footprint.parameters:
        ahead = replace(c, parameters="ahead", stream_loads=False)
        filled = (replace(ahead, min_blocks=n) for n in reversed(space.values["min_blocks"]))
        yield from itertools.islice((c for c in filled if c in space), 1)


def weighed_rows_untuned(
    footprint: Footprint, device: DeviceSpec, vector: int
) -> Iterator[RowSchedule]:
    """RMS norm's narrow rows, by a warp each, with the weights on their way beside the row.

    With 8192 rows on an H200, of 256 and 768 bf16 that took 4.2 and 8.4 us, by a persistent kernel
    4.6 and 8.7, of 512 as long, of 1024 10.6 and 10.4; with 65536 of 768 50.7 and 52.8 (2997111, no
    file kept). On an H100, which has less memory bandwidth for as many SMs, it was not measured.
    """
    weights = len(footprint.parameters) == 1 == len(footprint.queued)
    if not weights or footprint.columns or footprint.has_moments or footprint.keeps_costly_steps:
        return
    fast = device.dram_bytes_per_s >= SM_BYTES_PER_S * device.sms
    many = footprint.rows >= MANY_ROWS * device.sms
    if fast and many and footprint.width * footprint.itemsize <= WEIGHED_ROW_BYTES:
        yield RowSchedule(
            vector, device.warp, ROWS_OF_WARPS, 1, "registers", "two_pass", 1, 1,
            parameters="ahead",
        )  # fmt: skip


def _filling(
    c: RowSchedule,
    keeps: bool,
    space: ConfigSpace[RowSchedule],
    footprint: Footprint,
    device: DeviceSpec,
) -> Iterator[RowSchedule]:
    """As many blocks on an SM as registers allow. Parameters, which all blocks read again, stay in
    L2 longer than rows. With 512 rows of 16384 halves on an H200, softmax took 10.35 us, 10.94 us
    if rows left L2 first; with nothing kept 10.7 us, and 10.6 us if they did (1a5ce5c)."""
    packed = True in space.values["rematerialize"] and not keeps
    stream = bool(footprint.parameters) or (not keeps and is_streamed(footprint, device))
    c = replace(c, recompute=not keeps, rematerialize=packed, stream_loads=stream)
    several = footprint.kept_at_once(c.moments) > footprint.itemsize
    widening = WIDENING_SEVERAL_REGISTERS if several else WIDENING_REGISTERS
    spare = widening if packed and device.capability >= 100 else 0
    spare = max(spare, widened_registers(c, footprint))
    for blocks in reversed(space.values["min_blocks"]):
        filled = replace(c, min_blocks=blocks)
        few = blocks * c.block_threads <= MOST_THREADS
        needed = estimated_registers(filled, footprint) + spare
        if few and needed <= register_cap(filled, device):
            if filled in space:
                yield filled
            return
