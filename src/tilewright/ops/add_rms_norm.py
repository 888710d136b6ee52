"""A residual addition, rounded, then RMS normalisation: the block of Llama and its like."""

from torch import Tensor
from torch.nn import functional as F

from tilewright.op import op
from tilewright.ops._normalization import check_normalization
from tilewright.rounding import rounded


@op(
    flops=lambda w: 5 * w["x"].numel,  # an addition, then RMS norm's four
    check=check_normalization("add_rms_norm", ["residual"]),
    aliases={"input": "x"},
    returns=("output", "total"),
)
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float | None = None
) -> tuple[Tensor, Tensor]:
    """RMS norm of rounded(x + residual) over the last dim, and that sum.

    Args:
        x: (..., H), fp16, bf16, fp32 or fp64.
        residual: the shape and dtype of x.
        weight: (H,), the scale; dtype of x, or fp32 beside a half x. None means 1.
        eps: added to the mean square, in the units of x squared; None means the machine epsilon
            of the arithmetic (fp32 for halves), as PyTorch has it.

    Returns:
        The normalised rows, and the sum that the next residual addition takes, both (..., H) in
        the dtype of x. Implementations sum in fp32 or wider.

    Raises:
        InvalidArgument: a shape or dtype does not fit.

    Source: Touvron et al., LLaMA, arXiv 2302.13971.
    """
    total = rounded(x + residual)
    return F.rms_norm(total, x.shape[-1:], weight, eps), total
