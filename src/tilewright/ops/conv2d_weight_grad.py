"""The gradient of a 2-d convolution with respect to its weight."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tilewright.op import op
from tilewright.ops._convolution import (
    added,
    bytes_moved,
    check_results,
    check_weight_grad,
    flops,
    gradients,
    is_matrix_product,
    results_like,
    weight_shape,
    widened,
)

NAME, INTO = "conv2d_weight_grad", ("into",)


def check(args: dict[str, Any]) -> dict[str, Any]:
    args = check_weight_grad(NAME, args)
    check_results(NAME, args, {"into": weight_shape(args)})
    return args


def outputs_like(args: Mapping[str, Any]) -> list[str | None]:
    return results_like(NAME, args, INTO)


def accumulate(*args: Any, **kwargs: Any) -> Tensor:
    """What PyTorch's autograd does where the weight has a gradient already."""
    given = dict(zip(conv2d_weight_grad.parameters, args, strict=False)) | kwargs
    return given["into"].add_(conv2d_weight_grad.reference(**{**widened(given), "into": None}))


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
def conv2d_weight_grad(
    x: Tensor,
    grad_output: Tensor,
    kernel_size: tuple[int, ...],
    stride: tuple[int, ...] = (1, 1),
    padding: tuple[int, ...] = (0, 0),
    dilation: tuple[int, ...] = (1, 1),
    groups: int = 1,
    out_dtype: str | None = None,
    into: Tensor | None = None,
    allow_tf32: bool | None = None,
) -> Tensor:
    """Correlate input and output gradient: dw[k,c,r,s] = sum of dy[n,k,p,q] * x[n,c,h,w].

    The sum runs over n, p, q, with h = p * stride - padding + r * dilation and w alike; x is 0
    outside. What torch.nn.grad.conv2d_weight computes, by kernel size instead of weight shape.

    Args:
        x: (N, C, H, W), the convolution's input; fp16, bf16, fp32 or fp64, any layout.
        grad_output: (N, K, P, Q), the gradient of its output; dtype of x.
        kernel_size: (R, S) or one number for both, as the following.
        stride: pixels from one output to the next.
        padding: zeros on each side of x.
        dilation: pixels from one tap of the filter to the next.
        groups: K and C are divided into so many independent convolutions.
        out_dtype: torch.float32 ("f32") for a result that halves are not rounded for; None for the
            dtype of x.
        into: (K, C / groups, R, S), dtype of x, or fp32 beside halves: a gradient to which this one
            is added. `conv2d_weight_grad_` writes the sum to it; otherwise it stays as it is.
        allow_tf32: fp32 operands may be rounded to TF32 on a GPU; None for what torch's flag says
            (torch.backends.cudnn.conv.fp32_precision), and in a workload's text for "ieee".

    Returns:
        (K, C / groups, R, S), dtype of x, `out_dtype` or that of `into`; channels_last if x or
        grad_output is, else contiguous, and beside `into` laid out as PyTorch's sum with that.
        Halves are accumulated in fp32.

    Raises:
        InvalidArgument: the shapes do not belong to one convolution, or the dtypes do not fit.
        SharedMemory: in place, what is written to has memory of another tensor of the call.
    """
    geometry = (kernel_size, stride, padding, dilation, groups)
    found, _ = gradients(x, grad_output, *geometry, bias=False)
    return found if into is None else added(into, found)
