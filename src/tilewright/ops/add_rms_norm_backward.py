"""The gradients of a rounded residual addition followed by RMS normalisation."""

from typing import Any

from torch import Tensor

from tilewright.op import op
from tilewright.ops._gradients import chosen, like_arguments, wanted_gradients, weighted
from tilewright.ops._normalization import check_normalization, rms_norm_gradients, with_statistics
from tilewright.rounding import rounded

_check = check_normalization(
    "add_rms_norm_backward", ["grad_output", "grad_output_total"], ["rstd"], of="total"
)
_NORMALISED = ("grad_output", "total", "rstd")
_possible = weighted("x", "weight")
_READS = {"x": (*_NORMALISED, "grad_output_total", "weight"), "weight": _NORMALISED}


def check(args: dict[str, Any]) -> dict[str, Any]:
    args["grads"] = wanted_gradients("add_rms_norm_backward", args["grads"], _possible(args))
    return _check(args)


@op(
    flops=lambda w: 11 * w["total"].numel,  # RMS norm's gradients 10, an addition
    check=check,
    reads=_READS,
    examples=with_statistics("total"),
    wide=("rstd",),
    outputs_like=like_arguments(_possible, x="total"),
    gradient_of="add_rms_norm",
    same_gradient={"residual": "x"},
)
def add_rms_norm_backward(
    grad_output: Tensor,
    grad_output_total: Tensor,
    total: Tensor,
    rstd: Tensor,
    weight: Tensor | None = None,
    grads: tuple[str, ...] | None = None,
) -> tuple[Tensor, ...]:
    """Gradients of add_rms_norm from the sum and the statistic that its forward returned.

    The gradient through the normalisation is rounded to the dtype of x and added to that of the
    sum, as PyTorch's autograd does. It is the gradient of x and of the residual alike, and written
    once.

    Args:
        grad_output: (..., H), of the normalised rows, in the dtype of the sum.
        grad_output_total: (..., H), of the sum, in its dtype.
        total: (..., H), rounded(x + residual), fp16, bf16, fp32 or fp64.
        rstd: (..., 1), 1 / sqrt(mean square + eps) of each row, in fp32 for halves, else the dtype
            of the sum.
        weight: (H,), dtype of the sum, or fp32 beside a half one; None means 1.
        grads: which gradients: some of "x" (the residual's, too) and "weight"; None means all of
            them ("x" alone without a weight).

    Returns:
        The gradients that were asked for, in this order, with the shape and dtype of their
        argument. Sums are in fp32 or wider.

    Raises:
        InvalidArgument: a shape or dtype does not fit.

    Source: PyTorch's autograd of add_rms_norm (_fused_rms_norm_backward) and its decomposition.
    """
    grads = wanted_gradients("add_rms_norm_backward", grads, _possible({"weight": weight}))
    mask = [name in grads for name in ("x", "weight")]
    through, dweight = rms_norm_gradients(
        grad_output, total, list(total.shape[-1:]), rstd, weight, mask
    )
    dx = rounded(through) + grad_output_total if through is not None else None
    return chosen(grads, {"x": dx, "weight": dweight})
