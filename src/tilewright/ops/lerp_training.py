"""Linear interpolation and its gradients: one step of training."""

import torch
from torch import Tensor

from tilewright.ops._training import step, training_of


def forward(x: Tensor, end: Tensor, weight: Tensor | float) -> Tensor:
    return torch.lerp(x, end, weight)


@training_of("lerp")
def lerp_training(
    x: Tensor,
    end: Tensor,
    weight: Tensor | float,
    grad_output: Tensor,
    grads: tuple[str, ...] | None = None,
) -> tuple[Tensor, ...]:
    """lerp, and then its gradients: what a training step takes of both together.

    It is for measuring. The backward starts when the forward has ended, as it must where the
    gradient of the output follows from the output.

    Args:
        x, end, weight: as for lerp.
        grad_output: the broadcast shape of x, end and weight; the dtype of x.
        grads: which gradients: some of "x", "end" and, if it is a tensor, "weight"; None means
            those of all tensors.

    Returns:
        The result of lerp, then the gradients that were asked for, in this order, with the shape
        and dtype of their argument.

    Raises:
        InvalidArgument: the shapes do not broadcast, or the dtypes differ.

    Source: torch.lerp and PyTorch's autograd of it.
    """
    given = {"x": x, "end": end, "weight": weight}
    return step(forward, given, grads, grad_output)
