"""The gradients of two rounded bias additions followed by layer normalisation."""

from typing import Any

import torch
from torch import Tensor

from tilewright.examples import random_tensors
from tilewright.op import Workload, op
from tilewright.ops._gradients import chosen, like_arguments, wanted_gradients
from tilewright.ops._normalization import beside_statistics, check_normalization, row_statistics
from tilewright.rounding import rounded

_POSSIBLE = ("x", "bias0", "bias1", "weight", "bias")
_check = check_normalization("bias_layer_norm_backward", ["grad_output"], ["mean", "rstd"])
_NORMALISED = ("grad_output", "x", "bias0", "bias1", "mean", "rstd")
_READS = {
    **dict.fromkeys(("x", "bias0", "bias1"), (*_NORMALISED, "weight")),
    "weight": _NORMALISED,
    "bias": ("grad_output",),
}


def check(args: dict[str, Any]) -> dict[str, Any]:
    args["grads"] = wanted_gradients("bias_layer_norm_backward", args["grads"], _POSSIBLE)
    return _check(args)


def examples(w: Workload, *args: Any, **kwargs: Any) -> list[Tensor]:
    """Random tensors, and the statistics of the sum."""
    tensors = random_tensors(w.tensors, *args, **kwargs)
    h = (tensors["x"] + tensors["bias0"]).to(tensors["x"].dtype) + tensors["bias1"]
    mean, rstd = row_statistics(h.to(tensors["x"].dtype), h.shape[-1:])
    tensors["mean"].copy_(mean)
    tensors["rstd"].copy_(rstd)
    return list(tensors.values())


@op(
    # the additions 2, layer norm's gradients 14, a sum over columns that both biases share 1
    flops=lambda w: 17 * w["x"].numel,
    check=check,
    reads=_READS,
    examples=examples,
    wide=("mean", "rstd"),
    outputs_like=like_arguments(lambda args: _POSSIBLE, bias="weight"),
    gradient_of="bias_layer_norm",
)
def bias_layer_norm_backward(
    grad_output: Tensor,
    x: Tensor,
    bias0: Tensor,
    bias1: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    grads: tuple[str, ...] | None = None,
) -> tuple[Tensor, ...]:
    """Gradients of bias_layer_norm from the statistics that its forward saved.

    The sum h = rounded(rounded(x + bias0) + bias1) is computed again from x: it costs two additions
    instead of a tensor that the forward writes. The gradient of h is rounded to the dtype of x, as
    the same program written in PyTorch does, and is that of x; summed over rows it is that of
    both biases.

    Args:
        grad_output: (..., H), the dtype of x.
        x: (..., H), fp16, bf16, fp32 or fp64.
        bias0: (H,), added first; dtype of x, or fp32 beside a half x. So are the others.
        bias1: (H,), added second.
        mean: (..., 1), of each row of h, in fp32 for halves, else the dtype of x.
        rstd: as mean: 1 / sqrt(var + eps).
        weight: (H,), the scale.
        grads: which gradients: some of "x", "bias0", "bias1", "weight", "bias"; None means all.

    Returns:
        The gradients that were asked for, in this order, with the shape and dtype of their
        argument; that of the bias is like the weight's. Sums are in fp32 or wider.

    Raises:
        InvalidArgument: a shape or dtype does not fit.

    Source: PyTorch's autograd of the graph of NVIDIA/Fuser issue 383.
    """
    grads = wanted_gradients("bias_layer_norm_backward", grads, _POSSIBLE)
    h, pullback = torch.func.vjp(_sum, x, bias0, bias1)  # type: ignore[misc]
    scale = beside_statistics(weight, x, mean, weight.shape)
    through = any(name in grads for name in ("x", "bias0", "bias1"))
    mask = [through, "weight" in grads, "bias" in grads]
    dh, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
        grad_output, h, list(x.shape[-1:]), mean, rstd, scale, scale, mask
    )
    dx, dbias0, dbias1 = pullback(dh) if through else (None, None, None)
    return chosen(
        grads, {"x": dx, "bias0": dbias0, "bias1": dbias1, "weight": dweight, "bias": dbias}
    )


def _sum(x: Tensor, bias0: Tensor, bias1: Tensor) -> Tensor:
    return rounded(rounded(x + bias0) + bias1)
