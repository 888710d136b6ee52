"""Separate elements of src that an index sends to separate places: what scatter, scatter_add,
scatter_reduce and, of one dimension, index_add and index_reduce have in common."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, fields

from tilewright.device import DeviceSpec
from tilewright.impls.indices._indexed import NONE_SKIPPED, Launch
from tilewright.impls.indices.rows._rows import RowProblem, named_source, row_problem
from tilewright.op import Workload
from tilewright.tensor_spec import DTYPES, TensorSpec

COPYING, BLOCKS_OF_COPY = 256, 8
"""Threads of a block, and blocks per SM, that stride over x."""
OPERATORS = ("scatter_add", "scatter_reduce", "index_add", "index_reduce")
"""Those that reduce."""
PLACES_BY_NAME = 4
"""From so many places an element on kernels look only at those that are named."""


@dataclass(frozen=True)
class ElementProblem(RowProblem):
    """Elements of src as rows of one column, and those of x as places.

    Attributes:
        axes: of the index, outermost first, as few as do: size, and strides of x (0 along the
            scattered one), of the index and of src.
        along, stride: of the scattered axis of x.
        length, index_step, src_step: of the scattered axis of the index.
        moved: the argument that is src; a null pointer where that is a number.
    """

    axes: tuple[tuple[int, int, int, int], ...]
    along: int
    stride: int
    length: int
    index_step: int
    src_step: int
    moved: str | int

    @property
    def macros(self) -> dict[str, int | str]:
        """What kernels/indices/elements/elements.cuh has to be given."""
        axes = [[f"{n}{i}" for n in ("size", "x", "index", "src")] for i in range(len(self.axes))]
        numbers = ["along", "stride", *itertools.chain.from_iterable(axes)]
        return {
            "MORE_PARAMETERS": ", const T* moved" + "".join(f", u32 {n}" for n in numbers),
            "MORE": ", moved, along, stride AXES",
            "AXES": "".join(f", Axis{{{', '.join(axis)}}}" for axis in axes),
            "COPYING": COPYING,
            "COPIED": self.aligned_bytes // DTYPES[self.dtype].itemsize,
        }

    def copied(self, device: DeviceSpec) -> Launch:
        """x to out, before all else."""
        vectors = math.ceil(self.places * DTYPES[self.dtype].itemsize / self.aligned_bytes)
        blocks = min(math.ceil(vectors / COPYING), BLOCKS_OF_COPY * device.sms)
        return Launch("copy", "PPi", (blocks, 1, 1), COPYING, 0, ("x", "out", self.places))

    @property
    def arguments(self) -> tuple[int | str, ...]:
        """For these parameters."""
        axes = itertools.chain.from_iterable(reversed(self.axes))
        return (self.moved, self.along, self.stride, *axes)

    @property
    def signature(self) -> str:
        """Of these arguments, as a Launch has it."""
        return "P" + "i" * (len(self.arguments) - 1)


@functools.lru_cache(maxsize=1024)
def element_problem(w: Workload) -> ElementProblem | str:
    """The workload, or in words why its elements cannot be numbered."""
    moved = "src" if w.op.startswith("scatter") else "source"
    x, index, given, dim = w["x"], w["index"], w[moved], w["dim"]
    if isinstance(given, int):
        return f"src={given} may be no fp64, as which kernels are given numbers"
    src = given if isinstance(given, TensorSpec) else None
    tensors = [t for t in (x, index, src) if t is not None]
    if moved == "source" and x.rank > 1:
        return "its index sends rows, not elements"
    if x.rank == 0 or any(t.rank != x.rank for t in tensors):
        return "x, index or src is a scalar"
    if isinstance(alpha := dict(w.args).get("alpha", 1.0), int):
        return f"alpha={alpha} may be no fp64, as which kernels are given numbers"
    if x.strides is not None or w.outputs[0].strides is not None:
        return f"x={x} or the result is not contiguous"
    if (far := max(map(reach, tensors))) >= 2**31 - 1:
        return f"elements {far} apart exceed 32 bits"
    return ElementProblem(
        batch=None,
        outer=1,
        places=x.numel,
        count=index.numel,
        columns=1,
        dtype=x.dtype,
        index=index.dtype,
        reduce="last" if w.op == "scatter" else dict(w.args).get("reduce", "sum"),
        include=dict(w.args).get("include_self", True),
        fill=None if "x" in w.donated else "old",
        source=(0, 1),
        old=(0, 1),
        out=(0, 1),
        number=given if src is None else None,
        alpha=alpha,
        skipped=NONE_SKIPPED,
        aligned_bytes=math.gcd(x.align, 16),
        axes=_axes(x, index, src, dim),
        along=x.shape[dim],
        stride=x.real_strides[dim],
        length=index.shape[dim],
        index_step=index.real_strides[dim] if index.shape[dim] > 1 else 0,
        src_step=src.real_strides[dim] if src is not None and index.shape[dim] > 1 else 0,
        moved=0 if src is None else moved,
    )


def rows_as_elements(w: Workload) -> ElementProblem | str:
    """Rows of a flat index, each of their elements with the row's place."""
    p = row_problem(w)
    if isinstance(p, str):
        return p
    if p.old not in (None, p.out) or p.out != (
        p.places * p.columns if p.outer > 1 else p.out[0],
        p.columns,
    ):
        return "rows of x or of the result are apart"
    of_source = (p.outer - 1) * p.source[0] + (p.count - 1) * p.source[1] + p.columns
    if (far := max(of_source, p.outer * p.places * p.columns)) >= 2**31 - 1:
        return f"elements {far} apart exceed 32 bits"
    axes = [
        (p.outer, p.places * p.columns, 0, p.source[0]),
        (p.count, 0, 1, p.source[1]),
        (p.columns, 1, 0, 1),
    ]
    return ElementProblem(
        **{f.name: getattr(p, f.name) for f in fields(RowProblem)}
        | {
            "outer": 1,
            "places": p.outer * p.places * p.columns,
            "count": p.outer * p.count * p.columns,
            "columns": 1,
        },
        axes=tuple(axis for axis in axes if axis[0] > 1) or ((1, 0, 0, 0),),
        along=p.places,
        stride=p.columns,
        length=p.count,
        index_step=1,
        src_step=p.source[1],
        moved=named_source(w),
    )


def reach(t: TensorSpec) -> int:
    """Elements from the first to the last."""
    return sum((n - 1) * s for n, s in zip(t.shape, t.real_strides, strict=True))


def _axes(
    x: TensorSpec, index: TensorSpec, src: TensorSpec | None, dim: int
) -> tuple[tuple[int, int, int, int], ...]:
    of_x = [0 if d == dim else s for d, s in enumerate(x.real_strides)]
    of_src = (0,) * x.rank if src is None else src.real_strides
    axes: list[tuple[int, int, int, int]] = []
    for size, *strides in zip(index.shape, of_x, index.real_strides, of_src, strict=True):
        if size == 1:
            continue
        if axes and list(axes[-1][1:]) == [size * s for s in strides]:
            size *= axes.pop()[0]
        axes.append((size, strides[0], strides[1], strides[2]))
    return tuple(axes) or ((1, 0, 0, 0),)
