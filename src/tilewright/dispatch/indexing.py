"""`tw.embedding` and `tw.index_put`: PyTorch's functions over rows that the operators move and add.

Neither is an operator of its own. The gradient of an embedding's table is
`tw.embedding_backward`'s; index_put brings several index tensors down to one flat index of rows,
which `tw.scatter` copies and `tw.index_add` adds: of the implementation that the records speak for.
"""

from __future__ import annotations

import math
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

from tilewright.dispatch.call import operators
from tilewright.errors import IndexOutOfRange, InvalidArgument
from tilewright.ops._indexing import NUMBERS
from tilewright.tensor_spec import DTYPE_NAMES

_PLAIN = (Tensor, Parameter)
_INDICES = (torch.int32, torch.int64)


def _is_pytorchs(*tensors: Tensor) -> bool:
    """Whether the call is traced, transformed, or on tensors that are not plain ones."""
    return bool(
        is_dynamo_compiling()
        or any(type(t) not in _PLAIN for t in tensors)
        or _is_any_autocast_enabled()
        or _len_torch_dispatch_stack()
        or _is_torch_function_mode_enabled()
        or _are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


# --- embedding -----------------------------------------------------------------------------------


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """What torch.nn.functional.embedding computes; a drop-in for it.

    The looked-up rows are PyTorch's. The dense gradient of `weight` is `tw.embedding_backward`'s:
    the same bits in every run, however skewed the indices are. Where that is of no use (no gradient
    of weight is needed, a sparse one is, under autocast, torch.compile and transforms, for tensor
    subclasses) PyTorch's function runs as it is.

    Args:
        input: indices, any shape, int64 or int32.
        weight: (rows, D), the table; fp16, bf16, fp32 or fp64.
        padding_idx: the row whose gradient is left out; negative ones count from the end.
        max_norm, norm_type: rows are renormalised in place before they are read, as there.
        scale_grad_by_freq: divide each row's gradient by how often it was read.
        sparse: as there.

    Returns:
        input's shape and D, dtype of weight.
    """
    if (
        sparse
        or not (torch.is_grad_enabled() and weight.requires_grad)
        or weight.dim() != 2
        or not weight.is_floating_point()
        or weight.dtype not in DTYPE_NAMES
        or input.dtype not in _INDICES
        or _is_pytorchs(input, weight)
    ):
        return F.embedding(
            input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
        )
    rows = weight.shape[0]
    if padding_idx is not None and not -rows <= padding_idx < rows:
        raise InvalidArgument(
            f"embedding: padding_idx={padding_idx} is out of range for {rows} rows"
        )
    skipped = -1 if padding_idx is None else padding_idx % rows
    if max_norm is not None:
        with torch.no_grad():
            torch.embedding_renorm_(weight.detach(), input.contiguous(), max_norm, norm_type)
    return _Embedding.apply(input, weight, skipped, scale_grad_by_freq)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, index: Tensor, weight: Tensor, skipped: int, scale_grad_by_freq: bool
    ) -> Tensor:
        ctx.save_for_backward(index)
        ctx.constants = weight.shape[0], skipped, scale_grad_by_freq
        return torch.embedding(weight, index, skipped, scale_grad_by_freq, False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (index,) = grads, ctx.saved_tensors
        # The gradient of a gradient: PyTorch's formula is differentiable, and ours is not.
        run = (
            torch.ops.aten.embedding_dense_backward
            if torch.is_grad_enabled()
            else operators["embedding_backward"]
        )
        return None, run(grad, index, *ctx.constants), None, None


# --- index_put -----------------------------------------------------------------------------------


def index_put(
    input: Tensor, indices: Sequence[Tensor], values: Tensor, accumulate: bool = False
) -> Tensor:
    """What torch.index_put computes: a copy of input with input[indices] = values, or += values.

    Several index tensors become one flat index of rows, without a wait for the GPU; the rest is
    `tw.scatter`'s or `tw.index_add`'s, gradients included. So values are copied in index order,
    where the last of an index that repeats wins, and added with the same bits in every run. A mask
    alone, other dtypes, and calls that are traced or transformed are PyTorch's.

    Args:
        input: any shape; fp16, bf16, fp32, fp64, int32 or int64.
        indices: for each of the leading dims a tensor of positions, int64 or int32, or for several
            of them a mask, that broadcast with one another; negative ones count from the end.
        values: dtype of input; broadcasts to the shape of the indices and of the dims without one.
        accumulate: add the values.

    Returns:
        The shape, dtype and strides of input.

    Raises:
        IndexOutOfRange: a position is out of range.
    """
    if _is_any_autocast_enabled() and values.dtype == input.dtype:  # which changes nothing
        with torch._C._DisableAutocast():
            return index_put(input, indices, values, accumulate)
    indices = _positions(input, indices)
    shape = _common_shape(input, indices, values)
    if shape is None:
        return torch.index_put(input, tuple(indices), values, accumulate)
    x = input.contiguous()
    out = _moved(x, indices, values, shape, accumulate, "").view(input.shape)
    return out if x is input else torch.empty_like(input).copy_(out)


def index_put_(
    input: Tensor, indices: Sequence[Tensor], values: Tensor, accumulate: bool = False
) -> Tensor:
    """`index_put` that writes to input and returns it."""
    if _is_any_autocast_enabled() and values.dtype == input.dtype:
        with torch._C._DisableAutocast():
            return index_put_(input, indices, values, accumulate)
    indices = _positions(input, indices)
    shape = _common_shape(input, indices, values)
    if shape is None:
        return input.index_put_(tuple(indices), values, accumulate)
    differentiable = torch.is_grad_enabled() and (input.requires_grad or values.requires_grad)
    if differentiable or not (input.is_contiguous() or len(indices) == 1):
        return input.copy_(index_put(input, indices, values, accumulate))
    _moved(input, indices, values, shape, accumulate, "_")
    return input


def _positions(x: Tensor, indices: Sequence[Tensor]) -> Sequence[Tensor]:
    """Of a mask beside other indices its positions, as PyTorch finds them, on a GPU by waiting; a
    mask alone names no place twice, and is PyTorch's, as is one of another shape than x has."""
    if isinstance(indices, Tensor):
        raise InvalidArgument("index_put: indices is one Tensor, expected a tuple: (indices,)")
    if len(indices) < 2 or not any(
        isinstance(i, Tensor) and i.dtype is torch.bool for i in indices
    ):
        return indices
    if _is_pytorchs(*indices):
        return indices
    found: list[Tensor] = []
    for i in indices:
        if i.dtype is not torch.bool:
            found.append(i)
        elif i.dim() and i.shape == x.shape[len(found) : len(found) + i.dim()]:
            found += i.nonzero(as_tuple=True)
        else:
            return indices
    return found


def _moved(
    x: Tensor,
    indices: Sequence[Tensor],
    values: Tensor,
    shape: torch.Size,
    accumulate: bool,
    form: str,
) -> Tensor:
    try:
        return _move(*_as_rows(x, indices, values, shape), accumulate, form)
    except (IndexOutOfRange, RuntimeError):
        if x.device.type == "cpu":  # on a GPU it may be another call's
            _refuse_far_indices(x, indices)
        raise


def _move(table: Tensor, flat: Tensor, rows: Tensor, accumulate: bool, form: str) -> Tensor:
    if accumulate:
        return operators[f"index_add{form}"](table, 0, flat, rows)
    index = flat.view(-1, *[1] * (rows.dim() - 1)).expand(rows.shape)
    return operators[f"scatter{form}"](table, 0, index, rows)


def _refuse_far_indices(x: Tensor, indices: Sequence[Tensor]) -> None:
    """In the caller's terms: flat positions are ours."""
    for dim, (index, size) in enumerate(zip(indices, x.shape, strict=False)):
        far = index[(index < -size) | (index >= size)]
        if far.numel():
            raise IndexOutOfRange(
                f"index_put: index {int(far[0])} is out of range for dim {dim} of size {size}; "
                "nothing was written"
            ) from None


def _common_shape(x: Tensor, indices: Sequence[Tensor], values: Tensor) -> torch.Size | None:
    """Of the index tensors; None for calls that PyTorch answers, the wrong ones among them."""
    if (
        not (isinstance(x, Tensor) and isinstance(values, Tensor))
        or not 0 < len(indices) <= x.dim()
        or not all(isinstance(i, Tensor) and i.dtype in _INDICES for i in indices)
        or DTYPE_NAMES.get(x.dtype) not in NUMBERS
        or values.dtype != x.dtype
        or not x.numel()
        or any(t.device != x.device for t in (*indices, values))
        or _is_pytorchs(x, values, *indices)
    ):
        return None
    try:
        shape = torch.broadcast_shapes(*(i.shape for i in indices))
        whole = (*shape, *x.shape[len(indices) :])
        return shape if torch.broadcast_shapes(values.shape, whole) == whole else None
    except RuntimeError:  # they do not broadcast, which PyTorch says in its words
        return None


def _as_rows(
    x: Tensor, indices: Sequence[Tensor], values: Tensor, shape: torch.Size
) -> tuple[Tensor, Tensor, Tensor]:
    """(table, flat index, rows), views of x and values where that is possible.

    Args:
        x: contiguous, or with one index tensor of any strides.
        shape: that the index tensors broadcast to.
    """
    sizes, rest = x.shape[: len(indices)], x.shape[len(indices) :]
    flat = _flat(indices, sizes).expand(shape).reshape(-1)
    table = x
    if x.is_contiguous():
        table = x.view(math.prod(sizes), *([math.prod(rest)] if rest else []))
    rows = values.expand((*shape, *rest)).reshape(flat.numel(), *table.shape[1:])
    return table, flat, rows


def _flat(indices: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Positions in the flattened leading dims; one out of range in any dim is out of range."""
    if len(indices) == 1:
        (index,), (size,) = indices, sizes
        return torch.where(index < 0, index + size, index)
    total: Tensor | int = 0
    valid: Tensor | bool = True
    for index, size in zip(indices, sizes, strict=True):
        valid = ((index >= -size) & (index < size)) & valid
        total = total * size + torch.where(index < 0, index + size, index).long()
    assert isinstance(total, Tensor)
    assert isinstance(valid, Tensor)
    return torch.where(valid, total, -1)
