"""Rows that begin at different places of an aligned vector: a row's vectors are shifted with it.

A row of 50257 halves begins at any of eight places of a 16-byte vector. Its vectors are laid where
memory is aligned, the first up to a vector before the row begins; what lies outside of the row is
neither read nor written, and takes no part in reductions. All tensors of a row must begin alike.

Where columns are added up over rows, all rows that a block walks must begin at the same place, so
that a thread meets the same columns in each: a block walks every n-th row, and n is a multiple of
`rows_alike`.
"""

from __future__ import annotations

import math

from tilewright.fusion.cuda.column_graph import RowGraph
from tilewright.fusion.ir import Access, Graph

ALIGN = 16
"""Bytes to which tensors must be aligned, as PyTorch's own are."""


def shifted_alike(graph: Graph, vector: int) -> Access | None:
    """A tensor by which the shift of a row can be told, if all of the row's are shifted alike."""
    if isinstance(graph, RowGraph):
        if graph.samples > 1 or len(graph.kept) != 1:
            return None
    elif not graph.reductions:
        return None
    if len(graph.reduced) != 1:
        return None
    (lane,) = graph.reduced
    if not all(_varies(graph, i) for i in graph.reductions if lane in graph.axes(i)):
        return None  # rows would add up the same in another order each, and write it to one place
    accesses = [*graph.memory, *(a for _, a in graph.outputs)]
    along = [a for a in accesses if a.strides[lane]]
    rows = [a for a in along if not graph.kept or any(a.strides[k] for k in graph.kept)]
    starts = {tuple(a.strides[k] % vector for k in graph.kept) for a in rows}
    contiguous = all(a.strides[lane] == 1 for a in [*graph.inputs, *along] if a.strides[lane])
    aligned = all(a.align % ALIGN == 0 for a in rows)
    return rows[0] if contiguous and aligned and len(starts) == 1 else None


def _varies(graph: Graph, i: int) -> bool:
    """Whether each row has a result of its own."""
    shape = graph.nodes[graph.nodes[i].args[0]].shape
    return all(shape[a] == graph.space[a] for a in graph.kept)


def rows_alike(graph: Graph, vector: int) -> int:
    """The distance, in rows, of those that begin at the same place of a vector."""
    by = shifted_alike(graph, vector)
    assert by is not None, graph
    (rows,) = graph.kept
    return vector // math.gcd(vector, by.strides[rows])


def vectors_of(width: int, vector: int, shifted: bool) -> int:
    """Vectors that cover a row, wherever it begins."""
    return (width + vector - 2) // vector + 1 if shifted else width // vector
