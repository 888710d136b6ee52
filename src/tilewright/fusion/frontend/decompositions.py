"""What a trace takes an operation apart into: torch's own decompositions, and a few more."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.op import Workload

FEW_COMPARED = 1 << 22
"""Elements of a row with elements of an index that names some of it: more are compared only where
a tensor has as many elements, as logits have beside weights of their classes."""


def decompositions_of(w: Workload) -> dict[Any, Any]:
    """For a trace of a workload."""
    most = max(FEW_COMPARED, *(t.numel for t in w.tensors.values()))
    aten = torch.ops.aten
    found = {
        aten.gather.default: functools.partial(_gathered, most),
        aten.scatter_add.default: functools.partial(_scattered, most),
    }
    return {**decompositions(), **found}


@functools.cache
def decompositions() -> dict[Any, Any]:
    from torch._decomp import core_aten_decompositions, get_decompositions

    aten = torch.ops.aten
    wanted = [
        aten.native_layer_norm,
        aten._fused_rms_norm,
        aten.lerp,
        aten._softmax,
        aten.mean,
        aten.var_mean,
        aten.addcmul,
        aten.native_layer_norm_backward,
        aten._fused_rms_norm_backward,
        aten._softmax_backward_data,
        *(aten.gelu, aten.gelu_backward, aten.silu, aten.silu_backward, aten.sigmoid_backward),
        *(aten.tanh_backward, aten.threshold_backward, aten.native_dropout, aten.softplus),
        *(aten.clamp_min, aten.clamp_max, aten.rsub, aten.addcdiv, aten.mse_loss, aten.hardswish),
        *(aten.linalg_vector_norm, aten.norm, aten._log_softmax, aten._log_softmax_backward_data),
        *(aten.elu, aten.elu_backward, aten.leaky_relu, aten.leaky_relu_backward, aten.hardtanh),
        *(aten.hardtanh_backward, aten.native_batch_norm, aten.native_batch_norm_backward),
        *(aten._native_batch_norm_legit, aten._native_batch_norm_legit_no_training),
        *(aten.ldexp, aten.dist),
    ]
    found = {**core_aten_decompositions(), **get_decompositions(wanted)}
    for largest, name in ((torch.amax, "max"), (torch.amin, "min")):
        found[getattr(aten, name).dim] = functools.partial(_with_place, largest)
        found[getattr(aten, f"arg{name}").default] = functools.partial(_only_place, largest)
    found[aten.hardshrink_backward.default] = _shrink_backward
    found[aten.softshrink_backward.default] = _shrink_backward
    found[aten.elu_backward.default] = _elu_backward
    found[aten.hardswish_backward.default] = _hardswish_backward
    found[aten.logit_backward.default] = _logit_backward
    found[aten.smooth_l1_loss_backward.default] = _smooth_l1_loss_backward
    found[aten.native_group_norm.default] = _group_norm
    found[aten.native_group_norm_backward.default] = functools.partial(
        _of_contiguous, found[aten.native_group_norm_backward.default]
    )
    found[aten.select_scatter.default] = _select_scatter
    found[aten.index.Tensor] = _indexed
    found[aten.index_select.default] = _selected
    found[aten.index_put.default] = _put
    found[aten.round.decimals] = _round_decimals
    found[aten.constant_pad_nd.default] = _padded
    found[aten.roll.default] = _rolled
    found[aten.split_with_sizes.default] = _split
    found[aten._efficientzerotensor.default] = torch.zeros
    return found


def _shrink_backward(gradient: Tensor, x: Tensor, width: float) -> Tensor:
    return torch.where((x >= -width) & (x <= width), 0.0, gradient)


def _elu_backward(
    gradient: Tensor,
    alpha: float,
    scale: float,
    input_scale: float,
    is_result: bool,
    x: Tensor,
) -> Tensor:
    """PyTorch's own decomposition loses NaN, as its next does; its vectors on a CPU do not."""
    height = alpha * scale
    below = x + height if is_result else height * torch.exp(x * input_scale)
    return torch.where(x > 0, gradient * scale, gradient * input_scale * below)


def _hardswish_backward(gradient: Tensor, x: Tensor) -> Tensor:
    slope = torch.where(x >= 3, 1.0, x / 3 + 0.5)
    return torch.where(x <= -3, 0.0, gradient * slope)


def _logit_backward(gradient: Tensor, x: Tensor, eps: float | None = None) -> Tensor:
    """PyTorch's own decomposition loses NaN beside an eps, and takes one of 0 for none; its kernels
    for GPUs do not."""
    least = -1.0 if eps is None else eps
    outside = math.nan if least < 0 else 0.0
    least = max(least, 0.0)
    return torch.where((x < least) | (x > 1 - least), outside, gradient / (x * (1 - x)))


def _smooth_l1_loss_backward(
    gradient: Tensor, x: Tensor, target: Tensor, reduction: int, beta: float
) -> Tensor:
    """PyTorch's own decomposition loses NaN; its kernels do not."""
    apart = x - target
    slope = torch.where(apart <= -beta, -1.0, torch.where(apart >= beta, 1.0, apart / beta))
    mean = reduction == 1  # at::Reduction::Mean
    return slope * (gradient / apart.numel() if mean else gradient)


def _split(x: Tensor, sizes: Sequence[int], dim: int = 0) -> list[Tensor]:
    ends = list(itertools.accumulate(sizes))
    pairs = zip(ends, sizes, strict=True)
    return [torch.ops.aten.slice(x, dim, end - size, end) for end, size in pairs]


def _padded(x: Tensor, widths: Sequence[int], number: float = 0) -> Tensor:
    """With a number before and after the elements of the last dims, of which a negative width
    leaves some out."""
    for k, (before, after) in enumerate(zip(widths[::2], widths[1::2], strict=True), 1):
        dim = x.dim() - k
        x = torch.ops.aten.slice(x, dim, max(-before, 0), x.shape[dim] - max(-after, 0))
        shapes = ([*x.shape[:dim], max(n, 0), *x.shape[dim + 1 :]] for n in (before, after))
        first, last = (torch.full(s, number, dtype=x.dtype, device=x.device) for s in shapes)
        if pieces := [t for t in (first, x, last) if t.shape[dim]]:
            x = torch.cat(pieces, dim)
    return x


def _rolled(x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Tensor:
    """The last elements of a dim before the others; without dims, of all elements."""
    if not dims:
        return _rolled(x.flatten(), shifts, [0]).reshape(x.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        size = x.shape[dim]
        left = size - shift % max(size, 1)
        halves = (torch.ops.aten.slice(x, dim, *ends) for ends in ((left, size), (0, left)))
        x = torch.cat([t for t in halves if t.shape[dim]], dim) if left < size else x.clone()
    return x


def _gathered(most: int, x: Tensor, dim: int, index: Tensor, sparse_grad: bool = False) -> Tensor:
    """Any elements of a row: one of each of as many rows that are alike."""
    if not x.dim() == index.dim() == 1 or index.shape == (1,) or len(x) * len(index) > most:
        return NotImplemented
    return x.expand(len(index), -1).gather(1, index.unsqueeze(1)).squeeze(1)


def _scattered(most: int, x: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    """Into a row, of which elements may be named several times; zeros lose their sign."""
    if x.dim() != 1 or index.shape != src.shape or index.shape == (1,):
        return NotImplemented
    if not x.is_floating_point() or len(x) * len(index) > most:
        return NotImplemented
    named = index.reshape(-1, 1) == torch.arange(len(x), device=x.device)
    wide = torch.promote_types(x.dtype, torch.float32)
    added = torch.where(named, src.to(wide).reshape(-1, 1), 0).sum(0)
    return (x.to(wide) + added).to(x.dtype)


def _selected(x: Tensor, dim: int, index: Tensor) -> Tensor:
    if not x.dim() == index.dim() == 1:
        return NotImplemented
    return x.gather(0, index.to(torch.int64))


def _indexed(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    index = _index_of_a_row(x, indices)
    if index is None:
        return NotImplemented
    return x.gather(0, index.flatten()).reshape(index.shape)


def _put(
    x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> Tensor:
    index = _index_of_a_row(x, indices)
    if index is None or not accumulate:
        return _put_where(x, indices, values, accumulate)
    return x.scatter_add(0, index.flatten(), values.expand(index.shape).flatten())


def _index_of_a_row(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor | None:
    """Of whole numbers, from which negative ones, that count from the end, are gone."""
    index = indices[0]
    if x.dim() != 1 or index is None or index.dtype not in (torch.int32, torch.int64):
        return None
    index = index.to(torch.int64)
    return torch.where(index < 0, index + len(x), index)


def _put_where(
    x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> Tensor:
    """The same for all elements that a mask selects; other values follow from how many it does."""
    *before, mask = indices
    if mask is None or mask.dtype != torch.bool or any(i is not None for i in before):
        return NotImplemented
    after = x.dim() - len(before) - mask.dim()
    fits = mask.shape == x.shape[len(before) : x.dim() - after]  # PyTorch does not broadcast it
    if accumulate or values.dim() > after or not fits:
        return NotImplemented
    return torch.where(mask.reshape(*mask.shape, *[1] * after), values, x)


def _round_decimals(x: Tensor, *, decimals: int) -> Tensor:
    scale = 10.0 ** abs(decimals)
    return (x * scale).round() / scale if decimals > 0 else (x / scale).round() * scale


def _with_place(largest: Any, x: Any, dim: int, keepdim: bool = False) -> Any:
    """What `max` and `min` over a dim return: of the two, most programs use the first alone."""
    return largest(x, dim, keepdim), _place(largest, x, dim, keepdim)


def _only_place(largest: Any, x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    if x.dtype == torch.bool:  # PyTorch's kernels refuse it, behind this
        raise RuntimeError(f"arg{largest.__name__[1:]}() does not support bool input")
    return _place(largest, x, dim, keepdim)


def _place(largest: Any, x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    """The least position of the greatest (or least) element, or of the first that is NaN: in fp64
    where fp32 does not hold all positions."""
    if dim is None or not x.dim():
        place = _place(largest, x.reshape(-1), 0)
        return place.reshape([1] * x.dim()) if keepdim else place
    size = x.shape[dim]
    exact = torch.float32 if size <= 2**24 else torch.float64
    shape = [1] * x.dim()
    shape[dim] = size
    at = torch.arange(size, device=x.device).to(exact).reshape(shape)
    found = (x == largest(x, dim, True)) | (x != x)
    return torch.where(found, at, float(size)).amin(dim, keepdim).to(torch.int64)


def _group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    batch: int,
    channels: int,
    pixels: int,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """PyTorch's own has one for CPUs besides, which multiplies by rstd * weight."""
    grouped = x.reshape(batch, groups, channels // groups * pixels)
    variance, mean = torch.var_mean(grouped, dim=-1, correction=0, keepdim=True)
    rstd = torch.rsqrt(variance + eps)
    out = ((grouped - mean) * rstd).reshape(x.shape)
    beside = [channels, *[1] * (x.dim() - 2)]
    if weight is not None:
        out = out * weight.reshape(beside)
    if bias is not None:
        out = out + bias.reshape(beside)
    return out, mean.squeeze(-1), rstd.squeeze(-1)


def _of_contiguous(backward: Any, gradient: Tensor, x: Tensor, *rest: Any) -> Any:
    """PyTorch's takes views that other layouts do not allow."""
    return backward(gradient.contiguous(), x.contiguous(), *rest)


def _select_scatter(x: Tensor, src: Tensor, dim: int, index: int) -> Tensor:
    first = index % x.shape[dim]
    return torch.ops.aten.slice_scatter(x, src.unsqueeze(dim), dim, first, first + 1)
