"""A residual addition, rounded, then layer normalisation: the block of a pre-norm transformer."""

from torch import Tensor
from torch.nn import functional as F

from tilewright.op import op
from tilewright.ops._normalization import check_normalization
from tilewright.rounding import rounded


@op(
    flops=lambda w: 9 * w["x"].numel,  # an addition, then layer norm's eight
    check=check_normalization("add_layer_norm", ["residual"]),
    aliases={"input": "x"},
    returns=("output", "total"),
)
def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """Layer norm of rounded(x + residual) over the last dim, and that sum.

    Args:
        x: (..., H), fp16, bf16, fp32 or fp64.
        residual: the shape and dtype of x.
        weight: (H,), the scale; dtype of x, or fp32 beside a half x. None means 1.
        bias: (H,), the shift, as the weight. None means 0.
        eps: added to the biased variance, in the units of x squared.

    Returns:
        The normalised rows, and the sum that the next residual addition takes, both (..., H) in
        the dtype of x. Implementations sum in fp32 or wider.

    Raises:
        InvalidArgument: a shape or dtype does not fit.

    Source: Xiong et al., On Layer Normalization in the Transformer Architecture, arXiv 2002.04745.
    """
    total = rounded(x + residual)
    return F.layer_norm(total, x.shape[-1:], weight, bias, eps), total
