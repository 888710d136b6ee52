"""Schedules of kernels that also add up over rows, as gradients of weights are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest
from operator import itemgetter
from typing import Any

from tilewright.device import DeviceSpec
from tilewright.fusion.cuda.rows.few_rows import FULL_ROW_BYTES, SPARE_REGISTERS
from tilewright.fusion.cuda.rows.footprint import (
    MANY_STEPS,
    Footprint,
    estimated_registers,
    register_cap,
)
from tilewright.fusion.cuda.rows.schedule import RowSchedule
from tilewright.fusion.cuda.rows.space import COLUMN_GROUPS
from tilewright.space import ConfigSpace

COLUMN_BLOCKS = ((81, 256), (81, 384), (96, 256), (96, 384), (64, 256), (64, 384), (32, 512))
"""For kernels that sum over rows, in order of preference: bytes of a row that a thread keeps, and
threads on an SM (layer_norm_backward_gpt)."""
COLUMN_THREADS = 256
"""Of such a block, unless it is of a cluster."""
BUSY_THREADS = 512
"""On an SM, to hide the latency of more than memory."""
WAITING_THREADS = 768
"""On an SM, where the next rows are not on their way."""
FEWER_THREADS = 128, 384
"""Of a block, and on an SM, where a warp has such a row to itself."""
BUSY_STEPS = 60
"""Instructions for an element of rows whose columns are added up, from which on that latency counts
for more than memory's: between 43 of a biased gelu's gradients and 80 of those of a gate."""
THREAD_BYTES = 32
"""Of a tensor, at most, by each of so many threads: of a row of which much is computed, or of
several narrow ones that a warp takes at once. RMS norm's gradients of 262144 rows of 128 bf16, with
its weight's, took 68.7 us on an H100 by four rows at once, 95.4 by one and 256 threads on an SM
(5e0f59c)."""
ROUNDS_OF_ROWS = 4
"""That a warp so walks, at least: with fewer rows it takes less of them at once."""
WIDE_COLUMN_BYTES = 1 << 15
"""Of a row that blocks of a cluster share where they sum over rows."""
SHIFTED_COLUMN_BYTES = 1 << 14
"""Likewise, of a row that begins anywhere."""
HALF_ACCESS_BYTES = 8
ROOMY_REGISTERS = 200
"""As estimated: up to here a kernel that sums over rows holds its parameters, too, and does not
spill."""


def column_block_candidates(
    space: ConfigSpace[RowSchedule], footprint: Footprint, device: DeviceSpec, vector: int
) -> Iterator[RowSchedule]:
    """Sums over rows: 256 threads on an SM, each with 40 to 96 bytes of a row and the parameters in
    registers. They are one block, which leaves the fewest partial results, or a small one of each
    of the clusters that share a row of 32 KiB or more. With 128 threads or more those take two rows
    at once, in bulk, to wait for one another half as often.

    So were the best found of `layer_norm_backward_gpt` on an H200, 2026-11-21: 2048 columns take
    31.1 us, with two blocks on an SM 31.7, with four 32.0; 65536 take 860 us, without bulk 899,
    and row by row 927.
    """
    if not footprint.columns:
        return
    row_bytes = footprint.width * footprint.itemsize
    cluster = max(space.values["cluster"]) if row_bytes >= WIDE_COLUMN_BYTES else 1
    narrow = min(max(vector // 2, HALF_ACCESS_BYTES // footprint.itemsize), vector)
    yield from _narrow_rows(space, footprint, device, narrow)
    yield from _much_of_halves(space, footprint, device, narrow)
    held = "registers" if footprint.parameters else "reload"
    for kept_bytes, resident in COLUMN_BLOCKS:
        least = max(row_bytes / cluster / kept_bytes, 64 if cluster > 1 else 32)
        threads = next((t for t in space.values["row_threads"] if t >= least), None)
        if threads is None:
            continue
        groups = max((COLUMN_THREADS if cluster == 1 else 64) // threads, 1)
        blocks = [b for b in space.values["min_blocks"] if b * groups * threads <= resident]
        c = RowSchedule(
            narrow, threads, groups, 1, "registers", "two_pass", cluster, max(blocks, default=1),
            stages=2, parameters="shared" if footprint.parameters else "reload",
        )  # fmt: skip
        if cluster > 1 and threads >= 128 and footprint.itemsize == 2:
            yield replace(
                c, vector=vector, rows_per_block=max(256 // threads, 1), rows_per_thread=2,
                min_blocks=1, parameters=held, rematerialize=True,
                bulk=True in space.values["bulk"],
            )  # fmt: skip
        for varied in (replace(c, parameters=held), c):
            needed = estimated_registers(varied, footprint)
            roomy = varied is c or needed <= ROOMY_REGISTERS
            if roomy and needed + SPARE_REGISTERS <= register_cap(varied, device):
                yield varied
    yield from _parts_of_warps(space, footprint, device, vector)


def shifted_column_candidates(
    space: ConfigSpace[RowSchedule], footprint: Footprint, device: DeviceSpec, vector: int
) -> Iterator[RowSchedule]:
    """Sums over wide rows that begin anywhere: as much of them on an SM at once as its registers
    hold, by as few threads, in the largest clusters.

    On an H100, gradients of layer norm of 8192 rows of 12289 halves took 232 us (c63b420), in
    clusters of two with 448 threads 262 (5ef3d71); of RMS norm of 2048 rows of 50257, with 25 KiB
    on an SM, 220 us, with 12 KiB 509. Of 32769 halves, among schedules timed at 7d5d9c7 (no file
    kept), clusters of eight took 577 us with 16 KiB on an SM and 1153 with 8, clusters of four 656.
    """
    wide = footprint.width * footprint.itemsize >= SHIFTED_COLUMN_BYTES
    if not wide or not footprint.columns:
        return
    sizes = itertools.product(*(space.values[k] for k in ("row_threads", "cluster", "min_blocks")))
    by_share = sorted(sizes, key=lambda size: (-size[2] / size[1], -size[1], size[0]))
    most, _ = max(COLUMN_BLOCKS)
    held = ("registers", True), ("shared", False)
    for threads, cluster, blocks in by_share:
        if footprint.width // (cluster * threads) * footprint.itemsize > most:
            continue
        for parameters, packed in held if footprint.parameters else [("reload", True)]:
            c = RowSchedule(
                vector, threads, 1, 1, "registers", "two_pass", cluster, blocks, stages=2,
                parameters=parameters, rematerialize=packed, shifted=True,
            )  # fmt: skip
            if estimated_registers(c, footprint) + SPARE_REGISTERS <= register_cap(c, device):
                yield c


def _narrow_rows(
    space: ConfigSpace[RowSchedule], footprint: Footprint, device: DeviceSpec, vector: int
) -> Iterator[RowSchedule]:
    """Many rows so narrow that a warp takes several of them at once, or, where it computes much of
    each, has more of them on their way."""
    lane_bytes = math.ceil(footprint.width * footprint.itemsize / device.warp)
    at_once = ROUNDS_OF_ROWS * device.sms * BUSY_THREADS // device.warp
    fitting = [n for n in (4, 2) if n * lane_bytes <= THREAD_BYTES]
    if not fitting:
        return
    if footprint.instructions("two_pass") >= MANY_STEPS:
        fitting = [1]
    for rows in fitting:
        if footprint.rows >= rows * at_once:
            yield RowSchedule(
                vector, device.warp, COLUMN_THREADS // device.warp, rows, "registers", "two_pass",
                1, BUSY_THREADS // COLUMN_THREADS, stages=min(4 // rows, 3),
                parameters="registers" if footprint.parameters else "reload",
                rematerialize=True in space.values["rematerialize"],
            )  # fmt: skip


def _parts_of_warps(
    space: ConfigSpace[RowSchedule], footprint: Footprint, device: DeviceSpec, widest: int
) -> Iterator[RowSchedule]:
    """Narrow rows, several by each warp: of few vectors, or such as no queue holds, which more
    threads wait for. Gradients of rotary positions of pairs of normalised heads and of the norm's
    weight, bf16[4,2048,32,128], took 95.4 us on an H100 by 768 threads on an SM, each with two
    vectors of two elements (762ba9b); by 256, a warp for each row, 205 (dacf7d8)."""
    if not footprint.graph.reductions:  # tiles of columns do that
        return
    held = ("registers", "reload") if footprint.parameters else ("reload",)
    for parameters, vector, stages in itertools.product(held, space.values["vector"], (2, 1, 0)):
        vectors = footprint.width // vector
        threads = min(vectors, device.warp // 2)
        few = vectors in (threads, 2 * threads)
        if vector <= widest and few and threads in space.values["row_threads"]:
            groups = min(COLUMN_THREADS // threads, max(space.values["rows_per_block"]))
            blocks = (BUSY_THREADS if stages else WAITING_THREADS) // (groups * threads)
            c = RowSchedule(
                vector, threads, groups, 1, "registers", "two_pass", 1, blocks, stages=stages,
                parameters=parameters,
            )  # fmt: skip
            if estimated_registers(c, footprint) + SPARE_REGISTERS <= register_cap(c, device):
                yield c


def _much_of_halves(
    space: ConfigSpace[RowSchedule], footprint: Footprint, device: DeviceSpec, vector: int
) -> Iterator[RowSchedule]:
    """Of halves of which much is computed a thread has little, so that it has registers for the
    steps, and an SM has threads to hide their latency. Gradients of RMS norm of x * silu(gate) and
    of its weight, 8192 rows of 1024, 4096, 5120 and 16384 bf16, took 31.4, 115.6, 147.7 and
    461.6 us on an H100 as a search cut them, 50.4, 122.3, 188.6 and 690.9 by those below, which
    spilled but for 4096 (fd5fd49). Parameters widened in shared memory take the fewest registers.
    """
    if footprint.itemsize != 2 or footprint.instructions("two_pass") < BUSY_STEPS:
        return
    row_bytes = footprint.width * footprint.itemsize
    for cluster in space.values["cluster"]:
        least = max(row_bytes / cluster / THREAD_BYTES, device.warp)
        threads = next((t for t in space.values["row_threads"] if t >= least), None)
        if threads is not None and threads <= BUSY_THREADS:
            # A warp that has a row to itself holds more: with 128 registers it spills.
            alone = threads == device.warp
            block, resident = FEWER_THREADS if alone else (COLUMN_THREADS, BUSY_THREADS)
            groups = max(block // threads, 1)
            blocks = max(resident // (groups * threads), 1)
            c = RowSchedule(
                vector, threads, groups, 1, "registers", "two_pass", cluster, blocks, stages=2
            )
            held = replace(c, parameters="shared", widened=True)
            yield held if footprint.parameters else replace(c, parameters="reload")


def column_candidates(
    space: ConfigSpace[RowSchedule], footprint: Footprint, device: DeviceSpec, vector: int
) -> list[RowSchedule]:
    """Sums over rows: of each way to cut a row the best schedule, then the second of each, ...

    They move little (within 5%), and then have many threads. A thread keeps 32 to 96 bytes of a
    row: wider pieces leave few threads, narrower ones have to be joined too often. A cluster shares
    rows of which each block has `FULL_ROW_BYTES` or more.
    """
    found: dict[Any, list[tuple[int, int, RowSchedule]]] = {}
    dims = (COLUMN_GROUPS, (1, 2, 3, 4), (1, 2))
    row_bytes = footprint.width * footprint.itemsize
    least_bytes = max(footprint.rows * footprint.queued_bytes, 1)
    clusters = [c for c in space.values["cluster"] if c == 1 or row_bytes >= FULL_ROW_BYTES * c]
    for cluster, kept_bytes in itertools.product(clusters, (32, 48, 64, 96)):
        least = max(row_bytes / cluster / kept_bytes, 32)
        threads = next((t for t in space.values["row_threads"] if t >= least), 2048)
        for wide, groups, blocks, rows in itertools.product((vector // 2, vector), *dims):
            c = RowSchedule(
                max(wide, 1), threads, groups, rows, "registers", "two_pass", cluster, blocks,
                stages=2, parameters="shared" if footprint.parameters else "reload",
                rematerialize=True in space.values["rematerialize"],
            )  # fmt: skip
            if 256 <= c.block_threads * blocks <= 768 and c in space:
                moved = round(20 * _column_bytes(c, footprint, device) / least_bytes)
                cut = (c.vector, c.row_threads, c.cluster)
                found.setdefault(cut, []).append((moved, -c.block_threads * blocks, c))
    ranks = zip_longest(*(sorted(each, key=itemgetter(0, 1)) for each in found.values()))
    return [each[-1] for rank in ranks for each in rank if each is not None]


def _column_bytes(c: RowSchedule, footprint: Footprint, device: DeviceSpec) -> int:
    """What a candidate above moves."""
    clusters = device.sms * c.min_blocks // c.cluster
    at_once = clusters * c.rows_per_block * c.rows_per_thread
    walked = math.ceil(footprint.rows / at_once) * at_once
    partials = clusters * footprint.width * len(footprint.columns)
    return walked * footprint.queued_bytes + 2 * partials * footprint.column_itemsize


def column_block_variations(c: RowSchedule) -> Iterator[RowSchedule]:
    """Also in blocks of half and of a quarter of the threads, which leave more partial results and
    wait less for one another."""
    yield from (c, replace(c, early=True), replace(c, widened=True), replace(c, bulk=not c.bulk))
    yield replace(c, vector=2 * c.vector, rows_per_thread=2, rematerialize=True)
    cuts = [
        (c.rows_per_block // n, c.min_blocks * n) for n in (1, 2, 4) if c.rows_per_block % n == 0
    ]
    for (groups, blocks), stages, packed in itertools.product(cuts, (2, 3), (False, True)):
        yield replace(
            c, rows_per_block=groups, min_blocks=blocks, stages=stages, rematerialize=packed
        )


def column_variations(c: RowSchedule) -> Iterator[RowSchedule]:
    held = replace(c, parameters="registers" if c.parameters != "reload" else "reload")
    meeting = replace(c, combine="grid")
    kept = dict.fromkeys((c, meeting, held, replace(held, rematerialize=False)))
    for varied, stages, bulk in itertools.product(kept, (2, 3), (False, True)):
        yield replace(varied, stages=stages, bulk=bulk)
