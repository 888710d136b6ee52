"""The gradients of root-mean-square normalisation."""

from typing import Any

from torch import Tensor

from tilewright.op import op
from tilewright.ops._gradients import chosen, like_arguments, wanted_gradients, weighted
from tilewright.ops._normalization import (
    check_normalization,
    normalized_dims,
    rms_norm_gradients,
    with_statistics,
)

_check = check_normalization("rms_norm_backward", ["grad_output"], ["rstd"])
_NORMALISED = ("grad_output", "x", "rstd")
_possible = weighted("x", "weight")
_READS = {"x": (*_NORMALISED, "weight"), "weight": _NORMALISED}


def check(args: dict[str, Any]) -> dict[str, Any]:
    args["grads"] = wanted_gradients("rms_norm_backward", args["grads"], _possible(args))
    return _check(args)


@op(
    # products 2, normalise 1, a sum over rows 2, combine 3; a sum over columns 2
    flops=lambda w: 10 * w["x"].numel,
    check=check,
    reads=_READS,
    examples=with_statistics("x"),
    wide=("rstd",),
    outputs_like=like_arguments(_possible),
    gradient_of="rms_norm",
)
def rms_norm_backward(
    grad_output: Tensor,
    x: Tensor,
    rstd: Tensor,
    normalized_shape: tuple[int, ...] | None = None,
    weight: Tensor | None = None,
    grads: tuple[str, ...] | None = None,
) -> tuple[Tensor, ...]:
    """Gradients of RMS norm from the statistic that its forward saved.

    With n = x * rstd and g = grad_output * weight, over each row of N elements:
    dx = (g - n / N * sum(g * n)) * rstd; over all rows: dweight = sum(grad_output * n).

    Args:
        grad_output: (..., *normalized_shape), the dtype of x.
        x: (..., *normalized_shape), fp16, bf16, fp32 or fp64.
        rstd: (..., 1), 1 / sqrt(mean(x^2) + eps) of each row, in fp32 for halves, else the dtype
            of x.
        normalized_shape: the trailing dims that form a row; None means the last one.
        weight: (*normalized_shape), dtype of x, or fp32 beside a half x; None means 1.
        grads: which gradients: "x", "weight" or both; None means all of them ("x" alone without a
            weight).

    Returns:
        The gradients that were asked for, in this order, with the shape and dtype of their
        argument. Sums are in fp32 or wider.

    Raises:
        InvalidArgument: a shape or dtype does not fit.

    Source: PyTorch's autograd (_fused_rms_norm_backward) and its decomposition.
    """
    shape = normalized_dims(x, normalized_shape)
    grads = wanted_gradients("rms_norm_backward", grads, _possible({"weight": weight}))
    mask = [name in grads for name in ("x", "weight")]
    found = rms_norm_gradients(grad_output, x, shape, rstd, weight, mask)
    return chosen(grads, dict(zip(("x", "weight"), found, strict=True)))
