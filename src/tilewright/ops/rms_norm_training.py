"""Root-mean-square normalisation and its gradients: one step of training."""

import torch
from torch import Tensor

from tilewright.ops._normalization import normalized_dims
from tilewright.ops._training import step, training_of


@training_of("rms_norm")
def rms_norm_training(
    x: Tensor,
    grad_output: Tensor,
    normalized_shape: tuple[int, ...] | None = None,
    weight: Tensor | None = None,
    eps: float | None = None,
    grads: tuple[str, ...] | None = None,
) -> tuple[Tensor, ...]:
    """rms_norm, and then its gradients: what a training step takes of both together.

    It is for measuring. The backward starts when the forward has ended, as it must where the
    gradient of the output follows from the output.

    Args:
        x, normalized_shape, weight, eps: as for rms_norm.
        grad_output: the shape and dtype of x.
        grads: which gradients: some of "x", "weight"; None means those of all tensors.

    Returns:
        The normalised rows, then the gradients that were asked for, in this order, with the shape
        and dtype of their argument.

    Raises:
        InvalidArgument: a shape or dtype does not fit.

    Source: torch.nn.functional.rms_norm and PyTorch's autograd of it.
    """
    shape = normalized_dims(x, normalized_shape)

    def forward(x: Tensor, weight: Tensor | None) -> Tensor:
        return torch.nn.functional.rms_norm(x, shape, weight, eps)

    given = {"x": x, "weight": weight}
    return step(forward, given, grads, grad_output)
