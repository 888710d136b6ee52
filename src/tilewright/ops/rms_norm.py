"""Root-mean-square normalisation over the trailing dims."""

from torch import Tensor
from torch.nn import functional as F

from tilewright.op import op
from tilewright.ops._normalization import check_normalization, normalized_dims


@op(
    flops=lambda w: 4 * w["x"].numel,  # square, add, two multiplies
    check=check_normalization("rms_norm"),
    aliases={"input": "x"},
)
def rms_norm(
    x: Tensor,
    normalized_shape: tuple[int, ...] | None = None,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """Divide each row by its root mean square and scale: x / sqrt(mean(x^2) + eps) * weight.

    Args:
        x: (..., *normalized_shape), fp16, bf16, fp32 or fp64.
        normalized_shape: the trailing dims that form a row; None means the last one.
        weight: (*normalized_shape), dtype of x, or fp32 beside a half x (autocast).
        eps: added to the mean square, in the units of x squared; None means the machine epsilon
            of the arithmetic (fp32 for halves), as PyTorch has it.

    Returns:
        The shape and dtype of x. Implementations sum in fp32 or wider.

    Raises:
        InvalidArgument: a shape or dtype does not fit.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv 1910.07467.
    """
    return F.rms_norm(x, normalized_dims(x, normalized_shape), weight, eps)
