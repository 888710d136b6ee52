"""Gradients for a forward that PyTorch did not compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[2:]) if needed]
        return (None, None, *_reference_gradients(ctx.op, args, wanted, grads))


class Generated(torch.autograd.Function):
    """Forward and backward by operators of ours: `<name>_backward` has what autograd derives.

    The forward saves what the backward's parameters name: arguments, its output, or, where the
    backward takes statistics of rows, what `<name>_forward` returns beside the output.
    """

    @staticmethod
    def forward(ctx: Any, op: Op, backward: Op, operators: Any, *args: Any) -> Any:
        """`args` are the reference's, in its order; `operators` the public functions by name."""
        ctx.op, ctx.backward_op, ctx.operators = op, backward, operators
        if backward.wide:
            out, *statistics = operators[f"{op.name}_forward"](*args)
        else:
            out, statistics = operators[op.name](*args), []
        ctx.names = list(op.parameters)[: len(args)]
        ctx.constants = [None if isinstance(a, Tensor) else (a,) for a in args]
        ctx.extra = [n for n in ("output", *backward.wide) if n in backward.parameters]
        extra = [out, *statistics] if "output" in ctx.extra else statistics
        ctx.save_for_backward(*(a for a in args if isinstance(a, Tensor)), *extra)
        ctx.shapes = [o.shape for o in (out if isinstance(out, tuple) else (out,))]
        floats = [o.is_floating_point() for o in (out if isinstance(out, tuple) else (out,))]
        ctx.floats = floats
        if not all(floats):
            ctx.mark_non_differentiable(*(o for o, f in zip(out, floats, strict=True) if not f))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients by the operator; where they are differentiated again, PyTorch's."""
        saved = iter(ctx.saved_tensors)
        args = [next(saved) if constant is None else constant[0] for constant in ctx.constants]
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[3:]) if needed]
        if torch.is_grad_enabled():
            return (None, None, None, *_reference_gradients(ctx.op, args, wanted, grads))
        given = dict(zip(ctx.names, args, strict=True))
        given.update(zip(ctx.extra, saved, strict=True))
        like = next(a for a in args if isinstance(a, Tensor) and a.is_floating_point())
        floats = [i for i, is_float in enumerate(ctx.floats) if is_float]
        names = [n for n in ctx.backward_op.parameters if n.startswith("grad_output")]
        for name, i in zip(names, floats, strict=True):
            gradient = grads[i]
            given[name] = like.new_zeros(ctx.shapes[i]) if gradient is None else gradient
        call = {n: v for n, v in given.items() if n in ctx.backward_op.parameters}
        if "grads" in ctx.backward_op.parameters:
            call["grads"] = tuple(ctx.names[i] for i in wanted)
        found = ctx.operators[ctx.backward_op.name](**call)
        by_place = dict(zip(wanted, found if isinstance(found, tuple) else (found,), strict=True))
        return (None, None, None, *(by_place.get(i) for i in range(len(args))))


def _reference_gradients(
    op: Op, args: list[Any], wanted: list[int], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Gradients of the arguments at `wanted`, by PyTorch's autograd of the reference, run anew."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        for i in wanted:
            # An alias each: the same tensor may have been passed twice.
            args[i] = args[i].view_as(args[i]) if create_graph else args[i].detach()
            args[i].requires_grad_()
        out = as_pytorch(op, args, {})
        pairs = [
            (o, g)
            for o, g in zip(out if isinstance(out, tuple) else (out,), grads, strict=True)
            if g is not None and o.requires_grad
        ]
        found = torch.autograd.grad(
            [o for o, _ in pairs],
            [args[i] for i in wanted],
            [g for _, g in pairs],
            create_graph=create_graph,
            allow_unused=True,
        )
    by_place = dict(zip(wanted, found, strict=True))
    return [by_place.get(i) for i in range(len(args))]
