"""Read values from places named by an index: the backward of scatter."""

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
    columns_of,
    copies,
    elementwise_batch,
    elementwise_draws,
    examples,
    hits,
    readable,
)


def check(args: dict[str, Any]) -> dict[str, Any]:
    return check_elementwise("gather", args, None)


def traffic(w: Workload) -> tuple[int, int]:
    """Each place is read once, however many indices name it."""
    x, index = w["x"], w["index"]
    length, _ = elementwise_draws(w)
    read = hits(w) * (index.numel // max(length, 1))
    return index.distinct_bytes + read * x.itemsize, index.numel * x.itemsize


def terms(w: Workload, tensors: Sequence[Tensor]) -> Terms:
    args = w.call(tensors)
    return copies(torch.gather(args["x"], args["dim"], readable(args["index"])))


@op(
    flops=lambda w: max(w["index"].numel, 1),
    check=check,
    bytes=traffic,
    examples=examples(along_dim),
    integer_exact=True,
    aliases={"input": "x"},
    keywords=("out", "sparse_grad"),
    indexed=Indexed(terms, elementwise_draws, elementwise_batch, exact=lambda w: True, races=False),
)
def gather(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """out[.., j, ..] = x[.., index[.., j, ..], ..] along dim.

    Args:
        x: any shape; fp16, bf16, fp32, fp64, int32 or int64, and as PyTorch has them
            complex numbers, bool, int8, uint8 and int16.
        dim: the dim that the indices are for; negative ones count from the end.
        index: int64 or int32, rank of x; no larger than x in the other dims. Values from 0 to
            x.shape[dim] - 1.
        sparse_grad: the gradient of x is a sparse tensor; where x needs one, PyTorch's gather runs.
        out: see scatter.

    Returns:
        The shape of index, dtype of x.

    Raises:
        InvalidArgument: a shape or dtype does not fit.
        IndexOutOfRange: a value of index is out of range.

    Source: PyTorch's torch.gather.
    """
    return torch.gather(columns_of(x, dim, index), dim, readable(index))
