"""Graphs that reduce over their rows beside what they do along them, and how they are cut."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tilewright.fusion.cuda.kernel import JOINS
from tilewright.fusion.ir import Access, Graph
from tilewright.fusion.passes import collapsed, remove_dead
from tilewright.fusion.plan import needed_in

MOST_SAMPLES = 65535
"""The second size of a grid, at most."""
SAMPLE_ROWS = 16
"""Of each sample, at least: for its rows each block leaves sums of fp32, which are read again."""


@dataclass(frozen=True)
class RowGraph(Graph):
    """A graph whose rows are said, not derived: what it adds up over rows leaves no trace in it.

    Where it adds up over the rows of each sample apart, as the gradients of an adaptive norm are,
    it is the graph of one of them.

    Attributes:
        row_axes: the axes along a row.
        columns: per sum over rows: the node of the whole graph.
        first_column: outputs from here on are the operands of `columns`, to be added up.
    """

    row_axes: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()
    first_column: int = 0
    samples: int = 1
    sample_axis: int | None = None
    """Of the whole graph: that which numbers the samples."""

    @property
    def reduced(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.row_axes


def split(graph: Graph) -> RowGraph | str:
    """The row kernel's part of a graph that reduces over rows, or why there is none.

    Columns are reductions over all axes outside the row, or all but one that numbers samples;
    whatever follows from them is left to the second kernel.
    """
    rank = len(graph.space)
    inner = [axes for axes in graph.reduction_sets if rank - 1 in axes]
    outer = [axes for axes in graph.reduction_sets if rank - 1 not in axes]
    if len(inner) > 1 or len(outer) != 1:
        return f"reductions over {len(graph.reduction_sets)} different sets of dims in one kernel"
    row_axes = inner[0] if inner else tuple(a for a in range(rank) if a not in outer[0])
    if {*row_axes} & {*outer[0]} or row_axes != tuple(range(rank - len(row_axes), rank)):
        return "reductions over rows and columns that are no matrix in memory order"
    samples = [a for a in range(rank) if a not in row_axes and a not in outer[0]]
    if len(samples) > 1:
        return "sums over rows for each of several dims"
    if not inner and graph.joined & {*row_axes}:
        return "sums over rows alone, in columns of several dims, which tile kernels count"
    columns = tuple(i for i in graph.reductions if graph.axes(i) == outer[0])
    after = followers(graph, columns)
    if any(graph.nodes[i].op not in JOINS for i in columns):
        return "a mean or variance over rows"
    operands = [graph.nodes[i].args[0] for i in columns]
    if any(graph.nodes[i].args[0] in after for i in graph.reductions):
        return "a reduction of what was reduced over rows"
    ends = [i for i, _ in graph.outputs if i in after]
    if any(graph.nodes[i].shape[a] != 1 for i in ends for a in outer[0]):
        return "an output that varies over rows and follows from what was reduced over them"
    if any(i in graph.reductions for i in needed_after(graph, columns) if i not in columns):
        return "a second reduction in what follows from the one over rows"
    if any(graph.nodes[i].shape != graph.space for i in operands):
        return "a reduction over rows of what does not vary over all of them"
    rows = [(i, access) for i, access in graph.outputs if i not in after]
    if any(graph.nodes[i].shape[a] == 1 for i, _ in rows for a in outer[0] if graph.space[a] > 1):
        return "an output that does not vary over rows"
    if samples and (reason := _misfit(graph, samples[0], outer[0], rows)):
        return reason
    sums = [(i, Access((0,) * rank, graph.nodes[i].dtype, 16)) for i in operands]
    found = RowGraph(
        graph.nodes, graph.space, graph.inputs, (*rows, *sums), graph.scalars, graph.again,
        joined=graph.joined, row_axes=row_axes, columns=columns, first_column=len(rows),
    )  # fmt: skip
    pruned = remove_dead(found)
    assert isinstance(pruned, RowGraph)
    return _of_one(pruned, samples[0]) if samples else pruned


def _of_one(graph: RowGraph, sample: int) -> RowGraph:
    """The graph of any sample: each begins where the stride between them leaves it aligned."""

    def aligned(access: Access) -> Access:
        step = access.strides[sample] * access.itemsize
        return replace(access, align=math.gcd(access.align, step))

    each = replace(
        graph,
        inputs=tuple(map(aligned, graph.inputs)),
        outputs=tuple((i, aligned(a)) for i, a in graph.outputs),
    )
    found = collapsed(each, [[a] for a in range(len(graph.space)) if a != sample])
    assert isinstance(found, RowGraph)
    return replace(
        found,
        row_axes=tuple(a - (a > sample) for a in graph.row_axes),
        samples=graph.space[sample],
        sample_axis=sample,
    )


def _misfit(
    graph: Graph, sample: int, outer: tuple[int, ...], rows: list[tuple[int, Access]]
) -> str | None:
    """Why sums over the rows of each sample are no work for a row kernel."""
    count, of_each = graph.space[sample], math.prod(graph.space[a] for a in outer)
    if count > MOST_SAMPLES:
        return f"sums over rows for each of {count} samples: a grid has {MOST_SAMPLES}"
    if of_each < SAMPLE_ROWS:
        return f"sums over {of_each} rows, fewer than {SAMPLE_ROWS}"
    if any(graph.nodes[i].shape[sample] == 1 for i, _ in rows):
        return "an output that every sample has in common"
    return None


def needed_after(graph: Graph, columns: tuple[int, ...]) -> list[int]:
    """The steps, in order, from the sums over rows to the outputs that follow from them."""
    after = followers(graph, columns)
    return needed_in(graph, {i for i, _ in graph.outputs if i in after}, frozenset())


def followers(graph: Graph, sources: tuple[int, ...]) -> set[int]:
    """The nodes that depend on `sources`, these included."""
    found = set(sources)
    for i, n in enumerate(graph.nodes):
        if any(a in found for a in n.args):
            found.add(i)
    return found
