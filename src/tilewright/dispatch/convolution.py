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
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter
from torch.nn import functional as F
from torch.overrides import _is_torch_function_mode_enabled

from tilewright.dispatch import evidence, selection
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
    gradient of the weight is needed, under torch.compile and transforms, for tensor subclasses,
    complex and empty tensors, one image without a batch and padding that differs from side to side)
    PyTorch's function runs as it is. Autocast casts as it does there.

    Args:
        input: (N, C, H, W), or (C, H, W).
        weight: (K, C / groups, R, S), dtype of input.
        bias: (K), or None.
        stride, padding, dilation, groups: as there.

    Returns:
        (N, K, P, Q), dtype of input.
    """
    if (
        is_dynamo_compiling()
        or type(input) not in _PLAIN
        or type(weight) not in _PLAIN
        or (bias is not None and type(bias) not in _PLAIN)
        or not (torch.is_grad_enabled() and weight.requires_grad)
        or input.dim() != 4
        or not (input.is_floating_point() and input.numel() and weight.numel())
        or type(groups) is not int
        or (geometry := _geometry(weight, stride, padding, dilation)) is None
        or _len_torch_dispatch_stack()
        or _is_torch_function_mode_enabled()
        or _are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    ):
        return F.conv2d(input, weight, bias, stride, padding, dilation, groups)
    if _is_any_autocast_enabled() and torch.is_autocast_enabled(input.device.type):
        dtype = torch.get_autocast_dtype(input.device.type)
        input, weight = _autocast(input, dtype), _autocast(weight, dtype)
        bias = bias if bias is None else _autocast(bias, dtype)
    return _Convolution.apply(input, weight, bias, *geometry, groups)


def _autocast(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t if t.dtype is torch.float64 or not t.is_floating_point() else t.to(dtype)


def _geometry(
    weight: Tensor, stride: Any, padding: Any, dilation: Any
) -> tuple[tuple[int, int], ...] | None:
    """Stride, padding and dilation by height and width; None where "same" is more on one side, and
    for what PyTorch may refuse."""
    if not (_are_sizes(stride) and _are_sizes(dilation)):
        return None
    if isinstance(padding, str):
        if padding == "valid":
            padding = 0
        elif padding == "same" and pair(stride) == (1, 1):
            sizes = zip(pair(dilation), weight.shape[2:], strict=False)
            around = [d * (k - 1) for d, k in sizes]
            padding = None if any(n % 2 for n in around) else [n // 2 for n in around]
    return (pair(stride), pair(padding), pair(dilation)) if _are_sizes(padding) else None


def _are_sizes(value: Any) -> bool:
    sizes = value if isinstance(value, (tuple, list)) else (value,)
    return len(sizes) in (1, 2) and all(type(n) is int for n in sizes)


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
        # The gradient of a gradient, or many at once: PyTorch's formula can be differentiated and
        # mapped over, and ours not.
        chosen = needed[1] and not (torch.is_grad_enabled() or _is_mapped(grad))
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


def _is_mapped(grad: Tensor) -> bool:
    """Whether vmap runs the backward: torch.func's, or that of is_grads_batched and jacobian."""
    return _are_functorch_transforms_active() or is_legacy_batchedtensor(grad)


def _in_one_pass(x: Tensor) -> bool:
    """Whether records, or the caller, speak for an implementation of both gradients."""
    if selection.any_forced() and (forced := selection.forced_for(_WITH_BIAS)) is not None:
        return IMPLS[forced.implementation].serves(_WITH_BIAS)
    return bool(evidence.records_of(x.device, _WITH_BIAS).winners)
