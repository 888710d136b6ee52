"""Dynamic extents: sizes and strides that a kernel is given when it is launched.

A kernel's source holds what its schedule needs: the width that vectors run along, and sizes of a
row that a thread unrolls or keeps. Rows that are numbered by several axes would add those axes'
sizes, and strides that follow from them: forty sequence lengths would be forty kernels. They are
arguments instead.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from tilewright.fusion.ir import Access, Graph


class Extent(int):
    """A size or stride that is written as the name of a kernel's argument.

    It computes and compares as its value does, and what is computed from it is an ordinary number:
    source that holds such a number is of that value alone, and right.
    """

    name: str

    def __new__(cls, value: int, name: str) -> Extent:
        found = super().__new__(cls, value)
        found.name = name
        return found

    def __str__(self) -> str:
        return self.name

    def __format__(self, _: str) -> str:
        return self.name


def with_extents(graph: Graph, axes: Collection[int], lane: int, shared: bool = False) -> Graph:
    """The graph with dynamic extents: the sizes of `axes` and the strides along them.

    A tensor that is not contiguous along `lane`, on which vectors run, has all of its strides
    dynamic. Extents of 0 and 1 say that nothing varies, or is contiguous, and stay. `shared`:
    tensors with equal strides along an axis have one extent there, and one product with it.
    """
    names: dict[tuple[int, int], str] = {}

    def stride(s: int, a: int, name: str) -> Extent:
        own = f"{name}_stride{a}"
        return Extent(s, names.setdefault((a, s), own) if shared else own)

    def access(old: Access, name: str) -> Access:
        across = old.strides[lane] > 1
        strides = tuple(
            stride(s, a, name) if s > 1 and (across or a in axes) else s
            for a, s in enumerate(old.strides)
        )
        return old.along(strides)

    space = tuple(
        Extent(n, f"n{a}") if n > 1 and a in axes else n for a, n in enumerate(graph.space)
    )
    inputs = tuple(access(a, f"in{i}") for i, a in enumerate(graph.inputs))
    outputs = tuple((i, access(a, f"out{k}")) for k, (i, a) in enumerate(graph.outputs))
    return replace(graph, space=space, inputs=inputs, outputs=outputs)


def several(axes: Sequence[int]) -> Sequence[int]:
    """Axes that number rows, where dividing by their sizes tells rows apart. One axis needs no
    size, and its strides follow from the width."""
    return axes if len(axes) > 1 else ()


def pointwise_axes(graph: Graph, rows: Sequence[int], lane: int) -> Sequence[int]:
    """Axes whose sizes a kernel without reductions is given: all, where rows are divided, or are of
    several dims, as those of x[B,S,H] beside y[S,H] are; else the size of a dim is compiled in."""
    return (*rows, lane) if several(rows) or (rows and lane in graph.joined) else ()


def extents_of(graph: Graph) -> Iterator[Extent]:
    """All of a graph's, sizes first."""
    accesses = [*graph.inputs, *(a for _, a in graph.outputs)]
    for each in (graph.space, *(a.strides for a in accesses)):
        yield from (n for n in each if isinstance(n, Extent))


def divisor(size: int, bits: int = 32) -> tuple[int, int]:
    """The factor and shift of a division of numbers of one bit less than `bits` by `size`, at least
    2: the upper `bits` bits of the product, shifted right."""
    factor, shift = reciprocal(size, bits)
    return factor, shift - bits


def reciprocal(size: int, bits: int = 32) -> tuple[int, int]:
    """The same for a shift of the whole product, and a size of 1, too; the factor has `bits` bits.

    With s bits for size - 1 and b = bits - 1 the factor exceeds 2^(b+s) / size by less than 1, and
    the product 2^(b+s) times the quotient by less than 2^(b+s) / size: not so much that the
    quotient grows.

    Source: Granlund & Montgomery, Division by Invariant Integers using Multiplication, PLDI 1994.
    """
    shift = bits - 1 + (size - 1).bit_length()
    return -(-(1 << shift) // size), shift
