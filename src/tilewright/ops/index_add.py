"""Add rows to rows named by an index."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from tilewright.indexed import Indexed, Terms
from tilewright.op import Workload, op
from tilewright.ops._indexing import (
    check_rows,
    examples,
    number,
    reduced,
    rows_batch,
    rows_counts,
    rows_draws,
    rows_traffic,
)


def check(args: dict[str, Any]) -> dict[str, Any]:
    args["alpha"] = number("index_add", "alpha", args["alpha"], args["x"])
    return check_rows("index_add", args)


def terms(w: Workload, tensors: Sequence[Tensor]) -> Terms:
    return reduced(w, tensors, "sum", rows_counts(w, tensors), "source")


@op(
    flops=lambda w: max(w["source"].numel, 1),
    check=check,
    bytes=rows_traffic,
    examples=examples(lambda w: None),
    integer_exact=True,
    aliases={"input": "x"},
    keywords=("out",),
    inplace=lambda x, dim, index, source, alpha=1.0: x.index_add_(
        dim, index, source, alpha=_number(x, alpha)
    ),
    indexed=Indexed(terms, rows_draws, rows_batch),
)
def index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, alpha: float = 1.0) -> Tensor:
    """x with alpha times the slices of source added, slice j to x.select(dim, index[j]).

    Args:
        x: any shape; fp16, bf16, fp32, fp64, int32 or int64, and as PyTorch has them
            complex numbers, bool, int8, uint8 and int16.
        dim: the dim that the indices are for; negative ones count from the end.
        index: (J,), int64 or int32; values from 0 to x.shape[dim] - 1.
        source: the shape of x, but J along dim; dtype of x.
        alpha: factor of source; a whole number beside integers.
        out: see scatter.

    Returns:
        The shape and dtype of x. Kernels of this package sum halves in fp32 and round once, in an
        order that depends on the indices alone: the same bits in every run.

    Raises:
        InvalidArgument: a shape or dtype does not fit.
        IndexOutOfRange: a value of index is out of range.

    Source: PyTorch's torch.index_add.
    """
    return torch.index_add(x, dim, index, source, alpha=_number(x, alpha))


def _number(x: Tensor, alpha: float) -> float | int:
    """A whole number beside integers that hold it; of what they do not hold PyTorch says why."""
    if x.dtype == torch.bool or x.is_floating_point() or x.is_complex():
        return alpha
    range_of = torch.iinfo(x.dtype)
    if isinstance(alpha, Real) and range_of.min <= alpha <= range_of.max:
        return int(alpha)
    return alpha
