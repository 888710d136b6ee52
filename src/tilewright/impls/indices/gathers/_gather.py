"""Gathers of tensors with any strides: which positions there are, and where each reads."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from tilewright.op import Workload
from tilewright.tensor_spec import TensorSpec


@dataclass(frozen=True)
class Axis:
    """`size` positions; from one to the next x and index are so many elements on."""

    size: int
    x: int
    index: int


@dataclass(frozen=True)
class Slices:
    """(outer, places | length, inner), contiguous, gathered along the middle."""

    outer: int
    places: int
    length: int
    inner: int


@dataclass(frozen=True)
class GatherProblem:
    """out[position] = x[where the axes lead + index[..] * stride], positions in order of memory.

    Attributes:
        axes: outermost first, as few as do; `x` is 0 along the gathered dim, `index` 0 where the
            index is expanded.
        stride: of x along the gathered dim, in elements.
        reach: elements from the first to the last of x and of index, the larger.
        slices: the problem as slices of whole tensors; None where these are not contiguous, or
            differ in more than the gathered dim.
    """

    axes: tuple[Axis, ...]
    places: int
    stride: int
    reach: int
    dtype: str
    index: str
    x_align: int
    index_align: int
    slices: Slices | None

    @property
    def numel(self) -> int:
        return math.prod(axis.size for axis in self.axes)

    @property
    def copies_runs(self) -> bool:
        """Whether neighbours along the last axis are neighbours in x, under one index."""
        return self.axes[-1].x == 1 and self.axes[-1].index == 0

    def vectors(self, itemsize: int, index_bytes: int) -> list[int]:
        """Elements of one access that every position allows."""
        *outer, last = self.axes
        found = [1]
        for v in (2, 4, 8, 16):
            x_bytes, given_bytes = v * itemsize, min(v * index_bytes, 16)
            if x_bytes > 16 or last.size % v:
                break
            if self.copies_runs:
                strides = (self.stride, *(a.x for a in outer))
                fits = not any(s * itemsize % x_bytes for s in (*strides, self.x_align // itemsize))
            else:
                strides = tuple(a.index for a in outer)
                starts = (*strides, self.index_align // index_bytes)
                fits = last.index == 1 and not any(s * index_bytes % given_bytes for s in starts)
            if fits:
                found.append(v)
        return found


@functools.lru_cache(maxsize=1024)
def gather_problem(w: Workload) -> GatherProblem | str:
    """The workload, or in words why the kernels for gathers do not fit it."""
    x, index, out, dim = w["x"], w["index"], w.outputs[0], w["dim"]
    if x.rank == 0 or index.rank == 0:
        return "x or index is a scalar"
    if out.strides is not None:
        return f"the result {out} is not contiguous"
    reach = max(
        sum((n - 1) * s for n, s in zip(t.shape, t.real_strides, strict=True)) for t in (x, index)
    )
    return GatherProblem(
        axes=_axes(x, index, dim),
        places=x.shape[dim],
        stride=x.real_strides[dim],
        reach=reach,
        dtype=x.dtype,
        index=index.dtype,
        x_align=x.align,
        index_align=index.align,
        slices=_slices(x, index, dim),
    )


def _axes(x: TensorSpec, index: TensorSpec, dim: int) -> tuple[Axis, ...]:
    along = [0 if d == dim else s for d, s in enumerate(x.real_strides)]
    axes: list[Axis] = []
    for size, of_x, given in zip(index.shape, along, index.real_strides, strict=True):
        if size == 1:
            continue
        if axes and (axes[-1].x, axes[-1].index) == (size * of_x, size * given):
            axes[-1] = Axis(axes[-1].size * size, of_x, given)
        else:
            axes.append(Axis(size, of_x, given))
    return tuple(axes) or (Axis(1, 0, 0),)


def _slices(x: TensorSpec, index: TensorSpec, dim: int) -> Slices | None:
    others = [(n, m) for d, (n, m) in enumerate(zip(x.shape, index.shape, strict=True)) if d != dim]
    if x.strides is not None or index.strides is not None or any(n != m for n, m in others):
        return None
    outer, inner = math.prod(x.shape[:dim]), math.prod(x.shape[dim + 1 :])
    return Slices(outer, x.shape[dim], index.shape[dim], inner)


def served_gather(w: Workload) -> GatherProblem:
    """The problem of a workload that `unsupported` has let through."""
    p = gather_problem(w)
    assert isinstance(p, GatherProblem), p
    return p
