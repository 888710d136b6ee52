"""Schedules of generated C++ kernels: the knobs, and which of their values fit a graph."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tilewright.device import DeviceSpec
from tilewright.fusion.cpp.loops import Loops, arrange
from tilewright.fusion.ir import Access, Graph
from tilewright.fusion.program import Program, Segment
from tilewright.fusion.remembered import remembered
from tilewright.fusion.segments import cut
from tilewright.space import ConfigSpace, param

HUGE_PAGE_BYTES = 2 << 20
KEPT_BYTES_LIMIT = 1 << 20
"""Bytes of kept values of one row: beyond the caches, computing again is cheaper."""
MOST_SPLITS = 256
PARTIALS_SHARE = 16
"""Partials may add this fraction of the traffic."""
LONG_CHAIN = 64
"""Additions one after another, beyond which their roundings show beside PyTorch's."""
MOST_LANES = 16
PARAMETER_BYTES = 16 << 10
"""Half of an L1 cache."""
CACHE_BYTES = 24 << 20
"""Traffic that a last-level cache does not hold until the next call."""
REUSED_BYTES = 32 << 20
"""glibc returns larger blocks to the system when they are freed (DEFAULT_MMAP_THRESHOLD_MAX)."""
SERIAL_BYTES = 256 << 10
"""Below this traffic, waking threads (some 5 us) costs more than they save."""


@dataclass(frozen=True)
class LoopSchedule:
    """How a kernel walks memory.

    `rows` rows are walked together, so that a parameter vector loaded once serves all of them;
    a sweep over a row takes `unroll` vectors at a time, each with sums of its own. Between sweeps
    it keeps the `values` that later ones use, or the fewest `bytes` from which they can be
    computed again, or `nothing`. With `prefetch` the first sweep asks for the memory of the next
    rows. Reductions over other axes than the row's are added up in `splits`, at least one for each
    thread; with `split_rows`, so are those of rows too few for the threads.
    """

    rows: int = param(1, 2, 4, 8)
    unroll: int = param(1, 2, 4)
    keep: str = param("values", "bytes", "nothing")
    stream_stores: bool = param(False, True)
    huge_pages: bool = param(True, False)
    threads: str = param("all", "one")
    splits: int = param(*(2**k for k in range(9)))
    split_rows: bool = param(False, True)
    prefetch: bool = param(False, True)


def loop_space(graph: Graph, device: DeviceSpec) -> ConfigSpace[LoopSchedule]:
    """The schedules that fit `graph`; knobs that cannot matter have one value."""
    return _space_of(graph, _programs(graph, device), device)


def _space_of(
    graph: Graph, programs: dict[bool, Program], device: DeviceSpec
) -> ConfigSpace[LoopSchedule]:
    output_bytes = _output_bytes(graph)
    mains = {split: p.segments[main_kernel(p)] for split, p in programs.items()}
    keeps = {split: _keeps(main) for split, main in mains.items()}
    loops = {split: arrange(main, keeps[split][0]) for split, main in mains.items()}
    some = loops[False]
    length = 1 if some.walked is None else some.plan.graph.space[some.walked]
    streams = output_bytes >= HUGE_PAGE_BYTES and _rows_begin_lines(some)
    threads = _thread_choices(_traffic(graph), device)
    splits = {split: _splits(_adding(p), threads, device) for split, p in programs.items()}

    def constraint(c: LoopSchedule) -> str | None:
        kind = loops[c.split_rows].kind
        if c.rows * c.unroll > (8 if c.unroll == 1 else 4):
            return f"{c.rows} rows of {c.unroll} vectors leave no registers for the arithmetic"
        if c.prefetch and c.rows == 1:
            return "one row after another is what processors foresee by themselves"
        if kind == "rows" and c.rows * c.unroll == 1:
            return "a single chain of additions leaves the adders idle"
        if c.unroll > 1 and not _unrolls(loops[c.split_rows]):
            return "there are no sums over a row to keep apart"
        if c.splits not in splits[c.split_rows]:
            return f"{c.splits} splits, but one of {splits[c.split_rows]} suits the threads"
        return None

    return ConfigSpace(
        LoopSchedule,
        {
            "rows": tuple(r for r in (1, 2, 4, 8) if r <= length),
            "unroll": (1, 2, 4) if any(map(_unrolls, loops.values())) else (1,),
            "keep": keeps[False],
            "stream_stores": (True, False) if streams else (False,),
            "huge_pages": (True, False) if output_bytes >= 2 * HUGE_PAGE_BYTES else (False,),
            "threads": threads,
            "splits": tuple(sorted({n for listed in splits.values() for n in listed})),
            "split_rows": tuple(loops),
            "prefetch": (True, False) if some.kind == "rows" and length > 1 else (False,),
        },
        constraint,
    )


@remembered
def loop_heuristic(graph: Graph, device: DeviceSpec) -> LoopSchedule:
    """A schedule that is good untuned: the first of `_shapes` that fits.

    Stores stream past caches that could not hold the traffic, but not into fresh pages, which the
    kernel has just zeroed there. Rows are split where they are fewer than twice the threads, or
    where sums over other dims would be long chains of additions within one row. Measured on the
    suite `quickstart`, two Zen 4 cores with 32 MiB of L3 cache.
    """
    programs = _programs(graph, device)
    space = _space_of(graph, programs, device)
    first = {name: values[0] for name, values in space.values.items()}
    whole = programs[False]
    loops = arrange(whole.segments[main_kernel(whole)], first["keep"])
    output_bytes = _output_bytes(graph)
    first["stream_stores"] &= _traffic(graph) >= CACHE_BYTES and output_bytes < REUSED_BYTES
    few = loops.kind == "rows" and loops.plan.rows < 2 * device.threads
    helps = (few and first["threads"] == "all") or _chain(loops) > LONG_CHAIN
    first["split_rows"] = helps and True in space.values["split_rows"]
    for rows, unroll in _shapes(loops, device):
        for splits in reversed(space.values["splits"]):
            first["prefetch"] = rows > 1 and True in space.values["prefetch"]
            config = LoopSchedule(**{**first, "rows": rows, "unroll": unroll, "splits": splits})
            if config in space:
                return config
    return next(iter(space))


def _shapes(loops: Loops, device: DeviceSpec) -> list[tuple[int, int]]:
    """`rows` and `unroll`, the most promising first.

    Four rows at a time where parameters that they share must be widened, or do not fit the L1
    cache, or where their partials of a sum over rows can be joined, which rounds less too; else
    one, which the processor's prefetcher foresees by itself.

    Of columns as many as leave work for each thread, since each is read a line here and a line
    there: the variance of f32[4096,1024] over dim 0 takes one thread 5.7 ms by ones, 1.5 by fours
    and 0.9 by eights. Where they keep values that would crowd a cache, four: softmax of
    f32[8,512,1000] over dim 0 takes 1.2 ms by fours and 1.4 by eights (AMD EPYC, 2026-11-21).
    """
    graph = loops.plan.graph
    if loops.kind == "columns":
        assert loops.walked is not None
        outer = math.prod(graph.space[a] for a in loops.outer)
        vectors = graph.space[loops.walked] // MOST_LANES
        several = (4, 2) if loops.kept_values else (8, 4, 2)
        return [(n, 1) for n in several if outer * (vectors // n) >= device.threads] + [(1, 1)]
    narrow = any(access.itemsize == 2 for access in graph.inputs)
    together = narrow or bool(loops.added) or _shared_bytes(loops) > PARAMETER_BYTES
    return [(4, 1) if together else (1, 2), (1, 4), (1, 1), (2, 1)]


def fitted(schedule: LoopSchedule, segment: Segment) -> LoopSchedule:
    """What a kernel beside the main one, which has less to do, makes of the schedule."""
    keep = _keeps(segment)[0]
    unroll = 2 if arrange(segment, keep).kind == "rows" else 1
    plain = replace(schedule, stream_stores=False, huge_pages=False, prefetch=False)
    return replace(plain, rows=1, unroll=unroll, keep=keep)


def main_kernel(program: Program) -> int:
    """The kernel that the schedule is for: the first of the largest."""
    return program.largest()[0]


def _adding(program: Program) -> Loops:
    """The loops of the main kernel, or if it adds nothing up, of the first one that does."""
    main = program.segments[main_kernel(program)]
    found = next((s for s in (main, *program.segments) if s.added()), main)
    return arrange(found, _keeps(found)[0])


def _programs(graph: Graph, device: DeviceSpec) -> dict[bool, Program]:
    """Of the graph, and by True of split rows, where that gives other kernels and there are threads
    for it."""
    programs = {False: cut(graph, 2)}
    if device.threads > 1 and graph.reductions:
        divided = cut(graph, 2, split_rows=True)
        if divided != programs[False]:
            programs[True] = divided
    return programs


def _splits(loops: Loops, threads: tuple[str, ...], device: DeviceSpec) -> tuple[int, ...]:
    """Into how many splits sums over rows may be divided: one or a few for each thread, and so many
    that neither a split nor their combination is a long chain of additions, unless writing them
    would cost."""
    if not loops.added:
        return (1,)
    graph = loops.plan.graph
    least = 2 ** math.ceil(math.log2(device.threads)) if "all" in threads else 1
    result_bytes = sum(_bytes(graph, graph.outputs[k][1]) for k in loops.added)
    affordable = _traffic(graph) // (PARTIALS_SHARE * max(result_bytes, 1))
    chain = math.isqrt(max(loops.plan.rows, 1))
    most = least
    while most * 4 <= min(chain, affordable, MOST_SPLITS):  # few steps: each is a kernel of its own
        most *= 4
    return tuple(dict.fromkeys((most, max(most // 4, least), least)))


def _chain(loops: Loops) -> int:
    """Additions to one element of a result of other dims while a single row is swept."""
    graph = loops.plan.graph
    steps = [
        math.prod(graph.space[a] for a in loops.swept if a != loops.lane and a in graph.axes(i))
        for i in loops.added.values()
    ]
    return max(steps, default=0)


def _unrolls(loops: Loops) -> bool:
    """Whether a sweep folds sums along the lane axis, of which several can be kept apart."""
    lane_sums = [
        i for i in loops.added.values() if loops.plan.graph.nodes[i].shape[loops.lane] == 1
    ]
    return loops.kind == "rows" or bool(lane_sums)


def _traffic(graph: Graph) -> int:
    read = max((_bytes(graph, access) for access in graph.memory), default=0)
    return _output_bytes(graph) + read


def _output_bytes(graph: Graph) -> int:
    return max(_bytes(graph, access) for _, access in graph.outputs)


def _shared_bytes(loops: Loops) -> int:
    """Bytes of what all rows read alike."""
    graph = loops.plan.graph
    kept = range(len(graph.space)) if loops.kind == "pointwise" else loops.plan.kept
    shared = [a for a in graph.memory if not any(a.strides[axis] for axis in kept)]
    return sum(_bytes(graph, access) for access in shared)


def _keeps(segment: Segment) -> tuple[str, ...]:
    """The choices of what to keep that differ, and fit the caches."""
    if not segment.graph.reductions:
        return ("nothing",)
    found: dict[tuple[frozenset[int], ...], str] = {}
    for keep in ("values", "bytes"):
        loops = arrange(segment, keep)
        copies = MOST_LANES if loops.kind == "columns" else 1
        if copies * sum(map(loops.kept_bytes, loops.kept_values)) <= KEPT_BYTES_LIMIT:
            found.setdefault(tuple(p.carried_out for p in loops.plan.phases), keep)
    return tuple(found.values()) or ("nothing",)


def _rows_begin_lines(loops: Loops) -> bool:
    """Whether all rows of the outputs begin at the same place of a 64-byte cache line: a line that
    two rows share would be written twice."""
    outputs = [a for k, (_, a) in enumerate(loops.plan.graph.outputs) if k not in loops.added]
    return all(
        access.strides[a] * access.itemsize % 64 == 0 for access in outputs for a in loops.rows
    )


def _thread_choices(traffic: int, device: DeviceSpec) -> tuple[str, ...]:
    if device.threads == 1 or traffic < SERIAL_BYTES // 16:
        return ("one",)
    if traffic < SERIAL_BYTES:
        return ("one", "all")
    return ("all",)


def _bytes(graph: Graph, access: Access) -> int:
    sizes = [n for n, stride in zip(graph.space, access.strides, strict=True) if stride]
    return math.prod(sizes) * access.itemsize
