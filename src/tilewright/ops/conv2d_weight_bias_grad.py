"""The gradients of a 2-d convolution with respect to its weight and its bias, in one pass."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tilewright.op import Workload, op
from tilewright.ops._convolution import (
    added,
    bytes_moved,
    check_results,
    check_weight_grad,
    gradients,
    is_matrix_product,
    results_like,
    weight_shape,
    widened,
)
from tilewright.ops._convolution import flops as products

NAME, INTO = "conv2d_weight_bias_grad", ("into", "into_bias")


def check(args: dict[str, Any]) -> dict[str, Any]:
    args = check_weight_grad(NAME, args)
    shape = weight_shape(args)
    check_results(NAME, args, {"into": shape, "into_bias": shape[:1]})
    return args


def outputs_like(args: Mapping[str, Any]) -> list[str | None]:
    return results_like(NAME, args, INTO)


def accumulate(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """What PyTorch's autograd does where weight and bias have gradients already."""
    given = dict(zip(conv2d_weight_bias_grad.parameters, args, strict=False)) | kwargs
    alone = {**widened(given), "into": None, "into_bias": None}
    weight, bias = conv2d_weight_bias_grad.reference(**alone)
    return given["into"].add_(weight), given["into_bias"].add_(bias)


def flops(w: Workload) -> int:
    """The products of the weight's gradient, and an addition for each element of grad_output."""
    return products(w) + w["grad_output"].numel


@op(
    flops=flops,
    bytes=bytes_moved,
    check=check,
    aliases={"input": "x"},
    integer_exact=True,
    autocasts=False,
    tensor_cores=is_matrix_product,
    wide=INTO,
    outputs_like=outputs_like,
    inplace=accumulate,
    writes=INTO,
)
def conv2d_weight_bias_grad(
    x: Tensor,
    grad_output: Tensor,
    kernel_size: tuple[int, ...],
    stride: tuple[int, ...] = (1, 1),
    padding: tuple[int, ...] = (0, 0),
    dilation: tuple[int, ...] = (1, 1),
    groups: int = 1,
    out_dtype: str | None = None,
    into: Tensor | None = None,
    into_bias: Tensor | None = None,
    allow_tf32: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """The weight's gradient as `conv2d_weight_grad` has it, and the bias's: db[k] = sum of dy.

    Args:
        x: (N, C, H, W), the convolution's input; fp16, bf16, fp32 or fp64, any layout.
        grad_output: (N, K, P, Q), the gradient of its output; dtype of x.
        kernel_size: (R, S) or one number for both, as the following.
        stride: pixels from one output to the next.
        padding: zeros on each side of x.
        dilation: pixels from one tap of the filter to the next.
        groups: K and C are divided into so many independent convolutions.
        out_dtype: torch.float32 ("f32") for results that halves are not rounded for; None for the
            dtype of x.
        into: (K, C / groups, R, S), dtype of x, or fp32 beside halves: a gradient to which the
            weight's is added. `conv2d_weight_bias_grad_` writes both sums to what was given;
            otherwise it stays as it is.
        into_bias: (K), dtype of `into`, to which the bias's is added; both are given, or none.
        allow_tf32: fp32 operands may be rounded to TF32 on a GPU, though not the bias's gradient;
            None for what torch's flag says, and in a workload's text for "ieee".

    Returns:
        (K, C / groups, R, S) and (K), dtype of x, `out_dtype` or that of `into`; the first
        channels_last if x or grad_output is, else contiguous, and beside `into` laid out as
        PyTorch's sum with that. Halves are accumulated in fp32.

    Raises:
        InvalidArgument: the shapes do not belong to one convolution, or the dtypes do not fit.
        SharedMemory: in place, what is written to has memory of another tensor of the call.

    Source: PyTorch's autograd (convolution_backward).
    """
    geometry = (kernel_size, stride, padding, dilation, groups)
    weight, bias = gradients(x, grad_output, *geometry, bias=True)
    if into is None or into_bias is None:
        return weight, bias
    return added(into, weight), added(into_bias, bias)
