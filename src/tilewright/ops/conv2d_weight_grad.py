"""The gradient of a 2-d convolution with respect to its weight."""

from typing import Any

import torch
from torch import Tensor

from tilewright.errors import InvalidArgument
from tilewright.op import Workload, op
from tilewright.ops._convolution import (
    GEOMETRY,
    check_geometry,
    output_size,
    pair,
    touched_share,
)
from tilewright.ops._normalization import check_float

NAME = "conv2d_weight_grad"


def check(args: dict[str, Any]) -> dict[str, Any]:
    x, grad = args["x"], args["grad_output"]
    for name, spec in (("x", x), ("grad_output", grad)):
        check_float(NAME, name, spec)
        if spec.rank != 4:
            raise InvalidArgument(
                f"{NAME}: {name} has rank {spec.rank}, expected 4: batch, channels, height, width"
            )
    if grad.dtype != x.dtype:
        raise InvalidArgument(
            f"{NAME}: grad_output is {grad.dtype}, but x is {x.dtype}; convert one of them"
        )
    check_geometry(NAME, args)
    groups = args["groups"]
    for name, spec in (("x", x), ("grad_output", grad)):
        if spec.shape[1] % groups:
            raise InvalidArgument(
                f"{NAME}: {name} has {spec.shape[1]} channels, which groups={groups} do not divide"
            )
    sizes = output_size(x.shape[2:], *(args[name] for name in GEOMETRY))
    expected = (x.shape[0], grad.shape[1], *sizes)
    if min(sizes) < 1 or grad.shape != expected:
        raise InvalidArgument(
            f"{NAME}: grad_output has shape {list(grad.shape)}, but the convolution of "
            f"x {list(x.shape)} with kernel_size={list(args['kernel_size'])}, "
            f"stride={list(args['stride'])}, padding={list(args['padding'])}, "
            f"dilation={list(args['dilation'])} gives {list(expected)}"
        )
    return args


def flops(w: Workload) -> int:
    """One multiply-add for each output pixel, channel pair of a group, and filter tap."""
    r, s = w["kernel_size"]
    return 2 * w["grad_output"].numel * (w["x"].shape[1] // w["groups"]) * r * s


def bytes_moved(w: Workload) -> tuple[int, int]:
    """A strided convolution with a small filter leaves rows and columns of x unread."""
    share = touched_share(w["x"].shape[2:], *(w[name] for name in GEOMETRY))
    read = round(w["x"].distinct_bytes * share) + w["grad_output"].distinct_bytes
    return read, w.outputs[0].numel * w.outputs[0].itemsize


def is_matrix_product(w: Workload) -> bool:
    """Depthwise, each output is a product of two channels alone: nothing for tensor cores."""
    return w["x"].shape[1] > w["groups"]


@op(
    flops=flops,
    bytes=bytes_moved,
    check=check,
    aliases={"input": "x"},
    integer_exact=True,
    tensor_cores=is_matrix_product,
)
def conv2d_weight_grad(
    x: Tensor,
    grad_output: Tensor,
    kernel_size: tuple[int, ...],
    stride: tuple[int, ...] = (1, 1),
    padding: tuple[int, ...] = (0, 0),
    dilation: tuple[int, ...] = (1, 1),
    groups: int = 1,
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

    Returns:
        (K, C / groups, R, S), dtype of x; channels_last if x or grad_output is, else contiguous.
        Halves are accumulated in fp32.

    Raises:
        InvalidArgument: the shapes do not belong to one convolution, or the dtypes differ.
    """
    shape = (grad_output.shape[1], x.shape[1] // groups, *pair(kernel_size))
    weight = x.new_empty(1).expand(shape)  # only its shape is read
    sizes = pair(stride), pair(padding), pair(dilation)
    grad = torch.ops.aten.convolution_backward(
        grad_output, x, weight, None, *sizes, False, (0, 0), groups, (False, True, False)
    )[1]
    return grad.contiguous(memory_format=weight_format(x, grad_output))


def weight_format(x: Tensor, grad_output: Tensor) -> torch.memory_format:
    for t in (x, grad_output):
        if t.is_contiguous(memory_format=torch.channels_last) and not t.is_contiguous():
            return torch.channels_last
    return torch.contiguous_format
