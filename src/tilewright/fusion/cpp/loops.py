"""How the axes of a graph become the loops of a C++ kernel, and what sweeps keep in memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tilewright.fusion.extents import extents_of, pointwise_axes, several, with_extents
from tilewright.fusion.ir import Access, Graph
from tilewright.fusion.passes import with_axis
from tilewright.fusion.plan import Phase, Plan, needed_in, plan_rows
from tilewright.fusion.program import Segment
from tilewright.fusion.remembered import remembered
from tilewright.tensor_spec import DTYPES, HALVES

L1_BYTES = 12 << 10
"""Of the L1 cache (32 KiB or more), what is left beside the row itself and its parameters."""
_CHEAP = ("add", "sub", "mul", "cast")


@dataclass(frozen=True)
class Loops:
    """How a plan's axes become loops.

    Attributes:
        lane: the axis that vectors run along.
        swept: axes that one work item walks: the reduced ones, or the lane axis.
        rows: the axes that number the work items, the lane axis not among them.
        added: by position of the output: the reduction over other axes that it holds partials of.
        splits: into how many the work items are divided for those.
    """

    plan: Plan
    lane: int
    swept: tuple[int, ...]
    rows: tuple[int, ...]
    added: Mapping[int, int] = field(default_factory=dict)
    splits: int = 1

    @functools.cached_property
    def kind(self) -> str:
        if not any(phase.reductions for phase in self.plan.phases):
            return "pointwise"
        return "rows" if self.lane in self.swept else "columns"

    @property
    def dynamic(self) -> tuple[int, ...]:
        """The axes that have dynamic extents: all but those of a row; of a loss that one, too."""
        match self.kind:
            case "columns":
                return (*self.rows, *self.swept, self.lane)
            case "pointwise":
                return tuple(pointwise_axes(self.plan.graph, self.rows, self.lane))
        one_row = not self.rows and self.swept == (self.lane,)
        return (self.lane,) if one_row and self.plan.graph.is_total else tuple(several(self.rows))

    @functools.cached_property
    def extents(self) -> dict[str, int]:
        """By name, the values of the sizes and strides that the kernel is given: those, and the
        outermost size unless it is of a row."""
        space = self.plan.graph.space
        first = {0} if self.kind == "pointwise" else {0} & set(self.rows)
        sizes = {f"n{a}": int(space[a]) for a in sorted({*first, *self.dynamic})}
        return sizes | {e.name: int(e) for e in extents_of(self.plan.graph)}

    @property
    def row_width(self) -> int:
        return math.prod(self.plan.graph.space[a] for a in self.swept)

    def is_vector(self, i: int) -> bool:
        return self.plan.graph.nodes[i].shape[self.lane] != 1

    @functools.cached_property
    def walked(self) -> int | None:
        """The axis along which the rows (or vectors of columns) of one work item follow."""
        if self.kind == "columns":
            return self.lane
        return self.rows[-1] if self.rows else None

    @property
    def outer(self) -> tuple[int, ...]:
        """The axes on which a work item has one position."""
        return tuple(a for a in self.rows if a != self.walked)

    def is_replicated(self, i: int) -> bool:
        """Whether the rows (or vectors of columns) of a work item have different values."""
        return self.walked is not None and self.plan.graph.nodes[i].shape[self.walked] != 1

    @functools.cached_property
    def kept_values(self) -> list[int]:
        """Values that some sweep keeps for a later one."""
        return sorted(frozenset[int]().union(*(p.carried_out for p in self.plan.phases)))

    def kept_bytes(self, i: int) -> int:
        """Bytes of one kept value, for one row or one lane of columns; a multiple of 64."""
        size = DTYPES[self.plan.graph.nodes[i].dtype].itemsize
        return math.ceil(self.row_width * size / 64) * 64

    def kept_place(self, values: Sequence[int]) -> str:
        """Bytes of so many kept values, one for each row or lane, as an expression."""
        if self.kind != "columns":
            return str(sum(map(self.kept_bytes, values)))
        width = " * ".join(f"n{a}" for a in self.swept)
        itemsizes = [DTYPES[self.plan.graph.nodes[i].dtype].itemsize for i in values]
        return " + ".join(f"({width} * {n} + 63) / 64 * 64" for n in itemsizes) or "0"

    @property
    def kept_lanes(self) -> str:
        """How many times that: once, or once for each of a vector of columns."""
        return "LANES" if self.kind == "columns" else "1"


@remembered
def arrange(segment: Segment | Graph, keep: str) -> Loops:
    """Choose the lane axis, the one along which most bytes are contiguous, and the phases."""
    if isinstance(segment, Graph):
        segment = Segment(segment, (), ())
    if not segment.graph.space:
        segment = replace(segment, graph=with_axis(segment.graph))
    added = segment.added()
    if added:
        assert segment.lane is not None
        assert segment.row is not None
        lane, row = segment.lane, segment.row
        plan = _planned(segment.graph, row, lane, keep)
    else:
        lane, row = _free_lane(segment.graph), segment.graph.reduced
        plan = _planned(segment.graph, row, lane, keep)
    swept = (*(a for a in row if a != lane), *(a for a in row if a == lane)) or (lane,)
    rows = tuple(a for a in range(len(segment.graph.space)) if a not in swept and a != lane)
    loops = Loops(plan, lane, swept, rows, added, segment.partials)
    phases = plan.phases
    kept = _kept(loops, keep)
    trimmed = tuple(
        replace(phase, carried_in=before, carried_out=after)
        for phase, before, after in zip(phases, [frozenset[int](), *kept], kept, strict=False)
    )
    graph = with_extents(plan.graph, loops.dynamic, lane)
    return replace(loops, plan=replace(plan, graph=graph, phases=trimmed))


def _free_lane(graph: Graph) -> int:
    accesses = [*graph.inputs, *(a for _, a in graph.outputs)]
    contiguous = [
        sum(_bytes(graph, access) for access in accesses if access.strides[axis] == 1)
        for axis in range(len(graph.space))
    ]
    last = graph.reduced[-1] if graph.reductions else len(graph.space) - 1
    lane = max(range(len(graph.space)), key=lambda a: (contiguous[a], a == last))
    return last if lane in graph.reduced and contiguous[lane] == contiguous[last] else lane


def _planned(graph: Graph, row: tuple[int, ...], lane: int, keep: str) -> Plan:
    if row:
        return plan_rows(graph, "corrected", recompute=keep == "bytes", row=row)
    return _pointwise_plan(graph, lane)


def _pointwise_plan(graph: Graph, lane: int) -> Plan:
    inner = tuple(n.shape[lane] != 1 for n in graph.nodes)
    added = tuple(graph.reductions)
    stores = tuple(
        k for k, (i, _) in enumerate(graph.outputs) if inner[i] and i not in graph.reductions
    )
    phase = Phase((), stores, frozenset(), frozenset(), added)
    return Plan(graph, (phase,), inner, (0,) * len(graph.nodes), (lane,))


def _kept(loops: Loops, keep: str) -> list[frozenset[int]]:
    """What each sweep keeps: no scalars, no contiguous loads, which are memory of their own, and
    nothing that one or two additions or products give from what an earlier sweep kept."""
    graph, earlier, kept = loops.plan.graph, frozenset[int](), []
    for phase in loops.plan.phases:
        found: set[int] = set()
        for i in phase.carried_out if keep != "nothing" else ():
            if i in earlier:  # where it is kept, it stays
                found.add(i)
                continue
            steps = [k for k in needed_in(graph, {i}, earlier) if loops.plan.inner[k]]
            again = [k for k in steps if not _is_reread(loops, k)]
            if len(again) <= 2 and all(graph.nodes[k].op in _CHEAP for k in again):
                found |= {a for k in steps for a in graph.nodes[k].args if a in earlier}
            elif loops.is_vector(i) and not _is_reread(loops, i):
                found.add(i)
        earlier = frozenset(found)
        kept.append(earlier)
    return kept


def _is_reread(loops: Loops, i: int) -> bool:
    """Whether reading an input again is as good as keeping it: contiguous, and not to be widened,
    or part of a row that would fill the L1 cache if it were kept widened."""
    n = loops.plan.graph.nodes[i]
    if n.op != "load" or loops.plan.graph.generated(i):
        return False
    if loops.plan.graph.inputs[n.attr].strides[loops.lane] != 1:
        return False
    return n.dtype not in HALVES or 4 * loops.row_width > L1_BYTES


def _bytes(graph: Graph, access: Access) -> int:
    sizes = [n for n, s in zip(graph.space, access.strides, strict=True) if s]
    return math.prod(sizes) * access.itemsize
