"""A residual addition, layer normalisation, and the gradients: one step of training."""

from torch import Tensor

from tilewright.ops._training import step_by_operators, training_of


@training_of("add_layer_norm")
def add_layer_norm_training(
    x: Tensor,
    residual: Tensor,
    grad_output: Tensor,
    grad_output_total: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    grads: tuple[str, ...] | None = None,
) -> tuple[Tensor, ...]:
    """add_layer_norm, and then its gradients: what a training step takes of both together.

    It is for measuring. The backward starts when the forward has ended, as it must where the
    gradients of the outputs follow from the outputs: those of the normalised rows through the
    layers that read them, those of the sum through the blocks that follow.

    Args:
        x, residual, weight, bias, eps: as for add_layer_norm.
        grad_output: the shape and dtype of x, of the normalised rows.
        grad_output_total: likewise, of the sum.
        grads: which gradients: some of "x" (the residual's, too), "weight", "bias"; None means
            those of all tensors.

    Returns:
        The normalised rows and the sum, then the gradients that were asked for, in this order, with
        the shape and dtype of their argument.

    Raises:
        InvalidArgument: a shape or dtype does not fit.

    Source: the block of a pre-norm transformer, arXiv 2002.04745, and PyTorch's autograd of it.
    """
    given = {"x": x, "residual": residual, "weight": weight, "bias": bias, "eps": eps}
    gradients = {"grad_output": grad_output, "grad_output_total": grad_output_total}
    return step_by_operators("add_layer_norm", {**given, **gradients, "grads": grads})
