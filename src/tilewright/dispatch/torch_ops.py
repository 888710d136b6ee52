"""The operators below torch.compile: `torch.ops.tilewright.<name>`, with fake kernels.

Inside a compiled function an operator becomes one opaque node where records speak for a kernel of
ours on exactly known shapes. Elsewhere, and where a gradient is needed, its reference is traced,
so that Inductor can fuse it with its neighbours as it would without this package. But an update by
a tensor is always such a node, since its order of writes is promised, and so is a sum whose bits or
one rounding PyTorch's kernels do not keep.
"""

from __future__ import annotations

import functools
import itertools
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active, _len_torch_dispatch_stack

from tilewright.dispatch import selection
from tilewright.dispatch.autograd import Recomputed
from tilewright.dispatch.functions.outside import reading_outside
from tilewright.dispatch.plain_calls import is_transformed
from tilewright.dispatch.pytorch import (
    as_pytorch,
    bind,
    in_place_of_numbers,
    with_own_memory,
    with_scalars_alike,
)
from tilewright.errors import InvalidArgument, NoImplementation
from tilewright.impls._vendor import call_reference
from tilewright.op import OPS, Op, Workload
from tilewright.tensor_spec import DTYPE_NAMES, TensorSpec

_libraries: dict[str, torch.library.Library] = {}
"""By operator: a function that is fused again is another one under its name."""
_KEYS = (
    torch._C._dispatch_tls_local_include_set(),
    torch._C._dispatch_tls_local_exclude_set(),
)
"""What dispatch includes and leaves out where nobody asked for anything."""
_ARRAY = getattr(sys.modules.get("numpy"), "ndarray", None)
"""PyTorch imports numpy where it is installed."""
_SCHEMA_TYPES = {
    Tensor: "Tensor",
    float: "float",
    int: "int",
    bool: "bool",
    str: "str",
    types.NoneType: "None",
}


# --- registration ------------------------------------------------------------------------------


def schemas(op: Op) -> list[str] | None:
    """One torch.library schema for each way a union such as `Tensor | float` can be filled.

    Numbers from outside are no part of it: the public function reads them. None if a parameter has
    a type that torch.library does not know.
    """
    hints = _type_hints(op)
    if hints is None:
        return None
    parameters = []
    unspoken = op.outside() if op.outside else ()
    for name, parameter in op.parameters.items():
        if name in unspoken:
            continue
        spelled = _spellings(hints.get(name))
        if spelled is None:
            return None
        default = parameter.default
        listed = list(default) if isinstance(default, tuple) else default
        optional = "" if default is parameter.empty else f"={listed}"
        parameters.append([f"{kind} {name}{optional}" for kind in spelled])
    returns = hints.get("return", Tensor)
    results = typing.get_args(returns) if typing.get_origin(returns) is tuple else None
    result = "Tensor" if results is None else f"({', '.join('Tensor' for _ in results)})"
    if results is not None and Ellipsis in results:
        result = "Tensor[]"
    return [
        f"{op.name}{f'.overload{i}' if i else ''}({', '.join(chosen)}) -> {result}"
        for i, chosen in enumerate(itertools.product(*parameters))
    ]


def _type_hints(op: Op) -> dict[str, Any] | None:
    """None of a person's function that does not say how many tensors it returns, or whose
    annotations name what only checkers of types import."""
    try:
        hints = typing.get_type_hints(op.reference)
    except Exception:  # whatever evaluating a text may raise
        if not op.fused:
            raise
        return None
    of_a_person = op.fused and op.gradient_of is None
    return None if of_a_person and not _tells_results(hints.get("return")) else hints


def _tells_results(returns: Any) -> bool:
    """Whether an annotation says how many tensors are returned."""
    results = typing.get_args(returns) if typing.get_origin(returns) is tuple else (returns,)
    return bool(results) and all(r is Tensor for r in results)


def _spellings(hint: Any) -> list[str] | None:
    """`Tensor | None` is one type of the schema language, `Tensor?`; `Tensor | float` is two."""
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    members = list(typing.get_args(hint)) if union else [hint]
    spelled = [
        f"{_SCHEMA_TYPES.get(typing.get_args(m)[0])}[]"
        if typing.get_origin(m) in (tuple, list)
        else _SCHEMA_TYPES.get(m)
        for m in members
    ]
    if None in spelled:
        return None
    mark = "?" if "None" in spelled else ""
    return [f"{kind}{mark}" for kind in spelled if kind not in (None, "None")]


def register(op: Op, public: Callable[..., Any]) -> list[str] | None:
    """Define `torch.ops.tilewright.<name>` with one overload for each schema; returns those.

    Each has three kernels. The one above autograd hands plain calls to the public function at
    once (a second trip through the dispatcher, or torch.library.register_autograd, would cost
    6 us a call); the one below it serves tracing and inference mode; the fake one gives shapes.
    """
    listed = schemas(op)
    if op.name in _libraries:
        _libraries.pop(op.name)._destroy()
    if not listed:
        return listed
    library = _libraries[op.name] = torch.library.Library("tilewright", "FRAGMENT")
    for schema in listed:
        try:
            library.define(schema)
        except (RuntimeError, UnicodeError):  # a name or a default that schemas cannot spell
            if not op.fused:
                raise
            _libraries.pop(op.name)._destroy()
            return None
        name = schema.partition("(")[0]
        packet, _, overload = name.partition(".")
        target = getattr(getattr(torch.ops.tilewright, packet), overload or "default")
        library.impl(name, functools.partial(_above_autograd, op, public, target), "Autograd")
        library.impl(name, functools.partial(_no_grad, public), "CompositeExplicitAutograd")
        torch.library.register_fake(
            f"tilewright::{name}", functools.partial(_without_values, op), lib=library
        )
    return listed


def _without_values(op: Op, *args: Any) -> Any:
    """References that take gradients by torch.func need keys that are left out below autograd."""
    with torch._C._ForceDispatchKeyGuard(*_KEYS):
        return as_pytorch(op, args, {})


def _above_autograd(op: Op, public: Callable[..., Any], target: Any, *args: Any) -> Any:
    if _are_functorch_transforms_active():
        return as_pytorch(op, args, {})
    if not _len_torch_dispatch_stack():
        return public(*args)

    def below(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return target(*args)

    if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args):
        return Recomputed.apply(op, below, *args)
    return below(*args)


def _no_grad(public: Callable[..., Any], *args: Any) -> Any:
    if not torch.is_grad_enabled():
        return public(*args)
    with torch.no_grad():
        return public(*args)


# --- below torch.compile -----------------------------------------------------------------------


def traced(op: Op, public: Callable[..., Any]) -> Callable[[Sequence[Any], dict[str, Any]], Any]:
    """What torch.compile traces in place of the public function; everything here is traced too."""
    # The trace knows what an in-place form changes, and a training step is two operators there.
    opaque = None
    reading = public if op.outside is None else reading_outside(op, public)
    if op.form_of is None and op.training_of is None and register(op, reading):
        opaque = getattr(torch.ops.tilewright, op.name)
    name = op.name

    # A trace has no guard on the values of numpy's numbers, and would keep the first; nodes of ours
    # take none that a tensor has.
    untraced = _untraced(
        public,
        f"a trace does not know a number of numpy, or one in a tensor, that {name} was given; "
        "make it one of Python",
    )
    draws = _untraced(
        public,
        f"{name} draws from the seed that it was given, which a trace cannot follow; leave the "
        "seed to PyTorch, or tune the function where no gradient is wanted",
    )

    def in_pytorch(bound: dict[str, Any], reference: Callable[..., Any] | None = None) -> Any:
        if op.seed is not None and bound.get(op.seed) is not None:
            return draws(**bound)
        found = reference(**bound) if reference else call_reference(op, bound)
        return with_own_memory(op, bound.values(), found)

    def trace(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        args, kwargs = [_plain(a) for a in args], {n: _plain(a) for n, a in kwargs.items()}
        if any(_is_unknown_number(a) for a in (*args, *kwargs.values())):
            return untraced(*args, **kwargs)
        bound = with_scalars_alike(op, args, kwargs) or bind(op, args, kwargs)
        tensors = [v for v in bound.values() if isinstance(v, Tensor)]
        value = kwargs.get("value")  # a number, which a tensor of another dtype is to PyTorch, too
        if isinstance(value, Tensor) and any(value.dtype != t.dtype for t in tensors[:1]):
            return untraced(*args, **kwargs)
        if op.indexed is not None and _promises_more(op, bound) and _may_be_opaque(tensors):
            if in_place_of_numbers(op, args, kwargs):
                return untraced(*args, **kwargs)
            if opaque is not None:
                return opaque(**bound)
            x = bound["x"]
            if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
                bound["x"] = x.clone()  # backward needs it as it was
            return x.copy_(getattr(torch.ops.tilewright, str(op.form_of))(**bound))
        if op.autocasts and any(torch.is_autocast_enabled(t.device.type) for t in tensors):
            return in_pytorch(bound, op.reference)
        differentiable = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        if opaque is None or (differentiable and (op.outputs_like is None or op.fused)):
            return in_pytorch(bound)
        if all(_is_known(v) for v in bound.values()):
            described = tuple([(n, _description(v)) for n, v in bound.items()])
            why_not = _refusal(name, described)
            if why_not is not None and not op.fallback and op.indexed is None:
                raise InvalidArgument(why_not)
            if why_not is None and not differentiable and _is_tuned(name, described):
                return opaque(**bound)
        return in_pytorch(bound)

    return trace


def _untraced(public: Callable[..., Any], why: str) -> Callable[..., Any]:
    """The public function as one that Dynamo runs, and does not trace."""

    def untraced(*args: Any, **kwargs: Any) -> Any:
        return torch.compiler.disable(public)(*args, **kwargs)

    untraced._torchdynamo_disable = True  # type: ignore[attr-defined]
    untraced._torchdynamo_disable_msg = why  # type: ignore[attr-defined]
    return untraced


def _promises_more(op: Op, bound: Mapping[str, Any]) -> bool:
    """Whether a call with an index promises what compilers make of PyTorch's function leave open:
    the order of writes of an update by a tensor, the bits of a sum."""
    assert op.indexed is not None
    if op.indexed.last_wins:
        return isinstance(bound.get("src"), Tensor)
    summed = bound["x" if "x" in bound else "grad"]
    adds = bound.get("reduce", "sum") in ("sum", "mean", "prod")
    name = op.form_of or op.name
    return adds and _keeps_no_bits(name, summed.dtype, summed.device.type)


def _keeps_no_bits(name: str, dtype: torch.dtype, device: str) -> bool:
    """Whether PyTorch's kernel of such a sum keeps less than this package promises."""
    indexed = OPS[name].indexed
    assert indexed is not None
    return dtype in DTYPE_NAMES and indexed.promises_values(DTYPE_NAMES[dtype], device)


def _may_be_opaque(tensors: Sequence[Tensor]) -> bool:
    """Whether a call can stay one node: plain tensors, none of which autocast would cast."""
    one_dtype = len({t.dtype for t in tensors if t.is_floating_point()}) < 2
    return one_dtype and not is_transformed(*tensors)


def _is_known(value: Any) -> bool:
    """Whether a traced argument has one value, not a symbol that stands for many."""
    from torch.fx.experimental.symbolic_shapes import has_static_value

    if isinstance(value, Tensor):
        return all(has_static_value(n) for n in (*value.shape, *value.stride()))
    if isinstance(value, (tuple, list)):
        return all(_is_known(v) for v in value)
    return not isinstance(value, (int, float)) or has_static_value(value)


def _description(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (value.dtype, tuple(value.shape), value.stride(), value.device)
    return value


def _plain(value: Any) -> Any:
    """Numbers of numpy are arrays to Dynamo, which has the values of those that the traced function
    makes itself."""
    if isinstance(value, (tuple, list)):
        return tuple([_plain(v) for v in value])
    if not _is_array(value):
        return value
    number = value.tolist()
    return number if _is_constant(number) else value


def _is_unknown_number(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(_is_unknown_number(v) for v in value)
    return _is_array(value)


def _is_array(value: Any) -> bool:
    return _ARRAY is not None and isinstance(value, _ARRAY)


def _is_constant(number: Any) -> bool:
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return isinstance(number, (int, float)) and has_static_value(number)


def _workload(name: str, described: tuple[tuple[str, Any], ...]) -> Workload | None:
    """That of constants of the trace; None for dtypes and devices that are PyTorch's alone."""
    given = {}
    for n, value in described:
        given[n] = value
        if isinstance(value, tuple) and value and isinstance(value[0], torch.dtype):
            dtype, shape, strides, device = value
            if dtype not in DTYPE_NAMES or device.type not in ("cpu", "cuda"):
                return None
            given[n] = TensorSpec(DTYPE_NAMES[dtype], shape, strides)
    return OPS[name].workload(**given)


def _refusal(name: str, described: tuple[tuple[str, Any], ...]) -> str | None:
    """Why the operator does not take such arguments, or None."""
    try:
        _workload(name, described)
    except InvalidArgument as error:
        return str(error)
    return None


def _is_tuned(name: str, described: tuple[tuple[str, Any], ...]) -> bool:
    """Whether an implementation other than aten would run."""
    if _are_functorch_transforms_active():  # Dynamo enters them while it traces
        return False
    w = _workload(name, described)
    devices = [v[-1] for _, v in described if isinstance(v, tuple) and v and _is_device(v[-1])]
    if w is None or not devices:
        return False
    forced = selection.forced_for(name)
    try:
        choice = selection.choose(w, devices[-1], forced)
    except NoImplementation:
        if forced is not None:
            raise
        return False
    return choice.implementation != "aten" and choice.source != "asked"


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device)


# What torch.compiler.assume_constant_result does, less its import of all of Dynamo.
_refusal._dynamo_marked_constant = True  # type: ignore[attr-defined]
_is_tuned._dynamo_marked_constant = True  # type: ignore[attr-defined]
_keeps_no_bits._dynamo_marked_constant = True  # type: ignore[attr-defined]
