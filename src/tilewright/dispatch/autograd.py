"""Gradients for a forward that PyTorch did not compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch.pytorch import as_pytorch
from tilewright.op import Op


class Recomputed(torch.autograd.Function):
    """Forward by any callable; backward by PyTorch's gradients of the reference, computed anew.

    The reference is run again in the backward, so this is for a forward that was asked for by
    name: a choice that is to save time leaves forward and backward to PyTorch.
    """

    @staticmethod
    def forward(ctx: Any, op: Op, forward: Callable[..., Any], *args: Any) -> Any:
        """`forward(*args)`, without a graph; `args` are the reference's, in its order."""
        ctx.op = op
        ctx.save_for_backward(*(a for a in args if isinstance(a, Tensor)))
        ctx.constants = [None if isinstance(a, Tensor) else (a,) for a in args]
        return forward(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of the arguments; differentiable, since the reference's graph is PyTorch's."""
        saved = iter(ctx.saved_tensors)
        args = [next(saved) if constant is None else constant[0] for constant in ctx.constants]
        create_graph = torch.is_grad_enabled()
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[2:]) if needed]
        with torch.enable_grad():
            for i in wanted:
                # An alias each: the same tensor may have been passed twice.
                args[i] = args[i].view_as(args[i]) if create_graph else args[i].detach()
                args[i].requires_grad_()
            out = as_pytorch(ctx.op, args, {})
            pairs = [
                (o, g)
                for o, g in zip(out if isinstance(out, tuple) else (out,), grads, strict=True)
                if g is not None
            ]
            found = torch.autograd.grad(
                [o for o, _ in pairs],
                [args[i] for i in wanted],
                [g for _, g in pairs],
                create_graph=create_graph,
                allow_unused=True,
            )
        by_place = dict(zip(wanted, found, strict=True))
        return (None, None, *(by_place.get(i) for i in range(len(args))))
