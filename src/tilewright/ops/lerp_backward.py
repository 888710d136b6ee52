"""The gradients of linear interpolation, summed over what was broadcast."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.errors import InvalidArgument
from tilewright.op import op
from tilewright.ops._gradients import like_arguments, of_tensors, wanted_gradients
from tilewright.ops._lerp import check_lerp
from tilewright.tensor_spec import TensorSpec

_possible = of_tensors("x", "end", "weight")
_READS = {
    "x": ("grad_output", "weight"),
    "end": ("grad_output", "weight"),
    "weight": ("grad_output", "x", "end"),
}


def check(args: dict[str, Any]) -> dict[str, Any]:
    operands = {name: args[name] for name in ("x", "end", "weight")}
    args = {**args, **check_lerp("lerp_backward", operands)}
    tensors = {n: v for n, v in operands.items() if isinstance(v, TensorSpec)}
    shape = tuple(torch.broadcast_shapes(*(spec.shape for spec in tensors.values())))
    given, x = args["grad_output"], args["x"]
    if given.shape != shape or given.dtype != x.dtype:
        raise InvalidArgument(
            f"lerp_backward: grad_output is {given.dtype}{list(given.shape)}, "
            f"but lerp gives {x.dtype}{list(shape)}"
        )
    args["grads"] = wanted_gradients("lerp_backward", args["grads"], _possible(args))
    return args


@op(
    # 1 - weight, three products, a difference; sums where an operand was broadcast
    flops=lambda w: 5 * w["grad_output"].numel,
    check=check,
    reads=_READS,
    scalars=("weight",),
    integer_exact=True,
    outputs_like=like_arguments(_possible),
    gradient_of="lerp",
)
def lerp_backward(
    grad_output: Tensor,
    x: Tensor,
    end: Tensor,
    weight: Tensor | float,
    grads: tuple[str, ...] | None = None,
) -> tuple[Tensor, ...]:
    """Gradients of lerp, each summed over the dims along which its operand was broadcast.

    dx = grad_output * (1 - weight), dend = grad_output * weight, dweight = grad_output * (end - x).

    Args:
        grad_output: the broadcast shape of x, end and weight; the dtype of x.
        x: where weight is 0; fp16, bf16, fp32 or fp64.
        end: where weight is 1; dtype of x, broadcast with x.
        weight: a number, or a tensor of the dtype of x, broadcast with both.
        grads: which gradients: some of "x", "end" and, if it is a tensor, "weight"; None means all
            of them.

    Returns:
        The gradients that were asked for, in this order, with the shape and dtype of their
        argument. Sums are in fp32 or wider.

    Raises:
        InvalidArgument: the shapes do not broadcast, or the dtypes differ.

    Source: PyTorch's autograd of torch.lerp.
    """
    operands = {"x": x, "end": end, "weight": weight}
    wanted = wanted_gradients("lerp_backward", grads, _possible(operands))
    call = functools.partial(_lerp_of, operands, wanted)
    _, pullback = torch.func.vjp(call, *(operands[n] for n in wanted))  # type: ignore[misc]
    return tuple(pullback(grad_output))


def _lerp_of(operands: dict[str, Any], names: Sequence[str], *values: Tensor) -> Tensor:
    given = {**operands, **dict(zip(names, values, strict=True))}
    return torch.lerp(given["x"], given["end"], given["weight"])
