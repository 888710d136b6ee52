"""What the operators with an index tensor share: checks, example inputs, the exact result.

Two kinds. Elementwise: `index` has the rank of x, each of its elements sends one element of src
(scatter, scatter_add, scatter_reduce, gather). Rows: a flat `index` sends whole slices of src
(index_add, index_reduce, embedding_backward).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active

from tilewright.errors import IndexOutOfRange, InvalidArgument, InvalidDim, known_names
from tilewright.examples import random_tensors
from tilewright.indexed import Terms, draw, expected_distinct
from tilewright.op import Workload
from tilewright.signature import Value
from tilewright.tensor_spec import TensorSpec

NUMBERS = ("f16", "bf16", "f32", "f64", "i32", "i64")
ELEMENTWISE = ("scatter", "scatter_add", "scatter_reduce", "gather")
REDUCTIONS = ("sum", "prod", "mean", "amax", "amin")


# --- checks ------------------------------------------------------------------------------------


def check_tensors(op: str, args: dict[str, Value], x: str, src: str | None) -> None:
    """dtypes of x, src and index, as PyTorch has them."""
    if args[x].dtype not in NUMBERS:
        raise InvalidArgument(f"{op}: {x} is {args[x].dtype}, expected one of {', '.join(NUMBERS)}")
    empty = op in ELEMENTWISE and not args["index"].numel  # of any dtype in PyTorch, too
    if args["index"].dtype not in ("i32", "i64") and not empty:
        raise InvalidArgument(
            f"{op}: index is {args['index'].dtype}, expected i64 or i32; convert it: index.long()"
        )
    if src and isinstance(args[src], TensorSpec) and args[src].dtype != args[x].dtype:
        raise InvalidArgument(
            f"{op}: {src} is {args[src].dtype}, but {x} is {args[x].dtype}; convert one of them"
        )


def check_dim(op: str, dim: int, rank: int) -> int:
    """The dim counted from the front."""
    if not -max(rank, 1) <= dim < max(rank, 1):
        raise InvalidDim(
            f"{op}: dim={dim} is out of range for x of rank {rank}: "
            f"use {-max(rank, 1)} to {max(rank, 1) - 1}"
        )
    return dim % max(rank, 1)


def number(op: str, name: str, value: float, x: TensorSpec) -> float:
    """A float; but beside integers a whole number that may equal none stays what it is.

    Raises:
        InvalidArgument: no float holds it, or x's dtype does not.
    """
    try:
        as_float = float(value)
    except OverflowError:
        raise InvalidArgument(
            f"{op}: {name} is larger than any float; give a smaller number"
        ) from None
    if x.dtype in ("i32", "i64"):
        range_of = torch.iinfo(x.torch_dtype)
        if not range_of.min <= value <= range_of.max:
            raise InvalidArgument(
                f"{op}: {name}={value} is no {x.dtype}, which x is; "
                f"give a whole number from {range_of.min} to {range_of.max}"
            )
    if x.torch_dtype.is_floating_point:
        most = torch.finfo(x.torch_dtype).max
        if most < abs(as_float) < math.inf:
            raise InvalidArgument(
                f"{op}: {name}={value} is no {x.dtype}, which x is; "
                f"give a number from {-most:g} to {most:g}"
            )
    exact = isinstance(value, int) and x.dtype in ("i32", "i64") and abs(value) > 2**53
    return value if exact else as_float


def check_elementwise(op: str, args: dict[str, Value], src: str | None) -> dict[str, Value]:
    """For scatter and its kin; `src` names the tensor of values, None for gather."""
    check_tensors(op, args, "x", src)
    x, index = args["x"], args["index"]
    dim = args["dim"] = check_dim(op, args["dim"], x.rank)
    shapes = {"index": index.shape, "x": x.shape}
    if src and isinstance(args[src], TensorSpec):
        shapes[src] = args[src].shape
    elif src:
        args[src] = number(op, src, args[src], x)
    if index.numel and len({max(len(s), 1) for s in shapes.values()}) > 1:
        told = ", ".join(f"{n} {list(s)}" for n, s in shapes.items())
        raise InvalidArgument(f"{op}: {told} differ in rank; give them the same number of dims")
    if index.numel == 0:
        return args
    for d, n in enumerate(index.shape):
        too_far = [name for name, s in shapes.items() if d < len(s) and n > s[d]]
        for name in too_far:
            if name == src or d != dim:
                also = f", and nowhere larger than {src}" if src else ""
                raise InvalidArgument(
                    f"{op}: index {list(index.shape)} exceeds {name} {list(shapes[name])} in dim "
                    f"{d}; it may be larger than x in dim={dim} only{also}"
                )
    return args


def check_rows(op: str, args: dict[str, Value]) -> dict[str, Value]:
    """For index_add and its kin."""
    check_tensors(op, args, "x", "source")
    x, index, source = args["x"], args["index"], args["source"]
    dim = args["dim"] = check_dim(op, args["dim"], x.rank)
    if index.rank > 1:
        raise InvalidDim(f"{op}: index has shape {list(index.shape)}, expected one dim")
    if not x.rank and (source.rank or index.numel != 1):
        raise InvalidArgument(
            f"{op}: x has no dims, but source has shape {list(source.shape)} and there are "
            f"{index.numel} indices; give one index, and a source of no dims: source.reshape(())"
        )
    wanted = (*x.shape[:dim], index.numel, *x.shape[dim + 1 :]) if x.rank else ()
    if source.shape != wanted:
        raise InvalidArgument(
            f"{op}: source has shape {list(source.shape)}, but x {list(x.shape)} and "
            f"{index.numel} indices along dim={dim} need {list(wanted)}"
        )
    return args


def check_reduction(op: str, args: dict[str, Value], known: Sequence[str]) -> None:
    if args["reduce"] not in known:
        raise InvalidArgument(
            f"{op}: unknown reduce={args['reduce']}; {known_names(args['reduce'], known)}"
        )


def readable(index: Tensor) -> Tensor:
    """The index as PyTorch reads it right: its gather on a CPU, by which gradients go too, takes
    expanded int32 indices for int64 ones (2.13)."""
    if index.dtype != torch.int32 or index.device.type != "cpu" or not _is_expanded(index):
        return index
    return told_once(index).long().expand(index.shape)


def _is_expanded(index: Tensor) -> bool:
    try:
        return 0 in index.stride()
    except RuntimeError:  # sparse and nested tensors have no strides, and PyTorch's words for that
        return False


def columns_of(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """x, or the part of it that PyTorch's sums on a CPU, gather's gradients among them, read the
    index right for: one that is expanded and narrower than x they take for one of all of x (2.13).
    """
    if x.device.type != "cpu" or not _is_expanded(index) or x.dim() != index.dim():
        return x
    dim %= x.dim()
    if x.shape[:dim] == index.shape[:dim] and x.shape[dim + 1 :] == index.shape[dim + 1 :]:
        return x
    return x[tuple(slice(None if d == dim else n) for d, n in enumerate(index.shape))]


def reduced_into(
    run: Callable[..., Any], x: Tensor, dim: int, index: Tensor, *args: Any, **more: Any
) -> Tensor:
    """x, which `run`, PyTorch's scatter_add_ or scatter_reduce_, has written to."""
    run(columns_of(x, dim, index), dim, readable(index), *args, **more)
    return x


def reduced_copy(
    function: Callable[..., Tensor],
    run: Callable[..., Any],
    x: Tensor,
    dim: int,
    index: Tensor,
    *args: Any,
    **more: Any,
) -> Tensor:
    """What `function`, PyTorch's scatter_add or scatter_reduce, gives, by its in-place form `run`
    where it reads the index wrong."""
    if columns_of(x, dim, index) is not x:
        if not _are_functorch_transforms_active():
            copy = x.clone(memory_format=torch.contiguous_format)
            return reduced_into(run, copy, dim, index, *args, **more)
        index = index.contiguous()  # vmap may map it alone, and then no x is written in place
    return function(x, dim, readable(index), *args, **more)


def told_once(index: Tensor) -> Tensor:
    """Without the copies along dims that it is expanded over."""
    for d, stride in enumerate(index.stride()):
        if stride == 0 and index.shape[d]:
            index = index.narrow(d, 0, 1)
    return index


def refuse_out_of_range(op: str, index: Tensor, size: int) -> None:
    """On a GPU this waits to know, so not while its stream is captured.

    Raises:
        IndexOutOfRange: a value is negative, or `size` or more.
    """
    index = told_once(index)
    if index.numel() and not (index.is_cuda and torch.cuda.is_current_stream_capturing()):
        least, most = (int(value) for value in torch.aminmax(index))
        if least < 0 or most >= size:
            raise IndexOutOfRange(
                f"{op}: index {least if least < 0 else most} is out of range for {size} places; "
                f"nothing was {'read' if op in ('gather', 'embedding') else 'written'}"
            )


# --- inputs ------------------------------------------------------------------------------------


def examples(axis: Callable[[Workload], int | None]) -> Callable[..., list[Tensor]]:
    """Random or integer tensors, with indices of the workload's distribution.

    Args:
        axis: the dim of the index along which it is unique, balanced or sorted; None: all of it.
    """

    def make(
        w: Workload, kind: str = "random", seed: int = 0, device: torch.device | str = "cpu"
    ) -> list[Tensor]:
        tensors = random_tensors(w.tensors, kind, seed, device)
        index = tensors["index"]
        if index.numel() == 0:
            return list(tensors.values())
        _, places = _draws(w)
        if places == 0:
            raise InvalidArgument(f"{w}: there is no place that an index could name")
        generator = torch.Generator(device=device).manual_seed(seed + 1_000_003)
        once = told_once(index)
        assert w.distribution is not None
        once.copy_(draw(w.distribution, once.shape, axis(w), places, generator, device))
        return list(tensors.values())

    return make


def hits(w: Workload) -> int:
    """Places that the indices of one draw hit on average."""
    assert w.distribution is not None
    return expected_distinct(w.distribution, *_draws(w))


def _draws(w: Workload) -> tuple[int, int]:
    assert w.operator.indexed is not None
    return w.operator.indexed.draws(w)


def elementwise_draws(w: Workload) -> tuple[int, int]:
    """Of scatter and its kin: the indices along dim, for each position in the other dims."""
    index = w["index"]
    return index.shape[w["dim"]] if index.rank else 1, places_of_x(w)


def rows_draws(w: Workload) -> tuple[int, int]:
    """Of index_add and its kin: all of the flat index."""
    return w["index"].numel, places_of_x(w)


# --- exact results -----------------------------------------------------------------------------


def copies(value: Tensor) -> Terms:
    """Of elements that are copied, not added up."""
    value = value.double() if value.is_floating_point() else value
    ones = torch.ones((), device=value.device)
    return Terms(value, value.abs(), ones.expand(value.shape))


def reduced(
    w: Workload,
    tensors: Sequence[Tensor],
    reduce: str,
    counts: Callable[..., Tensor],
    src: str,
) -> Terms:
    """Of the workload's reference as a reduction of kind `reduce`.

    Args:
        counts: (x, source) -> how many of `source` were added to each element of x, where both
            hold ones or zeros; the reference as a plain sum.
        src: the name of the argument that is brought to x.
    """
    args = w.call(tensors)
    x = args["x"]
    value = w.operator.reference(
        **{n: _wide(t) if isinstance(t, Tensor) else t for n, t in args.items()}
    )
    if reduce in ("amax", "amin") or not x.is_floating_point():
        return copies(value)
    included = args.get("include_self", True)
    count = counts(torch.zeros_like(x, dtype=torch.float64), torch.ones_like(args[src].double()))
    if reduce == "prod":
        return Terms(value, value.abs(), count + 1, product=True)
    kept = x.double().abs() if included else x.double().abs().masked_fill(count > 0, 0.0)
    magnitude = counts(kept, _wide(args[src]).abs() * abs(args.get("alpha", 1.0)))
    if reduce == "mean":
        magnitude = magnitude / (count + included).clamp_min(1)
    return Terms(value, magnitude, count + 1)


def rows_counts(w: Workload, tensors: Sequence[Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """What `reduced` counts the terms of an index_add or index_reduce by."""
    args = w.call(tensors)
    return lambda x, source: torch.index_add(x, args["dim"], args["index"], source)


def last_written(
    x: Tensor,
    dim: int,
    index: Tensor,
    src: Tensor | float,
    skipped: Tensor | None = None,
) -> Tensor:
    """scatter with repeated indices resolved as its definition says: the last position wins.

    Args:
        skipped: bool, of the index's shape: positions that write nothing, whatever place they name.
    """
    if x.dim() == 0:
        x, index = x.reshape(1), index.reshape(1)
        src = src.reshape(1) if isinstance(src, Tensor) else src
        skipped = None if skipped is None else skipped.reshape(1)
        return last_written(x, 0, index, src, skipped).reshape(())
    out = x.clone(memory_format=torch.contiguous_format)  # as torch.scatter lays it out
    if index.numel() == 0 or out.numel() == 0:
        return out
    region = out
    for d, n in enumerate(index.shape):
        region = region if d == dim else region.narrow(d, 0, n)
    line = [1] * x.dim()
    line[dim] = index.shape[dim]
    position = torch.arange(index.shape[dim], device=x.device).view(line).expand(index.shape)
    if skipped is not None:
        position = position.masked_fill(skipped, -1)
    winner = torch.full(region.shape, -1, device=x.device)
    winner.scatter_reduce_(dim, index.long(), position, "amax")
    if isinstance(src, Tensor):
        given = src[tuple(slice(n) for n in index.shape)].gather(dim, winner.clamp_min(0))
    else:
        given = torch.full((), src, dtype=x.dtype, device=x.device)
    region.copy_(torch.where(winner >= 0, given, region))
    return out


def _wide(t: Tensor) -> Tensor:
    return t.double() if t.is_floating_point() else t


# --- batches -----------------------------------------------------------------------------------


def elementwise_batch(w: Workload) -> int:
    """A dim over which x, index and src all run alike, besides the indexed one."""
    shapes = [t.shape for t in w.tensors.values()]
    best = 0
    for d in range(w["x"].rank):
        sizes = {s[d] for s in shapes if len(s) == w["x"].rank}
        if d != w["dim"] and len(sizes) == 1 and w["x"].shape[d] > 1:
            near = d - w["x"].rank
            best = near if not best or w["x"].shape[d] > w["x"].shape[best] else best
    return best


def rows_batch(w: Workload) -> int:
    """The last dim of the rows, unless the flat index is as long and would be cut with them."""
    x = w["x"]
    if w["dim"] == x.rank - 1 or x.rank < 2 or x.shape[-1] in (1, w["index"].numel):
        return 0
    return -1


# --- memory traffic ----------------------------------------------------------------------------


def elementwise_traffic(w: Workload, src: str, reads_old: bool) -> tuple[int, int]:
    """Compulsory bytes of scatter and its kin: x is not read where it is overwritten.

    Args:
        reads_old: what was there is part of the result, so the rest of src is needed too.
    """
    x, index = w["x"], w["index"]
    length, _ = elementwise_draws(w)
    hit = hits(w) * (index.numel // max(length, 1))
    moved = index.numel if reads_old else hit
    read = index.distinct_bytes + (moved * x.itemsize if isinstance(w[src], TensorSpec) else 0)
    if "x" in w.donated:
        return read + (hit * x.itemsize if reads_old else 0), hit * x.itemsize
    return read + (x.numel - (0 if reads_old else hit)) * x.itemsize, x.numel * x.itemsize


def rows_traffic(w: Workload) -> tuple[int, int]:
    """Compulsory bytes of index_add and its kin; in place, only rows that are hit are touched."""
    x, index = w["x"], w["index"]
    read = index.distinct_bytes + w["source"].distinct_bytes
    touched = x.numel
    if "x" in w.donated and x.numel:
        touched = hits(w) * (x.numel // places_of_x(w))
    return read + touched * x.itemsize, touched * x.itemsize


def places_of_x(w: Workload) -> int:
    return w["x"].shape[w["dim"]] if w["x"].rank else 1


def along_dim(w: Workload) -> int | None:
    return w["dim"]
