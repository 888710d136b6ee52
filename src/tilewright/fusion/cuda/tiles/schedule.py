"""Schedules of tile kernels: how a space is cut into the tiles that blocks walk.

A tile kernel takes what a row kernel cannot: reductions across the order of memory (a softmax over
channels, a sum over dim 0), several reductions over different dims in one pass (the gradients of a
broadcast), and rows so long and few that blocks must share them. Vectors run along one axis, the
lane; a block walks a piece of other axes, and what is left numbers the blocks.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tilewright.compile.counters import COUNTERS
from tilewright.device import DeviceSpec
from tilewright.fusion.cuda.kernel import JOINS
from tilewright.fusion.cuda.partials import PARTIAL_WORDS, SECTOR_WORDS
from tilewright.fusion.cuda.vectors import ARITHMETIC_REGISTERS, held_bytes, widest_vectors
from tilewright.fusion.ir import Access, Graph
from tilewright.fusion.passes import permuted, with_axis
from tilewright.fusion.plan import Phase, Plan, needed_in, plan_rows, with_stores_last
from tilewright.fusion.program import Kernels, Segment
from tilewright.fusion.remembered import remembered
from tilewright.fusion.segments import main_axis
from tilewright.space import param

WARP = 32
JOIN_SHARES, FEW_COLUMNS = 8, 1 << 17
"""Shares of a block that puts few partials together, also where there are fewer partials than that,
if the results have so few elements in all: one kernel serves them."""
JOIN_THREADS = 1024
"""Threads of a block that puts partials together: their loads are all the parallelism there is."""
FEW_PARTIALS = 32
"""Of each result, so few that blocks of a quarter as many threads, which find room beside those
that leave the partials, have all of them under way at once."""
KEPT_STEPS = 32
"""Steps of a walk that a thread unrolls to keep their values in registers."""
KEPT_KINDS = 8
"""Counts of kept steps that have kernels of their own: each up to 8, every second one to 16, every
fourth to 32."""
MOST_ROUNDS = 4
"""Of a walk, that compilers unroll if they know how many there are: loads of all are then under
way. Of f16[64,512,768] over dim 1 that is four rounds, and 8 loads of 16 bytes instead of 2."""
BLOCK_REGISTERS = 1 << 16
"""Of the threads of one block, on every architecture."""
PARTIALS_SHARE = 4
"""Partials of results may be this fraction of the elements that are read."""
LONG_TILE, LONG_TURNS, LONG_SPLIT = 128, 8, 64
"""Elements along the lane, turns that add them to one number, and steps of a walk, by which the
partials that a walk leaves are judged."""
LONG_ROWS = 1 << 20
"""Elements from which more passes are cheaper than a device that is mostly idle."""
MORE_PASSES = 8
"""Over large tensors, that such rows may take."""
MOST_JOINED = 1 << 16
"""Partials of one number that a block joins: by 1024 threads, four loads of each under way at
once."""
MANY_LANES = 16
"""Elements along the lane that a block takes at least."""


@dataclass(frozen=True)
class TileSchedule:
    """How a kernel walks tiles.

    A block has `lanes` threads along the lane axis, each with `turns` vectors of `vector` elements,
    times `shares` that divide the steps of the walk; each has `unroll` steps in flight, and the
    next ones, too, while it computes, if they are loaded `ahead`. The walk is divided into
    `splits`.
    `storage` says whether values that a second sweep needs stay in registers or are read again;
    what blocks gather has a second sweep, of its stores, only if they stay there.
    What blocks leave of a result is put together by a `kernel` of its own, or, of all blocks that
    have a share in it, by the `last` one to begin: see gathering.
    `sizes` are given when the kernel is launched, so that it serves others, too, or compiled in.
    """

    vector: int = param(8, 4, 2, 1)
    lanes: int = param(1, 2, 4, 8, 16, 32, 64, 128, 256, default=32)
    shares: int = param(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, default=8)
    turns: int = param(1, 2, 4, 8, 16)
    unroll: int = param(1, 2, 4, 8)
    splits: int = param(*(2**k for k in range(11)))
    storage: str = param("reread", "registers")
    stream_loads: bool = param(True, False)
    combine: str = param("kernel", "last")
    ahead: bool = param(False, True)
    sizes: str = param("given", "compiled", own=True)

    @property
    def block_threads(self) -> int:
        return self.lanes * self.shares


def loads_bytes(graph: Graph, c: TileSchedule) -> int:
    """What one block may have on its way at once, of tensors that vary over all axes."""
    whole = [a.itemsize for a in graph.memory if _varies_everywhere(a, graph)]
    steps = c.unroll * (2 if c.ahead else 1)
    return c.block_threads * c.turns * c.vector * steps * sum(whole)


def _varies_everywhere(access: Access, graph: Graph) -> bool:
    return all(stride or n == 1 for stride, n in zip(access.strides, graph.space, strict=True))


class Area:
    """What one segment's tiles are cut from, whatever the schedule.

    Args:
        alone: nothing follows the segment's kernel but putting its partials together.

    Attributes:
        graph: with the lane axis last.
        walk: the axes whose steps follow one another in a thread.
        grid: the axes that number the blocks, besides pieces of lane and walk.
        added: by position of the output: the reduction that it holds partials of.
    """

    def __init__(self, segment: Segment, alone: bool = False):
        self.alone = alone
        self.graph = _lane_last(segment)
        self.lane = len(self.graph.space) - 1
        self.added = {k: self.graph.outputs[k][0] for k in segment.added()}
        sets = dict.fromkeys(self.graph.axes(i) for i in self.added.values())
        reduced = self.graph.reduced
        self.walk = best_walk(self.graph, self.lane, sets)[1] if sets else reduced
        assert self.lane not in self.walk, segment.graph
        self.grid = tuple(a for a in range(self.lane) if a not in self.walk)
        self.width = self.graph.space[self.lane]
        self.steps = math.prod(self.graph.space[a] for a in self.walk)
        self.cells = math.prod(self.graph.space[a] for a in self.grid)
        self.vectors = widest_vectors(self.graph, self.width)

    def walks_through(self, i: int) -> bool:
        """Whether a walk adds up to one partial of reduction `i`, or each step is a partial's
        own."""
        return set(self.walk) <= set(self.graph.axes(i))

    def varies(self, shape: tuple[int, ...]) -> bool:
        """Whether a value of this shape differs from step to step."""
        return any(shape[a] != 1 for a in self.walk) or not self.walk

    def along_lane(self, i: int) -> bool:
        return self.lane in self.graph.axes(i)

    def refuses(self, s: TileSchedule) -> str | None:
        """Why no tiles of the area are cut so, or None where `Tiles.misfit` has to say: most
        schedules of a space end here, before their tiles are reckoned."""
        split_steps = math.ceil(self.steps / s.splits)
        if s.block_threads % WARP or s.block_threads > 1024:
            return f"a block of {s.block_threads} threads"
        if self.width % s.vector:
            return f"vectors of {s.vector} do not divide {self.width} elements"
        if self.walk and (s.lanes - 1) * s.vector * s.turns >= 2 * self.width:
            return f"{s.lanes} lanes are more than twice those that {self.width} elements need"
        if self.walk and s.shares > 2 * split_steps and s.block_threads > WARP:
            return f"{s.shares} shares of {split_steps} steps"
        if self.walk and s.unroll > 1 and s.shares * s.unroll > 2 * split_steps:
            return f"{s.shares} shares of {s.unroll} steps are for longer walks"
        if not self.walk and (s.lanes != WARP or s.unroll > s.turns):
            return "without a walk, shares are lanes too, and turns are what is unrolled"
        if s.turns > 1 and not self.turning:
            return "several turns go with sums along the lane"
        if s.splits > 1 and not (self.added and self.walk):
            return "there is nothing to divide"
        if s.splits > self.steps:
            return f"{s.splits} splits of {self.steps} steps"
        return None

    @remembered
    def step_bytes(self, vector: int) -> tuple[int, int, int]:
        """Of a thread's step: what it loads, what it may keep, and what it adds up."""
        nodes = self.plan.graph.nodes
        loads = [n for n in nodes if n.op == "load" and self.varies(n.shape)]
        loaded = sum(held_bytes(n.dtype, vector) for n in loads)
        kept = sum(held_bytes(nodes[i].dtype, vector) for i in self.carried)
        kept += sum(held_bytes(nodes[i].dtype, 1) for i in self.parameters)
        sums = sum(held_bytes(nodes[i].dtype, vector) for i in self.plan.graph.reductions)
        return loaded, kept, sums

    @functools.cached_property
    def whole(self) -> list[Access]:
        """The tensors that are read or written most: those that vary over all axes, if any do."""
        memory = self.graph.memory
        return [a for a in memory if _varies_everywhere(a, self.graph)] or memory

    @functools.cached_property
    def turning(self) -> bool:
        """Whether a thread may take vector after vector: all that it adds up is one number."""
        ends = self.added.values()
        return bool(ends) and all(self.along_lane(i) and self.walks_through(i) for i in ends)

    @functools.cached_property
    def gathers(self) -> bool:
        """Whether blocks may leave their partials as words, one of each result, and join them."""
        nodes = self.graph.nodes
        words = all(nodes[i].dtype == "f32" and nodes[i].op in JOINS for i in self.added.values())
        walked = all(self.walks_through(i) for i in self.added.values())
        return self.alone and bool(self.added) and words and walked

    @functools.cached_property
    def plan(self) -> Plan:
        if not self.added and self.walk:
            return plan_rows(self.graph, "two_pass", row=self.walk)
        graph = self.graph
        inner = tuple(any(n.shape[a] != 1 for a in self.walk) for n in graph.nodes)
        stores = tuple(k for k in range(len(graph.outputs)) if k not in self.added)
        phase = Phase((), stores, frozenset(), frozenset(), tuple(self.added.values()))
        return Plan(graph, (phase,), inner, (0,) * len(graph.nodes), self.walk)

    @functools.cached_property
    def plan_with_stores_last(self) -> Plan:
        """Of what blocks gather: partials are left, and on their way, before results are stored."""
        return with_stores_last(self.plan) if self.gathers and self.walk else self.plan

    @functools.cached_property
    def carried(self) -> frozenset[int]:
        """Values that a later sweep uses, where they are kept for it."""
        phases = self.plan_with_stores_last.phases
        return frozenset[int]().union(*(p.carried_out for p in phases))

    @functools.cached_property
    def parameters(self) -> list[int]:
        """What later sweeps load for each step, beside the values that were kept for them."""
        graph, found = self.plan.graph, set[int]()
        for phase in self.plan.phases[1:]:
            ends = {graph.nodes[i].args[0] for i in phase.reductions}
            ends |= {graph.outputs[k][0] for k in phase.stores}
            found.update(needed_in(graph, ends, phase.carried_in))
        loads = (i for i in found if graph.nodes[i].op == "load")
        return [i for i in loads if self.varies(graph.nodes[i].shape)]


class Tiles:
    """An area under a schedule.

    Attributes:
        lanes, shares: threads of a block along the lane, and along the walk.
        splits: blocks among which a walk is divided, each with so many `split_steps`.
        pieces: blocks side by side along the lane.
        kept_steps: steps whose values a thread keeps: all of its walk, or none.
        sure_steps: of those, so many that every thread has.
        at_once: steps that a thread has in flight where it keeps none: a power of two, so that few
            kernels serve walks of all lengths. What is past the end is the last step again.
        rounds: how often a walk takes those, if its kernel is for so many alone; else 0.

    Where sizes are given to the kernel, steps that are kept and rounds are those of the longest
    walk of several, which it serves.
    """

    def __init__(self, area: Area, s: TileSchedule):
        self.area, self.s = area, s
        self.lanes, self.shares = (s.lanes, s.shares) if area.walk else (s.block_threads, 1)
        self.splits = s.splits if area.added and area.walk else 1
        self.split_steps = math.ceil(area.steps / self.splits)
        self.pieces = math.ceil(area.width / (self.lanes * s.vector * s.turns))
        self.blocks = area.cells * self.splits * self.pieces
        own = math.ceil(self.split_steps / self.shares)
        self.at_once = min(s.unroll, _power_above(own)) if area.walk else 1
        rounds, apart = math.ceil(own / self.at_once), 1
        last = area.steps - (self.splits - 1) * self.split_steps
        sure = min(self.split_steps, max(last, 0)) // self.shares
        if s.sizes == "given":
            rounds, apart = _power_above(rounds), max(_power_above(own) // KEPT_KINDS, 1)
            own = math.ceil(own / apart) * apart
            sure = min(own - apart, sure // apart * apart)
        self.rounds = rounds if self.splits == 1 and rounds <= MOST_ROUNDS else 0
        keeps = s.storage == "registers"
        self.kept_steps, self.sure_steps = (own, sure) if keeps else (0, 0)

    def partials_of(self, i: int) -> list[tuple[str, int]]:
        """What numbers the partials of reduction `i`, outermost first: a coordinate and its
        size."""
        area = self.area
        axes = area.graph.axes(i)
        found = [(f"grid{a}", area.graph.space[a]) for a in area.grid if a in axes]
        if area.walks_through(i):
            found.append(("split", self.splits))
        if area.along_lane(i):
            found.append(("piece", self.pieces))
            if not area.walks_through(i):
                found.append((f"(x / {WARP})", math.ceil(self.lanes / WARP)))
        return [(name, n) for name, n in found if n > 1]

    @remembered
    def count_of_partials(self, i: int) -> int:
        return math.prod(n for _, n in self.partials_of(i))

    def misfit(self) -> str | None:
        """Why the schedule does not suit, or None."""
        s, area = self.s, self.area
        if reason := area.refuses(s):
            return reason
        if self.kept_steps > KEPT_STEPS:
            return f"{self.kept_steps} steps of a walk are too many to keep"
        if self.kept_steps and area.added and (s.combine == "kernel" or s.turns > 1):
            return "stores come last, after one turn, where the last block joins the partials"
        if s.ahead and (self.kept_steps or self.shares * s.unroll >= self.split_steps):
            return "all steps of a thread are on their way at once"
        if s.combine == "last" and self.words > COUNTERS:
            return f"{self.words} words of partials exceed {COUNTERS}"
        room = min(255, BLOCK_REGISTERS // s.block_threads) - ARITHMETIC_REGISTERS
        if self.held_bytes > 4 * room:
            return f"{self.held_bytes} bytes per thread exceed {4 * room} bytes of registers"
        return None

    @property
    def stores_steps(self) -> bool:
        """Whether some result has an element of each step."""
        graph, walk = self.area.graph, self.area.walk
        results = (n for k, (n, _) in enumerate(graph.outputs) if k not in self.area.added)
        return any(graph.nodes[i].shape[a] != 1 for i in results for a in walk)

    @property
    def plan(self) -> Plan:
        return self.area.plan_with_stores_last if self.kept_steps else self.area.plan

    @property
    def joined_words(self) -> float:
        """Partials that a thread of the last block of a group joins, at most."""
        ends = self.area.added.values()
        columns = [1 if self.area.along_lane(i) else self.lanes * self.s.vector for i in ends]
        partials = [self.count_of_partials(i) * n for i, n in zip(ends, columns, strict=True)]
        return max(partials, default=0) / self.s.block_threads

    @property
    def words(self) -> int:
        """What partials and tickets take where the last block joins them."""
        shapes = {i: self.area.graph.nodes[i].shape for i in self.area.added.values()}
        partials = sum(self.count_of_partials(i) * math.prod(shapes[i]) for i in shapes)
        tickets = sum(self.blocks // self.count_of_partials(i) for i in shapes)
        return PARTIAL_WORDS * partials + tickets + 2 * SECTOR_WORDS * len(shapes)

    @functools.cached_property
    def held_bytes(self) -> int:
        """Of one thread: what it adds up, and what it keeps or has in flight, whichever is more."""
        loaded, kept, sums = self.area.step_bytes(self.s.vector)
        flying = (1 + self.s.ahead) * self.s.unroll * loaded
        return max(kept * self.kept_steps, flying) + sums


def blocks_of_sm(tiles: Tiles, device: DeviceSpec) -> int:
    """So many blocks on an SM that all run at once, or as many as registers allow."""
    threads = tiles.s.block_threads
    registers = ARITHMETIC_REGISTERS + tiles.held_bytes // 4
    most = min(device.threads_per_sm, device.registers_per_sm // registers) // threads
    return max(min(most, math.ceil(tiles.blocks / device.sms)), 1)


def few_rows(space: tuple[int, ...], row: tuple[int, ...], lane: int, device: DeviceSpec) -> bool:
    """Whether rows are so few and long that they leave most of a device idle: clusters, where rows
    run along the lane, else blocks side by side on it."""
    elements = math.prod(space)
    blocks = elements // math.prod(space[a] for a in row)
    if lane in row:
        blocks *= device.max_cluster
    else:
        blocks = blocks // space[lane] * math.ceil(space[lane] / MANY_LANES)
    return 2 * blocks <= device.sms and elements >= LONG_ROWS


class TileKernels(Kernels):
    """What kernels of this target do, under one schedule: see Kernels.

    Args:
        device: split rows that are too few for it, though each of their reductions is a pass.
        mixes: add up over different dims in one walk.
        rows: row kernels leave a partial for each row of what is reduced over rows and more.
        columns: they also add up over all rows.
    """

    across = True
    corrects = False
    most_joined = MOST_JOINED

    def __init__(
        self,
        schedule: TileSchedule,
        device: DeviceSpec | None = None,
        mixes: bool = True,
        rows: bool = False,
        columns: bool = False,
    ):
        super().__init__()
        self.schedule, self.device, self.mixes = schedule, device, mixes
        self.row_partials, self.columns = rows, columns
        self.extra = MORE_PASSES if device else 0

    def kind(self) -> tuple[Any, ...]:
        return (*super().kind(), self.device, self.mixes, self.row_partials, self.columns)

    def suits(self, space: tuple[int, ...], row: tuple[int, ...], lane: int) -> int:
        if not row:
            return 1
        if self.device and few_rows(space, row, lane, self.device):
            return -1
        return 2 if lane in row else 0

    def adds(self, graph: Graph, row: tuple[int, ...], lane: int, sums: Sequence[int]) -> bool:
        if row:
            others = [a for a in range(len(graph.space)) if a not in row and graph.space[a] > 1]
            return self.row_partials and all(
                set(row) < set(axes) or (self.columns and list(axes) == others)
                for axes in map(graph.axes, sums)
            )
        sets = list(dict.fromkeys(graph.axes(i) for i in sums))
        if len(sets) > 1 and not self.mixes:
            return False
        partial, _ = best_walk(graph, lane, sets)
        return len(sets) == 1 or partial * PARTIALS_SHARE <= math.prod(graph.space)

    def divided(self, segment: Segment) -> dict[int, int]:
        area = Area(segment)
        tiles = Tiles(area, fitted(self.schedule, area))
        return {k: tiles.count_of_partials(i) for k, i in area.added.items()}


def best_walk(
    graph: Graph, lane: int, sets: Iterable[tuple[int, ...]]
) -> tuple[float, tuple[int, ...]]:
    """The axes to walk that leave the fewest elements in partials of the results, and how many.

    A result either lies across the walk, and a thread adds it up on its way, or each step has its
    own, which must then be joined along the lane.
    """
    sets = list(sets)
    others = [a for a in range(len(graph.space)) if a != lane]
    found = []
    for count in range(len(others) + 1):
        for walk in itertools.combinations(others, count):
            through = [set(walk) <= set(axes) for axes in sets]
            apart = [not set(walk) & set(axes) and lane in axes for axes in sets]
            if all(a or b for a, b in zip(through, apart, strict=True)):
                left = sum(_partial(graph, lane, walk, axes) for axes in sets)
                found.append((left, -len(walk), walk))
    left, _, walk = min(found)
    return left, walk


def _partial(graph: Graph, lane: int, walk: tuple[int, ...], axes: tuple[int, ...]) -> float:
    """Elements in the partials of a result over `axes`."""
    space = graph.space
    elements = math.prod(space[a] for a in range(len(space)) if a not in walk and a != lane)
    through = set(walk) <= set(axes)
    elements *= math.ceil(math.prod(space[a] for a in walk) / (LONG_SPLIT if through else 1))
    tile = (LONG_TURNS if through else 1) * LONG_TILE if lane in axes else 1
    return elements * math.ceil(space[lane] / tile)


def _lane_last(segment: Segment) -> Graph:
    graph, lane = segment.graph, segment.lane
    if segment.added():
        assert lane is not None
    else:
        kept = [a for a in range(len(graph.space)) if a not in graph.reduced]
        if not kept:
            return with_axis(graph)
        if lane is None or lane in graph.reduced:
            best = main_axis(graph, range(len(graph.nodes)))
            lane = best if best in kept else kept[-1]
    return permuted(graph, [*(a for a in range(len(graph.space)) if a != lane), lane])


def joining_schedule(area: Area, most: int) -> TileSchedule:
    """For the kernels that put partials together: single columns, many shares of each. Those of one
    launch have as many threads; `most` are the partials of one result of any of them."""
    steps = _power_above(area.steps)
    threads = JOIN_THREADS if most > FEW_PARTIALS else JOIN_THREADS // 4
    if area.cells * area.width <= FEW_COLUMNS:
        steps = max(steps, JOIN_SHARES)
    shares = min(threads // min(_power_above(area.width), WARP), steps)
    return TileSchedule(1, threads // shares, shares, 1, max(min(4, steps // shares), 1))


def fitted(s: TileSchedule, area: Area) -> TileSchedule:
    """The schedule, or for another area the nearest: narrower, with fewer splits."""
    if s.vector in area.vectors and Tiles(area, s).misfit() is None:
        return s
    vector = next(v for v in area.vectors if v <= s.vector or v == 1)
    turns = s.turns if area.turning else 1
    if not area.walk:
        shares = max(s.block_threads // WARP, 1)
        return TileSchedule(vector, WARP, shares, turns, min(s.unroll, turns), sizes=s.sizes)
    lanes = min(s.lanes, _power_above(area.width / vector))
    steps = _power_above(area.steps)
    splits = min(s.splits, max(steps // 2, 1)) if area.added and area.walk else 1
    shares = max(min(s.shares, max(steps // splits, 1)), WARP // lanes)
    unroll = max(min(s.unroll, steps // splits // shares), 1)
    tried = TileSchedule(
        vector, lanes, shares, turns, unroll, splits, s.storage, s.stream_loads, sizes=s.sizes
    )
    keeps = area.carried and Tiles(area, tried).misfit() is None
    return tried if keeps else replace(tried, storage="reread")


def _power_above(n: float) -> int:
    return 1 << max(math.ceil(n) - 1, 0).bit_length()
