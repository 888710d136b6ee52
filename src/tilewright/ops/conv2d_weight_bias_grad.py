"""The gradients of a 2-d convolution with respect to its weight and its bias, in one pass."""

from typing import Any

from torch import Tensor

from tilewright.op import Workload, op
from tilewright.ops._convolution import (
    bytes_moved,
    check_weight_grad,
    gradients,
    is_matrix_product,
)
from tilewright.ops._convolution import flops as products


def check(args: dict[str, Any]) -> dict[str, Any]:
    return check_weight_grad("conv2d_weight_bias_grad", args)


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
)
def conv2d_weight_bias_grad(
    x: Tensor,
    grad_output: Tensor,
    kernel_size: tuple[int, ...],
    stride: tuple[int, ...] = (1, 1),
    padding: tuple[int, ...] = (0, 0),
    dilation: tuple[int, ...] = (1, 1),
    groups: int = 1,
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
        allow_tf32: fp32 operands may be rounded to TF32 on a GPU, though not the bias's gradient;
            None for what torch's flag says, and in a workload's text for "ieee".

    Returns:
        (K, C / groups, R, S) and (K), dtype of x; the first channels_last if x or grad_output is.
        Halves are accumulated in fp32.

    Raises:
        InvalidArgument: the shapes do not belong to one convolution, or the dtypes differ.

    Source: PyTorch's autograd (convolution_backward).
    """
    return gradients(x, grad_output, kernel_size, stride, padding, dilation, groups, bias=True)
