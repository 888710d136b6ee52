"""`tw.embedding`: PyTorch's function over rows that the operators read and add.

It is no operator of its own: the gradient of the table is `tw.embedding_backward`'s.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from numbers import Integral, Real
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tilewright.dispatch.call import operators
from tilewright.dispatch.indices.gradients import run_beside
from tilewright.dispatch.plain_calls import (
    any_without_memory,
    is_traced,
    refuse_on_meta,
    refuse_others,
    under_a_default_device,
)
from tilewright.dispatch.pytorch import outliving_indices
from tilewright.errors import InvalidArgument
from tilewright.impls.indices._any_index import POSITIONS, beyond, outside, reported, with_room
from tilewright.op import OPS
from tilewright.ops._indexing import NUMBERS, refuse_out_of_range
from tilewright.tensor_spec import DTYPE_NAMES

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
    if under_a_default_device():
        with torch._C.DisableTorchFunction():
            return embedding(input, weight, *given)
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
        or is_traced(input, weight)
    ):
        refuse_on_meta("embedding", {"weight": weight, "input": input})
        return run(input, weight, max_norm=max_norm)
    rows = weight.shape[0]
    if padding_idx is not None and padding_idx and not -rows <= padding_idx < rows:
        raise InvalidArgument(
            f"embedding: padding_idx={padding_idx} is out of range for {rows} rows"
        )
    if max_norm is not None:
        _renormalise(input, weight.detach(), max_norm, norm_type)
    wanted = torch.is_grad_enabled() and weight.requires_grad
    ours = not sparse and DTYPE_NAMES.get(weight.dtype) in NUMBERS
    if wanted and ours and not any_without_memory((input, weight)):
        skipped = -1 if padding_idx is None else padding_idx % max(rows, 1)
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
    refuse = functools.partial(refuse_others, "embedding")
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
        try:
            return run(index, weight)
        except (IndexError, RuntimeError):  # the latter of rows without columns
            if index.device.type == "cpu" and not any_without_memory([index]):
                refuse_out_of_range("embedding", index, len(weight))
            raise
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
