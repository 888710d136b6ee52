"""The gradient of an embedding table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.errors import InvalidArgument
from tilewright.indexed import Indexed, Terms
from tilewright.op import Workload, op
from tilewright.ops._indexing import check_tensors, examples


def check(args: dict[str, Any]) -> dict[str, Any]:
    grad, index = args["grad"], args["index"]
    if not grad.torch_dtype.is_floating_point:
        raise InvalidArgument(
            f"embedding_backward: grad is {grad.dtype}, expected f16, bf16, f32 or f64; "
            "convert it: grad.float()"
        )
    check_tensors("embedding_backward", args, "grad", None)
    if grad.shape[:-1] != index.shape or not grad.rank:
        raise InvalidArgument(
            f"embedding_backward: grad has shape {list(grad.shape)}, but index "
            f"{list(index.shape)}; grad is one dim longer than index"
        )
    if args["num_weights"] < 0:
        raise InvalidArgument(f"embedding_backward: num_weights={args['num_weights']} is negative")
    for name in ("num_weights", "padding_idx"):
        if not -(2**63) <= args[name] < 2**63:
            raise InvalidArgument(
                f"embedding_backward: {name}={args[name]} is no i64: give a number of 64 bits"
            )
    return args


def traffic(w: Workload) -> tuple[int, int]:
    grad = w["grad"]
    written = w["num_weights"] * grad.shape[-1] * grad.itemsize
    return grad.distinct_bytes + w["index"].distinct_bytes, written


def terms(w: Workload, tensors: Sequence[Tensor]) -> Terms:
    args = w.call(tensors)
    grad, index = args["grad"].double(), args["index"].reshape(-1)
    grad = grad.reshape(-1, grad.shape[-1])
    keep = index != args["padding_idx"]
    index, grad = index[keep], grad[keep]
    shape = (args["num_weights"], grad.shape[1])
    zeros = torch.zeros(shape, dtype=torch.float64, device=grad.device)
    value, magnitude = zeros.index_add(0, index, grad), zeros.index_add(0, index, grad.abs())
    one = torch.ones((), dtype=torch.float64, device=grad.device)
    count = zeros[:, 0].index_add(0, index, one.expand(index.shape))[:, None].expand(shape)
    if args["scale_grad_by_freq"]:
        value, magnitude = value / count.clamp_min(1), magnitude / count.clamp_min(1)
    return Terms(value, magnitude, count + args["scale_grad_by_freq"])


def _draws(w: Workload) -> tuple[int, int]:
    return w["index"].numel, w["num_weights"]


def _batch(w: Workload) -> int:
    return 0 if w["grad"].shape[-1] in (1, *w["index"].shape[-1:]) else -1


@op(
    flops=lambda w: max(w["grad"].numel, 1),
    check=check,
    bytes=traffic,
    examples=examples(lambda w: None),
    integer_exact=True,
    aliases={"grad_output": "grad", "indices": "index"},
    indexed=Indexed(terms, _draws, _batch, unchecked=True),
)
def embedding_backward(
    grad: Tensor,
    index: Tensor,
    num_weights: int,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
) -> Tensor:
    """The dense gradient of an embedding's table: row i is the sum of the grad rows of index i.

    Args:
        grad: index's shape and one dim more, (.., D): the gradient of the looked-up rows; fp16,
            bf16, fp32 or fp64.
        index: any shape, int64 or int32; values from 0 to num_weights - 1.
        num_weights: rows of the table.
        padding_idx: indices of this value are left out; -1 for none.
        scale_grad_by_freq: divide each row by the number of its indices.

    Returns:
        (num_weights, D), dtype of grad. Kernels of this package sum halves in fp32 and round once.

    Raises:
        InvalidArgument: a shape or dtype does not fit.
        IndexOutOfRange: a value of index is out of range.

    Source: PyTorch's aten::embedding_dense_backward.
    """
    if grad.shape == (*index.shape, 0):  # PyTorch's CUDA kernel reads where there is no memory
        return grad.new_zeros(num_weights, 0)
    return torch.ops.aten.embedding_dense_backward(
        grad, index, num_weights, padding_idx, scale_grad_by_freq
    )
