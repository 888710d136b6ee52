"""Launches of a program that are no tile kernels: those of steps alone, of rows, of rows that also
add up over all of them, and of rows in sets."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tilewright.device import MAX_GRID, DeviceSpec
from tilewright.fusion.cuda.column_graph import RowGraph, split
from tilewright.fusion.cuda.finishing import FINISH
from tilewright.fusion.cuda.kernel import Launch, prelude
from tilewright.fusion.cuda.pointwise.kernel import emit_pointwise
from tilewright.fusion.cuda.pointwise.schedule import (
    PointwiseSchedule,
    pointwise_heuristic,
    pointwise_registers,
)
from tilewright.fusion.cuda.rows.columns import emit_both
from tilewright.fusion.cuda.rows.footprint import Footprint, estimated_registers
from tilewright.fusion.cuda.rows.heuristics import row_heuristic
from tilewright.fusion.cuda.rows.row_sets import RowSets, emit_sets, row_sets, set_heuristic
from tilewright.fusion.cuda.rows.schedule import RowSchedule
from tilewright.fusion.cuda.rows.sharing import emit_rows
from tilewright.fusion.cuda.rows.space import row_space
from tilewright.fusion.cuda.tiles.capabilities import few_rows
from tilewright.fusion.cuda.tiles.schedule import TileSchedule
from tilewright.fusion.ir import Graph
from tilewright.fusion.passes import permuted
from tilewright.fusion.program import Segment
from tilewright.fusion.remembered import remembered
from tilewright.fusion.subgraphs import main_axis
from tilewright.space import ConfigSpace
from tilewright.tensor_spec import TensorSpec

Schedule = TileSchedule | RowSchedule | PointwiseSchedule


@dataclass(frozen=True)
class Stage:
    """One launch of a program.

    Attributes:
        entry: the name of its kernel.
        buffers: those whose addresses are its first arguments: inputs, outputs, temporaries.
        launch: of a row or pointwise kernel, which takes `count` rows or elements; else None.
        blocks, block_threads: of a tile kernel, or of one that finishes.
        estimated_registers: of a thread; 0 of a kernel that finishes or joins.
        counters: zeroed words that a tile kernel takes: their address follows the buffers.
        extents: the values of dynamic sizes and strides of a tile kernel.
        samples: grids side by side, each for the rows of one.
        meetings: how often blocks of a tile kernel wait for one another: all must run at once.
        finishes: it joins the partial results of all blocks, or clusters, of the launch before it,
            and is told how many those are.
        overlaps: it may begin before the launch before it has ended, which it waits for.
    """

    entry: str
    buffers: tuple[int, ...]
    signature: str
    launch: Launch | None = None
    count: int = 0
    blocks: int = 0
    block_threads: int = 0
    estimated_registers: int = 0
    counters: int = 0
    extents: tuple[int, ...] = ()
    finishes: bool = False
    samples: int = 1
    meetings: int = 0
    overlaps: bool = False

    @property
    def shared_bytes(self) -> int:
        """Of a block, besides what its source declares."""
        return self.launch.shared_bytes if self.launch else 0


def rows_last(graph: Graph) -> Graph:
    """The graph with the axes that it reduces last, the contiguous one behind all others."""
    lane = main_axis(graph, range(len(graph.nodes)))
    row = sorted(graph.reduced, key=lambda a: a == lane)
    return permuted(graph, [*graph.kept, *row])


def shares_rows(rows: Graph, device: DeviceSpec) -> bool:
    """Whether rows are so few and long that more than a cluster should share one."""
    samples = rows.samples if isinstance(rows, RowGraph) else 1
    row = tuple(a + 1 for a in rows.reduced)
    return few_rows((samples, *rows.space), row, row[-1], device)


def fits_rows(rows: Graph, device: DeviceSpec) -> bool:
    """Whether one row kernel takes all of these rows."""
    if math.prod(rows.space[a] for a in rows.kept) > MAX_GRID or shares_rows(rows, device):
        return False
    return row_heuristic(rows, device) is not None


# ---- rows that also add up over all of them ------------------------------------------------------


def nests(segment: Segment) -> bool:
    """Whether a kernel of rows reduces some axes of them alone."""
    row = set(segment.row or ())
    return segment.nested and any(set(axes) < row for axes in segment.graph.reduction_sets)


def adds_columns(segment: Segment) -> bool:
    """Whether a kernel of rows also adds up over all of them."""
    if nests(segment) or segment.lane not in (segment.row or ()):
        return False
    row = set(segment.row or ())
    return any(row - set(axes) for axes in segment.graph.reduction_sets)


@remembered
def column_graphs(segment: Segment) -> tuple[Graph, RowGraph] | None:
    """The segment with its row last, and what its row kernel does of it; None if no row kernel
    does all but putting sums over rows together."""
    graph, row = segment.graph, segment.row or ()
    others = [a for a in range(len(graph.space)) if a not in row]
    graph = permuted(graph, [*others, *sorted(row, key=lambda a: a == segment.lane)])
    rows = split(graph)
    return None if isinstance(rows, str) else (graph, rows)


def column_rows(segment: Segment) -> RowGraph:
    found = column_graphs(segment)
    assert found is not None, segment
    return found[1]


def sets_of_rows(segment: Segment) -> RowSets | str:
    """What a kernel of sets of rows computes of a segment, or why it is none."""
    assert segment.row is not None, segment
    assert segment.lane is not None, segment
    return row_sets(segment.graph, segment.row, segment.lane)


def sets_in(segment: Segment) -> RowSets:
    found = sets_of_rows(segment)
    assert isinstance(found, RowSets), found
    return found


def column_space(segment: Segment, device: DeviceSpec) -> ConfigSpace[RowSchedule]:
    """Of schedules whose partials a second launch joins."""
    whole = row_space(column_rows(segment), device)
    values = {**whole.values, "combine": ("kernel",)}
    return ConfigSpace(RowSchedule, values, whole.why_not)


def column_stages(
    segment: Segment, config: Schedule | None, device: DeviceSpec, entry: str, partials: int
) -> tuple[list[tuple[str, Stage]], TensorSpec]:
    """The row kernel, and what joins its partial results: the sources and launches of both, and
    what they pass on in the buffer `partials`."""
    found = column_graphs(segment)
    assert found is not None, segment
    graph, rows = found
    schedule = config if isinstance(config, RowSchedule) else row_heuristic(rows, device)
    assert schedule is not None, graph
    last = f"{entry}_{FINISH}"
    text, finish_text, launch = emit_both(graph, rows, schedule, entry, last)
    finish = launch.finish
    assert finish is not None
    count = math.prod(rows.space[a] for a in rows.kept)
    clusters = max(device.sms * schedule.min_blocks // launch.cluster, 1)
    most = launch.walking(count, clusters * launch.cluster)
    launch = replace(launch, most_blocks=most)
    outputs = launch.outputs or ()
    first = (*segment.reads, *(segment.writes[k] for k in outputs), partials)
    given = (
        *(segment.reads[k] for k in finish.inputs),
        *(segment.writes[k] for k in finish.outputs),
    )
    stages = [
        Stage(
            entry, first, launch.signature, launch, count,
            block_threads=launch.block_threads,
            estimated_registers=estimated_registers(schedule, Footprint(rows)),
            samples=launch.samples,
        ),
        Stage(
            last, (partials, *given), finish.signature,
            blocks=finish.blocks, block_threads=finish.block_threads, finishes=True,
            samples=launch.samples, overlaps=True,
        ),
    ]  # fmt: skip
    elements = most // launch.cluster * launch.samples * launch.partials
    texts = [text.removeprefix(prelude()), finish_text]
    return [*zip(texts, stages, strict=True)], TensorSpec(launch.partial_dtype, (elements,))


# ---- rows, and steps alone -----------------------------------------------------------------------


def plain_stage(
    segment: Segment, kind: str, config: Schedule | None, device: DeviceSpec, entry: str
) -> tuple[str, Stage]:
    """A row or pointwise kernel, or one of sets of rows."""
    graph = segment.graph
    if kind == "rows":
        graph = rows_last(graph)
        rows = config if isinstance(config, RowSchedule) else row_heuristic(graph, device)
        assert rows is not None, graph
        text, launch = emit_rows(graph, rows, entry)
        count = math.prod(graph.space[a] for a in graph.kept)
        estimated = estimated_registers(rows, Footprint(graph))
    elif kind == "sets":
        sets = sets_in(segment)
        rows = config if isinstance(config, RowSchedule) else set_heuristic(sets, device)
        assert rows is not None, graph
        text, launch = emit_sets(sets, rows, entry)
        count = math.prod(sets.space[a] for a in sets.kept)
        estimated = estimated_registers(rows, Footprint(sets))
    else:
        fits = isinstance(config, PointwiseSchedule)
        points = config if fits else pointwise_heuristic(graph, device)
        assert isinstance(points, PointwiseSchedule)
        text, launch = emit_pointwise(graph, points, entry)
        count = math.prod(graph.space)
        estimated = pointwise_registers(graph, points)
    buffers = (*segment.reads, *segment.writes)
    stage = Stage(
        entry, buffers, launch.signature, launch, count,
        block_threads=launch.block_threads,
        estimated_registers=estimated,
    )  # fmt: skip
    return text.removeprefix(prelude()), stage
