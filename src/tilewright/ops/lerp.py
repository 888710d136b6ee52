"""Linear interpolation between two tensors, with full broadcasting."""

from typing import Any

import torch
from torch import Tensor

from tilewright.errors import InvalidArgument
from tilewright.op import TensorSpec, op
from tilewright.ops._normalization import check_float


def check(args: dict[str, Any]) -> dict[str, Any]:
    tensors = {name: v for name, v in args.items() if isinstance(v, TensorSpec)}
    for name, spec in tensors.items():
        check_float("lerp", name, spec)
        if spec.dtype != args["x"].dtype:
            raise InvalidArgument(
                f"lerp: {name} is {spec.dtype}, but x is {args['x'].dtype}; convert one of them"
            )
    if "weight" not in tensors:
        args["weight"] = float(args["weight"])
    try:
        torch.broadcast_shapes(*(spec.shape for spec in tensors.values()))
    except RuntimeError:
        shapes = ", ".join(f"{name} {list(spec.shape)}" for name, spec in tensors.items())
        raise InvalidArgument(
            f"lerp: {shapes} do not broadcast: aligned at the end, sizes must be equal or 1"
        ) from None
    return args


@op(
    flops=lambda w: 3 * w.outputs[0].numel,  # subtract, multiply, add
    check=check,
    aliases={"input": "x"},
    integer_exact=True,
    scalars=("weight",),
)
def lerp(x: Tensor, end: Tensor, weight: Tensor | float) -> Tensor:
    """Move from x to end by weight: x + weight * (end - x).

    Where |weight| >= 0.5 it is end - (end - x) * (1 - weight), as PyTorch computes it, so that
    weight 1 gives end exactly.

    Args:
        x: where weight is 0; fp16, bf16, fp32 or fp64.
        end: where weight is 1; dtype of x, broadcast with x.
        weight: a number, or a tensor of the dtype of x, broadcast with both.

    Returns:
        The broadcast shape, dtype of x. Halves are computed in fp32 and rounded once.

    Raises:
        InvalidArgument: the shapes do not broadcast, or the dtypes differ.
    """
    return torch.lerp(x, end, weight)
