"""Schedules that are good without tuning, and those that a search should try first."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import zip_longest

from tilewright.device import DeviceSpec
from tilewright.fusion.cuda import registers
from tilewright.fusion.cuda.rows.copied_rows import (
    copied_row_candidates,
    copied_row_variations,
    copied_rows_untuned,
)
from tilewright.fusion.cuda.rows.few_rows import (
    FULL_ROW_BYTES,
    MANY_ROWS,
    WIDE_ROW_BYTES,
    few_row_candidates,
    few_row_heuristic,
    keeping,
    moments_at_once,
    shared_candidates,
    shared_variations,
)
from tilewright.fusion.cuda.rows.footprint import (
    MANY_STEPS,
    Footprint,
    estimated_registers,
    register_cap,
    widened_registers,
)
from tilewright.fusion.cuda.rows.persistent import (
    LANE_BYTES,
    persistent_candidates,
    two_rows_untuned,
    widest_clusters,
)
from tilewright.fusion.cuda.rows.schedule import UNROLL, RowSchedule
from tilewright.fusion.cuda.rows.shifted_rows import shifted_block_candidates
from tilewright.fusion.cuda.rows.small_blocks import (
    rows_of_warps,
    small_block_candidates,
    small_block_variations,
    weighed_rows_untuned,
)
from tilewright.fusion.cuda.rows.space import row_space
from tilewright.fusion.cuda.rows.summed_columns import (
    BUSY_THREADS,
    ROOMY_REGISTERS,
    column_block_candidates,
    column_block_variations,
    column_candidates,
    column_variations,
    shifted_column_candidates,
)
from tilewright.fusion.cuda.vectors import NARROW_BYTES, held_bytes, lies_apart, untuned_vector
from tilewright.fusion.ir import Graph
from tilewright.fusion.remembered import remembered
from tilewright.space import ConfigSpace

Kind = tuple[Iterable[RowSchedule], int, Callable[[RowSchedule], Iterable[RowSchedule]]]
"""Candidates, how many of them a search begins with, and the ways in which each is varied."""
MANY_KEPT_BYTES, MANY_THREADS = 96, 1024
"""Of many rows: bytes of a row that a thread keeps, and threads on an SM."""
SEVERAL_BYTES = 128
"""Of those, where no parameters take registers, beside several tensors of a row: gradients of a
smoothed cross entropy, 8192 rows of 4096 fp32, took 128.4 us on an H200 (fadb93b), in turn 146.2
(208af20)."""
DIVIDED_VECTOR = 4
"""Elements of an access, at most, of many rows whose elements are divided: halves divided by their
row's greatest, 8192 rows of 4096, took 66.1 us on an H100 (755376d), 91.0 by eight (2675026)."""
DEAR_BYTES = 128
"""Of what is dear to compute again, by a thread: 32768 rows of 2048 bf16, softmax of 50 tanh(x/50),
took 93.3 us on an H100 (755376d), 232.8 computed again (2675026); in a search 97 with half as many
and 105 with twice (no file kept)."""
LEAST_OF_MUCH = 128
"""Threads of a row of which much is dear, at least; each of more has twice as many bytes. Gradients
of Jensen-Shannon divergence, halves on an H200 (b67611f, no file kept): 16384 rows of 1024 took 100
us by 128 threads, 260 computed again, 8192 of 4096 213 by 256 and 312 by 512, 4096 of 8192 260 by
512 and 270 by 1024."""
MOST_HELD = 48
"""Registers, for all instructions that an element takes: see MANY_STEPS."""
CLUSTER_BYTES = 2048
"""Of a row, that each block of a cluster has at least where a smaller one would do, too."""
BUSY_BLOCK_THREADS = 128
"""Of a block of a wide row of which much is computed."""


@remembered
def row_heuristic(graph: Graph, device: DeviceSpec) -> RowSchedule | None:
    """A schedule from device numbers: the first of a list that fits and leaves a thread registers
    enough, or just fits, or None.

    Where there are many rows: of 4 to 24 KiB, blocks of a row each; else a persistent kernel of
    few threads with many registers, whose clusters take their rows in turn. Else, or where that
    does not fit, the widest vectors, a row by one warp while a thread keeps at most 64
    bytes, else by enough threads to keep that (registers then allow 32 or more warps per SM);
    beyond 1024 threads a thread keeps up to 128 bytes, then clusters share the row, and
    re-reading is the last resort. Measured as the best single rules over `bias_layer_norm_gpt` on
    an H200. Rows that would be read less than eight bytes at a time have shifted vectors. Rows so
    few and wide that clusters would leave SMs idle are shared by blocks anywhere, in one wave; for
    other few rows see few_rows.
    """
    footprint, fitting = Footprint(graph), None
    for config in _fitting(graph, device):
        if _leaves_room(config, footprint, device):
            return config
        fitting = fitting or config
    return fitting


def roomier_rows(graph: Graph, c: RowSchedule, device: DeviceSpec) -> Iterator[RowSchedule]:
    """Others of that list, in its order, each of which leaves a thread more registers beside what
    it is reckoned to need than all before: for a kernel that the compiler made to spill.

    Not such as read rows again that this one keeps, nor larger clusters whose blocks have little of
    a row: gradients of two modulated layer norms of 1152 halves took 115 us on an H100, in clusters
    of eight 476 (61c63d2, no file kept).
    """
    footprint = Footprint(graph)
    row_bytes = footprint.width * footprint.itemsize

    def room(c: RowSchedule) -> int:
        return register_cap(c, device) - estimated_registers(c, footprint)

    most = room(c)
    for other in _fitting(graph, device):
        again = other.storage == "reread" != c.storage
        apart = other.cluster > max(c.cluster, row_bytes / CLUSTER_BYTES)
        if room(other) > most and not again and not apart:
            most = room(other)
            yield other


def _fitting(graph: Graph, device: DeviceSpec) -> Iterator[RowSchedule]:
    space = row_space(graph, device)
    footprint = Footprint(graph)
    vector = _whole_vector(space, footprint)
    if footprint.divides and footprint.rows >= MANY_ROWS * device.sms:
        vector = min(vector, DIVIDED_VECTOR)
    choices = [
        *shared_candidates(space, footprint, device, vector),
        *_apart_candidates(footprint, device),
        *few_row_heuristic(space, footprint, device, vector),
        *column_block_candidates(space, footprint, device, vector),
        *_few_wide_candidates(space, footprint, device, vector),
        *_much_of_wide_rows(space, footprint, device, vector),
        *_much_of_rows(space, footprint, device, vector),
        *_small_blocks_alone(space, footprint, device, vector),
        *weighed_rows_untuned(footprint, device, vector),
        *two_rows_untuned(space, footprint, device, vector),
        *_many_row_candidates(space, footprint, device, vector),
        *_persistent_and_keeping(space, footprint, device, vector),
        *_roomy(_row_candidates(space, footprint, vector), footprint),
    ]
    if vector * footprint.itemsize < NARROW_BYTES and True in space.values["shifted"]:
        choices = [*_shifted_candidates(space, footprint, device), *choices]
    for config in (_rolled(c, footprint, device) for c in choices):
        if config in space:
            yield config


def _shifted_candidates(
    space: ConfigSpace[RowSchedule], footprint: Footprint, device: DeviceSpec
) -> Iterator[RowSchedule]:
    """Of rows that begin anywhere the widest vectors; beside sums over rows, for which a thread has
    registers, too, those of half as many elements."""
    widest, narrower, *_ = space.values["vector"]
    wide = itertools.chain(
        shifted_block_candidates(space, footprint, device, widest),
        _row_candidates(space, footprint, widest),
    )
    if footprint.columns:
        wide = itertools.chain(
            shifted_column_candidates(space, footprint, device, narrower),
            column_block_candidates(space, footprint, device, widest),
            persistent_candidates(space, footprint, device, narrower),
            wide,
            _row_candidates(space, footprint, narrower),
        )
    for c in wide:
        yield replace(c, shifted=True, rows_per_thread=1, bulk=False, moments="two_pass")


def _apart_candidates(footprint: Footprint, device: DeviceSpec) -> Iterator[RowSchedule]:
    """Narrow rows of every n-th elements: single ones, two rows at once by half a warp. Rotary
    positions of pairs of normalised heads, bf16[4,2048,32,128], took 54.0 us on an H100 (762ba9b),
    by two elements and a warp for each row 70.3 (dacf7d8)."""
    threads = device.warp // 2
    if footprint.columns or not lies_apart(footprint.graph) or footprint.width > 8 * threads:
        return
    for parameters in ("ahead", "reload"):
        yield RowSchedule(1, threads, 8, 2, "registers", "two_pass", 1, 1, parameters=parameters)


def _rolled(c: RowSchedule, footprint: Footprint, device: DeviceSpec) -> RowSchedule:
    """A row that one sweep reads, of which nothing is kept, in a few turns at once, if a thread
    has no registers for the loads of all, which compilers move to the front: gradients of a layer
    scale, 25 vectors of halves a thread, spilled for sm_90 with 128 registers (NVRTC 13.0)."""
    if c.persistent or c.storage != "registers" or footprint.columns:
        return c
    turns = footprint.turns(c) * c.rows_per_thread
    loaded = turns * sum(held_bytes(a.dtype, c.vector) for a in footprint.queued) // 4
    if footprint.kept_at_once(c.moments, c.recompute) or footprint.turns(c) <= UNROLL:
        return c
    if loaded + registers.ARITHMETIC <= register_cap(c, device):
        return c
    return replace(c, storage="reread", rematerialize=False)


def _leaves_room(c: RowSchedule, footprint: Footprint, device: DeviceSpec) -> bool:
    """Whether a thread has registers for what many steps hold, and what the compiler widens
    unasked, if there is such; parameters that are at hand from the start are held beside both. Not
    of wide rows that are read again, see _much_of_wide_rows, nor of shifted ones that are taken a
    turn at a time."""
    if c.storage == "reread" and _reads_much_again(footprint, device):
        return True
    if c.shifted and c.tail == "predicated":
        return True
    steps = footprint.instructions(c.moments, c.recompute)
    most = MOST_HELD * (2 if any(n.dtype == "f64" for n in footprint.graph.nodes) else 1)
    held = 0 if footprint.columns or steps < MANY_STEPS else min(steps // 2, most)
    beyond = widened_registers(c, footprint) + (2 * held if c.parameters == "ahead" else held)
    return not beyond or estimated_registers(c, footprint) + beyond <= register_cap(c, device)


def _roomy(found: Iterable[RowSchedule], footprint: Footprint) -> Iterator[RowSchedule]:
    """Of kernels that sum over rows those with registers to spare: RMS norm's gradients of 16384
    halves spill for sm_80 at the 232 that are reckoned."""
    for c in found:
        if not footprint.columns or estimated_registers(c, footprint) <= ROOMY_REGISTERS:
            yield c


def _small_blocks_alone(
    space: ConfigSpace[RowSchedule], footprint: Footprint, device: DeviceSpec, vector: int
) -> Iterator[RowSchedule]:
    """Without parameter vectors, which persistent kernels keep on chip. A row that one sweep reads
    is all on its way at once where a warp has it: 16384 rows of 784 halves, scaled, with their
    means, took 18.1 us on an H100, 19.8 by a persistent kernel (2675026)."""
    if footprint.columns or footprint.parameters:
        return
    yield from copied_rows_untuned(footprint, device, vector)
    by_warps = footprint.divides or not footprint.kept_at_once("two_pass")
    if by_warps and footprint.rows >= MANY_ROWS * device.sms:
        for c in rows_of_warps(space, footprint, device, vector):
            yield replace(c, stream_loads=True, min_blocks=1)
    least = LANE_BYTES * device.warp if footprint.keeps_costly_steps else WIDE_ROW_BYTES
    if footprint.width * footprint.itemsize > least:
        yield from small_block_candidates(space, footprint, device, vector)


def _much_of_wide_rows(
    space: ConfigSpace[RowSchedule], footprint: Footprint, device: DeviceSpec, vector: int
) -> Iterator[RowSchedule]:
    """Wide rows of which much is computed, in clusters of blocks that leave an SM threads enough to
    hide the latency of arithmetic: two softmaxes of 2048 rows of 32000 bf16 and what one diverges
    from the other took 188.2 us on an H100, by 256 threads on an SM 222.1 (5e0f59c). Where they
    would keep several values of halves that are dear to compute again, by blocks that read again:
    gradients of Jensen-Shannon divergence of 4096 such rows took 1.34 ms on an H200, in clusters
    1.73 (b39f707, no file kept)."""
    wide = footprint.width * footprint.itemsize > WIDE_ROW_BYTES and not footprint.columns
    if _reads_much_again(footprint, device):
        yield RowSchedule(
            min(vector, 4), BUSY_THREADS, 1, 1, "reread", "two_pass", 1, 2, stream_loads=False
        )
    if wide and footprint.instructions("two_pass", False) >= MANY_STEPS:
        for cluster in space.values["cluster"]:
            yield RowSchedule(
                vector, BUSY_BLOCK_THREADS, 1, 1, "registers", "two_pass", cluster,
                BUSY_THREADS // BUSY_BLOCK_THREADS, stream_loads=False, stages=1, in_turn=True,
                recompute=False,
            )  # fmt: skip


def _reads_much_again(footprint: Footprint, device: DeviceSpec) -> bool:
    """Of many wide rows of halves: whether no cluster keeps what is dear to compute again."""
    wide = footprint.width * footprint.itemsize > WIDE_ROW_BYTES and not footprint.columns
    many = footprint.rows >= MANY_ROWS * device.sms
    return wide and many and footprint.itemsize < 4 and footprint.much_is_kept


def _few_wide_candidates(
    space: ConfigSpace[RowSchedule], footprint: Footprint, device: DeviceSpec, vector: int
) -> Iterator[RowSchedule]:
    """Of a few hundred rows those that one block does not keep, or whose parameters are more than
    the row: with 512 rows on an H200, RMS norm of 32768 halves took 18.6 us, 20.5 us by small
    blocks (2c7c317); of 16384 one block took 10.4 us, but layer norm 11.2, and 10.9 so."""
    walking = persistent_candidates(space, footprint, device, vector)
    alone = next((c.cluster == 1 for c in walking if c in space), False)
    many = footprint.rows >= MANY_ROWS * device.sms
    if not many and (footprint.reads_more_parameters or not alone):
        yield from widest_clusters(space, footprint, device, vector)


def _persistent_and_keeping(
    space: ConfigSpace[RowSchedule], footprint: Footprint, device: DeviceSpec, vector: int
) -> Iterator[RowSchedule]:
    """What is costly is kept: with 8192 rows of 768 halves on an H200, softmax took 7.9 us, and
    8.3 us if it was not. A few hundred rows exchange their moments at once: layer norm of 512 rows
    of 65536 halves, in clusters, took 38.5 us, and 45.2 us in two passes (c4d3930)."""
    for c in persistent_candidates(space, footprint, device, vector):
        if footprint.rows < MANY_ROWS * device.sms and footprint.has_moments:
            yield replace(c, moments=moments_at_once(footprint))
        yield keeping(c, space)


def _many_row_candidates(
    space: ConfigSpace[RowSchedule], footprint: Footprint, device: DeviceSpec, vector: int
) -> Iterator[RowSchedule]:
    """By 128 or 256 threads that keep a row, `MANY_THREADS` of all rows on an SM, or three quarters
    where they keep several tensors; wider ones are taken in turn. Two rows at a time share what is
    loaded of parameter vectors."""
    row_bytes = footprint.width * footprint.itemsize
    if footprint.rows < MANY_ROWS * device.sms or footprint.columns or row_bytes < FULL_ROW_BYTES:
        return
    if footprint.computes_much_again and row_bytes <= WIDE_ROW_BYTES:
        yield from _kept_where_dear(space, footprint, vector, DEAR_BYTES)
    kept_bytes = footprint.width * footprint.kept_at_once("two_pass")
    rows = 2 if footprint.parameters else 1
    packed = True in space.values["rematerialize"]
    several = kept_bytes > row_bytes and not footprint.parameters
    for threads in (128, 256):
        few = max(row_bytes, kept_bytes) <= MANY_KEPT_BYTES * threads
        if few or (several and threads == 256 and kept_bytes <= SEVERAL_BYTES * threads):
            blocks = MANY_THREADS // threads // rows
            for resident in (blocks,) if few else (blocks, blocks * 3 // 4):
                yield RowSchedule(
                    vector, threads, 1, rows, "registers", "two_pass", 1, resident,
                    stream_loads=False, rematerialize=packed,
                )  # fmt: skip
            if few:
                return
    if footprint.itemsize <= 4:
        yield from widest_clusters(space, footprint, device, vector)
    for c in persistent_candidates(space, footprint, device, vector):
        if c.block_threads <= 512:
            yield replace(c, rows_per_thread=rows, stages=1, in_turn=True)


def _much_of_rows(
    space: ConfigSpace[RowSchedule], footprint: Footprint, device: DeviceSpec, vector: int
) -> Iterator[RowSchedule]:
    """Many rows of which sweeps keep several values that are dear to compute again."""
    many = footprint.rows >= MANY_ROWS * device.sms and not footprint.columns
    if not many or footprint.width * footprint.itemsize > WIDE_ROW_BYTES:
        return
    kept_bytes = footprint.width * footprint.kept_at_once("two_pass", False)
    if footprint.much_is_kept and kept_bytes >= DEAR_BYTES * LEAST_OF_MUCH:
        each = DEAR_BYTES * (1 if kept_bytes < 2 * DEAR_BYTES * LEAST_OF_MUCH else 2)
        yield from _kept_where_dear(space, footprint, vector, each)


def _kept_where_dear(
    space: ConfigSpace[RowSchedule], footprint: Footprint, vector: int, each_bytes: int
) -> Iterator[RowSchedule]:
    """The fewest threads that keep what no sweep should compute again, so much of it each."""
    kept_bytes = footprint.width * footprint.kept_at_once("two_pass", False)
    least = max(kept_bytes / each_bytes, 64)
    for threads in [t for t in space.values["row_threads"] if t >= least][:1]:
        yield RowSchedule(
            vector, threads, 1, 1, "registers", "two_pass", 1, 1,
            stream_loads=False, recompute=False,
        )  # fmt: skip


def _row_candidates(
    space: ConfigSpace[RowSchedule], footprint: Footprint, vector: int
) -> Iterator[RowSchedule]:
    moments = "merge" if footprint.has_moments else "two_pass"
    width, itemsize = footprint.width, footprint.itemsize
    for kept_bytes in (64, 128):
        threads = math.ceil(width * itemsize / kept_bytes)
        for cluster in space.values["cluster"]:
            fits = [t for t in space.values["row_threads"] if t * cluster >= threads and t >= 32]
            if fits:
                rows = max(1, 128 // fits[0]) if cluster == 1 else 1
                way = "two_pass" if fits[0] <= 32 else moments
                for blocks in (rows, 1):
                    yield RowSchedule(vector, fits[0], blocks, 1, "registers", way, cluster, 1)
    small = [
        t
        for t in space.values["row_threads"]
        if t * vector <= max(width, 4 * vector) and width * itemsize <= 128 * t
    ]
    for threads in reversed(small):
        for rows in (8, 4, 2, 1):
            yield RowSchedule(vector, threads, rows, 1, "registers", "two_pass", 1, 1)
    for threads in (1024, 512, 256):
        yield RowSchedule(vector, threads, 1, 1, "shared", "two_pass", 1, 1)
        yield RowSchedule(vector, threads, 1, 1, "reread", "two_pass", 1, 1)


def _block_candidates(
    space: ConfigSpace[RowSchedule], footprint: Footprint, vector: int
) -> Iterator[RowSchedule]:
    """A block for each row, of threads that keep little of it, and several of them on an SM: the
    best of all on an H200 where a row has 2048 to 12288 halves."""
    for resident, kept_bytes in itertools.product((512, 768), (32, 64, 96)):
        least = max(64, footprint.width * footprint.itemsize / kept_bytes)
        threads = next((t for t in space.values["row_threads"] if t >= least), None)
        if threads is not None:
            blocks = max(b for b in space.values["min_blocks"] if b == 1 or b * threads <= resident)
            yield RowSchedule(
                vector, threads, 1, 1, "registers", "two_pass", 1, blocks, stream_loads=False
            )


def row_promising(graph: Graph, device: DeviceSpec) -> list[RowSchedule]:
    """Schedules for a search to begin with: the heuristic's own, then a few of each kind, each in
    the ways that it does not choose between."""
    space, footprint = row_space(graph, device), Footprint(graph)
    vector = _whole_vector(space, footprint)
    persistent = list(persistent_candidates(space, footprint, device, vector))
    walking: Kind = (persistent, 3, _variations)
    kinds: list[Kind]
    if footprint.columns:
        columns = column_candidates(space, footprint, device, vector)
        small = column_block_candidates(space, footprint, device, vector)
        kinds = [
            (small, 4, column_block_variations),
            (persistent, 1, _variations),
            (columns, 3, column_variations),
        ]
    else:
        few = list(few_row_candidates(space, footprint, device, vector))
        many = footprint.rows >= MANY_ROWS * device.sms
        if not many:
            few += persistent[:2]
        rows = _row_candidates(space, footprint, vector)
        small = small_block_candidates(space, footprint, device, vector)
        copied = copied_row_candidates(footprint, device, vector)
        kinds = [
            (widest_clusters(space, footprint, device, vector), 2, _way_variations),
            (small, 4, lambda c: small_block_variations(c, space)),
            (copied, 2, lambda c: copied_row_variations(c, space)),
            (few, 6, _few_row_variations),
            walking,
            (rows, 2, _variations),
            (_block_candidates(space, footprint, vector), 5, _variations),
            (shared_candidates(space, footprint, device, vector), 12, shared_variations),
        ]
    untuned = None if footprint.columns else row_heuristic(graph, device)
    found = [] if untuned is None else list(_untuned_variations(untuned))
    for candidates, most, variations in kinds:
        fitting = [c for c in dict.fromkeys(candidates) if c in space][:most]
        varied = [variations(c) for c in fitting]
        if footprint.columns:
            found += itertools.chain.from_iterable(varied)
        else:  # of each the first, then of each the second: a short search sees all of them
            found += [c for rank in zip_longest(*varied) for c in rank if c is not None]
    return [c for c in dict.fromkeys(found) if c in space]


def _untuned_variations(c: RowSchedule) -> Iterator[RowSchedule]:
    yield c
    if c.moments == "lanes" and not c.stages:
        yield replace(c, moments="two_pass")
    if not c.stages:
        yield replace(c, stream_loads=not c.stream_loads)
    yield replace(c, recompute=False, rematerialize=False, moments="two_pass")


def _way_variations(c: RowSchedule) -> Iterator[RowSchedule]:
    yield from (c, replace(c, moments="lanes"), replace(c, moments="two_pass"))


def _few_row_variations(c: RowSchedule) -> Iterator[RowSchedule]:
    yield c
    yield replace(c, stream_loads=not c.stream_loads)
    for way in ("two_pass", "merge"):
        yield replace(c, moments=way, recompute=c.recompute or way == "merge")
    if c.stages:
        yield replace(c, bulk=True)


def _variations(c: RowSchedule) -> Iterator[RowSchedule]:
    moments = dict.fromkeys((c.moments, "two_pass", "tensor_cores"))
    yield c
    yield replace(c, recompute=False, rematerialize=False)
    yield replace(c, in_turn=True)
    yield replace(c, in_turn=True, bulk=True)
    yield replace(c, rows_per_thread=2)
    ways = itertools.product((False, True), (False, True), {c.rows_per_thread: 0, 2: 0}, moments)
    for in_turn, contiguous, rows, way in ways:
        yield replace(c, in_turn=in_turn, contiguous=contiguous, rows_per_thread=rows, moments=way)
    for rows, way in itertools.product((1, 2), moments):
        yield replace(c, in_turn=True, bulk=True, rows_per_thread=rows, moments=way)


def _whole_vector(space: ConfigSpace[RowSchedule], footprint: Footprint) -> int:
    """The widest vector that divides a row and suits its tensors."""
    whole = (v for v in space.values["vector"] if footprint.width % v == 0)
    return untuned_vector(footprint.graph, whole)
