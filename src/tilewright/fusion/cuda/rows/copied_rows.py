"""Rows that are copied to shared memory as they come, and swept there."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from tilewright.device import DeviceSpec
from tilewright.fusion.cuda.rows.few_rows import FULL_ROW_BYTES, MANY_ROWS, WIDE_ROW_BYTES
from tilewright.fusion.cuda.rows.footprint import Footprint
from tilewright.fusion.cuda.rows.schedule import UNROLL, RowSchedule
from tilewright.space import ConfigSpace

PAIRED_ROW_BYTES = 5 << 10
"""Rows of no more bytes are a warp's each, two of them a block's."""
PAIRED_ACCESS, FULL_ACCESS_ROW_BYTES = 4, 3072
"""Elements of an access to them, at most, while a row has fewer bytes: of 1280 halves four took
15.2 us and eight 15.8 (41530a7), of 1536 18.2 and 17.9 (8d4db48)."""
BLOCK_THREADS, BLOCK_ACCESS_BYTES = 128, 8
"""Of a block that has a row to itself, where rows are too wide or too few for warps: 2048 rows of
4096 halves took 12.5 us, 13.0 from registers (8d4db48)."""
FEWEST_WARPS = 24
"""On an SM: so many have a row each, if it holds as many."""
AT_HAND_BYTES = 32
"""Of a row that a thread has in registers at once: with more of them there are fewer warps. Not so
of halves whose last turn is none of all threads: of 1600 bf16, 64 bytes at hand took 19.2 us, 32
took 19.9 (8d4db48)."""
LEAST_ROW_BYTES, LINE_BYTES, LEAST_SHARE = 1536, 128, 1 / 3
"""Best without tuning are rows of so many bytes and more, those beyond 4 KiB if they begin where
lines do, if all that come to an SM are such a share of its shared memory. Of 1300 fp32 softmax took
30.1 us from registers, as a copy does (8d4db48), and 1.5 % more copied (no file kept)."""
LEAST_INSTRUCTIONS = 32
"""Of an element in the time that memory takes for it: sweeps of shared memory that compute costly
steps twice take most of them. Of halves an H200 has 28, an H100 40; of fp32 twice as many."""


def copied_row_candidates(
    footprint: Footprint, device: DeviceSpec, vector: int
) -> Iterator[RowSchedule]:
    """All of a row is on its way at once and takes no registers: an SM has most rows at once, in
    blocks that soon make room for others. With 8192 rows on an H100 softmax took 17.8, 45.4 and
    89.8 us of 768, 2048 and 4096 fp32, 18.5, 46.2 and 90.1 from registers (8d4db48)."""
    row_bytes = footprint.width * footprint.itemsize
    widest = FULL_ROW_BYTES if footprint.parameters else WIDE_ROW_BYTES
    if footprint.rows < MANY_ROWS * device.sms or row_bytes > widest:
        return
    paired = row_bytes <= PAIRED_ROW_BYTES
    most = PAIRED_ACCESS if row_bytes < FULL_ACCESS_ROW_BYTES else vector
    by_warp = _copied(device.warp, 2 if paired else 1, min(vector, most), footprint)
    access = max(BLOCK_ACCESS_BYTES // footprint.itemsize, 1)
    by_block = _copied(BLOCK_THREADS, 1, min(vector, access), footprint)
    warps = min(footprint.rows / device.sms, device.shared_bytes_per_sm / row_bytes)
    if footprint.parameters:
        yield by_warp
    else:
        yield from (by_warp, by_block) if warps >= FEWEST_WARPS else (by_block, by_warp)


def copied_row_variations(c: RowSchedule, space: ConfigSpace[RowSchedule]) -> Iterator[RowSchedule]:
    """Single rows as well: calls that find L2 full of other results take less time by them."""
    yield c
    yield replace(c, rows_per_block=1)
    yield from (replace(c, unroll=n) for n in space.values["unroll"])
    yield replace(c, stream_loads=True)


def copied_rows_untuned(
    footprint: Footprint, device: DeviceSpec, vector: int
) -> Iterator[RowSchedule]:
    """The one to take where steps of a row's only tensor are costly, as softmax's exponentials are,
    and lanes have the time to compute them twice."""
    row_bytes = footprint.width * footprint.itemsize
    alone = len(footprint.queued) == 1 and not footprint.parameters
    shared = footprint.rows * row_bytes / (device.shared_bytes_per_sm * device.sms)
    lanes = device.sms * device.schedulers_per_sm * device.warp
    room_for = lanes * device.clock_hz * 2 * footprint.itemsize / device.dram_bytes_per_s
    twice = footprint.keeps_costly_steps and not footprint.computes_much_again
    costly = alone and twice and room_for >= LEAST_INSTRUCTIONS
    aligned = row_bytes <= FULL_ROW_BYTES or row_bytes % LINE_BYTES == 0
    if costly and aligned and row_bytes >= LEAST_ROW_BYTES and shared >= LEAST_SHARE:
        yield from itertools.islice(copied_row_candidates(footprint, device, vector), 1)


def _copied(threads: int, rows: int, vector: int, footprint: Footprint) -> RowSchedule:
    c = RowSchedule(vector, threads, rows, 1, "shared", "two_pass", 1, 1, stream_loads=False)
    ragged = footprint.width % (threads * vector) > 0 and footprint.itemsize == 2
    at_hand = AT_HAND_BYTES * (2 if ragged else 1) // (vector * footprint.itemsize)
    fewer = 0 < at_hand < min(footprint.turns(c), UNROLL)
    return replace(c, unroll=at_hand) if fewer else c
