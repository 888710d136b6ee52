"""The gradients of a rounded residual addition followed by layer normalisation."""

from typing import Any

import torch
from torch import Tensor

from tilewright.op import op
from tilewright.ops._gradients import chosen, like_arguments, wanted_gradients, weighted
from tilewright.ops._normalization import beside_statistics, check_normalization, with_statistics
from tilewright.rounding import rounded

_check = check_normalization(
    "add_layer_norm_backward", ["grad_output", "grad_output_total"], ["mean", "rstd"], of="total"
)
_NORMALISED = ("grad_output", "total", "mean", "rstd")
_possible = weighted("x", "weight", "bias")
_READS = {
    "x": (*_NORMALISED, "grad_output_total", "weight"),
    "weight": _NORMALISED,
    "bias": ("grad_output",),
}


def check(args: dict[str, Any]) -> dict[str, Any]:
    args["grads"] = wanted_gradients("add_layer_norm_backward", args["grads"], _possible(args))
    return _check(args)


@op(
    flops=lambda w: 15 * w["total"].numel,  # layer norm's gradients 14, an addition
    check=check,
    reads=_READS,
    examples=with_statistics("total"),
    wide=("mean", "rstd"),
    outputs_like=like_arguments(_possible, x="total", bias="weight"),
    gradient_of="add_layer_norm",
    same_gradient={"residual": "x"},
)
def add_layer_norm_backward(
    grad_output: Tensor,
    grad_output_total: Tensor,
    total: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None = None,
    grads: tuple[str, ...] | None = None,
) -> tuple[Tensor, ...]:
    """Gradients of add_layer_norm from the sum and the statistics that its forward returned.

    The gradient through the normalisation is rounded to the dtype of x and added to that of the
    sum, as PyTorch's autograd does. It is the gradient of x and of the residual alike, and written
    once.

    Args:
        grad_output: (..., H), of the normalised rows, in the dtype of the sum.
        grad_output_total: (..., H), of the sum, in its dtype.
        total: (..., H), rounded(x + residual), fp16, bf16, fp32 or fp64.
        mean: (..., 1), of each row, in fp32 for halves, else the dtype of the sum.
        rstd: as mean: 1 / sqrt(var + eps).
        weight: (H,), dtype of the sum, or fp32 beside a half one; None means 1.
        grads: which gradients: some of "x" (the residual's, too), "weight", "bias"; None means all
            of them ("x" alone without a weight).

    Returns:
        The gradients that were asked for, in this order, with the shape and dtype of their
        argument; that of the bias is like the weight's. Sums are in fp32 or wider.

    Raises:
        InvalidArgument: a shape or dtype does not fit.

    Source: PyTorch's autograd of add_layer_norm (native_layer_norm_backward).
    """
    shape = list(total.shape[-1:])
    grads = wanted_gradients("add_layer_norm_backward", grads, _possible({"weight": weight}))
    scale = beside_statistics(weight, total, mean, shape)
    mask = [name in grads for name in ("x", "weight", "bias")]
    through, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
        grad_output, total, shape, mean, rstd, scale, scale, mask
    )
    dx = rounded(through) + grad_output_total if mask[0] else None
    return chosen(grads, {"x": dx, "weight": dweight, "bias": dbias})
