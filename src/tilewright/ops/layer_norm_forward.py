"""Layer normalisation that returns the statistics its gradients need."""

import torch
from torch import Tensor

from tilewright.op import op
from tilewright.ops._normalization import check_normalization, normalized_dims


@op(
    flops=lambda w: 8 * w["x"].numel,  # mean 1, variance 3, normalise 2, scale and shift 2
    check=check_normalization("layer_norm_forward"),
    aliases={"input": "x"},
    outputs_like=lambda args: ("x", None, None),
)
def layer_norm_forward(
    x: Tensor,
    normalized_shape: tuple[int, ...] | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor, Tensor]:
    """layer_norm, and the mean and 1 / sqrt(var + eps) of each row, as training needs them.

    Args:
        x, normalized_shape, weight, bias, eps: as for layer_norm.

    Returns:
        The normalised rows, in the shape and dtype of x; mean and 1 / sqrt(var + eps), (..., 1) in
        fp32 for halves, else in the dtype of x.

    Raises:
        InvalidArgument: a shape or dtype does not fit.

    Source: torch.native_layer_norm, which PyTorch's autograd runs.
    """
    shape = normalized_dims(x, normalized_shape)
    return torch.ops.aten.native_layer_norm(x, shape, weight, bias, eps)
