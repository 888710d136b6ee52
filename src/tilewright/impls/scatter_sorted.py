"""Elementwise reductions on a GPU: a counting sort of places, then sums over sorted runs."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace
from typing import Any

from tilewright.device import DeviceSpec
from tilewright.impls._indexed import NONE_SKIPPED
from tilewright.impls._rows import RowProblem, row_problem
from tilewright.impls._sort import CountingSort
from tilewright.impls.rows_sorted import RowsSorted
from tilewright.impls.scatter_tiled import ScatterTiled
from tilewright.op import Workload
from tilewright.tensor_spec import TensorSpec

TILED = ScatterTiled()


@dataclass(frozen=True)
class ElementProblem(RowProblem):
    """Elements of src as rows of one column, and those of x as places.

    Attributes:
        axes: of the index, outermost first, as few as do: size, and strides of x (0 along the
            scattered one), of the index and of src.
        along, stride: of the scattered axis of x.
    """

    axes: tuple[tuple[int, int, int, int], ...]
    along: int
    stride: int


class ScatterSorted(RowsSorted):
    """For any indices and any number of places; index and src may be smaller than x and strided."""

    name, op = "scatter_sorted", ("scatter_add", "scatter_reduce")
    files = ("entry.cuh", "elements.cuh", "chunk.cuh", "sort.cuh", "product.cuh", "rows.cu")

    def suits(self, w: Workload, device: DeviceSpec) -> bool:
        return TILED.unsupported(w, device) is not None or not TILED.suits(w, device)

    def problem(self, w: Workload) -> ElementProblem | str:
        return element_problem(w)

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        if isinstance(row_problem(w), RowProblem):
            return "its index sends whole rows, which rows_sorted moves as such"
        return super().unsupported(w, device)

    def sort(self, p: RowProblem, c: Any) -> CountingSort:
        assert isinstance(p, ElementProblem)
        axes = itertools.chain.from_iterable(reversed(p.axes))
        return replace(super().sort(p, c), more=(p.along, p.stride, *axes))

    def sort_macros(self, p: RowProblem, c: Any) -> dict[str, int | str]:
        assert isinstance(p, ElementProblem)
        axes = [[f"{n}{i}" for n in ("size", "x", "index", "src")] for i in range(len(p.axes))]
        given = ["along", "stride", *itertools.chain.from_iterable(axes)]
        return {
            **super().sort_macros(p, c),
            "MORE_PARAMETERS": "".join(f", u32 {n}" for n in given),
            "MORE": ", along, stride" + "".join(f", Axis{{{', '.join(a)}}}" for a in axes),
        }


@functools.lru_cache(maxsize=1024)
def element_problem(w: Workload) -> ElementProblem | str:
    """The workload, or in words why its elements cannot be numbered."""
    x, index, src, dim = w["x"], w["index"], w["src"], w["dim"]
    if x.rank == 0:
        return "x is a scalar"
    if x.strides is not None or w.outputs[0].strides is not None:
        return f"x={x} or the result is not contiguous"
    if (far := max(reach(t) for t in (x, index, src))) >= 2**31 - 1:
        return f"elements {far} apart exceed 32 bits"
    return ElementProblem(
        outer=1,
        places=x.numel,
        count=index.numel,
        columns=1,
        dtype=x.dtype,
        index=index.dtype,
        reduce="sum" if w.op == "scatter_add" else w["reduce"],
        include=dict(w.args).get("include_self", True),
        fill=None if "x" in w.donated else "old",
        source=(0, 1),
        old=(0, 1),
        out=(0, 1),
        alpha=1.0,
        skipped=NONE_SKIPPED,
        aligned_bytes=x.itemsize,
        axes=_axes(x, index, src, dim),
        along=x.shape[dim],
        stride=x.real_strides[dim],
    )


def reach(t: TensorSpec) -> int:
    """Elements from the first to the last."""
    return sum((n - 1) * s for n, s in zip(t.shape, t.real_strides, strict=True))


def _axes(
    x: TensorSpec, index: TensorSpec, src: TensorSpec, dim: int
) -> tuple[tuple[int, int, int, int], ...]:
    of_x = [0 if d == dim else s for d, s in enumerate(x.real_strides)]
    axes: list[tuple[int, int, int, int]] = []
    for size, *strides in zip(index.shape, of_x, index.real_strides, src.real_strides, strict=True):
        if size == 1:
            continue
        if axes and list(axes[-1][1:]) == [size * s for s in strides]:
            size *= axes.pop()[0]
        axes.append((size, strides[0], strides[1], strides[2]))
    return tuple(axes) or ((1, 0, 0, 0),)
