"""The gradients of layer normalisation."""

from typing import Any

import torch
from torch import Tensor

from tilewright.op import op
from tilewright.ops._gradients import chosen, like_arguments, wanted_gradients, weighted
from tilewright.ops._normalization import (
    beside_statistics,
    check_normalization,
    normalized_dims,
    with_statistics,
)

_check = check_normalization("layer_norm_backward", ["grad_output"], ["mean", "rstd"])
_NORMALISED = ("grad_output", "x", "mean", "rstd")
_possible = weighted("x", "weight", "bias")
_READS = {"x": (*_NORMALISED, "weight"), "weight": _NORMALISED, "bias": ("grad_output",)}


def check(args: dict[str, Any]) -> dict[str, Any]:
    args["grads"] = wanted_gradients("layer_norm_backward", args["grads"], _possible(args))
    return _check(args)


@op(
    # products 3, normalise 2, two sums over rows 4, combine 5; sums over columns 3
    flops=lambda w: 14 * w["x"].numel,
    check=check,
    reads=_READS,
    examples=with_statistics("x"),
    wide=("mean", "rstd"),
    outputs_like=like_arguments(_possible, bias="weight"),
    gradient_of="layer_norm",
)
def layer_norm_backward(
    grad_output: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    normalized_shape: tuple[int, ...] | None = None,
    weight: Tensor | None = None,
    grads: tuple[str, ...] | None = None,
) -> tuple[Tensor, ...]:
    """Gradients of layer norm from the statistics that its forward saved.

    With n = (x - mean) * rstd and g = grad_output * weight, over each row of N elements:
    dx = rstd / N * (N * g - sum(g) - n * sum(g * n)); over all rows: dweight =
    sum(grad_output * n), dbias = sum(grad_output).

    Args:
        grad_output: (..., *normalized_shape), the dtype of x.
        x: (..., *normalized_shape), fp16, bf16, fp32 or fp64.
        mean: (..., 1), one for each row of x, in fp32 for halves, else the dtype of x.
        rstd: as mean: 1 / sqrt(var + eps).
        normalized_shape: the trailing dims that form a row; None means the last one.
        weight: (*normalized_shape), dtype of x, or fp32 beside a half x; None means 1.
        grads: which gradients: some of "x", "weight", "bias"; None means all of them ("x" alone
            without a weight).

    Returns:
        The gradients that were asked for, in this order, with the shape and dtype of their
        argument; that of the bias is like the weight's. Sums are in fp32 or wider.

    Raises:
        InvalidArgument: a shape or dtype does not fit.

    Source: PyTorch's autograd (native_layer_norm_backward) and its decomposition.
    """
    shape = normalized_dims(x, normalized_shape)
    grads = wanted_gradients("layer_norm_backward", grads, _possible({"weight": weight}))
    weight = beside_statistics(weight, x, mean, shape)
    mask = [name in grads for name in ("x", "weight", "bias")]
    found = torch.ops.aten.native_layer_norm_backward(
        grad_output, x, shape, mean, rstd, weight, weight, mask
    )
    return chosen(grads, dict(zip(("x", "weight", "bias"), found, strict=True)))
