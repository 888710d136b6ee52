"""A rounded residual addition and layer normalisation, with what the gradients need."""

import torch
from torch import Tensor

from tilewright.op import op
from tilewright.ops._normalization import check_normalization
from tilewright.rounding import rounded


@op(
    flops=lambda w: 9 * w["x"].numel,  # an addition, then layer norm's eight
    check=check_normalization("add_layer_norm_forward", ["residual"]),
    aliases={"input": "x"},
    outputs_like=lambda args: ("x", "x", None, None),
)
def add_layer_norm_forward(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """add_layer_norm, and the mean and 1 / sqrt(var + eps) of each row of the sum.

    Args:
        x, residual, weight, bias, eps: as for add_layer_norm.

    Returns:
        The normalised rows and the sum, in the shape and dtype of x; mean and
        1 / sqrt(var + eps), (..., 1) in fp32 for halves, else in the dtype of x.

    Raises:
        InvalidArgument: a shape or dtype does not fit.

    Source: torch's native_layer_norm, which PyTorch's autograd runs.
    """
    total = rounded(x + residual)
    out, mean, rstd = torch.ops.aten.native_layer_norm(total, list(x.shape[-1:]), weight, bias, eps)
    return out, total, mean, rstd
