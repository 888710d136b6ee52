"""Reduce values into places named by an index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.indexed import Indexed, Terms
from tilewright.op import Workload, op
from tilewright.ops._indexing import (
    REDUCTIONS,
    along_dim,
    check_elementwise,
    check_reduction,
    elementwise_batch,
    elementwise_draws,
    elementwise_traffic,
    examples,
    reduced,
    reduced_copy,
    reduced_into,
)


def check(args: dict[str, Any]) -> dict[str, Any]:
    check_reduction("scatter_reduce", args, REDUCTIONS)
    return check_elementwise("scatter_reduce", args, "src")


def terms(w: Workload, tensors: Sequence[Tensor]) -> Terms:
    args = w.call(tensors)

    def counts(x: Tensor, src: Tensor) -> Tensor:
        index = args["index"].long()
        return reduced_into(Tensor.scatter_add_, x.clone(), args["dim"], index, src)

    return reduced(w, tensors, w["reduce"], counts, "src")


@op(
    flops=lambda w: max(w["index"].numel, 1),
    check=check,
    bytes=lambda w: elementwise_traffic(w, "src", reads_old=True),
    examples=examples(along_dim),
    aliases={"input": "x"},
    keywords=("out",),
    inplace=lambda x, dim, index, src, reduce, include_self=True: reduced_into(
        Tensor.scatter_reduce_, x, dim, index, src, reduce, include_self=include_self
    ),
    indexed=Indexed(
        terms, elementwise_draws, elementwise_batch, exact=lambda w: w["reduce"] in ("amax", "amin")
    ),
)
def scatter_reduce(
    x: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, include_self: bool = True
) -> Tensor:
    """x with src reduced into it: out[.., index[.., j, ..], ..] takes in src[.., j, ..] along dim.

    Args:
        x: any shape; fp16, bf16, fp32, fp64, int32 or int64, and as PyTorch has them
            complex numbers, bool, int8, uint8 and int16.
        dim: the dim that the indices are for; negative ones count from the end.
        index: int64 or int32, rank of x; no larger than x in the other dims. Values from 0 to
            x.shape[dim] - 1.
        src: dtype of x, no smaller than index in any dim.
        reduce: sum, prod, mean (a true one: the sum over the number of terms), amax or amin; NaN
            wins in amax and amin.
        include_self: x itself is a term; else it stands only where no index points.
        out: see scatter.

    Returns:
        The shape and dtype of x.

    Raises:
        InvalidArgument: a shape or dtype does not fit, or an unknown `reduce`.
        IndexOutOfRange: a value of index is out of range.

    Source: PyTorch's torch.scatter_reduce.
    """
    functions = torch.scatter_reduce, Tensor.scatter_reduce_
    return reduced_copy(*functions, x, dim, index, src, reduce, include_self=include_self)
