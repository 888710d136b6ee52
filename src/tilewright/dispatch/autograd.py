"""Gradients for a forward that PyTorch did not compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active

from tilewright.dispatch.gradients import Way
from tilewright.dispatch.pytorch import as_pytorch, outliving_indices
from tilewright.dispatch.selection import any_forced, as_before
from tilewright.errors import InvalidArgument, NoImplementation
from tilewright.op import OPS, Op


class Recomputed(torch.autograd.Function):
    """Forward by any callable; backward by PyTorch's gradients of the reference, computed anew.

    The reference is run again in the backward, so this is for a forward that was asked for by
    name: a choice that is to save time leaves forward and backward to PyTorch.
    """

    @staticmethod
    def forward(ctx: Any, op: Op, forward: Callable[..., Any], *args: Any) -> Any:
        """`forward(*args)`, without a graph; `args` are the reference's, in its order."""
        ctx.op = op
        ctx.set_materialize_grads(False)
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

    The forward saves what the backward's parameters name: arguments, its outputs, or, where the
    backward takes statistics of rows, what `<name>_forward` returns beside the outputs. An argument
    whose values no gradient follows from is not kept, and may be written to between the two, as in
    PyTorch.
    """

    @staticmethod
    def forward(ctx: Any, op: Op, way: Way, operators: Any, *args: Any) -> Any:
        """`args` are the reference's, in its order; `operators` the public functions by name."""
        backward = way.backward
        assert backward is not None, op.name
        ctx.op, ctx.way, ctx.operators = op, way, operators
        ctx.set_materialize_grads(False)
        ctx.asked = any_forced()
        found = operators[f"{op.name}_forward" if backward.wide else op.name](*args)
        outs = found if isinstance(found, tuple) else (found,)
        named = dict(zip((*op.returns, *backward.wide), outs, strict=False))
        if backward.wide:
            outs = outs[: len(op.returns)]
            found = outs[0] if len(outs) == 1 else outs
        ctx.names = list(op.parameters)[: len(args)]
        ctx.extra = [n for n in named if n in backward.parameters and n not in op.parameters]
        extra = [named[n] for n in ctx.extra]
        # Gradients of gradients follow from the arguments that statistics were computed from.
        read = frozenset(ctx.names) if backward.wide else way.reads
        tensors = {n: a for n, a in zip(ctx.names, args, strict=True) if isinstance(a, Tensor)}
        ctx.unread = {n: _Layout.of(a) for n, a in tensors.items() if n not in read}
        ctx.constants = {n: a for n, a in zip(ctx.names, args, strict=True) if n not in tensors}
        ctx.save_for_backward(*(a for n, a in tensors.items() if n in read), *extra)
        ctx.shapes = [o.shape for o in outs]
        ctx.strides = [o.stride() for o in outs]
        ctx.dtypes = [o.dtype for o in outs]
        if not all(dtype.is_floating_point for dtype in ctx.dtypes):
            ctx.mark_non_differentiable(*(o for o in outs if not o.is_floating_point()))
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients by the operator; where they are differentiated again, PyTorch's."""
        way, backward = ctx.way, ctx.way.backward
        # A backward that reads results alone is differentiated itself, through their own graph.
        of_results = bool(ctx.extra) and not backward.wide
        by_reference = (torch.is_grad_enabled() and not of_results) or _fused_anew(backward)
        saved = iter(ctx.saved_tensors)
        args = []
        for n in ctx.names:
            if n in ctx.constants:
                args.append(ctx.constants[n])
            elif n not in ctx.unread:
                args.append(next(saved))
            else:
                taken = by_reference or n in backward.parameters
                args.append(ctx.unread[n].empty() if taken else None)
        reached = ctx.names if way.reach is None else way.reach.of(grads)
        needed = zip(ctx.names, ctx.needs_input_grad[3:], strict=True)
        wanted = [i for i, (name, needs) in enumerate(needed) if needs and name in reached]
        if not wanted:
            return (None,) * len(ctx.needs_input_grad)
        if by_reference:
            return (None, None, None, *_reference_gradients(ctx.op, args, wanted, grads))
        given = dict(zip(ctx.names, args, strict=True))
        given.update(zip(ctx.extra, saved, strict=True))
        like = next(t for t in (*grads, *args) if isinstance(t, Tensor))
        floats = [i for i, dtype in enumerate(ctx.dtypes) if dtype.is_floating_point]
        places = [*zip(way.given, floats, strict=True)]
        for output, i in places:
            gradient = grads[i]
            if gradient is None:
                gradient = like.new_zeros(ctx.shapes[i], dtype=ctx.dtypes[i])
            given[output] = gradient
        by_name = {n: given[n] for n in way.given}
        if asked := way.asked(ctx.names[i] for i in wanted):
            call = {n: v for n, v in given.items() if n in backward.parameters}
            if "grads" in backward.parameters:
                call["grads"] = asked
            run = as_before(ctx.asked, ctx.operators[backward.name])
            try:
                found = _differentiated(run, call, {n: ctx.strides[i] for n, i in places})
            except InvalidArgument:
                if not _fused_anew(backward):
                    raise
                return (None, None, None, *_reference_gradients(ctx.op, args, wanted, grads))
            by_name |= zip(asked, found if isinstance(found, tuple) else (found,), strict=True)
        names = {i: ctx.names[i] for i in wanted}
        by_place = {i: by_name[way.same.get(n, n)] for i, n in names.items()}
        return (None, None, None, *(by_place.get(i) for i in range(len(args))))


def _differentiated(
    run: Callable[..., Any], call: dict[str, Any], strides: Mapping[str, Sequence[int]]
) -> Any:
    """`run(**call)`. Gradients whose strides allow no view that the backward takes are copied to
    those of their outputs, for which the forward made sure that there is a kernel."""
    try:
        return run(**call)
    except NoImplementation:
        copies = {
            n: torch.empty_strided(g.shape, strides[n], dtype=g.dtype, device=g.device).copy_(g)
            for n, g in call.items()
            if n in strides
        }
        return run(**{**call, **copies})


def _fused_anew(op: Op) -> bool:
    """Whether another function has taken the operator's name since."""
    return OPS.get(op.name) is not op


@dataclass(frozen=True)
class _Layout:
    """What is kept of an argument whose values no gradient follows from: neither its memory nor
    its history, which gradients of gradients do not follow from either."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, t: Tensor) -> _Layout:
        return cls(t.shape, t.stride(), t.dtype, t.device)

    def empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)


def _reference_gradients(
    op: Op, args: list[Any], wanted: list[int], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Gradients of the arguments at `wanted`, by PyTorch's autograd of the reference, run anew."""
    if _are_functorch_transforms_active():
        return _transformed_gradients(op, args, wanted, grads)
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        for i in wanted:
            # An alias each: the same tensor may have been passed twice.
            args[i] = args[i].view_as(args[i]) if create_graph else args[i].detach()
            args[i].requires_grad_()
        out = outliving_indices(op, args, {})
        pairs = [
            (o, g)
            for o, g in zip(out if isinstance(out, tuple) else (out,), grads, strict=True)
            if g is not None and o.requires_grad
        ]
        if not pairs:
            return [None] * len(args)
        found = torch.autograd.grad(
            [o for o, _ in pairs],
            [args[i] for i in wanted],
            [g for _, g in pairs],
            create_graph=create_graph,
            allow_unused=True,
        )
    by_place = dict(zip(wanted, found, strict=True))
    return [by_place.get(i) for i in range(len(args))]


def _transformed_gradients(
    op: Op, args: list[Any], wanted: list[int], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The same inside torch.func's transforms, which refuse torch.autograd.grad."""
    given = [g for g in grads if g is not None and g.is_floating_point()]

    def reference(*tensors: Tensor) -> tuple[Tensor, ...]:
        by_place = dict(zip(wanted, tensors, strict=True))
        out = as_pytorch(op, [by_place.get(i, a) for i, a in enumerate(args)], {})
        pairs = zip(out if isinstance(out, tuple) else (out,), grads, strict=True)
        return tuple(o for o, g in pairs if g is not None and g.is_floating_point())

    pull = torch.func.vjp(reference, *(args[i] for i in wanted))[1]
    by_place = dict(zip(wanted, pull(tuple(given)), strict=True))
    return [by_place.get(i) for i in range(len(args))]
