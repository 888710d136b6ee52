"""Two rounded bias additions, layer normalisation, and the gradients: one step of training."""

from torch import Tensor
from torch.nn import functional as F

from tilewright.ops._training import step, training_of
from tilewright.rounding import rounded


def forward(
    x: Tensor, bias0: Tensor, bias1: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> Tensor:
    return F.layer_norm(rounded(rounded(x + bias0) + bias1), x.shape[-1:], weight, bias, eps)


@training_of("bias_layer_norm")
def bias_layer_norm_training(
    x: Tensor,
    grad_output: Tensor,
    bias0: Tensor,
    bias1: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float = 1e-5,
    grads: tuple[str, ...] | None = None,
) -> tuple[Tensor, ...]:
    """bias_layer_norm, and then its gradients: what a training step takes of both together.

    It is for measuring. The backward starts when the forward has ended, as it must where the
    gradient of the output follows from the output.

    Args:
        x, bias0, bias1, weight, bias, eps: as for bias_layer_norm.
        grad_output: the shape and dtype of x.
        grads: which gradients: some of "x", "bias0", "bias1", "weight", "bias"; None means all.

    Returns:
        The normalised rows, then the gradients that were asked for, in this order, with the shape
        and dtype of their argument.

    Raises:
        InvalidArgument: a shape or dtype does not fit.

    Source: the graph of NVIDIA/Fuser issue 383, and PyTorch's autograd of it.
    """
    given = {"x": x, "bias0": bias0, "bias1": bias1, "weight": weight, "bias": bias, "eps": eps}
    return step(forward, given, grads, grad_output)
