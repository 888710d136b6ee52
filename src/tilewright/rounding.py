"""Roundings that are written into an operator's reference."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import torch

_tracing_roundings: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "roundings", default=False
)
_rounding_dtype: contextvars.ContextVar[torch.dtype | None] = contextvars.ContextVar(
    "rounding_dtype", default=None
)
_library = torch.library.Library("tilewright", "FRAGMENT")
_library.define("rounded(Tensor t) -> Tensor")
_library.impl("rounded", lambda t: t.clone(), "CompositeExplicitAutograd")


class _Rounded(torch.autograd.Function):
    """A value that was rounded gets a rounded gradient, as PyTorch's casts have it."""

    @staticmethod
    def forward(t: torch.Tensor) -> torch.Tensor:
        return torch.ops.tilewright.rounded(t)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return _Rounded.apply(gradient)


def rounded(t: torch.Tensor) -> torch.Tensor:
    """Mark a rounding that the program wrote: to the dtype of the operator's first tensor.

    Eagerly it is the identity, since PyTorch rounds after each operator; so it is in the fp64
    truth and under torch.compile. In a trace, where halves are computed in fp32, it becomes a
    cast node; inside `roundings_to` it rounds.
    """
    if torch.compiler.is_dynamo_compiling():
        return t
    if _tracing_roundings.get():
        return _Rounded.apply(t)
    dtype = _rounding_dtype.get()
    return t if dtype is None else t.to(dtype).to(t.dtype)


@contextlib.contextmanager
def roundings_to(dtype: torch.dtype) -> Iterator[None]:
    """Inside, `rounded` rounds to `dtype`: for a half operator that runs on widened tensors."""
    token = _rounding_dtype.set(dtype)
    try:
        yield
    finally:
        _rounding_dtype.reset(token)


@contextlib.contextmanager
def traced_roundings() -> Iterator[None]:
    """Inside, `rounded` leaves a `tilewright.rounded` node in the trace."""
    token = _tracing_roundings.set(True)
    try:
        yield
    finally:
        _tracing_roundings.reset(token)


@torch.library.impl(_library, "rounded", "Meta")
def _rounded_meta(t: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(t)
