"""Rows that are reduced into rows: what index_add, index_reduce, embedding_backward and the
scatters with an expanded index have in common."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tilewright.device import MAX_GRID_YZ, DeviceSpec
from tilewright.impls.indices._indexed import NONE_SKIPPED, REDUCE, sum_bytes
from tilewright.op import Workload
from tilewright.tensor_spec import TensorSpec

OPERATORS = ("index_add", "index_reduce", "embedding_backward", "scatter_add", "scatter_reduce")
MOST_INDICES_TINY, SHARE_OF_L2_TINY = 1024, 8
"""Indices at most, and the share of the L2 cache that its rows may take, of a workload that is
tiny: one launch, in which every block reads the whole index. 1000 rows of 128 take 14.1 us so and
25.2 sorted (H200, rows_small, d280a3a)."""
FEWEST_SORTED, MOST_SORTED, MOST_COPIED = 2**12, 2**20, 16
"""Elements of one column, of up to four bytes, of which untuned the positions are sorted, and out
of place as many places for each, which are copied row by row. H200, sums by uniform indices and the
slowest of six distributions: 32768 take 42.7 and 44.3 us, sorted themselves 84.8 and 89.9; 262144
into 16 times as many 108 and 109, 140 and 140; but 4096 41.2 and 41.2, 28.9 and 33.6, and two
million 238 and 277, 228 and 231 (4f86109); a million 119 and 141, 152 and 166; 551200 into 34725600
in place 107 and 109, 164 and 164, by buckets 167 and 197 (3d3c0d0)."""
MOST_FILLED = 2**17
"""Places of a result out of place whose rows one launch fills beside its sums: a guess."""


class Batch(NamedTuple):
    """What one batch has of all, where each has an index of its own.

    Attributes:
        apart: elements from one batch's part of the index to the next one's.
    """

    length: int
    places: int
    apart: int


@dataclass(frozen=True)
class RowProblem:
    """(outer, count, columns) reduced into (outer, places, columns) along the middle.

    Attributes:
        batch: where an index differs from batch to batch; `outer` is then 1, the rows of all
            batches are one source and their places one table, each batch's behind the one before's.
        reduce: "last" for scatter, where a row replaces the one before, else a reduction.
        source, old, out: strides (outer, row) in elements; unit stride along columns. `old` is
            None where there is no old table (embedding_backward).
        number: what scatter writes where there is no source.
        include: the old row is a term.
        fill: what rows without an index become: "old", "zero", or None where out is the table.
        alpha: factor of the sum.
        skipped: an index to leave out.
        aligned_bytes: every row of every tensor starts at a multiple of this.
    """

    batch: Batch | None
    outer: int
    places: int
    count: int
    columns: int
    dtype: str
    index: str
    reduce: str
    include: bool
    fill: str | None
    source: tuple[int, int]
    old: tuple[int, int] | None
    out: tuple[int, int]
    number: float | None
    alpha: float
    skipped: int
    aligned_bytes: int

    @property
    def batched(self) -> tuple[int, ...]:
        """For the parameters of kernels/indices/rows/batches.cuh; none where all share an index."""
        return self.batch or ()

    @property
    def in_order(self) -> bool:
        """Whether no part of a result may be reduced on its own: a product of floats may leave the
        range of the dtype where the whole does not."""
        return self.reduce == "prod" and self.dtype not in ("i32", "i64")

    @property
    def meaning(self) -> dict[str, int | str]:
        """What kernels are told of the reduction, as macros."""
        return {
            "REDUCE": REDUCE[self.reduce],
            "MEAN": self.reduce == "mean",
            "SCALED": self.alpha != 1,
            "INCLUDE": self.include,
            "FILL_ZERO": self.fill == "zero",
        }


@functools.lru_cache(maxsize=1024)
def row_problem(w: Workload) -> RowProblem | str:
    """The workload as rows, or in words why it is none."""
    if w.op not in (*OPERATORS, "scatter"):
        return f"it reduces rows: {', '.join(OPERATORS)}"
    if w.op == "embedding_backward":
        return _of_embedding(w)
    x, index, dim = w["x"], w["index"], w["dim"]
    moved = w["src" if w.op.startswith("scatter") else "source"]
    if isinstance(moved, int):
        return f"src={moved} may be no fp64, as which kernels are given numbers"
    source = moved if isinstance(moved, TensorSpec) else None
    given = [t for t in (source, x) if t is not None]
    if x.rank == 0:
        return "x is a scalar"
    if w.op.startswith("scatter") and any(t.rank != x.rank for t in (index, *given)):
        return "index or src is a scalar"
    if isinstance(alpha := dict(w.args).get("alpha", 1.0), int):
        return f"alpha={alpha} may be no fp64, as which kernels are given numbers"
    if reason := _not_rows(w, x, index, source, dim):
        return reason
    views = [_rows(t, dim) for t in (*given, w.outputs[0])]
    if any(v is None for v in views):
        return "a tensor is neither contiguous nor a matrix of contiguous rows"
    *read, out_rows = (v for v in views if v is not None)
    old_rows = read[-1]
    in_place = "x" in w.donated
    if in_place and x.shape[dim] > 1 and old_rows[1] < math.prod(x.shape[dim + 1 :]):
        return "rows of x share memory"
    outer, places = math.prod(x.shape[:dim]), x.shape[dim]
    count = index.shape[dim] if w.op.startswith("scatter") else index.numel
    apart = _apart(index, dim) if w.op.startswith("scatter") else 0
    batch = Batch(count, places, apart) if apart else None
    if batch:  # whose tensors are contiguous, having more than a matrix's dims
        outer, places, count = 1, outer * places, outer * count
    return RowProblem(
        batch=batch,
        outer=outer,
        places=places,
        count=count,
        columns=math.prod(x.shape[dim + 1 :]),
        dtype=x.dtype,
        index=index.dtype,
        reduce="last" if w.op == "scatter" else dict(w.args).get("reduce", "sum"),
        include=dict(w.args).get("include_self", True),
        fill=None if in_place else "old",
        source=(0, 0) if source is None else read[0],
        old=old_rows,
        out=old_rows if in_place else out_rows,
        number=moved if source is None else None,
        alpha=alpha,
        skipped=NONE_SKIPPED,
        aligned_bytes=_aligned_bytes([*zip(given, read, strict=True)]),
    )


def vectors(p: RowProblem, itemsize: int, widest: int = 8) -> list[int]:
    """The two widest accesses, in elements, that every row allows; none is over `widest`."""
    fit = [
        v
        for v in (1, 2, 4, 8)
        if v <= widest
        and v * itemsize <= 16
        and p.columns % v == 0
        and p.aligned_bytes % (v * itemsize) == 0
    ]
    return fit[-2:]


def _of_embedding(w: Workload) -> RowProblem | str:
    grad, index = w["grad"], w["index"]
    columns = grad.shape[-1]
    flat = index.rank == 1 and grad.real_strides[-1] == 1
    if index.strides is not None or not (grad.strides is None or flat):
        return "grad or index is neither contiguous nor a matrix of contiguous rows"
    source = (0, grad.real_strides[0] if flat else columns)
    return RowProblem(
        batch=None,
        outer=1,
        places=w["num_weights"],
        count=index.numel,
        columns=columns,
        dtype=grad.dtype,
        index=index.dtype,
        reduce="mean" if w["scale_grad_by_freq"] else "sum",
        include=False,
        fill="zero",
        source=source,
        old=None,
        out=(0, columns),
        number=None,
        alpha=1.0,
        skipped=NONE_SKIPPED if w["padding_idx"] < 0 else w["padding_idx"],
        aligned_bytes=_aligned_bytes([(grad, source)]),
    )


def _not_rows(
    w: Workload, x: TensorSpec, index: TensorSpec, source: TensorSpec | None, dim: int
) -> str | None:
    if not w.op.startswith("scatter"):
        return None if index.strides is None else "index is not contiguous"
    batched = _apart(index, dim) and math.prod(x.shape[dim + 1 :]) > 1
    for d in sorted(range(x.rank), key=lambda d: d == dim):
        if d == dim:
            if index.shape[d] > 1 and index.real_strides[d] != 1:
                return "index is not contiguous along dim"
        elif index.shape[d] > 1 and index.real_strides[d] != 0 and not (batched and d < dim):
            return "index is not expanded: its elements go separate ways, not rows"
        elif any(t.shape[d] != x.shape[d] for t in (index, source) if t is not None):
            return "index covers only a part of the rows"
    if source is not None and source.shape[dim] != index.shape[dim]:
        return "src is longer than index"
    return None


def _apart(index: TensorSpec, dim: int) -> int | None:
    """Elements from one batch's part of an index to the next one's: 0 where they share one, None
    where no one distance leads to all."""
    outer = zip(index.shape[:dim], index.real_strides[:dim], strict=True)
    axes = [(size, stride) for size, stride in outer if size > 1]
    if not any(stride for _, stride in axes):
        return 0
    apart = expected = axes[-1][1]
    for size, stride in reversed(axes):
        if stride != expected:
            return None
        expected = size * stride
    return apart if apart < 2**31 else None


def _rows(t: TensorSpec, dim: int) -> tuple[int, int] | None:
    inner = math.prod(t.shape[dim + 1 :])
    if t.strides is None:
        return inner * t.shape[dim], inner
    if t.rank == 2 and dim == 0 and (t.strides[1] == 1 or t.shape[1] == 1):
        return 0, t.strides[0]
    return None


def _aligned_bytes(tensors: list[tuple[TensorSpec, tuple[int, int]]]) -> int:
    return math.gcd(
        *(t.align for t, _ in tensors),
        *(stride * t.itemsize for t, strides in tensors for stride in strides),
        16,
    )


def served_rows(w: Workload) -> RowProblem:
    """The problem of a workload that `unsupported` has let through."""
    p = row_problem(w)
    assert isinstance(p, RowProblem), p
    return p


def is_tiny(p: RowProblem, itemsize: int, device: DeviceSpec) -> bool:
    """Whether a single launch is worth that every block reads all indices."""
    rows = p.count + (p.places if p.fill else 0)
    moved = p.outer * rows * p.columns * itemsize
    few = p.count <= MOST_INDICES_TINY and (not p.fill or p.places <= MOST_FILLED)
    return few and moved <= device.l2_bytes // SHARE_OF_L2_TINY


class Moved(Protocol):
    """How a group of threads moves a row: `lanes` of them, `vec` elements at a time."""

    @property
    def lanes(self) -> int: ...
    @property
    def vec(self) -> int: ...


def across(p: RowProblem, c: Moved) -> int:
    """Pieces of a row that a group of threads moves each."""
    return math.ceil(p.columns / (c.lanes * c.vec))


def misfit(p: RowProblem, c: Moved, narrowest: int = 4, most: int = MAX_GRID_YZ) -> str | None:
    """Why rows do not come apart into pieces for groups of lanes, or None.

    Args:
        narrowest: lanes of the group that takes rows of any width.
        most: pieces of a row at most.
    """
    if c.lanes > narrowest and c.lanes * c.vec >= 2 * p.columns:
        return f"{c.lanes} threads of {c.vec} are twice a row of {p.columns} columns"
    if (pieces := across(p, c)) > most:
        return f"{pieces} pieces of a row exceed a grid of {most}"
    return None


def items(p: RowProblem, threads: int) -> int:
    """Indices of a thread, of a block that reads all: a power of two, so that few kernels serve all
    counts."""
    return 1 << (math.ceil(p.count / threads) - 1).bit_length()


def named_source(w: Workload) -> str:
    """The argument that is reduced."""
    return next(n for n in ("source", "src", "grad") if n in w.tensors)


def named_old(p: RowProblem) -> str | int:
    """The argument that holds the old table; a null pointer where there is none."""
    return "x" if p.old else 0


def sorts_positions(count: int, copied: int, dtype: str, reduce: str) -> bool:
    """Whether untuned so many elements of one column, beside so many places that are copied, are
    reduced by rows_sorted, which sorts their positions, where scatter_sorted sorts the elements
    themselves."""
    measured = FEWEST_SORTED < count <= MOST_SORTED and copied <= MOST_COPIED * count
    return measured and sum_bytes(dtype) <= 4 and reduce != "prod"
