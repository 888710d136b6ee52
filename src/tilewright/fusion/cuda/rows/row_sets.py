"""Rows in sets: what is reduced along each row, and over all rows of its set, in one pass.

The backward of group norm sums each channel, and each group of channels: its rows are channels, and
a group is a set. A block, or a cluster, has all rows of a set on chip. What runs along all of them
is summed by each thread over its rows first, then by all threads of the block at once; what rows
were reduced to, one number each, is joined by whoever has them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import itemgetter

from tilewright.device import MAX_GRID, WARP, DeviceSpec
from tilewright.fusion.cuda.kernel import ENTRY, JOINS, TYPES, Launch
from tilewright.fusion.cuda.rows.footprint import Footprint, estimated_registers
from tilewright.fusion.cuda.rows.kernel import RowKernel
from tilewright.fusion.cuda.rows.schedule import RowSchedule
from tilewright.fusion.cuda.rows.space import row_space
from tilewright.fusion.cuda.vectors import NARROW_BYTES
from tilewright.fusion.ir import REDUCTIONS, Graph, Node, Rewriter
from tilewright.fusion.passes import merge_common, permuted, remove_dead
from tilewright.fusion.plan import Phase, expand_moments
from tilewright.fusion.remembered import remembered
from tilewright.space import ConfigSpace

JOIN_SET = "join_set"
"""A step that joins one number of each row of a set; attr: by which reduction."""
MOST_ROWS = 128
"""Of a set: the source of a kernel has the steps of all rows that a thread takes."""
THREAD_ROWS = 16
"""Of them, by one thread."""
MOST_GROUPS = 32
"""Of a block, of a warp at least."""
MOST_THREADS = 1024
"""Of a block."""
MOST_TOLD_BYTES = 44 << 10
"""Of a block's 48 KiB of static shared memory: what warps and groups tell one another."""
MOST_STEP_REGISTERS = 12
"""Beside what is kept, at most, for the steps of an element."""
ROW_REGISTERS = 9
"""For the numbers and addresses of a row that a thread takes, so that NVRTC 13.0 spills nothing."""
BUSY_THREADS = 768
"""On an SM: more of them take longer for as many elements each."""
WAITS, WAITS_ALONE = 25, 15
"""Of a wave of blocks, for memory and to join sums, in a cluster or without: in elements of a
thread."""
FEW_ELEMENTS = 16
"""Of a thread: fewer take no less time, and so numbers of images share a schedule."""
SHORT = 1.2
"""Of the registers that a thread has it may need so many times as many: it spills a few."""
MANY_ROWS, MOST_UNTUNED_ROWS = 5, 8
"""Of a thread: with eight and what they keep it spills up to 240 bytes, with 16 thousands."""


@dataclass(frozen=True)
class RowSets(Graph):
    """A graph whose innermost rows are reduced, and come in sets of so many."""

    set_rows: int = 1

    @property
    def sets(self) -> int:
        return math.prod(self.space[a] for a in self.kept) // self.set_rows


def may_have_sets(graph: Graph) -> bool:
    """Whether what is reduced over some dims is reduced over few more, or their results are."""
    sets = graph.reduction_sets
    more = [{*other} - {*axes} for axes in sets for other in sets]
    return any(over and math.prod(graph.space[a] for a in over) <= MOST_ROWS for over in more)


@remembered
def row_sets(graph: Graph, row: tuple[int, ...], lane: int) -> RowSets | str:
    """The rows and sets of a graph whose reductions run over `row`, or some of its axes, one of
    which vectors run along; or why it has none. Sets come behind what numbers them, rows last."""
    dims = {graph.axes(i) for i in graph.reductions}
    inner = {axes for axes in dims if lane in axes and axes != row}
    if len(inner) != 1:
        return "rows that are reduced along several sets of dims, or along all alone"
    (along,) = inner
    over = tuple(a for a in row if a not in along)
    if not dims <= {row, along, over}:
        return "reductions over dims that are neither rows nor sets of them"
    others = [a for a in range(len(graph.space)) if a not in row]
    order = [*others, *over, *sorted(along, key=lambda a: a == lane)]
    graph = expand_moments(permuted(graph, order))
    row = tuple(range(len(others), len(order)))
    over, along = row[: len(over)], row[len(over) :]
    nodes = graph.nodes
    if any(nodes[i].op not in JOINS for i in graph.reductions):
        return "a reduction that rows do not join"
    if any(any(nodes[nodes[i].args[0]].shape[a] != 1 for a in along)
           for i in graph.reductions if graph.axes(i) == over):  # fmt: skip
        return "a sum over rows of what varies along them"
    count = math.prod(graph.space[a] for a in over)
    if count > MOST_ROWS:
        return f"sets of {count} rows, more than {MOST_ROWS}"

    def rule(r: Rewriter, i: int, n: Node) -> int | None:
        if n.op not in REDUCTIONS or graph.axes(i) == along:
            return None
        (value,) = n.args
        if graph.axes(i) == row:
            shape = tuple(1 if a in along else s for a, s in enumerate(r[value].shape))
            value = r.add(Node(n.op, n.args, n.dtype, shape))
        return r.add(Node(JOIN_SET, (value,), n.dtype, n.shape, n.op))

    found = remove_dead(merge_common(graph.rewritten(rule))).check()
    return RowSets(
        found.nodes, found.space, found.inputs, found.outputs, found.scalars, found.again,
        joined=found.joined, set_rows=count,
    )  # fmt: skip


# ---- schedules -----------------------------------------------------------------------------------


def set_space(graph: RowSets, device: DeviceSpec) -> ConfigSpace[RowSchedule]:
    """Of row schedules those whose blocks, or clusters, take one set each."""
    whole, footprint = row_space(graph, device), Footprint(graph)
    shares = [n for n in range(1, graph.set_rows + 1) if graph.set_rows % n == 0]
    values = {
        **whole.values,
        "rows_per_thread": tuple(n for n in shares if n <= THREAD_ROWS),
        "rows_per_block": tuple(n for n in shares if n <= MOST_GROUPS),
        "moments": ("two_pass",),
        "recompute": (True, False),
        "storage": ("registers",),
        "parameters": ("reload",),
        "blocks_per_row": (1,),
        **dict.fromkeys(("shifted", "bulk", "in_turn", "widened"), (False,)),
        "stages": (0,),
    }

    def why_not(c: RowSchedule) -> str | None:
        taken = c.rows_per_thread * c.rows_per_block
        if taken != graph.set_rows:
            return f"{taken} rows of sets of {graph.set_rows}"
        if c.row_threads < WARP:
            return "a row takes whole warps"
        if graph.sets * c.cluster > MAX_GRID:
            return f"{graph.sets * c.cluster} blocks exceed a grid of {MAX_GRID}"
        if (told := footprint.exchanged_bytes(c) // 2) > MOST_TOLD_BYTES:
            return f"{told} bytes that warps tell one another exceed {MOST_TOLD_BYTES}"
        return whole.constraint(c)

    return ConfigSpace(RowSchedule, values, why_not)


def set_heuristic(graph: RowSets, device: DeviceSpec) -> RowSchedule | None:
    """The first that is promising, if one is."""
    return next(iter(set_promising(graph, device)), None)


@remembered
def set_promising(graph: RowSets, device: DeviceSpec) -> list[RowSchedule]:
    """Schedules whose threads have registers, or hardly too few; those first that have, and of them
    the ones that keep what would be dear to compute again and take least time, as waves of blocks,
    each of which waits for memory and for joins, and then for the elements of a thread.

    Of gradients of group norm and SiLU on an H100, 8 images of 320 channels, 64 x 64, took 44.7 us
    in four waves by threads of 32 elements, 52 by threads of 43, 49 in eight waves by threads of
    16; of 512 channels 81 in eight waves by threads of 32; of 2560, 16 x 16, 28.6 with nine
    registers too few, and 39.2 in four kernels (no file kept).
    """
    space, footprint = set_space(graph, device), Footprint(graph)
    of_steps = min(footprint.instructions("two_pass") // 2, MOST_STEP_REGISTERS)

    def needed(c: RowSchedule) -> float:
        """Registers of a thread; of them ptxas 13.0 takes more for sm_100a."""
        of_rows = ROW_REGISTERS * c.rows_per_thread
        found = estimated_registers(c, footprint) + of_steps + 2 * c.vector + of_rows
        return found * (1.125 if device.capability >= 100 else 1)

    def rank(c: RowSchedule, registers_needed: float) -> tuple[float, ...]:
        room = device.registers_left(c.block_threads, 1)
        short = max(registers_needed - room, 0)
        narrow = max(NARROW_BYTES / (c.vector * footprint.itemsize), 1)
        unfit = c.rows_per_thread > MANY_ROWS, short > 0, narrow > 2, short
        most = device.threads_per_sm // c.block_threads
        rooms = ((b, device.registers_left(c.block_threads, b)) for b in range(most, 0, -1))
        resident = next((b for b, room in rooms if registers_needed <= room), 1)
        of_sm = graph.sets * c.cluster / device.sms
        at_once = min(resident, max(math.ceil(of_sm), 1))
        waves = max(of_sm / at_once, 1)
        elements = max(footprint.turns(c) * c.vector * c.rows_per_thread, FEW_ELEMENTS)
        crowded = max(at_once * c.block_threads / BUSY_THREADS, 1)
        waits = WAITS if c.cluster > 1 else WAITS_ALONE
        again = c.recompute == footprint.computes_much_again
        cost = round(waves * (waits + elements * crowded) * narrow, 2)
        return *unfit, again, cost, c.rows_per_thread, c.cluster, c.block_threads, c.vector

    found = []
    for c in filter(space.__contains__, _candidates(space, graph)):
        registers_needed = needed(c)
        if registers_needed <= SHORT * device.registers_left(c.block_threads, 1):
            found.append((rank(c, registers_needed), c))
    return [c for _, c in sorted(found, key=itemgetter(0))]


def _candidates(space: ConfigSpace[RowSchedule], graph: RowSets) -> Iterator[RowSchedule]:
    names = ("vector", "row_threads", "rows_per_block", "cluster", "recompute")
    dims = [space.values[name] for name in names]
    for vector, threads, groups, cluster, again in itertools.product(*dims):
        rows = graph.set_rows // groups
        if rows <= MOST_UNTUNED_ROWS and threads * groups <= MOST_THREADS:
            yield RowSchedule(
                vector, threads, groups, rows, "registers", "two_pass", cluster, 1,
                rematerialize=True in space.values["rematerialize"], recompute=again,
            )  # fmt: skip


# ---- the kernel ----------------------------------------------------------------------------------


def emit_sets(graph: RowSets, schedule: RowSchedule, entry: str = ENTRY) -> tuple[str, Launch]:
    return SetKernel(graph, schedule, entry).emit()


class SetKernel(RowKernel):
    """A row kernel each of whose blocks, or clusters, has one set.

    Attributes:
        whole: reductions along rows that only the join of their set reads: threads add up their
            rows, then all threads of the block at once.
    """

    def __init__(self, graph: RowSets, schedule: RowSchedule, entry: str):
        plan = Footprint(graph).plan(schedule.moments, schedule.recompute)
        super().__init__(plan, schedule, entry)
        nodes, ends = self.graph.nodes, {i for i, _ in self.graph.outputs}

        def joined_alone(i: int) -> bool:
            users = self.graph.users(i)
            alike = [nodes[u].op == JOIN_SET and nodes[u].attr == nodes[i].op for u in users]
            return i not in ends and bool(alike) and all(alike)

        self.whole = frozenset(i for i in self.graph.reductions if joined_alone(i))
        self.block_warps = schedule.block_threads // WARP
        self.awaited = False

    def fixed(self, i: int) -> bool:
        return self.graph.nodes[i].op != JOIN_SET and super().fixed(i)

    def sync_group(self) -> None:
        self.line("__syncthreads();")

    def await_cluster(self) -> None:
        if not self.awaited:
            super().await_cluster()
        self.awaited = True

    @property
    def cluster_barriers(self) -> list[str]:
        sweeps = range(len(self.joining) if self.whole else 0)
        return [*super().cluster_barriers, *(f"whole_joined{n}" for n in sweeps)]

    def combine(self, sweep: int, phase: Phase) -> None:
        rows = tuple(i for i in phase.reductions if i not in self.whole)
        if rows:
            super().combine(sweep, replace(phase, reductions=rows))
        if whole := [i for i in phase.reductions if i in self.whole]:
            self.combine_whole(sweep, whole)

    def combine_whole(self, sweep: int, sums: list[int]) -> None:
        """What runs along all rows of the set: every thread of the block ends with it in acc[0]."""
        s, count = self.s, self.block_warps * self.s.cluster
        nodes = self.graph.nodes
        for i in sums:
            join = JOINS[nodes[i].op]
            each = f"TW_UNROLL for (int r = 1; r < {s.rows_per_thread}; ++r)"
            self.line(f"{each} acc{i}[0] = {join}::join(acc{i}[0], acc{i}[r]);")
            self.line(f"acc{i}[0] = reduce_warp<{join}, {WARP}>(acc{i}[0]);")
            self.names[i] = f"acc{i}[0]"
        if count == 1:
            return
        for i in sums:
            self.shared.append(f"__shared__ {TYPES[nodes[i].dtype]} whole{i}[{count}];")
        if s.cluster > 1:
            self.exchange_whole(sweep, sums)
        else:
            for i in sums:
                self.line(f"if (lane % 32 == 0) whole{i}[threadIdx.x / 32] = acc{i}[0];")
            self.line("__syncthreads();")
        for i in sums:
            join, start = (
                JOINS[nodes[i].op],
                f"{JOINS[nodes[i].op]}::start<{TYPES[nodes[i].dtype]}>()",
            )
            self.line(f"acc{i}[0] = {start};")
            self.line(
                f"for (int i = threadIdx.x % 32; i < {count}; i += 32)"
                f" acc{i}[0] = {join}::join(acc{i}[0], whole{i}[i]);"
            )
            self.line(f"acc{i}[0] = reduce_warp<{join}, {WARP}>(acc{i}[0]);")

    def exchange_whole(self, sweep: int, sums: list[int]) -> None:
        """Every warp of every block of the cluster tells every block."""
        s, barrier = self.s, f"whole_joined{sweep}"
        sizes = {i: 8 if self.graph.nodes[i].dtype == "f64" else 4 for i in sums}
        self.await_cluster()
        arriving = self.block_warps * s.cluster * sum(sizes.values())
        self.line(f"if (threadIdx.x == 0) barrier_expect({barrier}, {arriving});")
        self.open(f"if (lane % 32 < {s.cluster})")
        for i in sums:
            to = f"&whole{i}[rank * {self.block_warps} + threadIdx.x / 32]"
            self.line(f"store_remote({to}, {barrier}, lane % 32, acc{i}[0]);")
        self.close()
        self.line(f"barrier_wait({barrier}, 0);")

    def row_values(self, phase: int) -> None:
        """What needs no more than is known, then all joins over sets that are ready, and so on."""
        nodes, plan = self.graph.nodes, self.plan
        left = [
            i
            for i in range(len(nodes))
            if not plan.inner[i] and i not in self.names and plan.ready[i] == phase
        ]
        while left:
            for i in left:
                if nodes[i].op != JOIN_SET and all(a in self.names for a in nodes[i].args):
                    self.row_value(i)
            joins = [i for i in left if nodes[i].op == JOIN_SET and nodes[i].args[0] in self.names]
            self.join_sets(joins)
            left = [i for i in left if i not in self.names]

    def join_sets(self, joins: list[int]) -> None:
        """By each thread over its rows, then over those of the other groups of its block."""
        nodes, groups = self.graph.nodes, self.s.rows_per_block
        several = []
        for i in joins:
            (rows,) = nodes[i].args
            if rows in self.whole:
                self.names[i] = self.names[rows]
                continue
            kind, join = TYPES[nodes[i].dtype], JOINS[nodes[i].attr]
            self.line(f"{kind} s{i} = {join}::start<{kind}>();")
            self.line(f"{self.each_row()} s{i} = {join}::join(s{i}, {self.names[rows]});")
            self.names[i] = f"s{i}"
            several.append(i)
        if groups == 1 or not several:
            return
        for i in several:
            self.shared.append(f"__shared__ {TYPES[nodes[i].dtype]} set{i}[{groups}];")
            self.line(f"if (lane == 0) set{i}[group] = s{i};")
        self.line("__syncthreads();")
        for i in several:
            join = JOINS[nodes[i].attr]
            self.line(f"s{i} = set{i}[0];")
            each = f"TW_UNROLL for (int i = 1; i < {groups}; ++i)"
            self.line(f"{each} s{i} = {join}::join(s{i}, set{i}[i]);")
