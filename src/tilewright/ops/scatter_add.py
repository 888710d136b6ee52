"""Add values to places named by an index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.indexed import Indexed, Terms
from tilewright.op import Workload, op
from tilewright.ops._indexing import (
    along_dim,
    check_elementwise,
    elementwise_batch,
    elementwise_draws,
    elementwise_traffic,
    examples,
    reduced,
    reduced_copy,
    reduced_into,
)


def check(args: dict[str, Any]) -> dict[str, Any]:
    return check_elementwise("scatter_add", args, "src")


def terms(w: Workload, tensors: Sequence[Tensor]) -> Terms:
    args = w.call(tensors)

    def counts(x: Tensor, src: Tensor) -> Tensor:
        return reduced_into(Tensor.scatter_add_, x.clone(), args["dim"], args["index"], src)

    return reduced(w, tensors, "sum", counts, "src")


@op(
    flops=lambda w: max(w["index"].numel, 1),
    check=check,
    bytes=lambda w: elementwise_traffic(w, "src", reads_old=True),
    examples=examples(along_dim),
    integer_exact=True,
    aliases={"input": "x"},
    keywords=("out",),
    inplace=lambda x, dim, index, src: reduced_into(Tensor.scatter_add_, x, dim, index, src),
    indexed=Indexed(terms, elementwise_draws, elementwise_batch),
)
def scatter_add(x: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    """x with src added: out[.., index[.., j, ..], ..] += src[.., j, ..] along dim.

    Args:
        x: any shape; fp16, bf16, fp32, fp64, int32 or int64, and as PyTorch has them
            complex numbers, bool, int8, uint8 and int16.
        dim: the dim that the indices are for; negative ones count from the end.
        index: int64 or int32, rank of x; no larger than x in the other dims. Values from 0 to
            x.shape[dim] - 1. Expanded ones (stride 0) send whole rows.
        src: dtype of x, no smaller than index in any dim.
        out: see scatter.

    Returns:
        The shape and dtype of x. Kernels of this package sum halves in fp32 and round once, in an
        order that depends on the indices alone: the same bits in every run.

    Raises:
        InvalidArgument: a shape or dtype does not fit.
        IndexOutOfRange: a value of index is out of range.

    Source: PyTorch's torch.scatter_add.
    """
    return reduced_copy(torch.scatter_add, Tensor.scatter_add_, x, dim, index, src)
