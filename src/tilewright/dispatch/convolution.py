"""`tw.conv2d`: PyTorch's convolution, its weight gradient chosen as any operator's result is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import (
    _are_functorch_transforms_active,
    _is_any_autocast_enabled,
    _len_torch_dispatch_stack,
)
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter
from torch.nn import functional as F
from torch.overrides import _is_torch_function_mode_enabled

from tilewright.dispatch import selection
from tilewright.dispatch.call import operators
from tilewright.impl import IMPLS
from tilewright.ops._convolution import pair

_PLAIN = (Tensor, Parameter)
_WITH_BIAS = "conv2d_weight_bias_grad"


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """What torch.nn.functional.conv2d computes; a drop-in for it.

    The result and the gradient of the input are PyTorch's. The gradient of the weight is
    `tw.conv2d_weight_grad`'s: of the implementation that the records speak for; with the bias's it
    is `tw.conv2d_weight_bias_grad`'s where there are records of that. Where that is of no use (no
    gradient of the weight is needed, under autocast, torch.compile and transforms, for tensor
    subclasses and for padding by name) PyTorch's function runs as it is.

    Args:
        input: (N, C, H, W).
        weight: (K, C / groups, R, S), dtype of input.
        bias: (K), or None.
        stride, padding, dilation, groups: as there.

    Returns:
        (N, K, P, Q), dtype of input.
    """
    given = (input, weight, bias)
    if (
        is_dynamo_compiling()
        or not (torch.is_grad_enabled() and weight.requires_grad)
        or isinstance(padding, str)
        or input.dim() != 4
        or any(t is not None and type(t) not in _PLAIN for t in given)
        or _is_any_autocast_enabled()
        or _len_torch_dispatch_stack()
        or _is_torch_function_mode_enabled()
        or _are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    ):
        return F.conv2d(input, weight, bias, stride, padding, dilation, groups)
    return _Convolution.apply(
        input, weight, bias, pair(stride), pair(padding), pair(dilation), groups
    )


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias, ctx.geometry = None if bias is None else list(bias.shape), geometry
        return F.conv2d(x, weight, bias, *geometry)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.geometry
        needed = list(ctx.needs_input_grad[:3])
        # The gradient of a gradient: PyTorch's formula is differentiable, and ours is not.
        chosen = needed[1] and not torch.is_grad_enabled()
        both = chosen and needed[2] and _in_one_pass(x)
        mask = [needed[0], needed[1] and not chosen, needed[2] and not both]
        found: list[Tensor | None] = [None, None, None]
        if any(mask):
            found = torch.ops.aten.convolution_backward(
                grad, x, weight, ctx.bias, stride, padding, dilation, False, (0, 0), groups, mask
            )
        wanted = [f if m else None for f, m in zip(found, mask, strict=True)]
        geometry = (tuple(weight.shape[2:]), stride, padding, dilation, groups)
        if both:
            wanted[1:] = operators[_WITH_BIAS](x, grad, *geometry)
        elif chosen:
            wanted[1] = operators["conv2d_weight_grad"](x, grad, *geometry)
        return (*wanted, None, None, None, None)


def _in_one_pass(x: Tensor) -> bool:
    """Whether records, or the caller, speak for an implementation of both gradients."""
    if selection.any_forced() and (forced := selection.forced_for(_WITH_BIAS)) is not None:
        return IMPLS[forced.implementation].serves(_WITH_BIAS)
    return bool(selection.records_of(x.device, _WITH_BIAS).winners)
