"""`tw.index_put`: PyTorch's function over rows that the operators copy and add.

It is no operator of its own: several index tensors are brought down to one flat index of rows,
which `tw.scatter` copies and `tw.index_add` adds, of the implementation that the records speak for.
Below torch.compile it is one opaque node, `torch.ops.tilewright.index_put`: PyTorch's function, and
what compilers make of it, leave open which of several writes to one place wins.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import (
    _are_functorch_transforms_active,
    _is_any_autocast_enabled,
    _len_torch_dispatch_stack,
)
from torch.compiler import is_dynamo_compiling
from torch.jit import is_tracing

from tilewright.dispatch.call import operators
from tilewright.dispatch.indices.flat_index import flat_index
from tilewright.dispatch.indices.gradients import Moved
from tilewright.dispatch.plain_calls import (
    any_without_memory,
    is_transformed,
    refuse_on_meta,
    refuse_others,
    under_a_default_device,
)
from tilewright.errors import IndexOutOfRange, InvalidArgument, InvalidType
from tilewright.impls._in_place import refuse_shared
from tilewright.impls.indices._any_index import (
    POSITIONS,
    beyond,
    from_front,
    outside,
    outside_both_ways,
    reported,
    with_room,
)
from tilewright.op import OPS
from tilewright.ops._indexing import NUMBERS
from tilewright.tensor_spec import DTYPE_NAMES

MASKS = (torch.bool, torch.uint8)


def index_put(
    input: Tensor, indices: Sequence[Tensor], values: Tensor, accumulate: bool = False
) -> Tensor:
    """What torch.index_put computes: a copy of input with input[indices] = values, or += values.

    Several index tensors become one flat index of rows, without a wait for the GPU; the rest is
    `tw.scatter`'s or `tw.index_add`'s, gradients included. So values are copied in index order,
    where the last of an index that repeats wins, and added with the same bits in every run, also
    below torch.compile. A mask alone, which names no place twice, is PyTorch's, and so are, with
    the order that it leaves open, calls under autocast that casts and transformed ones.

    Args:
        input: any shape and dtype.
        indices: for each of the leading dims a tensor of positions, int64 or int32, or for several
            of them a mask, bool or uint8, that broadcast with one another; negative ones count from
            the end.
        values: dtype of input; broadcasts to the shape of the indices and of the dims without one.
        accumulate: add the values.

    Returns:
        The shape, dtype and strides of input.

    Raises:
        InvalidType: input or values is no tensor, or indices no tuple or list.
        IndexOutOfRange: a position is out of range.
    """
    return _in_form("index_put", _put, torch.index_put, input, indices, values, accumulate)


def index_put_(
    input: Tensor, indices: Sequence[Tensor], values: Tensor, accumulate: bool = False
) -> Tensor:
    """`index_put` that writes to input and returns it.

    Raises:
        SharedMemory: input has memory of values or of an index, too.
    """
    return _in_form("index_put_", _put_, Tensor.index_put_, input, indices, values, accumulate)


def _in_form(
    name: str,
    put: Callable[..., Tensor],
    pytorchs: Callable[..., Tensor],
    x: Tensor,
    indices: Sequence[Tensor],
    values: Tensor,
    accumulate: bool,
) -> Tensor:
    refuse_others(name, "a Tensor", Tensor, input=x, values=values)
    if isinstance(indices, Tensor):
        raise InvalidType(f"{name}: indices is one Tensor, expected a tuple: (indices,)")
    refuse_others(name, "a tuple of Tensors", (tuple, list), indices=indices)
    if not indices:
        raise InvalidArgument(
            f"{name}: indices is empty; give an index tensor for one dim at least"
        )
    for d, index in enumerate(indices):
        refuse_others(name, "a Tensor", Tensor, **{f"indices[{d}]": index})
    refuse_others(name, "a bool", bool, accumulate=accumulate)
    if is_dynamo_compiling():
        if is_transformed(x, values, *indices):
            return pytorchs(x, tuple(indices), values, accumulate)
        out = torch.ops.tilewright.index_put(x, list(indices), values, accumulate)
        return x.copy_(out) if put is _put_ else out
    if under_a_default_device():
        with torch._C.DisableTorchFunction():
            return _in_form(name, put, pytorchs, x, indices, values, accumulate)
    if _is_any_autocast_enabled() and values.dtype == x.dtype:  # which changes nothing
        with torch._C._DisableAutocast():
            return _in_form(name, put, pytorchs, x, indices, values, accumulate)
    others = is_transformed(x, values, *indices) or any_without_memory((x, values, *indices))
    if others or is_tracing() or _is_any_autocast_enabled():
        read = {f"indices[{d}]": index for d, index in enumerate(indices)}
        refuse_on_meta(name, {"input": x, **read, "values": values})
        return pytorchs(x, tuple(indices), values, accumulate)
    indices = _positions(x, indices)
    shape = _common_shape(x, indices, values)
    if shape is None:
        return _by_pytorch(pytorchs, x, indices, values, accumulate)
    if x.dtype.is_complex or DTYPE_NAMES.get(x.dtype) in NUMBERS:
        return put(x, indices, values, shape, accumulate)
    if not (accumulate or values.requires_grad):
        values = _of_the_last(x, indices, values, shape)
    return _by_pytorch(pytorchs, x, indices, values, accumulate)


def _put(
    x: Tensor, indices: Sequence[Tensor], values: Tensor, shape: torch.Size, accumulate: bool
) -> Tensor:
    if x.dtype.is_complex:
        parts = torch.view_as_real(x.resolve_conj()), torch.view_as_real(values.resolve_conj())
        return torch.view_as_complex(_put(parts[0], indices, parts[1], shape, accumulate))
    out = _placed(x, indices, values, shape, accumulate)
    return out if x.is_contiguous() else torch.empty_like(x).copy_(out)


def _put_(
    x: Tensor, indices: Sequence[Tensor], values: Tensor, shape: torch.Size, accumulate: bool
) -> Tensor:
    if any(n > 1 and not s for n, s in zip(x.shape, x.stride(), strict=True)):
        return _by_pytorch(Tensor.index_put_, x, indices, values, accumulate)  # which warns
    if x.is_conj() or _is_recorded(x, values):
        return x.copy_(_put(x, indices, values, shape, accumulate))
    if x.dtype.is_complex:
        parts = torch.view_as_real(x), torch.view_as_real(values.resolve_conj())
        _put_(parts[0], indices, parts[1], shape, accumulate)
        return x
    named = {f"indices[{d}]": index for d, index in enumerate(indices)}
    refuse_shared("index_put_", "input", x, values=values, **named)
    if not (x.is_contiguous() or len(indices) == 1):
        return x.copy_(_placed(x, indices, values, shape, accumulate))
    _moved(x, indices, values, shape, accumulate, "_")
    return x


def _placed(
    x: Tensor, indices: Sequence[Tensor], values: Tensor, shape: torch.Size, accumulate: bool
) -> Tensor:
    """The result, contiguous; of a copy of x in place of that."""
    table = x.contiguous()
    form = "" if table is x or _is_recorded(x, values) else "_"
    return _moved(table, indices, values, shape, accumulate, form).view(x.shape)


def _is_recorded(x: Tensor, values: Tensor) -> bool:
    """Whether a gradient is."""
    return torch.is_grad_enabled() and (x.requires_grad or values.requires_grad)


def _positions(x: Tensor, indices: Sequence[Tensor]) -> Sequence[Tensor]:
    """The indices on x's device; of masks beside other indices their positions, as PyTorch finds
    them, on a GPU by waiting. A mask alone names no place twice, and is PyTorch's, as is one of
    another shape than x has."""
    if x.is_cuda:
        indices = [i.to(x.device) if i.device.type == "cpu" else i for i in indices]
    if len(indices) < 2 or not any(i.dtype in MASKS for i in indices):
        return indices
    found: list[Tensor] = []
    for i in indices:
        if i.dtype not in MASKS:
            found.append(i)
        elif i.shape == x.shape[len(found) : len(found) + i.dim()]:
            found += i.nonzero().unbind(1)
        else:
            return indices
    return found


def _of_the_last(x: Tensor, indices: Sequence[Tensor], values: Tensor, shape: torch.Size) -> Tensor:
    """Values of which each position has those of the last one of its place: in whatever order they
    are written, they leave what the order of positions leaves."""
    sizes, rest = x.shape[: len(indices)], x.shape[len(indices) :]
    if values.dim() <= len(rest):  # the same for all
        return values
    places = math.prod(sizes)
    flat = flat_index(indices, sizes, shape)
    skipped = outside(flat, places)
    place = beyond(flat, skipped, places).long()
    position = torch.arange(len(flat), device=x.device)
    last = position.new_zeros(places + 1).scatter_reduce_(0, place, position, "amax")
    rows = values.expand((*shape, *rest)).reshape(len(flat), *rest)
    return rows[last[place]].view((*shape, *rest))


def _by_pytorch(
    put: Callable[..., Tensor],
    x: Tensor,
    indices: Sequence[Tensor],
    values: Tensor,
    accumulate: bool,
) -> Tensor:
    """torch.index_put or its in-place form; on a GPU a position that is out of range in a dim is
    left out, and a later call tells."""
    if not OPS["scatter"].outlives_indices(x.device.type):
        return _checked(put, x, indices, values, accumulate)
    if not x.numel() or any(i.device != x.device and i.dim() for i in indices):
        return put(x, tuple(indices), values, accumulate)
    dims: dict[int, int] = {}
    """Of the positions, by the place of their tensor."""
    dim = 0
    for place, index in enumerate(indices):
        if index.dtype in POSITIONS:
            dims[place] = dim
        dim += index.dim() if index.dtype in MASKS else 1
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


def _checked(put: Callable[..., Tensor], x: Tensor, indices: Sequence[Tensor], *how: Any) -> Tensor:
    """PyTorch's kernels on a CPU find an index out of range on the way."""
    if x.device.type != "cpu":
        return put(x, tuple(indices), *how)
    if put is Tensor.index_put_ and x.numel():
        _refuse_far_indices(x, indices)
    try:
        return put(x, tuple(indices), *how)
    except IndexError:
        _refuse_far_indices(x, indices)
        raise


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
    except (IndexError, RuntimeError):
        if x.device.type == "cpu":  # on a GPU it may be another call's
            _refuse_far_indices(x, indices)
        raise


def _move(table: Tensor, flat: Tensor, rows: Tensor, accumulate: bool, form: str) -> Tensor:
    if accumulate:
        if _is_recorded(table, rows):  # torch.index_add would keep its source
            out: Tensor = Moved.apply(OPS["index_add"], operators, table, 0, flat, rows, 1)
            return out
        return operators[f"index_add{form}"](table, 0, flat, rows)
    index = flat.view(-1, *[1] * (rows.dim() - 1)).expand(rows.shape)
    return operators[f"scatter{form}"](table, 0, index, rows)


def _refuse_far_indices(x: Tensor, indices: Sequence[Tensor]) -> None:
    """In the caller's terms: flat positions are ours."""
    for dim, (index, size) in enumerate(zip(indices, x.shape, strict=False)):
        if index.dtype not in POSITIONS:
            return  # a mask takes as many dims as it has
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
        or not all(i.dtype in POSITIONS for i in indices)
        or values.dtype != x.dtype
        or not x.numel()
        or any(t.device != x.device for t in (*indices, values))
    ):
        return None
    return _broadcast(x.shape[len(indices) :], values.shape, *(i.shape for i in indices))


@functools.lru_cache(maxsize=4096)
def _broadcast(rest: torch.Size, values: torch.Size, *indices: torch.Size) -> torch.Size | None:
    """What indices broadcast to, if values broadcast to that and the rest of x: remembered, since
    torch.broadcast_shapes takes longer than a small copy, 15 us."""
    try:
        shape = torch.broadcast_shapes(*indices)
        whole = (*shape, *rest)
        return shape if torch.broadcast_shapes(values, whole) == whole else None
    except RuntimeError:  # they do not, which PyTorch says in its words
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
    flat = flat_index(indices, sizes, shape)
    table = x
    if x.is_contiguous():
        table = x.view(math.prod(sizes), *([math.prod(rest)] if rest else []))
    if values.dim() <= len(rest):  # the same row for all
        row = values.expand(rest).contiguous().view(table.shape[1:])
        return table, flat, row.expand(flat.numel(), *row.shape)
    rows = values.expand((*shape, *rest)).reshape(flat.numel(), *table.shape[1:])
    return table, flat, rows


# --- below torch.compile -------------------------------------------------------------------------


class _Put(torch.autograd.Function):
    """The opaque node where a gradient is traced; the formulas are PyTorch's (derivatives.yaml)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, accumulate: bool, *indices: Tensor) -> Tensor:
        ctx.save_for_backward(*indices)
        ctx.accumulate, ctx.shape = accumulate, values.shape
        with torch._C._AutoDispatchBelowAutograd():
            out: Tensor = torch.ops.tilewright.index_put(x, indices, values, accumulate)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), indices = grads, ctx.saved_tensors
        of_x = of_values = None
        if ctx.needs_input_grad[0]:
            zero = grad.new_zeros(())
            of_x = grad if ctx.accumulate else torch.index_put(grad, indices, zero)
        if ctx.needs_input_grad[1]:
            of_values = torch.ops.aten.index(grad, indices).sum_to_size(ctx.shape)
        return of_x, of_values, None, *(None for _ in indices)


def _above_autograd(x: Tensor, indices: list[Tensor], values: Tensor, accumulate: bool) -> Tensor:
    if not (_len_torch_dispatch_stack() or _are_functorch_transforms_active()):
        return index_put(x, indices, values, accumulate)
    out: Tensor = _Put.apply(x, values, accumulate, *indices)
    return out


def _below_autograd(x: Tensor, indices: list[Tensor], values: Tensor, accumulate: bool) -> Tensor:
    with torch.no_grad():
        return index_put(x, indices, values, accumulate)


def _register() -> torch.library.Library:
    """As dispatch/torch_ops.py does it for operators."""
    library = torch.library.Library("tilewright", "FRAGMENT")
    library.define(
        "index_put(Tensor x, Tensor[] indices, Tensor values, bool accumulate) -> Tensor"
    )
    library.impl("index_put", _above_autograd, "Autograd")
    library.impl("index_put", _below_autograd, "CompositeExplicitAutograd")
    torch.library.register_fake(
        "tilewright::index_put", lambda x, *others: torch.empty_like(x), lib=library
    )
    return library


_library = _register()
