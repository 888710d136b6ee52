"""A rounded residual addition and RMS normalisation, with what the gradients need."""

from torch import Tensor

from tilewright.op import op
from tilewright.ops._normalization import check_normalization, rms_norm_with_statistic
from tilewright.rounding import rounded


@op(
    flops=lambda w: 5 * w["x"].numel,  # an addition, then RMS norm's four
    check=check_normalization("add_rms_norm_forward", ["residual"]),
    aliases={"input": "x"},
    outputs_like=lambda args: ("x", "x", None),
)
def add_rms_norm_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """add_rms_norm, and the 1 / sqrt(mean square + eps) of each row of the sum.

    Args:
        x, residual, weight, eps: as for add_rms_norm.

    Returns:
        The normalised rows and the sum, in the shape and dtype of x; 1 / sqrt(mean square + eps),
        (..., 1) in fp32 for halves, else in the dtype of x.

    Raises:
        InvalidArgument: a shape or dtype does not fit.

    Source: torch's _fused_rms_norm, which PyTorch's autograd runs on a GPU.
    """
    total = rounded(x + residual)
    out, rstd = rms_norm_with_statistic(total, list(x.shape[-1:]), weight, eps)
    return out, total, rstd
