"""Elementwise scatters of contiguous tensors: (outer, length | places, inner)."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from tilewright.device import DeviceSpec
from tilewright.impls._indexed import no_cuda
from tilewright.op import Workload
from tilewright.tensor_spec import TensorSpec

OPERATORS = ("scatter", "scatter_add", "scatter_reduce")


@dataclass(frozen=True)
class ScatterProblem:
    """Attributes:
    reduce: "last" for scatter, else a reduction.
    number: src is one number for all places.
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
    in_place: bool

    @property
    def macros(self) -> dict[str, int | str]:
        return {
            "OUTER": f"{self.outer}ll",
            "PLACES": self.places,
            "LENGTH": self.length,
            "INNER": self.inner,
            "NUMBER": self.number is not None,
            "IN_PLACE": self.in_place,
        }


@functools.lru_cache(maxsize=1024)
def scatter_problem(w: Workload) -> ScatterProblem | str:
    """The workload, or in words why the kernels for contiguous scatters do not fit it."""
    if w.op not in OPERATORS:
        return f"it scatters elements: {', '.join(OPERATORS)}"
    x, index, dim = w["x"], w["index"], w["dim"]
    if x.rank == 0:
        return "x is a scalar"
    if isinstance(w["src"], int):
        return f"src={w['src']} may be no fp64, as which kernels are given numbers"
    src = w["src"] if isinstance(w["src"], TensorSpec) else None
    if index.rank != x.rank or (src is not None and src.rank != x.rank):
        return "index or src is a scalar"
    for name, t in w.tensors.items():
        if t.strides is not None:
            return f"{name}={t} is not contiguous"
    if w.outputs[0].strides is not None:
        return "the result is not contiguous"
    if reason := partial(w):
        return reason
    inner = math.prod(x.shape[dim + 1 :])
    if max(x.shape[dim], index.shape[dim], inner) >= 2**31 - 1:
        return "a dim exceeds 32 bits"
    return ScatterProblem(
        outer=math.prod(x.shape[:dim]),
        places=x.shape[dim],
        length=index.shape[dim],
        inner=inner,
        dtype=x.dtype,
        index=index.dtype,
        reduce={"scatter": "last", "scatter_add": "sum"}.get(w.op) or w["reduce"],
        include=dict(w.args).get("include_self", True),
        number=w["src"] if src is None else None,
        in_place="x" in w.donated,
    )


def partial(w: Workload) -> str | None:
    """In words that an index of x's rank covers a part of x or of src; None if all of them."""
    x, index, src = w["x"], w["index"], w["src"]
    if isinstance(src, TensorSpec) and src.shape != index.shape:
        return f"src {list(src.shape)} is larger than index {list(index.shape)}"
    if any(index.shape[d] != n for d, n in enumerate(x.shape) if d != w["dim"]):
        return f"index {list(index.shape)} covers only a part of x {list(x.shape)}"
    return None


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
    return ("src", 0.0) if p.number is None else (0, p.number)
