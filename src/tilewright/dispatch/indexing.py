"""`tw.embedding` and `tw.index_put`: PyTorch's functions over rows that the operators move and add.

Neither is an operator of its own. The gradient of an embedding's table is
`tw.embedding_backward`'s; index_put brings several index tensors down to one flat index of rows,
which `tw.scatter` copies and `tw.index_add` adds: of the implementation that the records speak for.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from types import NoneType
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
from tilewright.dispatch.index_gradients import run_beside
from tilewright.dispatch.pytorch import outliving_indices
from tilewright.errors import IndexOutOfRange, InvalidArgument, InvalidType
from tilewright.impls._any_index import (
    POSITIONS,
    beyond,
    from_front,
    outside,
    outside_both_ways,
    reported,
    with_room,
)
from tilewright.impls._in_place import refuse_shared
from tilewright.op import OPS
from tilewright.ops._indexing import NUMBERS, refuse_out_of_range
from tilewright.tensor_spec import DTYPE_NAMES

_PLAIN = (Tensor, Parameter)


def _is_pytorchs(*tensors: Tensor) -> bool:
    """Whether the call is traced, transformed, under autocast, or on tensors that are not plain."""
    return _is_traced(*tensors) or _is_any_autocast_enabled()


def _is_traced(*tensors: Tensor) -> bool:
    """The same less autocast."""
    return bool(
        is_dynamo_compiling()
        or any(type(t) not in _PLAIN for t in tensors)
        or _len_torch_dispatch_stack()
        or _is_torch_function_mode_enabled()
        or _are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


def _refuse_others(op: str, wanted: str, kinds: type | tuple[type, ...], **given: Any) -> None:
    """Arguments of other types, in PyTorch's kind of error; True is no number."""
    for name, value in given.items():
        if not isinstance(value, kinds) or (type(value) is bool and kinds is not bool):
            raise InvalidType(f"{op}: {name} is of type {type(value).__name__}, expected {wanted}")


# --- embedding -----------------------------------------------------------------------------------

_USUAL = frozenset(
    itertools.product((NoneType, int), (NoneType, float, int), (float, int), (bool,), (bool,))
)
"""Types of an embedding's arguments behind the tensors: one look spares most calls one for each."""


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

    On a GPU the rows are looked up by `tw.gather`. The dense gradient of `weight` is
    `tw.embedding_backward`'s: the same bits in every run, however skewed the indices are. Autocast
    changes nothing; under torch.compile and transforms, and for tensor subclasses, PyTorch's
    function runs.

    Args:
        input: indices, any shape, int64 or int32.
        weight: (rows, D), the table; fp16, bf16, fp32 or fp64, others without gradients.
        padding_idx: the row whose gradient is left out; negative ones count from the end.
        max_norm, norm_type: rows are renormalised in place before they are read, as there.
        scale_grad_by_freq: divide each row's gradient by how often it was read.
        sparse: the gradient is a sparse tensor, PyTorch's.

    Returns:
        input's shape and D, dtype of weight.

    Raises:
        InvalidType: an argument is of another type.
        InvalidArgument: padding_idx is out of range.
        IndexOutOfRange: a value of input is out of range.
    """
    given = padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
    if not (
        isinstance(input, Tensor) and isinstance(weight, Tensor) and (*map(type, given),) in _USUAL
    ):
        _refuse_embedding(input, weight, *given)
    run = functools.partial(
        F.embedding,
        padding_idx=padding_idx,
        norm_type=norm_type,
        scale_grad_by_freq=scale_grad_by_freq,
        sparse=sparse,
    )
    if (
        weight.dim() != 2
        or input.dtype not in POSITIONS
        or input.device != weight.device
        or _is_traced(input, weight)
    ):
        return run(input, weight, max_norm=max_norm)
    rows = weight.shape[0]
    if padding_idx is not None and not -rows <= padding_idx < rows:
        raise InvalidArgument(
            f"embedding: padding_idx={padding_idx} is out of range for {rows} rows"
        )
    if max_norm is not None:
        _renormalise(input, weight.detach(), max_norm, norm_type)
    wanted = torch.is_grad_enabled() and weight.requires_grad
    if wanted and not sparse and DTYPE_NAMES.get(weight.dtype) in NUMBERS:
        skipped = -1 if padding_idx is None else padding_idx % rows
        return _Embedding.apply(input, weight, skipped, scale_grad_by_freq)
    return _looked_up(input, weight, run, by_pytorch=wanted)


def _refuse_embedding(
    input: Any,
    weight: Any,
    padding_idx: Any,
    max_norm: Any,
    norm_type: Any,
    scale_grad_by_freq: Any,
    sparse: Any,
) -> None:
    refuse = functools.partial(_refuse_others, "embedding")
    refuse("a Tensor", Tensor, input=input, weight=weight)
    refuse("an int or None", (Integral, NoneType), padding_idx=padding_idx)
    refuse("a float or None", (Real, NoneType), max_norm=max_norm)
    refuse("a float", Real, norm_type=norm_type)
    refuse("a bool", bool, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)


def _looked_up(
    index: Tensor, weight: Tensor, run: Callable[..., Tensor], by_pytorch: bool = False
) -> Tensor:
    """The rows, which on a GPU are zeros where an index is out of range: by `tw.gather`, or by
    PyTorch's `run`, differentiable."""
    if not OPS["gather"].outlives_indices(index.device.type):
        return run(index, weight)
    empty = not (index.numel() and weight.numel())
    if by_pytorch or empty or DTYPE_NAMES.get(weight.dtype) not in NUMBERS:
        skipped = reported(outside(index, weight.shape[0]))
        table = weight if len(weight) else with_room(weight, 0)
        return run(beyond(index, skipped, 0), table).masked_fill(skipped[..., None], 0)
    columns = weight.shape[1]
    names = index.reshape(-1, 1).expand(-1, columns)
    return run_beside(operators, "gather", weight, 0, names).view(*index.shape, columns)


def _renormalise(index: Tensor, table: Tensor, max_norm: float, norm_type: float) -> None:
    """Rows that are read, in place; PyTorch's kernels write before they look at all indices."""
    rows = len(table)
    if not OPS["gather"].outlives_indices(index.device.type):
        if index.device.type == "cpu":
            refuse_out_of_range("embedding", index, rows)
        torch.embedding_renorm_(table, index.contiguous(), max_norm, norm_type)
    elif rows:
        skipped, first = outside(index, rows), table[0].clone()
        torch.embedding_renorm_(table, beyond(index, skipped, 0).contiguous(), max_norm, norm_type)
        table[0].copy_(torch.where((index == 0).any(), table[0], first))


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, index: Tensor, weight: Tensor, skipped: int, scale_grad_by_freq: bool
    ) -> Tensor:
        ctx.save_for_backward(index)
        ctx.constants = weight.shape[0], skipped, scale_grad_by_freq
        return _looked_up(index, weight, F.embedding)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (index,) = grads, ctx.saved_tensors
        if torch.is_grad_enabled():  # PyTorch's formula is differentiable, and ours is not
            given = grad, index, *ctx.constants
            return None, outliving_indices(OPS["embedding_backward"], given, {}), None, None
        return None, operators["embedding_backward"](grad, index, *ctx.constants), None, None


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
        InvalidType: input or values is no tensor, or indices no tuple or list.
        IndexOutOfRange: a position is out of range.
    """
    _refuse_others("index_put", "a Tensor", Tensor, input=input, values=values)
    if _is_any_autocast_enabled() and values.dtype == input.dtype:  # which changes nothing
        with torch._C._DisableAutocast():
            return index_put(input, indices, values, accumulate)
    indices = _positions(input, indices)
    shape = _common_shape(input, indices, values)
    if shape is None:
        return _by_pytorch(torch.index_put, input, indices, values, accumulate)
    x = input.contiguous()
    out = _moved(x, indices, values, shape, accumulate, "").view(input.shape)
    return out if x is input else torch.empty_like(input).copy_(out)


def index_put_(
    input: Tensor, indices: Sequence[Tensor], values: Tensor, accumulate: bool = False
) -> Tensor:
    """`index_put` that writes to input and returns it.

    Raises:
        SharedMemory: input has memory of values or of an index, too.
    """
    _refuse_others("index_put_", "a Tensor", Tensor, input=input, values=values)
    if _is_any_autocast_enabled() and values.dtype == input.dtype:
        with torch._C._DisableAutocast():
            return index_put_(input, indices, values, accumulate)
    indices = _positions(input, indices)
    shape = _common_shape(input, indices, values)
    if shape is None:
        return _by_pytorch(Tensor.index_put_, input, indices, values, accumulate)
    named = {f"indices[{d}]": index for d, index in enumerate(indices)}
    refuse_shared("index_put_", "input", input, values=values, **named)
    differentiable = torch.is_grad_enabled() and (input.requires_grad or values.requires_grad)
    if differentiable or not (input.is_contiguous() or len(indices) == 1):
        return input.copy_(index_put(input, indices, values, accumulate))
    _moved(input, indices, values, shape, accumulate, "_")
    return input


def _positions(x: Tensor, indices: Sequence[Tensor]) -> Sequence[Tensor]:
    """Of a mask beside other indices its positions, as PyTorch finds them, on a GPU by waiting; a
    mask alone names no place twice, and is PyTorch's, as is one of another shape than x has."""
    if isinstance(indices, Tensor):
        raise InvalidType("index_put: indices is one Tensor, expected a tuple: (indices,)")
    _refuse_others("index_put", "a tuple of Tensors", (tuple, list), indices=indices)
    for d, index in enumerate(indices):
        _refuse_others("index_put", "a Tensor", Tensor, **{f"indices[{d}]": index})
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


def _by_pytorch(
    put: Callable[..., Tensor],
    x: Tensor,
    indices: Sequence[Tensor],
    values: Tensor,
    accumulate: bool,
) -> Tensor:
    """torch.index_put or its in-place form; on a GPU a position that is out of range in a dim is
    left out, and a later call tells."""
    if (
        not OPS["scatter"].outlives_indices(x.device.type)
        or not x.numel()
        or _is_traced(x, values, *indices)
        or any(i.device != x.device and i.dim() for i in indices)
    ):
        return put(x, tuple(indices), values, accumulate)
    dims: dict[int, int] = {}
    """Of the positions, by the place of their tensor."""
    dim = 0
    for place, index in enumerate(indices):
        if index.dtype in POSITIONS:
            dims[place] = dim
        dim += index.dim() if index.dtype in (torch.bool, torch.uint8) else 1
    try:
        given = torch.broadcast_tensors(*(indices[place] for place in dims))
    except RuntimeError:
        given = ()
    if not given or dim > x.dim():  # masks alone, or wrong as PyTorch says in its words
        return put(x, tuple(indices), values, accumulate)
    sizes = [x.shape[d] for d in dims.values()]
    outsides = [outside_both_ways(i, n) for i, n in zip(given, sizes, strict=True)]
    skipped = functools.reduce(torch.logical_or, outsides)
    reported(skipped)
    safe, (first, *_) = [*indices], dims
    for place, index, size in zip(dims, given, sizes, strict=True):
        safe[place] = beyond(from_front(index, size), skipped, size if place == first else 0)
    room = with_room(x, dims[first])
    out = torch.index_put(room, tuple(safe), values, accumulate)
    out = out.narrow(dims[first], 0, sizes[0])
    return x.copy_(out) if put is Tensor.index_put_ else torch.empty_like(x).copy_(out)


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
        far = index[outside_both_ways(index, size)]
        if far.numel():
            raise IndexOutOfRange(
                f"index_put: index {int(far[0])} is out of range for dim {dim} of size {size}; "
                "nothing was written"
            ) from None


def _common_shape(x: Tensor, indices: Sequence[Tensor], values: Tensor) -> torch.Size | None:
    """Of the index tensors; None for calls that PyTorch answers, the wrong ones among them."""
    if (
        not 0 < len(indices) <= x.dim()
        or not all(isinstance(i, Tensor) and i.dtype in POSITIONS for i in indices)
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
        return from_front(indices[0], sizes[0])
    total: Tensor | int = 0
    valid: Tensor | bool = True
    for index, size in zip(indices, sizes, strict=True):
        valid = ~outside_both_ways(index, size) & valid
        total = total * size + from_front(index, size).long()
    assert isinstance(total, Tensor)
    assert isinstance(valid, Tensor)
    return torch.where(valid, total, -1)
