"""Elementwise scatters of contiguous tensors: (outer, length | places, inner), as the index has
them; x and src may be wider. An index_add of one dimension is one of them, too."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tilewright.build import CompileTask
from tilewright.device import DeviceSpec
from tilewright.impls.indices._indexed import Launch, cuda_task, no_cuda
from tilewright.impls.indices.elements._boxes import Beyond, Box, beyond, box_of
from tilewright.op import Workload
from tilewright.tensor_spec import TensorSpec

OPERATORS = ("scatter", "scatter_add", "scatter_reduce")


@dataclass(frozen=True)
class ScatterProblem:
    """Attributes:
    length: positions of a column, in an index_add so many at most.
    reduce: "last" for scatter, else a reduction.
    number: src is one number for all places.
    alpha: factor of the sum.
    source: the argument whose elements are moved, where that is no number.
    counted: positions of a column that a call has.
    x, src: where they have what the index covers; src is `x` where there is none.
    beyond: what else is to be copied.
    """

    outer: int
    places: int
    length: int
    inner: int
    dtype: str
    index: str
    reduce: str
    include: bool
    number: float | None
    alpha: float
    in_place: bool
    x: Box
    src: Box
    beyond: Beyond | None
    source: str = field(repr=False)
    counted: int = field(repr=False)

    @property
    def positions(self) -> int:
        return self.outer * self.counted * self.inner

    @property
    def cells(self) -> int:
        """Places of all columns of the index."""
        return self.outer * self.places * self.inner

    @property
    def macros(self) -> dict[str, int | str]:
        return {
            "OUTER": f"{self.outer}ll",
            "PLACES": self.places,
            "LENGTH": self.length,
            "INNER": self.inner,
            "NUMBER": self.number is not None,
            "IN_PLACE": self.in_place,
            "X_DENSE": self.x.dense,
            "X_AT(slice, row, column)": self.x.address,
            "SOURCE_DENSE": self.src.dense,
            "SOURCE_ROW": f"{self.src.row}ll",
            "SOURCE_AT(slice, row, column)": self.src.address,
        }

    def task(
        self,
        files: Sequence[str],
        entry: str,
        macros: Mapping[str, int | str],
        device: DeviceSpec,
    ) -> CompileTask:
        given = {**self.macros, **(self.beyond.macros if self.beyond else {}), **macros}
        more = ["elements/beyond.cu"] if self.beyond else []
        files = ["elements/boxes.cuh", *files, *more]
        return cuda_task(files, entry, self.dtype, self.index, given, device)

    def with_beyond(self, launches: Sequence[Launch], device: DeviceSpec) -> list[Launch]:
        """What a kernel launches of a call, and the copy of what it leaves out."""
        if self.beyond is None:
            return [*launches]
        copy = self.beyond.copied(device)
        return [*launches, copy._replace(overlapping=not launches[-1].meets)]


@functools.lru_cache(maxsize=1024)
def scatter_problem(w: Workload) -> ScatterProblem | str:
    """The workload, or in words why the kernels for contiguous scatters do not fit it."""
    if w.op not in (*OPERATORS, "index_add"):
        return f"it scatters elements: {', '.join(OPERATORS)}, index_add of one dimension"
    x, index, dim = w["x"], w["index"], w["dim"]
    source = "source" if w.op == "index_add" else "src"
    if x.rank == 0:
        return "x is a scalar"
    if w.op == "index_add" and x.rank > 1:
        return "its index sends rows, not elements"
    for name, number in ((source, w[source]), ("alpha", dict(w.args).get("alpha", 1.0))):
        if isinstance(number, int):
            return f"{name}={number} may be no fp64, as which kernels are given numbers"
    src = w[source] if isinstance(w[source], TensorSpec) else None
    if index.rank != x.rank or (src is not None and src.rank != x.rank):
        return "index or src is a scalar"
    for name, t in w.tensors.items():
        if t.strides is not None and name != "source":
            return f"{name}={t} is not contiguous"
    if w.outputs[0].strides is not None:
        return "the result is not contiguous"
    inner, length = math.prod(index.shape[dim + 1 :]), index.shape[dim]
    if max(x.shape[dim], length, inner) >= 2**31 - 1:
        return "a dim exceeds 32 bits"
    in_place, of_x = "x" in w.donated, box_of(x, index, dim, x.shape[dim])
    return ScatterProblem(
        outer=math.prod(index.shape[:dim]),
        places=x.shape[dim],
        length=bound(length) if w.op == "index_add" else length,
        inner=inner,
        dtype=x.dtype,
        index=index.dtype,
        reduce="last" if w.op == "scatter" else dict(w.args).get("reduce", "sum"),
        include=dict(w.args).get("include_self", True),
        number=w[source] if src is None else None,
        alpha=dict(w.args).get("alpha", 1.0),
        in_place=in_place,
        x=of_x,
        src=of_x if src is None else box_of(src, index, dim, length),
        beyond=None if in_place else beyond(x, index, dim),
        source=source,
        counted=length,
    )


def bound(length: int) -> int:
    """So many positions at most, by which a binary goes: eight bounds from one power of two to the
    next, since index_put comes with as many positions as there happen to be."""
    step = 1 << max(length.bit_length() - 4, 0)
    return -(-length // step) * step


def scatter_refusal(w: Workload, device: DeviceSpec) -> str | None:
    """Why no kernel for contiguous scatters runs the workload there, in words; None if some may."""
    if reason := no_cuda(w, device):
        return reason
    problem = scatter_problem(w)
    return problem if isinstance(problem, str) else None


def served_scatter(w: Workload) -> ScatterProblem:
    """The problem of a workload that `unsupported` has let through."""
    p = scatter_problem(w)
    assert isinstance(p, ScatterProblem), p
    return p


def moved(p: ScatterProblem) -> tuple[str | int, float]:
    """The argument whose elements are moved, a null pointer for a number; and the number."""
    return (p.source, 0.0) if p.number is None else (0, p.number)
