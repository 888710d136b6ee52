"""Softmax and its gradient: one step of training."""

import torch
from torch import Tensor
from torch.nn import functional as F

from tilewright.ops._training import training_of
from tilewright.rounding import rounded


@training_of("softmax")
def softmax_training(
    x: Tensor, grad_output: Tensor, dim: int = -1, grads: tuple[str, ...] | None = None
) -> tuple[Tensor, ...]:
    """softmax, and then its gradient: what a training step takes of both together.

    It is for measuring. The backward starts when the forward has ended, as it must where the
    gradient of the output follows from the output, which it reads in the place of x.

    Args:
        x, dim: as for softmax.
        grad_output: the shape and dtype of x.
        grads: ("x",), which None means as well.

    Returns:
        The softmax of x, then the gradient of x that follows from it as it is stored; both have the
        shape and dtype of x.

    Raises:
        InvalidArgument: the dim is out of range, or a shape or dtype does not fit.

    Source: torch.nn.functional.softmax and PyTorch's autograd of it (_softmax_backward_data).
    """
    output = rounded(F.softmax(x, dim))  # the backward reads what the forward stored
    gradient = torch.ops.aten._softmax_backward_data(grad_output, output, dim, output.dtype)
    return output, gradient
