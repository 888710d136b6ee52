"""Write values to places named by an index."""

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
    copies,
    elementwise_batch,
    elementwise_draws,
    elementwise_traffic,
    examples,
    last_written,
    readable,
)


def check(args: dict[str, Any]) -> dict[str, Any]:
    return check_elementwise("scatter", args, "src")


def terms(w: Workload, tensors: Sequence[Tensor]) -> Terms:
    return copies(last_written(**w.call(tensors)))


@op(
    flops=lambda w: max(w["index"].numel, 1),  # one move each
    check=check,
    bytes=lambda w: elementwise_traffic(w, "src", reads_old=False),
    examples=examples(along_dim),
    integer_exact=True,
    aliases={"input": "x", "value": "src"},
    keywords=("out", "reduce"),
    inplace=lambda x, dim, index, src: x.scatter_(dim, readable(index), src),
    indexed=Indexed(
        terms, elementwise_draws, elementwise_batch, exact=lambda w: True, last_wins=True
    ),
)
def scatter(x: Tensor, dim: int, index: Tensor, src: Tensor | float | bool) -> Tensor:
    """A copy of x with out[.., index[.., j, ..], ..] = src[.., j, ..] along dim.

    Where an index repeats, the last position along dim wins, in every run; PyTorch's own kernels
    leave it open on a GPU, so there they do not run. Gradients are PyTorch's: each position of src
    gets the gradient of its place, also where a later one has overwritten it.

    Args:
        x: any shape; fp16, bf16, fp32, fp64, int32 or int64, and as PyTorch has them
            complex numbers, bool, int8, uint8 and int16.
        dim: the dim that the indices are for; negative ones count from the end.
        index: int64 or int32, rank of x; no larger than x in the other dims. Values from 0 to
            x.shape[dim] - 1.
        src: dtype of x, no smaller than index in any dim; or one number for all places, of which
            True is 1.
        reduce: "add" calls scatter_add instead, "multiply" scatter_reduce with "prod".
        out: the result is copied here once it is there, so it may share memory with any argument;
            in another shape it is resized, with PyTorch's warning. It has no gradients. The
            in-place form does not take it; for out=x that form runs.

    Returns:
        The shape and dtype of x.

    Raises:
        InvalidArgument: a shape or dtype does not fit, that of out too, an unknown `reduce`, or out
            where gradients are needed.
        IndexOutOfRange: a value of index is out of range.

    Source: PyTorch's torch.scatter.
    """
    return torch.scatter(x, dim, readable(index), src)
