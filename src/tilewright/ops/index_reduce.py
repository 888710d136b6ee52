"""Reduce rows into rows named by an index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.indexed import Indexed, Terms
from tilewright.op import Workload, op
from tilewright.ops._indexing import (
    check_reduction,
    check_rows,
    examples,
    reduced,
    rows_batch,
    rows_counts,
    rows_draws,
    rows_traffic,
)


def check(args: dict[str, Any]) -> dict[str, Any]:
    check_reduction("index_reduce", args, ("prod", "mean", "amax", "amin"))
    return check_rows("index_reduce", args)


def terms(w: Workload, tensors: Sequence[Tensor]) -> Terms:
    return reduced(w, tensors, w["reduce"], rows_counts(w, tensors), "source")


@op(
    flops=lambda w: max(w["source"].numel, 1),
    check=check,
    bytes=rows_traffic,
    examples=examples(lambda w: None),
    aliases={"input": "x"},
    keywords=("out",),
    inplace=lambda x, dim, index, source, reduce, include_self=True: x.index_reduce_(
        dim, index, source, reduce, include_self=include_self
    ),
    indexed=Indexed(terms, rows_draws, rows_batch, exact=lambda w: w["reduce"] in ("amax", "amin")),
)
def index_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, include_self: bool = True
) -> Tensor:
    """x with the slices of source reduced into it, slice j into x.select(dim, index[j]).

    Args:
        x: any shape; fp16, bf16, fp32, fp64, int32 or int64, and as PyTorch has them
            int8, uint8 and int16.
        dim: the dim that the indices are for; negative ones count from the end.
        index: (J,), int64 or int32; values from 0 to x.shape[dim] - 1.
        source: the shape of x, but J along dim; dtype of x.
        reduce: prod, mean (the sum over the number of terms), amax or amin; NaN wins in the last
            two.
        include_self: x itself is a term; else it stands only where no index points.
        out: see scatter.

    Returns:
        The shape and dtype of x.

    Raises:
        InvalidArgument: a shape or dtype does not fit, or an unknown `reduce`.
        IndexOutOfRange: a value of index is out of range.

    Source: PyTorch's torch.index_reduce.
    """
    return torch.index_reduce(x, dim, index, source, reduce, include_self=include_self)
