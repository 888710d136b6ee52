"""Root-mean-square normalisation that returns the statistic its gradients need."""

from torch import Tensor

from tilewright.op import op
from tilewright.ops._normalization import (
    check_normalization,
    normalized_dims,
    rms_norm_with_statistic,
)


@op(
    flops=lambda w: 4 * w["x"].numel,  # square, add, two multiplies
    check=check_normalization("rms_norm_forward"),
    aliases={"input": "x"},
    outputs_like=lambda args: ("x", None),
)
def rms_norm_forward(
    x: Tensor,
    normalized_shape: tuple[int, ...] | None = None,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> tuple[Tensor, Tensor]:
    """rms_norm, and the 1 / sqrt(mean(x^2) + eps) of each row, as training needs it.

    Args:
        x, normalized_shape, weight, eps: as for rms_norm.

    Returns:
        The normalised rows, in the shape and dtype of x; 1 / sqrt(mean(x^2) + eps), (..., 1) in
        fp32 for halves, else in the dtype of x.

    Raises:
        InvalidArgument: a shape or dtype does not fit.

    Source: torch's _fused_rms_norm, which PyTorch's autograd runs on a GPU.
    """
    return rms_norm_with_statistic(x, normalized_dims(x, normalized_shape), weight, eps)
