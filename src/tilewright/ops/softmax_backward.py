"""The gradient of softmax."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tilewright.examples import random_tensors
from tilewright.op import Workload, op
from tilewright.ops._normalization import check_dim, check_float, check_like


def check(args: dict[str, Any]) -> dict[str, Any]:
    check_float("softmax_backward", "output", args["output"])
    check_like("softmax_backward", "grad_output", args["grad_output"], "output", args["output"])
    return {**args, "dim": check_dim("softmax_backward", "output", args["output"], args["dim"])}


def examples(w: Workload, *args: Any, **kwargs: Any) -> list[Tensor]:
    """Random tensors; the output is the softmax of one."""
    grad_output, output = random_tensors(w.tensors, *args, **kwargs).values()
    if w["output"].numel == output.numel() and all(w["output"].real_strides):
        output.copy_(F.softmax(output.double(), w["dim"]))
    return [grad_output, output]


@op(
    flops=lambda w: 4 * w["output"].numel,  # product, sum, product, subtract
    check=check,
    examples=examples,
    gradient_of="softmax",
)
def softmax_backward(grad_output: Tensor, output: Tensor, dim: int = -1) -> Tensor:
    """Gradient of softmax from its output: output * (grad_output - sum(grad_output * output)).

    Args:
        grad_output: the shape and dtype of output.
        output: what softmax gave; any shape, fp16, bf16, fp32 or fp64.
        dim: the dim that was normalised; negative counts from the end.

    Returns:
        The shape and dtype of output.

    Raises:
        InvalidArgument: the dim is out of range, or a shape or dtype does not fit.

    Source: PyTorch's autograd (_softmax_backward_data) and its decomposition.
    """
    return torch.ops.aten._softmax_backward_data(grad_output, output, dim, output.dtype)
