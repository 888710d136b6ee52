"""Two rounded bias additions and layer normalisation, with what the gradients need."""

import torch
from torch import Tensor

from tilewright.op import op
from tilewright.ops._normalization import check_normalization
from tilewright.rounding import rounded


@op(
    flops=lambda w: 10 * w["x"].numel,  # two additions, then layer norm's eight
    check=check_normalization("bias_layer_norm_forward"),
    aliases={"input": "x"},
    outputs_like=lambda args: ("x", None, None),
)
def bias_layer_norm_forward(
    x: Tensor, bias0: Tensor, bias1: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    """bias_layer_norm, and the mean and 1 / sqrt(var + eps) of each row of the sum.

    Args:
        x, bias0, bias1, weight, bias, eps: as for bias_layer_norm.

    Returns:
        The normalised rows, in the shape and dtype of x; mean and 1 / sqrt(var + eps), (..., 1) in
        fp32 for halves, else in the dtype of x.

    Raises:
        InvalidArgument: a shape or dtype does not fit.

    Source: the graph of NVIDIA/Fuser issue 383, as PyTorch's autograd runs it.
    """
    h = rounded(rounded(x + bias0) + bias1)
    return torch.ops.aten.native_layer_norm(h, list(x.shape[-1:]), weight, bias, eps)
