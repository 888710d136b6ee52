"""Softmax over one dim."""

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from tilewright.op import op
from tilewright.ops._normalization import check_dim, check_float


def check(args: dict[str, Any]) -> dict[str, Any]:
    check_float("softmax", "x", args["x"])
    return {**args, "dim": check_dim("softmax", "x", args["x"], args["dim"])}


@op(flops=lambda w: 5 * w["x"].numel, check=check, aliases={"input": "x"}, casts_first=True)
def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Exponentials of x, scaled to sum 1 along dim: exp(x - max) / sum(exp(x - max)).

    Args:
        x: any shape, fp16, bf16, fp32 or fp64.
        dim: the dim to normalise; negative counts from the end.

    Returns:
        The shape and dtype of x. A row of -inf gives NaN, as PyTorch does.

    Raises:
        InvalidArgument: the dim is out of range, or the dtype does not fit.

    Source: Milakov and Gimelshein, Online normalizer calculation for softmax, arXiv 1805.02867.
    """
    return F.softmax(x, dim)
