"""Two bias additions, each rounded, then layer normalisation: the block of GPT-2 and GPT-3."""

from torch import Tensor
from torch.nn import functional as F

from tilewright.op import op
from tilewright.ops._normalization import check_normalization
from tilewright.rounding import rounded


@op(
    flops=lambda w: 10 * w["x"].numel,  # two additions, then layer norm's eight
    check=check_normalization("bias_layer_norm"),
    aliases={"input": "x"},
)
def bias_layer_norm(
    x: Tensor, bias0: Tensor, bias1: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5
) -> Tensor:
    """Layer norm of rounded(rounded(x + bias0) + bias1) over the last dim.

    Both sums are rounded to the dtype of x, as the same program written in PyTorch does.

    Args:
        x: (..., H), fp16, bf16, fp32 or fp64.
        bias0: (H,), added first; dtype of x, or fp32 beside a half x. So are the others.
        bias1: (H,), added second.
        weight: (H,), the scale.
        bias: (H,), the shift.
        eps: added to the biased variance, in the units of x squared.

    Returns:
        (..., H), dtype of x. Implementations sum in fp32 or wider.

    Raises:
        InvalidArgument: a shape or dtype does not fit.

    Source: the graph of NVIDIA/Fuser issue 383 (LayerNormFusedOp_fp16).
    """
    h = rounded(rounded(x + bias0) + bias1)
    return F.layer_norm(h, x.shape[-1:], weight, bias, eps)
