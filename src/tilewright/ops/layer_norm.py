"""Layer normalisation over the trailing dims."""

from torch import Tensor
from torch.nn import functional as F

from tilewright.op import op
from tilewright.ops._normalization import check_normalization, normalized_dims


@op(
    flops=lambda w: 8 * w["x"].numel,  # mean 1, variance 3, normalise 2, scale and shift 2
    check=check_normalization("layer_norm"),
    aliases={"input": "x"},
)
def layer_norm(
    x: Tensor,
    normalized_shape: tuple[int, ...] | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Give each row mean 0 and variance 1, scale and shift: (x - mean) / sqrt(var + eps) * w + b.

    Args:
        x: (..., *normalized_shape), fp16, bf16, fp32 or fp64.
        normalized_shape: the trailing dims that form a row; None means the last one.
        weight: (*normalized_shape), dtype of x, or fp32 beside a half x (autocast).
        bias: as weight.
        eps: added to the biased variance, in the units of x squared.

    Returns:
        The shape and dtype of x. Implementations sum in fp32 or wider.

    Raises:
        InvalidArgument: a shape or dtype does not fit.

    Source: Ba, Kiros and Hinton, Layer Normalization, arXiv 1607.06450.
    """
    return F.layer_norm(x, normalized_dims(x, normalized_shape), weight, bias, eps)
