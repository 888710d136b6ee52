"""What blocks leave for the one of them that joins: which graphs allow it, and the room it takes.

A partial is a word of eight bytes, a float beside the sign that it is there; see
prelude_joining.cuh.
"""

from __future__ import annotations

from tilewright.fusion.cuda.column_graph import followers
from tilewright.fusion.cuda.kernel import JOINS
from tilewright.fusion.ir import Graph
from tilewright.fusion.plan import expand_moments

PARTIAL_WORDS = 2
"""Words of four bytes, zero before and after a launch, for a partial or a ticket."""
SECTOR_WORDS = 8
"""Of what memory is read in."""


def partials_of_row(graph: Graph) -> int:
    """How many numbers a block leaves of its share of a row; 0 where rows cannot be shared so:
    something along the row waits for one of its sums, or a sum is not fp32."""
    graph = expand_moments(graph)
    nodes, sums = graph.nodes, graph.reductions
    after = followers(graph, tuple(sums))
    if any(nodes[i].op not in JOINS or nodes[i].dtype != "f32" for i in sums):
        return 0
    if any(nodes[i].shape[a] != 1 for i in after for a in graph.reduced):
        return 0
    return 0 if any(a in after for i in sums for a in nodes[i].args) else len(sums)


def words_of_row(blocks: int, partials: int) -> int:
    """Words for the tickets of a row's blocks, and for their partials."""
    return PARTIAL_WORDS * (1 + blocks * partials)
