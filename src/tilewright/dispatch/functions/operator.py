"""The operator behind a person's function, and the one behind its gradients."""

from __future__ import annotations

import functools
import inspect
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from tilewright.dispatch.prepared import state
from tilewright.dispatch.seeding import SPEC, draws, no_seed
from tilewright.errors import InvalidArgument, InvalidType, NoImplementation
from tilewright.fakes import without_compiled_autograd
from tilewright.fusion.frontend.families import forget, outputs_of
from tilewright.fusion.frontend.lower import lower
from tilewright.fusion.frontend.picks import examples, named
from tilewright.fusion.frontend.reach import memories, reached
from tilewright.fusion.frontend.trace import by_shapes, program_of, trace_reference, trace_truth
from tilewright.fusion.ir import Graph
from tilewright.fusion.remembered import ByOperator
from tilewright.fusion.staged import graphs_of
from tilewright.impls._vendor import tracked
from tilewright.impls.fused import graph_of
from tilewright.op import OPS, Op, Workload
from tilewright.ops._gradients import in_order, wanted_gradients
from tilewright.tensor_spec import HALVES, TensorSpec

_registering = threading.RLock()
"""One operator is put in the place of another by one thread at a time."""


@dataclass(frozen=True, eq=False)
class FusedFunction(Op):
    """What tw.fuse makes of a function, or what its gradients are.

    Attributes:
        gradients: the names of those that are given, one for each floating output.
    """

    gradients: tuple[str, ...] = ()
    examples: Callable[..., list[Tensor]] = examples
    __doc__ = Op.__doc__  # the function's, as every operator's

    def backward(self, arguments: Iterable[str] = ()) -> Op:
        own = self.parameters
        given = [n for n in arguments if n not in own and re.fullmatch(r"grad_output\d*", n)]
        return backward_operator(self, len(given) or None)

    def resolve(self, given: Mapping[str, Any]) -> dict[str, Any]:
        seed = given.get(self.seed) if self.seed is not None else None
        is_one = isinstance(seed, TensorSpec) and (seed.dtype, seed.shape) == ("i64", ())
        if seed is not None and not is_one:
            own = [n for n in self.parameters if n != self.seed]
            raise no_seed(self.name, own, seed)
        return super().resolve(given)

    def draws(self, w: Workload) -> bool:
        try:
            return self.seed is not None and w.seed is None and draws(w)
        except NoImplementation:  # nothing of it can be fused, masks included
            return False

    def output_specs(self, w: Workload) -> tuple[TensorSpec, ...]:
        with by_shapes(self, w):
            return super().output_specs(w)

    def composed(self, w: Workload) -> Callable[..., Any] | None:
        """Halves are computed in fp32 and rounded as a kernel does: what a call gives must not
        depend on how often its shape came."""
        if not any(t.dtype in HALVES for t in w.tensors.values()):
            return None
        try:
            return _Composed(w)
        except NoImplementation:  # PyTorch's result is all that there is
            return None

    def program(self, w: Workload) -> str:
        return program_of(w)

    def read(self, w: Workload) -> frozenset[str]:
        graph = graph_of(w)
        if isinstance(graph, str):
            return frozenset(w.tensors)
        return frozenset[str]().union(*(_loaded(w, each) for each in graphs_of(graph)))

    def truth(self, w: Workload, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The traced function in fp64; its casts from one floating dtype to another are dropped."""
        wide = [t.double() if t.is_floating_point() else t for t in tensors]
        return tuple(_Widened(trace_truth(w))(*wide))


def _loaded(w: Workload, graph: Graph) -> frozenset[str]:
    names = list(w.tensors)
    places = [*range(len(graph.inputs) - len(graph.again)), *graph.again]
    loaded = (places[n.attr] for n in graph.nodes if n.op == "load")
    return frozenset(names[place] for place in loaded if place < len(names))


class _OnDevice(fx.Interpreter):
    """A traced function on the device of its tensors; those of the trace are nowhere."""

    def __call__(self, *tensors: Tensor) -> Any:
        self.device = tensors[0].device
        return self.run(*tensors)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().get_attr(target, args, kwargs).to(self.device)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs = {**kwargs, "device": self.device}
        return super().call_function(target, args, kwargs)


class _Widened(_OnDevice):
    """A graph that was traced in one floating dtype, so that constants which follow from it are
    what they are there, computed in fp64."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        name = target._schema.name.split("::")[1]
        if name == "rounded":
            return args[0]
        args, kwargs = fx.node.map_aggregate((args, kwargs), _widened)
        return super().call_function(target, args, kwargs)


class _Composed(_OnDevice):
    """The traced function, on the tensors of its workload."""

    def __init__(self, w: Workload):
        super().__init__(trace_reference(w))
        self.main, self.dtypes = w.main.torch_dtype, [o.torch_dtype for o in outputs_of(w)]

    def __call__(self, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        halves = (torch.float16, torch.bfloat16)
        found = super().__call__(*(t.float() if t.dtype in halves else t for t in tensors))
        outs = tuple(o.to(dtype) for o, dtype in zip(found, self.dtypes, strict=True))
        return outs[0] if len(outs) == 1 else outs

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target._schema.name == "tilewright::rounded":
            return args[0].to(self.main).to(args[0].dtype)
        return super().call_function(target, args, kwargs)


def _widened(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value


def backward_operator(op: Op, outputs: int | None = None) -> Op:
    """The operator `<name>_backward` of a fused function: made when it is first needed.

    Its arguments are a gradient for each floating output, None where that has none, those of the
    function, and `grads`, the names of those whose gradients are wanted.

    Args:
        outputs: how many are floating; None for as many as it was made for, at first one.

    Raises:
        InvalidArgument: another function was fused under its name since, or it has a parameter
            named as a gradient's operator names its own.
    """
    name = f"{op.name}_backward"
    with _registering:
        op.still_itself()
        made = OPS.get(name)
        ours = made if isinstance(made, FusedFunction) and made.gradient_of == op.name else None
        if ours and outputs in (None, len(ours.gradients)):
            return ours
        backward = _of_gradients(op, name, 1 if outputs is None else outputs)
        register(backward)
        return backward


def _of_gradients(op: Op, name: str, outputs: int) -> FusedFunction:
    gradients = _names_of_gradients(outputs)
    if clash := [n for n in (*gradients, "grads") if n in op.parameters]:
        raise InvalidArgument(
            f"{op.name} takes {clash[0]!r}, which names a parameter of its gradients' operator; "
            "give it another name"
        )
    return FusedFunction(
        name,
        _gradient(op, name, gradients),
        flops=steps,
        check=functools.partial(_check_gradient, name, op, gradients),
        scalars=op.scalars,
        outputs_like=lambda args: in_order(
            args.get("grads"), _differentiable({n: args.get(n) for n in op.parameters})
        ),
        gradient_of=op.name,
        fused=True,
        fallback=op.fallback,
        seed=op.seed,
        outside=op.outside,
        gradients=gradients,
    )


def _names_of_gradients(outputs: int) -> tuple[str, ...]:
    return ("grad_output",) if outputs == 1 else tuple(f"grad_output{k}" for k in range(outputs))


def _gradient(op: Op, name: str, gradients: Sequence[str]) -> Callable[..., Any]:
    def reference(**args: Any) -> tuple[Tensor, ...]:
        args = {**defaults, **args}
        given = {n: tracked(args[n]) for n in op.parameters}
        wanted = wanted_gradients(name, args["grads"], _differentiable(given))
        upstream = [args[n] for n in gradients]

        def call(*values: Tensor) -> tuple[Tensor, ...]:
            out = op.reference(**{**given, **dict(zip(wanted, values, strict=True))})
            outs = out if isinstance(out, (tuple, list)) else (out,)
            floats = [o for o in outs if o.is_floating_point()]
            return tuple(o for o, g in zip(floats, upstream, strict=False) if g is not None)

        back = [g for g in upstream if g is not None]
        return _pulled_back(call, [given[n] for n in wanted], back)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(n, kind) for n in gradients]
    outside = op.outside() if op.outside else ()
    needed = [p for n, p in op.parameters.items() if n != op.seed and n not in outside]
    # A default need not be what its annotation says: `w: Tensor = None`.
    said = (p if p.default is p.empty else p.replace(annotation=p.empty) for p in needed)
    parameters += [p.replace(kind=kind, default=p.empty) for p in said]
    optional = ["grads"] if op.seed is None else [op.seed, "grads"]
    parameters += [inspect.Parameter(n, kind, default=None) for n in optional]
    parameters += [op.parameters[n].replace(kind=kind) for n in outside]
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    reference.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    reference.__annotations__ = {**op.reference.__annotations__, "return": tuple[Tensor, ...]}
    reference.__wrapped__ = op.reference  # type: ignore[attr-defined]  # steps are at its lines
    reference.__doc__ = f"Gradients of `{op.name}`, by PyTorch's autograd of it."
    return reference


def _pulled_back(
    call: Callable[..., tuple[Tensor, ...]], at: Sequence[Tensor], gradients: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """The gradients of what is called, from those of its results."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        outs, pullback = torch.func.vjp(call, *at)  # type: ignore[misc]
        given = zip(gradients, outs, strict=False)
        return tuple(pullback(tuple(g.to(o.dtype) for g, o in given)))
    # Unlike vjp it takes every torch.autograd.Function.
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in at]
        pairs = [(o, g) for o, g in zip(call(*leaves), gradients, strict=False) if o.requires_grad]
    if not pairs:
        return tuple(map(torch.zeros_like, at))
    back = [g.to(o.dtype) for o, g in pairs]
    with without_compiled_autograd():
        return torch.autograd.grad(
            [o for o, _ in pairs], leaves, back, allow_unused=True, materialize_grads=True
        )


def register(op: Op) -> None:
    """Add an operator, in the place of one that the same function made before."""
    with _registering:
        earlier = OPS.get(op.name)
        taken = earlier is not None and not (earlier.fused and _origin(earlier) == _origin(op))
        if taken or _writes_in_place(op.name):
            raise InvalidArgument(f"fuse: there is an operator {op.name!r} already; give name=")
        OPS.remove(op.name)
        gradients = OPS.get(f"{op.name}_backward")
        if gradients is not None and gradients.gradient_of == op.name:
            OPS.remove(gradients.name)
        OPS.add(op.name, op)
        of_traces = (graph_of, lower, program_of, draws, reached, memories, outputs_of, named)
        for known in (*of_traces, _floating_outputs):
            known.cache_clear()
        forget()
        state.forget()


def _writes_in_place(name: str) -> bool:
    """Whether it is the name of a form of another operator."""
    base = OPS.get(name[:-1]) if name.endswith("_") else None
    return base is not None and base.in_place_form is not None


def _origin(op: Op) -> tuple[str, str]:
    return op.reference.__module__, op.reference.__qualname__


def _differentiable(args: Mapping[str, Any]) -> tuple[str, ...]:
    kinds = (Tensor, TensorSpec)
    tensors = {n: v for n, v in args.items() if isinstance(v, kinds)}
    return tuple(
        n
        for n, v in tensors.items()
        if (v.torch_dtype if isinstance(v, TensorSpec) else v.dtype).is_floating_point
    )


def check(name: str, seed: str | None, args: dict[str, Any]) -> dict[str, Any]:
    for n, v in args.items():
        if isinstance(v, TensorSpec):
            continue
        if isinstance(v, fx.Proxy):
            raise InvalidArgument(
                f"{name}: {n} is a proxy of torch.fx, which goes through no fused function; let "
                f"the trace keep its call as one step: torch.fx.wrap({name!r}) where it is a global"
            )
        if isinstance(v, Tensor):
            raise InvalidArgument(f"{name}: {n} is a tensor by default; give it in each call")
        if any(isinstance(t, Tensor) for t in tree_leaves(v)):
            raise InvalidArgument(
                f"{name}: {n} holds several tensors; make each an argument of its own"
            )
        try:
            hash(v)  # a workload is known by its arguments
        except TypeError:
            found = f"{name}: {n} is or holds what cannot be hashed ({type(v).__name__})"
            raise InvalidType(f"{found}; give a tensor, a number or a list of numbers") from None
    tensors = {n: v for n, v in args.items() if isinstance(v, TensorSpec)}
    if not tensors:
        raise InvalidArgument(f"{name}: no argument is a tensor; it needs at least one")
    if seed is not None and args[seed] is not None:
        args = {**args, seed: SPEC}
    return args


def _check_gradient(
    name: str, op: Op, gradients: Sequence[str], args: dict[str, Any]
) -> dict[str, Any]:
    possible = _differentiable({n: args[n] for n in op.parameters})
    if not possible:
        raise InvalidArgument(f"{name}: {op.name} has no argument to differentiate by")
    wanted = wanted_gradients(name, args["grads"], possible)
    outputs = _floating_outputs(op.workload(**{n: args[n] for n in op.parameters}))
    given = [args[n].shape if isinstance(args[n], TensorSpec) else args[n] for n in gradients]
    fits = len(given) == len(outputs) and all(
        shape is None or shape == o.shape for shape, o in zip(given, outputs, strict=True)
    )
    if not fits or all(shape is None for shape in given):
        told = ", ".join(f"{n}={args[n]}" for n in gradients)
        names = _names_of_gradients(len(outputs))
        right = ", ".join(f"{n}={o}" for n, o in zip(names, outputs, strict=True))
        raise InvalidArgument(f"{name}: {told} does not fit what {op.name} returns; give {right}")
    return check(name, op.seed, {**args, "grads": wanted})


@ByOperator
def _floating_outputs(w: Workload) -> tuple[TensorSpec, ...]:
    return tuple(o for o in outputs_of(w) if o.torch_dtype.is_floating_point)


def steps(w: Workload) -> int:
    """One operation for each element of each step's result."""
    calls = [n for n in trace_reference(w).graph.nodes if n.op == "call_function"]
    return sum(n.meta["val"].numel() for n in calls if isinstance(n.meta.get("val"), Tensor))
