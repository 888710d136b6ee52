"""Schedules for few rows: fewer than SMs, or so few that all of them can be on chip at once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from tilewright.device import DeviceSpec
from tilewright.fusion.cuda.rows.footprint import Footprint, estimated_registers, register_cap
from tilewright.fusion.cuda.rows.schedule import RowSchedule
from tilewright.space import ConfigSpace

MANY_ROWS = 8
"""For each SM: so many keep a persistent kernel busy, fewer may all be on chip at once. That is
1056 rows on an H200, between the 512 and 8192 of norms_sweep."""
WIDE_ROW_BYTES = 1 << 14
"""Beyond it a row takes more than 256 threads with 64 bytes each."""
NARROW_ROW_BYTES = 1 << 13
"""Up to here a row is no more than a small block's."""
BLOCK_SHAPES = ((1, 256), (2, 256), (4, 1024), (8, 1024))
"""Vectors of a thread, and the threads that a block may then have: the shortest work first."""
RESIDENT_THREADS = (1024, 768, 640, 512)
"""On an SM: the fewer, the more of its registers are left for rows."""
TWO_VECTOR_THREADS = 640
"""The same where lanes join moments and have two vectors each."""
PARAMETER_REGISTERS = 8
"""For what is read of two parameters when the row is known: a vector of each."""
SPARE_REGISTERS = 8
"""What the estimate may miss, but for what is of fp32 alone."""
FULL_SHARE = 0.9
"""Of the SMs: clusters that take more may have to wait for one another, if an SM holds one block.
Layer norm of 16 rows of 65536 fp32 took 7.3 us on an H200 by eight blocks of 512 threads, 5.4 by
eight of 256, two of which fit an SM (7c2ec09, no file kept)."""
BLOCK_ROW_BYTES = 3 << 9
"""From here on a row of costly steps is a block's: 96 threads with 16 bytes each."""
FULL_ROW_BYTES = 1 << 12
"""From here on a row gives each of 128 threads 32 bytes."""
FULL_BLOCK_BYTES = 1 << 16
"""What 1024 threads keep at 64 bytes each."""
EXCHANGED_BYTES = 32
"""Of a row, by a thread: up to here softmax's exponentials are computed twice to exchange once."""
STREAMED_SHARE = 0.3
"""Of the L2 cache: loads that take more of it are no faster for leaving it first. 512 rows of 12288
and 16384, which take less, gain 2 to 4 %, 8192 rows lose 3 to 5 % (docs/row_kernels.md)."""
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
    """The same, for rows that registers hold: what they do not hold, small blocks share.

    Narrow rows of a few hundred are as fast with few threads, unless parameters come beside them or
    what is costly is kept: with 512 rows of 2048 halves on an H200, softmax took 3.0 us in one
    wave, 3.3 us with few threads; 8.2 us of 12288, 9.1 us if nothing is kept (c4d3930); and 2.48 us
    of 1024 in one wave, 2.68 us with few threads (2c7c317). Of fp32 that is not wide, threads may
    be fewer where parameters then come beside the row: layer norm took 6.0 us of 4096 by 128
    threads, 6.6 by 256 that read them later, and 5.05 of 3072 by 192, 5.4 (7c2ec09, no file kept).
    """
    row_bytes = footprint.width * footprint.itemsize
    found = few_row_candidates(space, footprint, device, vector)
    wide = row_bytes > WIDE_ROW_BYTES
    if footprint.rows <= device.sms:
        yield from found
    elif footprint.parameters:
        fitting = [c for c in found if c.storage == "registers"]
        if wide:
            fitting.sort(key=lambda c: not footprint.fills(c))
        elif footprint.is_of_fp32:
            fitting.sort(key=lambda c: c.parameters != "ahead")
        yield from fitting
    elif wide or (footprint.keeps_costly_steps and row_bytes >= BLOCK_ROW_BYTES):
        keeps = footprint.keeps_costly_steps
        fitting = [c for c in found if c.storage == "registers" and c.recompute != keeps]
        yield from sorted(fitting, key=lambda c: not footprint.fills(c))


def latency_candidates(
    space: ConfigSpace[RowSchedule], footprint: Footprint, device: DeviceSpec, vector: int
) -> Iterator[RowSchedule]:
    """Rows that leave SMs idle: what counts is how long one of them takes.

    So a thread has one vector if a block of 256 threads then holds the row, and up to eight else,
    and parameters come beside the row. Rows wider than a small block holds are shared by clusters
    on SMs that would be idle: to hear from the others takes less than to work on all of the row.
    With 16 rows of 5140 halves on an H200, RMS norm took 2.14 us in clusters of four blocks of 64
    threads, 2.18 us of 96, and 2.24 us in one block (c4d3930).
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
        shapes = BLOCK_SHAPES[:1:-1] + BLOCK_SHAPES[:2]
    for cluster in clusters:
        fitting = [
            threads
            for turns, most in shapes
            for threads in [_threads(space, vectors / cluster / turns)]
            if threads is not None and threads <= most
        ]
        if cluster > 1 and cluster * footprint.rows > FULL_SHARE * device.sms:
            fitting.sort(key=lambda threads: threads > max(most for _, most in BLOCK_SHAPES[:2]))
        for threads in list(dict.fromkeys(fitting))[:2]:
            way = moments_at_once(footprint)
            c = RowSchedule(vector, threads, 1, 1, "registers", way, cluster, 1)
            little = footprint.turns(c) * vector * footprint.itemsize <= EXCHANGED_BYTES
            if cluster > 1 and little and not footprint.has_moments:
                c = replace(c, moments=one_exchange(space))
            yield _with_parameters(keeping(c, space), space, footprint, device)


def one_wave_candidates(
    space: ConfigSpace[RowSchedule], footprint: Footprint, device: DeviceSpec, vector: int
) -> Iterator[RowSchedule]:
    """A block for each row, and all blocks at once on the device: a second round would wait until
    the slowest of the first has left. Where registers do not hold the rows, shared memory may.

    With 512 rows on an H200, layer norm took 3.07 us of 2048 halves by threads with two vectors,
    3.18 us with one; what of 4 to 8 KiB, or to 16 KiB beside parameters, leaves L2 first takes as
    long or longer, but of 12288 halves 8.53 us, and 8.77 us if it does not (2c7c317).
    """
    vectors = footprint.width / vector
    if footprint.columns or vectors <= 64:
        return
    # A power of two: one kernel then serves more row counts.
    blocks = 1 << (math.ceil(footprint.rows / device.sms) - 1).bit_length()
    if blocks not in space.values["min_blocks"]:
        return
    most_kept = MOST_BESIDE_PARAMETERS if footprint.parameters else MOST_KEPT_BYTES
    row_bytes = footprint.width * footprint.itemsize
    widest_kept = WIDE_ROW_BYTES if footprint.parameters else NARROW_ROW_BYTES
    stream = not FULL_ROW_BYTES <= row_bytes <= widest_kept and is_streamed(footprint, device)
    residents = RESIDENT_THREADS if footprint.parameters else RESIDENT_THREADS[1:]
    if footprint.has_moments and vectors * blocks <= 2 * TWO_VECTOR_THREADS:
        residents = (TWO_VECTOR_THREADS, *residents)
    for resident in (*residents, None):
        turns = math.ceil(vectors / ((resident or max(RESIDENT_THREADS)) // blocks))
        threads = _threads(space, vectors / turns)
        if threads is None or (resident and turns * vector * footprint.itemsize > most_kept):
            continue
        storage = "registers" if resident else "shared"
        packed = True in space.values["rematerialize"] and storage == "registers"
        way = moments_at_once(footprint) if resident else "two_pass"
        c = RowSchedule(
            vector, threads, 1, 1, storage, way, 1, blocks,
            stream_loads=stream, rematerialize=packed,
        )  # fmt: skip
        on_the_way = PARAMETER_REGISTERS * math.ceil(len(footprint.parameters) / 2)
        if estimated_registers(c, footprint) + on_the_way <= register_cap(c, device):
            yield _with_parameters(keeping(c, space), space, footprint, device)


def shared_candidates(
    space: ConfigSpace[RowSchedule], footprint: Footprint, device: DeviceSpec, vector: int
) -> Iterator[RowSchedule]:
    """As many blocks for each row as run at once, for rows that one block would not keep: 1024
    threads on an SM and more, with the whole row on its way from the start. Loads that L1 keeps are
    the quicker ones by 1% (lerp's gradients of B and C on an H200, 77fc060)."""
    if footprint.width * footprint.itemsize < FULL_BLOCK_BYTES or footprint.rows >= device.sms:
        return
    for threads, blocks in ((256, 4), (512, 2), (256, 6), (128, 8), (512, 3), (1024, 1)):
        most = blocks * device.sms / footprint.rows
        shares = max((n for n in space.values["blocks_per_row"] if n <= most), default=1)
        for storage in ("registers", "reread") if shares > 1 else ():
            yield RowSchedule(
                vector, threads, 1, 1, storage, "two_pass", 1, blocks, stream_loads=False,
                blocks_per_row=shares,
            )  # fmt: skip


def shared_variations(c: RowSchedule) -> Iterator[RowSchedule]:
    """Also half the vector, and twice the blocks, in two waves: what the first stores then overlaps
    with what the second loads."""
    widths, blocks = (c.vector, max(c.vector // 2, 1)), (c.blocks_per_row, 2 * c.blocks_per_row)
    for vector, shares, stream in itertools.product(widths, blocks, (True, False)):
        yield replace(c, vector=vector, blocks_per_row=shares, stream_loads=stream)


def keeping(c: RowSchedule, space: ConfigSpace[RowSchedule]) -> RowSchedule:
    """With what is costly to compute again in registers, if it fits."""
    kept = replace(c, recompute=False, rematerialize=False)
    return kept if kept in space else c


def is_streamed(footprint: Footprint, device: DeviceSpec) -> bool:
    """Whether what is loaded should be the first to leave L2.

    On an H200 that made softmax 2 to 4% faster of 512 rows of 12288 and 16384 halves, and 2 to 5%
    slower of 512 rows of 20480 and more and of 8192 rows of 2048 and more (c4d3930).
    """
    loaded = footprint.rows * footprint.queued_bytes
    return loaded <= STREAMED_SHARE * device.l2_bytes


def moments_at_once(footprint: Footprint) -> str:
    """How a row whose every exchange is waited for finds its moments: in one, if it has some."""
    return "lanes" if footprint.has_moments else "two_pass"


def one_exchange(space: ConfigSpace[RowSchedule]) -> str:
    """How the blocks of a cluster find moments: mean and m2 at once, or the greatest element and
    the sum of exponentials below it."""
    return "merge" if "merge" in space.values["moments"] else "two_pass"


def _with_parameters(
    c: RowSchedule, space: ConfigSpace[RowSchedule], footprint: Footprint, device: DeviceSpec
) -> RowSchedule:
    """Their parameters beside the row, if there are registers to spare for them: layer norm of 512
    rows of 4096 halves took 4.15 us on an H200, and 4.21 us if they filled all (2c7c317)."""
    ahead = replace(c, parameters="ahead")
    spare = 0 if footprint.is_of_fp32 else SPARE_REGISTERS
    needed = estimated_registers(ahead, footprint) + spare
    return ahead if ahead in space and needed <= register_cap(ahead, device) else c


def _threads(space: ConfigSpace[RowSchedule], least: float) -> int | None:
    """Whole warps of a block that takes part in a row."""
    return next((t for t in space.values["row_threads"] if t >= max(least, 64)), None)
