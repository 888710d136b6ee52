"""The box of wider tensors that an index covers: where its elements are, and what lies beyond."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tilewright.device import DeviceSpec
from tilewright.impls.indices._indexed import Launch
from tilewright.tensor_spec import TensorSpec

Axes = tuple[tuple[int, int], ...]
"""Outermost first, as few as do: of each how many, and how far one lies from the next."""
COPYING, IN_FLIGHT, BLOCKS_OF_COPY = 256, 4, 8
"""Threads of a block that copies what lies beyond, its accesses at once, and its blocks per SM."""


@dataclass(frozen=True)
class Box:
    """Where a tensor has the element (slice, row, column): slices lie before the scattered axis,
    columns behind it, and both are numbered as the index has them.

    Attributes:
        dense: as a tensor of nothing else would.
    """

    slices: Axes
    row: int
    columns: Axes
    dense: bool

    @property
    def address(self) -> str:
        """In terms of `slice`, `row` and `column`."""
        of_row = f"(row) * {self.row}ull"
        return f"({_offset('slice', self.slices)} + {of_row} + {_offset('column', self.columns)})"


def box_of(t: TensorSpec, index: TensorSpec, dim: int, rows: int) -> Box:
    """Of so many rows, for an index that is no wider than `t`."""
    sizes = index.shape

    def axes(strides: Sequence[int]) -> tuple[Axes, int, Axes]:
        before = zip(sizes[:dim], strides[:dim], strict=True)
        behind = zip(sizes[dim + 1 :], strides[dim + 1 :], strict=True)
        return _merged(before), strides[dim], _merged(behind)

    alone = TensorSpec(t.dtype, (*sizes[:dim], rows, *sizes[dim + 1 :]))
    found = axes(t.real_strides)
    return Box(*found, dense=found == axes(alone.real_strides))


@dataclass(frozen=True)
class Beyond:
    """What x has outside the box, which out of place is copied: runs of neighbours, of some kinds.

    Attributes:
        vector: elements of an access, which all sizes below are multiples of.
        runs: of each kind the elements of one, where the first begins, and the axes along which
            there are more.
    """

    vector: int
    runs: tuple[tuple[int, int, Axes], ...]

    @property
    def ends(self) -> list[int]:
        """Accesses up to the end of each kind, one kind after the other."""
        counts = (n // self.vector * math.prod(s for s, _ in axes) for n, _, axes in self.runs)
        return [*itertools.accumulate(counts)]

    @property
    def macros(self) -> dict[str, int | str]:
        """What kernels/indices/elements/beyond.cu has to be given."""
        starts = [0, *self.ends]
        found = ""
        for (n, first, axes), start, end in zip(self.runs, starts, self.ends, strict=False):
            at, each = f"((i) - {_literal(start)})", _literal(n // self.vector)
            run = f"{_offset(f'{at} / {each}', axes)} + {first}ull"
            here = f"{run} + {at} % {each} * {self.vector}ull"
            found += here if end == starts[-1] else f"(i) < {_literal(end)} ? {here} : "
        return {
            "BEYOND": _literal(starts[-1]),
            "Access": "u32" if starts[-1] < 2**31 else "u64",
            "BEYOND_AT(i)": f"({found})",
            "BEYOND_VECTOR": self.vector,
            "COPYING": COPYING,
            "COPIES_IN_FLIGHT": IN_FLIGHT,
        }

    def copied(self, device: DeviceSpec) -> Launch:
        """To out, where nothing else is written: it need not wait for what comes before it."""
        blocks = math.ceil(self.ends[-1] / (COPYING * IN_FLIGHT))
        grid = min(blocks, BLOCKS_OF_COPY * device.sms), 1, 1
        return Launch("beyond", "PP", grid, COPYING, 0, ("x", "out"), overlapping=True)


def beyond(x: TensorSpec, index: TensorSpec, dim: int) -> Beyond | None:
    """None where the index is as wide as x."""
    strides, runs = x.real_strides, []
    for d in reversed(range(x.rank)):
        if d == dim or index.shape[d] == x.shape[d]:
            continue
        before = [*index.shape[:d]]
        if dim < d:
            before[dim] = x.shape[dim]
        n = (x.shape[d] - index.shape[d]) * strides[d]
        runs.append((n, index.shape[d] * strides[d], _merged(zip(before, strides, strict=False))))
    if not runs:
        return None
    numbers = (m for n, first, axes in runs for m in (n, first, *(stride for _, stride in axes)))
    vector = math.gcd(math.gcd(x.align, 16) // x.itemsize, *numbers)
    return Beyond(vector, tuple(runs))


def _merged(axes: Iterable[tuple[int, int]]) -> Axes:
    merged: list[tuple[int, int]] = []
    for size, stride in axes:
        if size == 1:
            continue
        count = size
        if merged and merged[-1][1] == size * stride:
            count *= merged.pop()[0]
        merged.append((count, stride))
    return tuple(merged)


def _offset(number: str, axes: Axes) -> str:
    """Of the element that has this number among those of all axes."""
    terms: list[str] = []
    inner = 1
    for size, stride in reversed(axes):
        along = f"({number})" if inner == 1 else f"({number}) / {_literal(inner)}"
        inner *= size
        of_outermost = len(terms) + 1 == len(axes)
        terms.append(f"{along if of_outermost else f'{along} % {_literal(size)}'} * {stride}ull")
    return " + ".join(terms) or "0ull"


def _literal(n: int) -> str:
    return f"{n}u" if n < 2**32 else f"{n}ull"
