"""PyTorch's own result for an operator: what `aten`, `inductor` and every fallback call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tilewright.op import Op, Workload, roundings_to

Result = torch.Tensor | tuple[torch.Tensor, ...]


def call_reference(op: Op, args: Mapping[str, Any]) -> Result:
    """The reference on real tensors, differentiable, in the dtypes that were given.

    Halves beside wider parameters are computed in the wider type and rounded at the end to the
    dtype of the first tensor, as autocast does: PyTorch's CUDA kernels refuse the mix.
    """
    floating = {
        n: v for n, v in args.items() if isinstance(v, torch.Tensor) and v.is_floating_point()
    }
    dtypes = {t.dtype for t in floating.values()}
    if len(dtypes) < 2:
        return op.reference(**args)
    main = next(iter(floating.values())).dtype
    wide = max(dtypes, key=lambda dtype: dtype.itemsize)
    tracing = torch.compiler.is_dynamo_compiling()
    with contextlib.nullcontext() if tracing else roundings_to(main):
        out = op.reference(**{**args, **{n: t.to(wide) for n, t in floating.items()}})
    if isinstance(out, torch.Tensor):
        return _narrowed(out, main)
    return tuple(_narrowed(o, main) for o in out)


def _narrowed(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return t.to(dtype) if t.is_floating_point() else t


def in_form(w: Workload) -> Callable[..., Any]:
    """The reference, or its in-place form where the workload donates the first tensor."""
    op = w.operator
    return op.inplace if op.inplace and next(iter(w.tensors)) in w.donated else op.reference


def vendor(w: Workload) -> Callable[..., Result]:
    """A function of the workload's tensors, in their order, that gives PyTorch's result."""
    op, names, constants = w.operator, tuple(w.tensors), dict(w.args)
    floating = {s.dtype for s in w.tensors.values() if s.torch_dtype.is_floating_point}
    if len(floating) > 1:
        return lambda *tensors: call_reference(
            op, {**constants, **dict(zip(names, tensors, strict=True))}
        )
    reference, values = in_form(w), list(constants.values())
    slots = [i for i, name in enumerate(constants) if name in w.tensors]

    def run(*tensors: torch.Tensor) -> Result:
        args = values.copy()
        for i, t in zip(slots, tensors, strict=True):
            args[i] = t
        return reference(*args)

    return run
