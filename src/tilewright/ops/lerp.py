"""Linear interpolation between two tensors, with full broadcasting."""

import functools

import torch
from torch import Tensor

from tilewright.op import op
from tilewright.ops._lerp import check_lerp


@op(
    flops=lambda w: 3 * w.outputs[0].numel,  # subtract, multiply, add
    check=functools.partial(check_lerp, "lerp"),
    aliases={"input": "x"},
    integer_exact=True,
    scalars=("weight",),
    keywords=("out",),
)
def lerp(x: Tensor, end: Tensor, weight: Tensor | float) -> Tensor:
    """Move from x to end by weight: x + weight * (end - x).

    Where |weight| >= 0.5 it is end - (end - x) * (1 - weight), as PyTorch computes it, so that
    weight 1 gives end exactly.

    Args:
        x: where weight is 0; fp16, bf16, fp32 or fp64.
        end: where weight is 1; dtype of x, broadcast with x.
        weight: a number, or a tensor of the dtype of x, broadcast with both; one of no dims may
            have any real dtype, which is cast, and lie on the CPU.

    Returns:
        The broadcast shape, dtype of x. Halves are computed in fp32 and rounded once.

    Raises:
        InvalidArgument: the shapes do not broadcast, or the dtypes differ.
    """
    return torch.lerp(x, end, weight)
