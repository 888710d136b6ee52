"""What tiles are cut from: one segment's elements, by the axes of lane, walk and grid."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable

from tilewright.device import WARP
from tilewright.fusion.cuda.kernel import JOINS
from tilewright.fusion.cuda.tiles.schedule import TileSchedule
from tilewright.fusion.cuda.vectors import held_bytes, widest_vectors
from tilewright.fusion.ir import Access, Graph
from tilewright.fusion.passes import permuted, with_axis
from tilewright.fusion.plan import Phase, Plan, needed_in, plan_rows, with_stores_last
from tilewright.fusion.program import Segment
from tilewright.fusion.remembered import remembered
from tilewright.fusion.subgraphs import main_axis

LONG_TILE, LONG_TURNS, LONG_SPLIT = 128, 8, 64
"""Elements along the lane, turns that add them to one number, and steps of a walk, by which the
partials that a walk leaves are judged."""
KEPT_STEPS = 32
"""Steps of a walk that a thread unrolls to keep their values in registers."""


class Area:
    """What one segment's tiles are cut from, whatever the schedule.

    Args:
        alone: nothing follows the segment's kernel but putting its partials together.

    Attributes:
        graph: with the lane axis last.
        walk: the axes whose steps follow one another in a thread.
        grid: the axes that number the blocks, besides pieces of lane and walk.
        added: by position of the output: the reduction that it holds partials of.
        only_adds: partials are all that the walk leaves of reductions.
        adds_across: it also completes some, which its steps use: partials are of sums along the
            lane then, one for each step.
    """

    def __init__(self, segment: Segment, alone: bool = False):
        self.alone = alone
        self.graph = _lane_last(segment)
        self.lane = len(self.graph.space) - 1
        self.added = {k: self.graph.outputs[k][0] for k in segment.added()}
        ends = set(self.added.values())
        sets = dict.fromkeys(self.graph.axes(i) for i in ends)
        rows = {self.graph.axes(i) for i in self.graph.reductions if i not in ends}
        self.only_adds, self.adds_across = segment.only_adds, segment.adds_across
        if rows:
            assert len(rows) == 1, (rows, segment.graph)
            (self.walk,) = rows
        else:
            self.walk = best_walk(self.graph, self.lane, sets)[1] if sets else self.graph.reduced
        assert self.lane not in self.walk, segment.graph
        self.grid = tuple(a for a in range(self.lane) if a not in self.walk)
        self.width = self.graph.space[self.lane]
        self.steps = math.prod(self.graph.space[a] for a in self.walk)
        self.cells = math.prod(self.graph.space[a] for a in self.grid)
        self.vectors = widest_vectors(self.graph, self.width)

    def walks_through(self, i: int) -> bool:
        """Whether a walk adds up to one partial of reduction `i`, or each step is a partial's
        own."""
        return i in self._through

    @functools.cached_property
    def _through(self) -> frozenset[int]:
        walk, graph = set(self.walk), self.graph
        return frozenset(i for i in graph.reductions if walk <= set(graph.axes(i)))

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
        meets = s.combine == "grid"
        if meets and not (self.meets and s.splits > 1):
            return "blocks meet that share a walk and need what all of them add up"
        if s.splits > 1 and not (self.divides or meets):
            return "there is nothing to divide"
        if s.splits > self.steps:
            return f"{s.splits} splits of {self.steps} steps"
        if s.storage == "registers":
            own_steps = math.ceil(split_steps / s.shares)
            if own_steps > KEPT_STEPS:
                return f"{own_steps} steps of a walk are too many to keep"
            if self.only_adds and (s.combine == "kernel" or s.turns > 1):
                return "stores come last, after one turn, where the last block joins the partials"
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
        return [a for a in memory if varies_everywhere(a, self.graph)] or memory

    @functools.cached_property
    def itemsize(self) -> int:
        """Bytes of the widest element of those."""
        return max((a.itemsize for a in self.whole), default=4)

    @functools.cached_property
    def element_bytes(self) -> int:
        """Bytes of one element of each of those."""
        return sum(a.itemsize for a in self.whole)

    @functools.cached_property
    def loaded_bytes(self) -> int:
        """Of all tensors that vary over all axes."""
        loads = (a for a in self.graph.inputs if varies_everywhere(a, self.graph))
        return sum(a.itemsize for a in loads) * math.prod(self.graph.space)

    @functools.cached_property
    def swept_bytes(self) -> int:
        """Of one element of those, what all sweeps load where nothing is kept."""
        graph, found = self.plan.graph, 0
        for phase in self.plan.phases:
            needed = needed_in(graph, self.plan.ends(phase), frozenset())
            nodes = (graph.nodes[i] for i in needed)
            loads = (graph.inputs[n.attr] for n in nodes if n.op == "load")
            found += sum(a.itemsize for a in loads if varies_everywhere(a, graph))
        return found

    @functools.cached_property
    def step_loads(self) -> int:
        """Loads of numbers of a step, which all lanes have in common."""
        nodes = (n for n in self.plan.graph.nodes if n.op == "load" and self.varies(n.shape))
        return sum(n.shape[self.lane] == 1 for n in nodes)

    @functools.cached_property
    def result_elements(self) -> dict[int, int]:
        """By reduction that it holds partials of: the elements of its result."""
        return {i: math.prod(self.graph.nodes[i].shape) for i in self.added.values()}

    @property
    def divides(self) -> bool:
        """Whether several blocks may each leave partials of one walk."""
        return self.only_adds and bool(self.walk)

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
    def meets(self) -> bool:
        """Whether blocks may share a walk whose steps wait for what all of it adds up to."""
        return not self.added and bool(self.carried)

    @property
    def meetings(self) -> int:
        """How often such blocks wait for it."""
        return sum(bool(phase.reductions) for phase in self.plan.phases)

    @functools.cached_property
    def plan(self) -> Plan:
        if self.walk and not self.only_adds:
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
            found.update(needed_in(graph, self.plan.ends(phase), phase.carried_in))
        loads = (i for i in found if graph.nodes[i].op == "load")
        return [i for i in loads if self.varies(graph.nodes[i].shape)]


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
        if lane is None:  # rows of one element each: no tensor of the segment varies along them
            return with_axis(graph)
    else:
        kept = [a for a in range(len(graph.space)) if a not in graph.reduced]
        if not kept:
            return with_axis(graph)
        if lane is None or lane in graph.reduced:
            best = main_axis(graph, range(len(graph.nodes)))
            lane = best if best in kept else kept[-1]
    return permuted(graph, [*(a for a in range(len(graph.space)) if a != lane), lane])


def varies_everywhere(access: Access, graph: Graph) -> bool:
    return all(stride or n == 1 for stride, n in zip(access.strides, graph.space, strict=True))
