"""`tw.conv2d`: PyTorch's convolution, its weight gradient chosen as any operator's result is."""

from __future__ import annotations

import functools
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
from torch.jit import is_tracing
from torch.nn import Parameter
from torch.nn import functional as F
from torch.overrides import _is_torch_function_mode_enabled

from tilewright.dispatch import evidence, selection
from tilewright.dispatch.call import operators
from tilewright.dispatch.plain_calls import under_a_default_device
from tilewright.dispatch.prepared import state
from tilewright.impl import IMPLS
from tilewright.tensor_spec import channels_last_strides, contiguous_strides, same_layout

_PLAIN = (Tensor, Parameter)
_ALONE, _WITH_BIAS = "conv2d_weight_grad", "conv2d_weight_bias_grad"
_BEYOND = 2**31
"""Sizes from here on are PyTorch's alone, which lets some of them overflow."""


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
    `tw.conv2d_weight_grad`'s: of the implementation that the records speak for, or that `tw.use`
    names around this call; with the bias's it is `tw.conv2d_weight_bias_grad`'s where there are
    records of that. It is laid out as the weight, or else as PyTorch would for these tensors.
    Where there is no choice (no records on this kind of device, no gradient of the weight needed,
    under torch.compile, torch.jit.trace and transforms, for tensors that are not plain and strided,
    complex and empty ones, one image without a batch and padding that differs from side to side)
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
        or _is_torch_function_mode_enabled()
        or not _are_plain(input, weight, bias)
        or not (torch.is_grad_enabled() and weight.requires_grad)
        or is_tracing()
        or input.dim() != 4
        or not (input.is_floating_point() and input.numel() and weight.numel())
        or type(groups) is not int
        or (geometry := _geometry(weight, stride, padding, dilation)) is None
        or _len_torch_dispatch_stack()
        or _are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or (choices := _choices(input, bias)) is None
    ):
        if under_a_default_device() and _are_plain(input, weight, bias):
            with torch._C.DisableTorchFunction():
                return conv2d(input, weight, bias, stride, padding, dilation, groups)
        return F.conv2d(input, weight, bias, stride, padding, dilation, groups)
    if _is_any_autocast_enabled() and torch.is_autocast_enabled(input.device.type):
        dtype = torch.get_autocast_dtype(input.device.type)
        input, weight = _autocast(input, dtype), _autocast(weight, dtype)
        bias = bias if bias is None else _autocast(bias, dtype)
    return _Convolution.apply(choices, input, weight, bias, *geometry, groups)


def _are_plain(input: Any, weight: Any, bias: Any) -> bool:
    return (
        type(input) in _PLAIN
        and type(weight) in _PLAIN
        and (bias is None or type(bias) in _PLAIN)
        and input.layout is torch.strided
    )


def _autocast(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t if t.dtype is torch.float64 or not t.is_floating_point() else t.to(dtype)


def _geometry(
    weight: Tensor, stride: Any, padding: Any, dilation: Any
) -> tuple[tuple[int, int], ...] | None:
    """Stride, padding and dilation by height and width; None where "same" is more on one side, and
    for what PyTorch may refuse."""
    strides, dilations = _sizes(stride), _sizes(dilation)
    if strides is None or dilations is None:
        return None
    if isinstance(padding, str):
        if padding == "valid":
            padding = 0
        elif padding == "same" and strides == (1, 1):
            sizes = zip(dilations, weight.shape[2:], strict=False)
            around = [d * (k - 1) for d, k in sizes]
            padding = None if any(n % 2 for n in around) else [n // 2 for n in around]
    paddings = _sizes(padding)
    return None if paddings is None else (strides, paddings, dilations)


def _sizes(value: Any) -> tuple[int, int] | None:
    sizes = value if isinstance(value, (tuple, list)) else (value,)
    if len(sizes) not in (1, 2):
        return None
    for n in sizes:
        if type(n) is not int or not -_BEYOND < n < _BEYOND:
            return None
    return sizes[0], sizes[-1]


_Choices = tuple[bool, bool, selection.Asked]
"""Whether there is a choice for the weight's gradient alone, and for it with the bias's in one
pass; and what `tw.use` asks for."""


def _choices(x: Tensor, bias: Tensor | None) -> _Choices | None:
    """None where there is no choice."""
    with_bias = bias is not None and bias.requires_grad
    if (asked := selection.any_forced()) is None:
        return _by_records(x.device, with_bias, torch.get_num_threads(), state.generation)
    return _find_choices(x.device, with_bias, asked)


@functools.lru_cache(maxsize=64)
def _by_records(
    device: torch.device, with_bias: bool, threads: int, generation: int
) -> _Choices | None:
    """Records are of a number of threads, and read again in each generation."""
    return _find_choices(device, with_bias, None)


def _find_choices(device: torch.device, with_bias: bool, asked: selection.Asked) -> _Choices | None:
    if not state.enabled or device.type not in ("cpu", "cuda"):
        return None
    alone, both = _has_choice(_ALONE, device), with_bias and _has_choice(_WITH_BIAS, device)
    return (alone, both, asked) if alone or both else None


def _has_choice(op: str, device: torch.device) -> bool:
    """Whether records, or the caller, speak for an implementation that is not PyTorch's."""
    if selection.any_forced() and (forced := selection.forced_for(op)) is not None:
        serves = op == _ALONE or IMPLS[forced.implementation].serves(op)
        return serves and forced.implementation != "aten"
    return evidence.records_of(device, op).beat_aten


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, choices: _Choices, x: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.set_materialize_grads(False)
        ctx.bias, ctx.geometry = None if bias is None else list(bias.shape), geometry
        ctx.choices = choices
        return F.conv2d(x, weight, bias, *geometry)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        if grad is None:
            return (None,) * 8
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad[1:4]
        alone, both, asked = ctx.choices
        ours = for_weight and not _is_pytorchs(grad)
        both = both and ours and for_bias
        ours = both or (alone and ours)
        dx = dw = db = None
        mask = (for_x, for_weight and not ours, for_bias and not both)
        if any(mask):
            sizes = ctx.geometry[:3]
            with torch._C.DisableTorchFunctionSubclass():
                dx, dw, db = torch.ops.aten.convolution_backward(
                    grad, x, weight, ctx.bias, *sizes, False, (0, 0), ctx.geometry[3], mask
                )
        if ours:
            run = selection.as_before(asked, operators[_WITH_BIAS if both else _ALONE])
            dw = run(x, grad, tuple(weight.shape[2:]), *ctx.geometry)
            if both:
                dw, db = dw
            if dw.stride() != weight.stride():
                dw = _laid_out(dw, x, weight, ctx.bias, *ctx.geometry)
        return None, dx, dw, db, None, None, None, None


def _is_pytorchs(grad: Tensor) -> bool:
    """Whether PyTorch's formula gives all gradients: it can be differentiated (a gradient of a
    gradient is needed), mapped over (vmap runs the backward: torch.func's, or that of
    is_grads_batched and jacobian), and seen by modes and subclasses."""
    return (
        torch.is_grad_enabled()
        or type(grad) is not Tensor
        or _are_functorch_transforms_active()
        or bool(_len_torch_dispatch_stack())
        or is_legacy_batchedtensor(grad)
    )


def _laid_out(
    dw: Tensor, x: Tensor, weight: Tensor, bias: Sequence[int] | None, *geometry: Any
) -> Tensor:
    """A gradient that is not laid out as its weight: as PyTorch's backward gives it."""
    *sizes, groups = geometry
    backend = torch._C._select_conv_backend(x, weight, None, *sizes, False, (0, 0), groups, bias)
    layout = torch._C._conv_determine_backend_memory_format(x, weight, backend)
    last = layout is torch.channels_last
    strides = (channels_last_strides if last else contiguous_strides)(weight.shape)
    if dw.stride() == strides:
        return dw
    if same_layout(dw.shape, dw.stride(), strides):
        return dw.as_strided_(dw.shape, strides)
    return dw.new_empty_strided(dw.shape, strides).copy_(dw)
