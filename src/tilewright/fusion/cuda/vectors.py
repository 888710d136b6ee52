"""Vectors that a thread loads, stores and holds, whatever kind its kernel is of."""

from __future__ import annotations

import math
from collections.abc import Iterable

from tilewright.device import SECTOR_BYTES
from tilewright.fusion.ir import Access, Graph
from tilewright.tensor_spec import DTYPES

WIDEST_ACCESS = 16
"""Bytes of the widest access of one thread."""
NARROW_BYTES = 8
"""Accesses narrower than this leave bandwidth unused."""
APART_VECTOR = 2
"""Elements of a thread's vector where most tensors are every n-th element of others, which are
accessed one by one: those of neighbouring threads then share sectors. Rotary positions of pairs,
bf16[4,2048,32,128], took 350 us on an H100 by eight (c63b420) and 51.7 by two (dacf7d8)."""
MOST_COLUMNS = 2**30
"""Of a row that one kernel walks: an int numbers them, on to the end of all threads' last turn."""


def access_bytes(access: Access, vector: int) -> int:
    """The widest aligned access to `vector` consecutive elements, wherever a row starts."""
    steps = [s * access.itemsize for s in access.strides if s > 1]
    whole = vector * access.itemsize
    return max(math.gcd(whole, access.align, WIDEST_ACCESS, *steps), access.itemsize)


def side_by_side(access: Access) -> bool:
    """Whether a vector's elements follow one another in memory, so that a copy can move them."""
    return access.strides[-1] == 1


def widest_vectors(graph: Graph, inner: int) -> tuple[int, ...]:
    """Vector lengths that divide the innermost axis, widest first."""
    narrowest = min(a.itemsize for a in (*graph.memory, *(o for _, o in graph.outputs)))
    widest = WIDEST_ACCESS // narrowest
    return tuple(v for v in (8, 4, 2, 1) if v <= widest and inner % v == 0)


def lies_apart(graph: Graph) -> bool:
    """Whether most of what is moved are every n-th elements along the innermost axis."""
    if not graph.space:
        return False
    moved = [a for a in (*graph.memory, *(o for _, o in graph.outputs)) if a.strides[-1]]
    apart = sum(a.itemsize for a in moved if 1 < a.strides[-1] < SECTOR_BYTES // a.itemsize)
    return 2 * apart > sum(a.itemsize for a in moved)


def untuned_vector(graph: Graph, vectors: Iterable[int]) -> int:
    """The widest of these vectors that suits how elements lie in memory."""
    most = APART_VECTOR if lies_apart(graph) else WIDEST_ACCESS
    return next(v for v in vectors if v <= most)


def held_bytes(dtype: str, vector: int) -> int:
    """Bytes that a thread's vector takes in registers or shared memory: halves go in pairs."""
    itemsize = DTYPES[dtype].itemsize
    return vector * itemsize if itemsize >= 4 else 4 * math.ceil(vector * itemsize / 4)
