"""PyTorch's own result for an operator: what `aten`, `inductor` and every fallback call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tilewright.fakes import tracing_lock
from tilewright.op import Op, Workload
from tilewright.ops._training import forward_of, gradient_arguments
from tilewright.rounding import roundings_to

Result = torch.Tensor | tuple[torch.Tensor, ...]


def call_reference(op: Op, args: Mapping[str, Any]) -> Result:
    """The reference on real tensors, differentiable, in the dtypes that were given.

    Halves beside wider parameters are computed in the wider type and rounded at the end to the
    dtype of the first tensor, as autocast does: PyTorch's CUDA kernels refuse the mix. Where an
    operator promises a result wider than its tensors, they are widened: PyTorch's kernels round.
    """
    promised = None if op.outputs_like is None else op.output_dtypes(args)
    floating = {
        n: v for n, v in args.items() if isinstance(v, torch.Tensor) and v.is_floating_point()
    }
    main = next((t.dtype for t in floating.values()), None)
    floating = {n: t for n, t in floating.items() if n not in op.wide}
    dtypes = {t.dtype for t in floating.values()}
    if len(dtypes) == 1 and op.gradient_of is None and (wider := _wider(promised, *dtypes)):
        return op.reference(**{**args, **{n: t.to(wider) for n, t in floating.items()}})
    if len(dtypes) < 2 or op.fused or op.indexed is not None:
        return _typed(op.reference(**args), promised)
    assert main is not None
    wide = max(dtypes, key=lambda dtype: dtype.itemsize)
    tracing = torch.compiler.is_dynamo_compiling()
    with contextlib.nullcontext() if tracing else roundings_to(main):
        out = op.reference(**{**args, **{n: t.to(wide) for n, t in floating.items()}})
    if promised is not None:
        return _typed(out, promised)
    if isinstance(out, torch.Tensor):
        return _narrowed(out, main)
    return tuple(_narrowed(o, main) for o in out)


def _wider(promised: Sequence[torch.dtype] | None, given: torch.dtype) -> torch.dtype | None:
    """The dtype of the outputs, if each is wider than the tensors."""
    if promised is None:
        return None
    floating = {d for d in promised if d.is_floating_point}
    widest = max(floating, key=lambda dtype: dtype.itemsize, default=given)
    return widest if all(d.itemsize > given.itemsize for d in floating) else None


def _typed(out: Result, promised: Sequence[torch.dtype] | None) -> Result:
    """Outputs in the dtypes that the operator promises, where PyTorch's kernels give others."""
    if promised is None:
        return out
    outs = (out,) if isinstance(out, torch.Tensor) else out
    typed = tuple(o.to(d) for o, d in zip(outs, promised, strict=True))
    return typed[0] if isinstance(out, torch.Tensor) else typed


def _narrowed(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return t.to(dtype) if t.is_floating_point() else t


def in_form(w: Workload) -> Callable[..., Any]:
    """The reference, or its in-place form where the workload donates what that writes to."""
    op = w.operator
    return op.inplace if op.inplace is not None and op.destinations(w) else op.reference


def vendor(w: Workload) -> Callable[..., Result]:
    """A function of the workload's tensors, in their order, that gives PyTorch's result."""
    op, names, constants = w.operator, tuple(w.tensors), dict(w.args)
    if op.gradient_of is not None:
        return Backward(w)
    if op.training_of is not None:
        return TrainingStep(w)
    floating = {s.dtype for s in w.tensors.values() if s.torch_dtype.is_floating_point}
    in_place = bool(op.destinations(w))
    as_promised = op.outputs_like is None or {o.dtype for o in w.outputs} == {w.main.dtype}
    by_name = any(p.kind is p.KEYWORD_ONLY for p in op.parameters.values())
    if not in_place and (by_name or len(floating) > 1 or not as_promised):
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


def unseeded(w: Workload) -> Workload:
    """As PyTorch's users have it: what is drawn comes from PyTorch's generator, not from a seed."""
    return w if w.seed is None else w.with_args(**{str(w.operator.seed): None})


def without_seed(w: Workload, run: Callable[..., Result]) -> Callable[..., Result]:
    """`run`, which takes the tensors of `unseeded(w)`, as a function of those of `w`."""
    at = w.seed
    return run if at is None else lambda *tensors: run(*tensors[:at], *tensors[at + 1 :])


def tracked(value: Any) -> Any:
    """What autograd may keep: of a tensor of inference mode, a copy."""
    compiling = torch.compiler.is_compiling()
    if compiling or not isinstance(value, torch.Tensor) or not value.is_inference():
        return value
    with torch.inference_mode(False):
        return value.clone()


class TrainingStep:
    """A forward and its backward, as PyTorch's users run them: by autograd.

    Attributes:
        forward: a differentiable function of the forward's tensors; one may put a compiled one in
            its place.
    """

    def __init__(self, w: Workload):
        plain, given = forward_of(w), list(w.tensors)
        self.forward = vendor(plain)
        self._takes = [given.index(n) for n in plain.tensors]
        self._wanted = [list(plain.tensors).index(n) for n in w["grads"]]
        self._grad_outputs = [given.index(n) for n in gradient_arguments(given)]

    def __call__(self, *tensors: torch.Tensor) -> Result:
        with torch.inference_mode(False), torch.enable_grad():
            taken = [tracked(tensors[i]).detach() for i in self._takes]
            leaves = [taken[i].requires_grad_() for i in self._wanted]
            out = self.forward(*taken)
        outs = (out,) if isinstance(out, torch.Tensor) else out
        given = zip(outs, (tensors[i] for i in self._grad_outputs), strict=True)
        reached, gradients = zip(*(pair for pair in given if pair[0].requires_grad), strict=True)
        return *(o.detach() for o in outs), *torch.autograd.grad(reached, leaves, gradients)


class Backward:
    """What PyTorch's autograd runs for a gradient operator: its reference without the forward.

    The reference is traced once for each kind of device, in ATen operators as autograd calls them,
    and the steps that no gradient needs are dropped.
    """

    def __init__(self, w: Workload):
        self._w = w
        self._dtypes = [spec.torch_dtype for spec in w.outputs]
        self._graphs: dict[str, torch.fx.GraphModule] = {}

    def __call__(self, *tensors: torch.Tensor) -> Result:
        out = self.graph(tensors)(*tensors)
        outs = (out,) if isinstance(out, torch.Tensor) else out
        # Without rows PyTorch's kernels give other dtypes than the fake ones of the trace.
        typed = tuple(o.to(dtype) for o, dtype in zip(outs, self._dtypes, strict=True))
        return typed[0] if isinstance(out, torch.Tensor) else typed

    def graph(self, tensors: Sequence[torch.Tensor]) -> torch.fx.GraphModule:
        """What runs on tensors such as these."""
        kind = tensors[0].device.type
        if kind not in self._graphs:
            self._graphs[kind] = self._trace(tensors)
        return self._graphs[kind]

    def _trace(self, tensors: Sequence[torch.Tensor]) -> torch.fx.GraphModule:
        from torch.fx.experimental.proxy_tensor import make_fx

        op, names, constants = self._w.operator, tuple(self._w.tensors), dict(self._w.args)

        def run(*given: torch.Tensor) -> Result:
            return call_reference(op, {**constants, **dict(zip(names, given, strict=True))})

        with tracing_lock():
            traced = make_fx(run, tracing_mode="fake")(*(t.detach() for t in tensors))
        _drop_unused(traced.graph)
        traced.recompile()
        return traced


def _drop_unused(graph: torch.fx.Graph) -> None:
    """Dead steps go, in-place ones on values that nothing else reads too."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            written = _written(node)
            if all(a.op == "call_function" and list(a.users) == [node] for a in written):
                graph.erase_node(node)


def _written(node: torch.fx.Node) -> list[Any]:
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    arguments = zip(node.args, node.target._schema.arguments, strict=False)
    return [a for a, spec in arguments if spec.alias_info is not None and spec.alias_info.is_write]
