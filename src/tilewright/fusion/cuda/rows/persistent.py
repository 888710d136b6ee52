"""Schedules of persistent kernels: parameters on chip, and the next rows on their way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tilewright.device import DeviceSpec
from tilewright.fusion.cuda.rows.few_rows import FULL_ROW_BYTES, MANY_ROWS, WIDE_ROW_BYTES
from tilewright.fusion.cuda.rows.footprint import Footprint
from tilewright.fusion.cuda.rows.schedule import ON_CHIP, RowSchedule
from tilewright.space import ConfigSpace

LANE_BYTES = 64
"""Of a row, by a lane of a warp that has it to itself, at most."""
FEW_THREADS_BYTES = 80
"""Of one of many rows, by each of 64 threads of a block, at most."""
TWO_ROWS_BYTES = 128
"""Of each of two rows that a thread takes at once, at most."""
MOST_TWO_ROWS_BYTES = 96
"""The same of fp32, where twice the threads would not leave SMs idle."""
LEAST_TWO_ROWS_BYTES = 2048
"""Of each of many rows that 64 threads take two at a time, at least."""
TWO_ROWS_VECTOR = 4
"""Elements of an access of those threads."""


def persistent_candidates(
    space: ConfigSpace[RowSchedule], footprint: Footprint, device: DeviceSpec, vector: int
) -> Iterator[RowSchedule]:
    """Parameter vectors on chip, the next rows on their way, 512 threads on an SM.

    A thread keeps about 64 bytes of its row, and 32 beside sums over rows. A cluster shares a row
    whose parameter vectors would fill more than a quarter of an SM's shared memory. A few hundred
    rows, if wide, are dealt out: with 512 of them on an H200 that took 10.4 us for RMS norm of
    16384 halves, in turn it was 12.5 us (9461804).
    """
    resident, kept_bytes = 512, 32 if footprint.columns else 64
    few = footprint.rows < MANY_ROWS * device.sms and not footprint.columns
    wide = footprint.width * footprint.itemsize > WIDE_ROW_BYTES
    if few and (footprint.rows <= device.sms or not wide):
        return
    column_bytes = sum(a.itemsize for a in footprint.parameters)
    for cluster in space.values["cluster"]:
        width = footprint.width / cluster
        least = max(32 if cluster == 1 else 64, width * footprint.itemsize / kept_bytes)
        if few and resident < least <= 1.5 * resident:
            least = resident
        threads = next((t for t in space.values["row_threads"] if t >= least), None)
        if threads is None or (few and threads > resident):
            continue
        rows = max(r for r in (1, 2, 4, 8) if r == 1 or r * threads <= resident)
        blocks = max(b for b in (1, 2, 4) if b == 1 or b * rows * threads <= resident)
        of_thread = width / threads * column_bytes
        little = of_thread <= (128 if few else 96)
        crowded = 4 * width * column_bytes > device.shared_bytes_per_sm and cluster < 8
        if crowded and not (few and of_thread <= 160):
            continue
        for parameters in ON_CHIP if little else ("shared",):
            for stages in (2, 1):
                yield RowSchedule(
                    vector, threads, rows, 1, "registers", "two_pass", cluster, blocks,
                    stages=stages, parameters=parameters if footprint.parameters else "reload",
                )  # fmt: skip


def two_rows_untuned(
    space: ConfigSpace[RowSchedule], footprint: Footprint, device: DeviceSpec, vector: int
) -> Iterator[RowSchedule]:
    """RMS norm's rows of 2 to 4 KiB: two at a time share the weights that 64 threads have kept.

    With 8192 rows on an H100, of 1280, 1536, 1600 and 2048 halves that took 15.9, 18.4, 19.3 and
    23.7 us, one at a time 16.7, 18.9, 20.2 and 25.1; eight elements an access, not four, 16.0,
    18.5, 19.5 and 24.1 (1213345). On an H200, with eight, 12.0, 13.9 and 14.7, and 12.8, 14.2 and
    15.4 one at a time (632da8c).
    """
    row_bytes = footprint.width * footprint.itemsize
    if footprint.rows < MANY_ROWS * device.sms or footprint.columns or footprint.has_moments:
        return
    if len(footprint.parameters) != 1 or len(footprint.queued) != 1 or footprint.keeps_costly_steps:
        return
    if not LEAST_TWO_ROWS_BYTES < row_bytes <= FULL_ROW_BYTES:
        return
    for c in persistent_candidates(space, footprint, device, min(vector, TWO_ROWS_VECTOR)):
        if c.cluster == 1 and c.row_threads == 64 and c.parameters == "registers":
            yield replace(c, rows_per_thread=2)


def widest_clusters(
    space: ConfigSpace[RowSchedule], footprint: Footprint, device: DeviceSpec, vector: int
) -> Iterator[RowSchedule]:
    """Wide rows whose parameters the blocks of the largest cluster share: few threads, which take
    two rows at a time.

    With 8192 rows on an H200, layer norm with two more biases took 128.9 us of 16384 halves, 161.6
    of 20480, 256.7 of 32768 and 514.0 of 65536 (f21b0e2): 0.97 of the floor each. Layer norm in
    clusters of two or four took 150.8 us of 16384, 296.2 of 32768 and 579.3 of 65536 (c3f46f9), and
    RMS norm of 16384 130.0 us, 139.0 us in one block (2c7c317). Of fp32, layer norm of 16384 took
    256.2 us, 291.5 in clusters of four, and of 32768 511.6 and 572.6; RMS norm 256.1 us of 16384,
    260.8 in clusters of two, and 510.3 of 32768, 516.6 in clusters of four (00bca26).

    With 512 rows, layer norm took 10.9, 12.8, 19.9 and 37.6 us; by 512 threads on an SM 11.2, 14.2,
    22.2 and 40.7. Of 32768 those with 64 threads a block must come in turn (22.6 us if dealt out),
    and blocks that fill an SM are best dealt out: RMS norm took 19.0 us, 20.1 in turn (2c7c317).
    Of fp32, whose means are corrected where they are far, a row at a time finds its moments in two
    passes: layer norm of 12288 took 15.0 us, 17.1 by lanes, and of 16384 19.9 and 22.5. Of two rows
    by 128 threads lanes are the better, and the next on their way take too much: 24576 took 27.8
    us, 29.5 with two stages. 256 threads took 35.7 of 32768, those 37.6 (7c2ec09, no file kept).
    """
    cluster = max(space.values["cluster"])
    kept_bytes = footprint.width * footprint.itemsize / cluster
    if cluster == 1 or not footprint.parameters or kept_bytes <= WIDE_ROW_BYTES // cluster:
        return
    few = footprint.rows < MANY_ROWS * device.sms
    if footprint.rows <= device.sms or footprint.columns or footprint.keeps_costly_steps:
        return
    threads = 64 if kept_bytes <= 64 * (TWO_ROWS_BYTES if few else FEW_THREADS_BYTES) else 128
    groups = 1 if threads == 64 else 4 if kept_bytes <= threads * LANE_BYTES else 2
    if kept_bytes > threads * TWO_ROWS_BYTES:
        return
    of_fp32 = few and footprint.has_moments and footprint.is_of_fp32
    if of_fp32 and kept_bytes > 128 * MOST_TWO_ROWS_BYTES:
        threads, groups = 256, 1
    way = "lanes" if few else "merge"
    if not footprint.has_moments or (of_fp32 and groups == 1):
        way = "two_pass"
    packed = few and device.capability >= 100 and True in space.values["rematerialize"]
    for stages in (2, 1) if groups == 2 and not of_fp32 else (1,):
        yield RowSchedule(
            vector, threads, groups, 2, "registers", way, cluster, 6 if threads == 64 else 1,
            stages=stages, parameters="shared", in_turn=groups == 1 or not few,
            rematerialize=packed,  # else the compiler for sm_100a spills what it widened
        )  # fmt: skip
