"""Gradients for a forward that PyTorch did not compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active

from tilewright.dispatch.gradients import Step, Way
from tilewright.dispatch.pytorch import as_pytorch, by_place, outliving_indices
from tilewright.dispatch.seeding import fresh_seed
from tilewright.dispatch.selection import any_forced, as_before
from tilewright.errors import InvalidArgument, NoImplementation
from tilewright.impls._vendor import tracked
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
        ctx.save_for_backward(*(tracked(a) for a in args if isinstance(a, Tensor)))
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
    def forward(ctx: Any, way: Way, operators: Any, *args: Any) -> Any:
        """`args` are the reference's, in its order; `operators` the public functions by name."""
        ctx.way, ctx.operators, ctx.asked = way, operators, any_forced()
        ctx.set_materialize_grads(False)
        found = operators[way.forward](*args)
        way.op.still_itself()  # else another function may have run in its place
        outs = found if isinstance(found, tuple) else (found,)
        kept_outputs = [outs[i] for i in way.kept_outputs.values()]
        if way.wide:
            outs = outs[: len(way.op.returns)]
            found = outs[0] if len(outs) == 1 else outs
        kept = [a if a.requires_grad else tracked(a) for a in map(args.__getitem__, way.kept)]
        ctx.save_for_backward(*kept, *kept_outputs)
        ctx.unread = [_Layout.of(args[i]) for i in way.unread]
        ctx.constants = [*args]
        for i in way.tensor_places:
            ctx.constants[i] = None
        ctx.outs = [_Layout.of(o) for o in outs]
        if without := [o for o in outs if not o.is_floating_point()]:
            ctx.mark_non_differentiable(*without)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients by the operator; where they are differentiated again, PyTorch's."""
        way, backward = ctx.way, ctx.way.backward
        # A backward that reads results alone is differentiated itself, through their own graph.
        of_results = bool(way.kept_outputs) and not way.wide
        by_reference = (torch.is_grad_enabled() and not of_results) or _fused_anew(backward)
        saved, args = ctx.saved_tensors, [*ctx.constants]
        for i, t in zip(way.kept, saved, strict=False):
            args[i] = t
        for i, layout in zip(way.unread, ctx.unread, strict=True):
            if by_reference or way.names[i] in backward.parameters:
                args[i] = layout.without_values()
        step = way.step(ctx.needs_input_grad[2:], tuple([g is not None for g in grads]))
        if not step.wanted:
            return (None,) * len(ctx.needs_input_grad)
        if by_reference:
            return (None, None, *_reference_gradients(way.op, args, step.wanted, grads))
        outs = [ctx.outs[i] for i in way.floats]
        gradients = [grads[i] for i in way.floats]
        if not backward.fused:  # others leave out what follows from an output without a gradient
            gradients = [
                out.zeros() if g is None else g for g, out in zip(gradients, outs, strict=True)
            ]
        found: Any = ()
        if step.asked:
            run = as_before(ctx.asked, ctx.operators[backward.name])
            kept = (*args, *saved[len(way.kept) :])
            try:
                found = _differentiated(run, step, kept, gradients, outs)
            except InvalidArgument:
                if not _fused_anew(backward):
                    raise
                return (None, None, *_reference_gradients(way.op, args, step.wanted, grads))
        computed = (*gradients, *(found if isinstance(found, tuple) else (found,)))
        return (None, None, *[None if i is None else computed[i] for i in step.results])


def along(way: Way, bound: Mapping[str, Any], operators: Any) -> Callable[..., Any]:
    """Calls that differ from one with these arguments in their tensors alone, as a function of
    these."""
    op, reach = way.op, way.reach
    others = by_place(op, bound)
    places = [i for i, v in enumerate(others) if isinstance(v, Tensor)]
    for i in places:
        others[i] = None
    detached = [i for i in places if reach is not None and way.names[i] not in reach.behind]
    seed = way.names.index(str(op.seed)) if way.draws else None

    def run(*tensors: Tensor) -> Any:
        args = [*others]
        for i, t in zip(places, tensors, strict=True):
            args[i] = t
        for i in detached:
            args[i] = args[i].detach()
        if seed is not None:
            args[seed] = fresh_seed(tensors[0].device)
        if way.backward is None:
            found = Recomputed.apply(op, operators[op.name], *args)
        else:
            found = Generated.apply(way, operators, *args)
        return found if reach is None else reach.returned(found)

    return run


def _differentiated(
    run: Callable[..., Any],
    step: Step,
    kept: Sequence[Any],
    gradients: Sequence[Tensor | None],
    outs: Sequence[_Layout],
) -> Any:
    """What `run` gives, called by place, as calls that come again are found by. Gradients whose
    strides allow no view that the backward takes are copied to those of their outputs, for which
    the forward made sure that there is a kernel."""
    try:
        return run(*step.arguments(kept, gradients))
    except NoImplementation:
        pairs = [*zip(gradients, outs, strict=True)]
        if all(g is None or g.stride() == out.strides for g, out in pairs):
            raise
        copies = [None if g is None else out.empty(g.dtype).copy_(g) for g, out in pairs]
        return run(*step.arguments(kept, copies))


def _fused_anew(op: Op) -> bool:
    """Whether another function has taken the operator's name since."""
    return not OPS.holds(op.name, op)


class _Layout(NamedTuple):
    """What is kept of a result, and of an argument whose values no gradient follows from: neither
    its memory nor its history, which gradients of gradients do not follow from either."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, t: Tensor) -> _Layout:
        return cls(t.shape, t.stride(), t.dtype, t.device)

    def empty(self, dtype: torch.dtype | None = None) -> Tensor:
        dtype, device = dtype or self.dtype, self.device
        return torch.empty_strided(self.shape, self.strides, dtype=dtype, device=device)

    def zeros(self) -> Tensor:
        return self.empty().zero_()

    def without_values(self) -> Tensor:
        """One whose values nobody reads. Where a function is run anew, an index names something."""
        return self.empty() if self.dtype.is_floating_point else self.zeros()


def _reference_gradients(
    op: Op, args: list[Any], wanted: Sequence[int], grads: Sequence[Tensor | None]
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
    op: Op, args: list[Any], wanted: Sequence[int], grads: Sequence[Tensor | None]
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
