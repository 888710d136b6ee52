"""Public operators: PyTorch's signatures in, the selected implementation's result out.

A call like one before costs a check of its tensors (`recent`) and the launch, and what autograd
takes where an operator of ours differentiates it. Other calls on plain tensors cost one key (shape,
strides, dtype, device and alignment of every tensor, the other arguments as they are, and on a CPU
the number of threads) and one dict lookup. Everything else, from validation to building, happens
when a key is met for the first time.

PyTorch's own function runs instead, and differentiates, where a gradient is needed and no backward
of ours is known to be faster (a forward without its backward would make PyTorch compute the forward
twice), under autocast where that may cast, function transforms, forward-mode gradients, dispatch
modes such as fake tensors, in torch.jit.trace, and for tensor subclasses.
"""

from __future__ import annotations

import functools
import inspect
import math
import types
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch._C import (
    _are_functorch_transforms_active,
    _is_any_autocast_enabled,
    _is_torch_function_mode_enabled,
    _len_torch_dispatch_stack,
)
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.jit import is_tracing
from torch.nn import Parameter

from tilewright.dispatch import torch_ops
from tilewright.dispatch.autograd import Recomputed, along
from tilewright.dispatch.functions.outside import reading_outside
from tilewright.dispatch.gradients import generated_backward, known_reach, numbers_of
from tilewright.dispatch.indices.gradients import Moved, keeps_bits, keeps_order, moves
from tilewright.dispatch.indices.other_dtypes import is_of_another_dtype, of_another_dtype
from tilewright.dispatch.keywords import called_by, with_keywords
from tilewright.dispatch.plain_calls import (
    any_without_memory,
    refuse_on_meta,
    under_a_default_device,
)
from tilewright.dispatch.prepared import Run, first_call, reload_records, state
from tilewright.dispatch.pytorch import (
    as_pytorch,
    as_written,
    bind,
    by_place,
    or_why,
    outliving_indices,
    with_numbers_read,
    with_scalars_alike,
)
from tilewright.dispatch.ranges import look_first
from tilewright.dispatch.recent import MISSED, PLAIN, Recent, is_exact
from tilewright.dispatch.seeding import fresh_seed
from tilewright.dispatch.selection import Forced, any_forced, forced_for
from tilewright.impls._in_place import refuse_shared
from tilewright.op import OPS, Op, Workload, told_apart
from tilewright.tensor_spec import DTYPE_NAMES, other_layout

_EXACT = frozenset({int, str, types.NoneType})
"""Arguments that are equal only where they are the same."""


def public_operator(op: Op) -> Callable[..., Any]:
    """The function behind `tw.<name>`: the reference's signature, on CPU and CUDA tensors.

    It takes PyTorch's keywords too (`op.aliases`, `op.keywords`), and `dtype=` where
    `op.casts_first`.
    """
    with state.lock:
        prepared = state.prepared.setdefault(op.name, {})
        recent = state.recent.setdefault(op.name, Recent())
    name, keywords = op.name, frozenset(op.keywords)
    with_gradients = functools.partial(_with_gradients, recent)
    first = first_call if op.indexed is None else _first_of_an_index
    if op.scalars:
        first = _first_of_scalars

    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs and not keywords.isdisjoint(kwargs):
            return with_keywords(op, operators, args, kwargs)
        if is_dynamo_compiling():
            return traced(args, kwargs)
        if _len_torch_dispatch_stack() or forward_ad._current_level >= 0:
            return _under_modes(op, args, kwargs)
        if _is_torch_function_mode_enabled():
            return _under_function_modes(op, call, args, kwargs)
        forced = None if any_forced() is None else forced_for(name)
        differentiable = is_grad_enabled()
        positional = forced is None and not kwargs and args and type(args[0]) in PLAIN
        if positional and (
            (found := recent.last(args, differentiable)) is not MISSED
            or (found := recent.earlier(args, differentiable)) is not MISSED
        ):
            return found
        # No call is answered above under function transforms or autocast, nor on negated views:
        # guards compare the thread's dispatch state, and the tensors' keys.
        if _are_functorch_transforms_active():
            return _under_modes(op, args, kwargs)
        if _is_any_autocast_enabled():
            return _under_autocast(op, call, args, kwargs)
        # Not a function of its own: each such call would pay for calling it.
        key: list[Any] = [forced, len(kwargs), *kwargs]  # a keyword is no word given by place
        tensors = []
        leave: Callable[..., Any] | None = None
        try:
            for a in (*args, *kwargs.values()) if kwargs else args:
                kind = type(a)
                if kind is Tensor or kind is Parameter:
                    if differentiable and a.requires_grad:
                        leave = with_gradients
                        break
                    address = a.data_ptr()
                    if a.is_neg() or (not address and a._is_zerotensor()):
                        leave = _not_as_in_memory
                        break
                    key += (a.shape, a.stride(), a.dtype, a.device, address & 15)
                    tensors.append(a)
                elif isinstance(a, Tensor):
                    leave = _unlike_plain_tensors
                    break
                elif kind in _EXACT:
                    key.append(a)
                elif kind is tuple or kind is list:
                    key.append(_elements(a))
                elif kind is float or kind is bool or isinstance(a, Real):
                    key += _told_apart(a)
                else:
                    key.append(told_apart(a))
            else:
                if tensors and tensors[0].is_cpu:
                    key.append(torch.get_num_threads())
                run = prepared.get(tuple(key))
        except RuntimeError:  # sparse and opaque tensors have no strides or no memory
            leave = _unlike_plain_tensors
        except TypeError:  # an argument cannot be hashed: validation will name it
            return first(op, None, args, kwargs, tensors, forced)
        if leave is not None:
            return leave(op, call, args, kwargs, forced)
        if run is not None and is_tracing():  # tensors of no dims are the same whatever they hold
            return as_pytorch(op, args, kwargs)
        if run is None:
            return first(op, tuple(key), args, kwargs, tensors, forced)
        if positional:
            with state.lock:
                if prepared.get(tuple(key)) is run:  # else everything was forgotten meanwhile
                    recent.keep(args, run, differentiable)
        return run(*tensors)

    traced = torch_ops.traced(op, call)
    public = _as_public(op, call)
    # Dynamo keeps by code object what it compiled, how often, and what it gave up on.
    for function in (call, public):
        function.__code__ = function.__code__.replace()  # type: ignore[attr-defined]
    return public


def _as_public(op: Op, call: Run) -> Run:
    """The call by the name, the signature and the documentation of PyTorch's function."""
    public = _casting_first(op, call) if op.casts_first else call
    public = _naming_dtypes(call) if "out_dtype" in op.parameters else public
    public = _asking_for_tf32(op, public) if "allow_tf32" in op.parameters else public
    public = reading_outside(op, public) if op.outside is not None else public
    public.__name__ = public.__qualname__ = op.name
    public.__module__ = "tilewright"
    public.__doc__ = op.reference.__doc__
    public.__signature__ = _signature(op)  # type: ignore[attr-defined]
    return public


def _told_apart(number: Any) -> tuple[Any, ...]:
    """A number in a key: 2 equals 2.0 and 0.0 equals -0.0, which are others, and NaN not even
    itself."""
    if number != number:
        return (math.nan,)  # equal to itself as an object
    negative = not number and math.copysign(1.0, number) < 0
    return (number, type(number), "negative") if negative else (number, type(number))


def _elements(values: Sequence[Any]) -> tuple[Any, ...]:
    """Numbers within a sequence, told apart in the same way; sizes and words are as they are."""
    if is_exact(values):
        return tuple(values)
    told: list[Any] = []
    for v in values:
        if isinstance(v, (tuple, list)):
            told.append(_elements(v))
        else:
            told.append(_told_apart(v) if isinstance(v, Real) else told_apart(v))
    return tuple(told)


def _casting_first(op: Op, call: Run) -> Run:
    names = _keywords_of_first(op)

    def casting(*args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
        if dtype is None:
            return call(*args, **kwargs)
        if args:
            args = (args[0].to(dtype), *args[1:])
        kwargs = {n: v.to(dtype) if n in names else v for n, v in kwargs.items()}
        return call(*args, **kwargs)

    return casting


def _keywords_of_first(op: Op) -> set[str]:
    first = next(iter(op.parameters))
    return {first, *(alias for alias, name in op.aliases.items() if name == first)}


def _naming_dtypes(call: Run) -> Run:
    """Workloads and schemas have dtypes by name."""

    def naming(*args: Any, out_dtype: Any = None, **kwargs: Any) -> Any:
        if out_dtype is None:
            return call(*args, **kwargs)
        return call(*args, out_dtype=DTYPE_NAMES.get(out_dtype, out_dtype), **kwargs)

    return naming


def _asking_for_tf32(op: Op, call: Run) -> Run:
    """fp32 tensors on a GPU are told what torch's flag allows: workloads hold it."""
    names = list(op.parameters)
    defaults = [op.parameters[name].default for name in names]
    place = names.index("allow_tf32")
    keywords = _keywords_of_first(op)

    def asking(*args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else next((kwargs[n] for n in keywords if n in kwargs), None)
        if (
            len(args) <= place
            and isinstance(first, Tensor)
            and first.dtype is torch.float32
            and first.is_cuda
            and "allow_tf32" not in kwargs
            and not is_dynamo_compiling()
            and tf32_is_allowed()
        ):
            if kwargs:
                return call(*args, **kwargs, allow_tf32=True)
            return call(*args, *defaults[len(args) : place], True)
        return call(*args, **kwargs)

    return asking


def tf32_is_allowed() -> bool:
    """Whether torch's flag lets cuDNN round the operands of fp32 convolutions to TF32."""
    return torch._C._get_fp32_precision_getter("cuda", "conv") == "tf32"


def _signature(op: Op) -> inspect.Signature:
    signature = inspect.signature(op.reference)
    more = [
        inspect.Parameter(keyword, inspect.Parameter.KEYWORD_ONLY, default=None)
        for keyword in (*op.keywords, *(["dtype"] if op.casts_first else []))
    ]
    return signature.replace(parameters=[*signature.parameters.values(), *more])


def _first_of_an_index(
    op: Op, key: Any, args: Sequence[Any], kwargs: dict[str, Any], given: list[Tensor], forced: Any
) -> Any:
    if not state.enabled or is_tracing():
        return as_pytorch(op, args, kwargs)
    if (read := with_numbers_read(op, args, kwargs)) is not None:
        return operators[op.name](**read)
    asked = forced is not None and forced.implementation != "aten"
    if not asked and is_of_another_dtype(op, args, kwargs):
        return of_another_dtype(op, operators, bind(op, args, kwargs))
    return first_call(op, key, args, kwargs, given, forced)


def _first_of_scalars(
    op: Op, key: Any, args: Sequence[Any], kwargs: dict[str, Any], given: list[Tensor], forced: Any
) -> Any:
    if state.enabled and (alike := with_scalars_alike(op, args, kwargs)) is not None:
        return operators[op.name](**alike)
    return first_call(op, key, args, kwargs, given, forced)


# --- calls that PyTorch answers --------------------------------------------------------------


def _under_modes(op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if op.autocasts and _is_any_autocast_enabled():
        return as_written(op, args, kwargs)
    return as_pytorch(op, args, kwargs)


def _under_autocast(op: Op, call: Run, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """It changes nothing for an operator with an index whose tensors have one dtype."""
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    mixed = len({t.dtype for t in tensors if t.is_floating_point()}) > 1
    if op.autocasts and (op.indexed is None or mixed):
        plain = all(type(t) is Tensor or type(t) is Parameter for t in tensors)
        if op.indexed is not None and op.form_of is None and plain and state.enabled:
            return outliving_indices(op, args, kwargs)
        return as_written(op, args, kwargs)
    with torch._C._DisableAutocast():
        return call(*args, **kwargs)


def _under_function_modes(op: Op, call: Run, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if under_a_default_device():
        with torch._C.DisableTorchFunction():
            return call(*args, **kwargs)
    return _under_modes(op, args, kwargs)


def _unlike_plain_tensors(
    op: Op, call: Run, args: Sequence[Any], kwargs: dict[str, Any], forced: Forced | None
) -> Any:
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    if any(t.is_meta for t in tensors):
        bound = bind(op, args, kwargs)
        refuse_on_meta(op.name, {n: bound[n] for n in op.parameters if n in bound})
    if op.outputs_like is None or all(other_layout(t) is None for t in tensors):
        return as_pytorch(op, args, kwargs)  # in PyTorch's words too, where it has the function
    return or_why(op, args, kwargs, lambda: as_pytorch(op, args, kwargs))


def _with_gradients(
    recent: Recent,
    op: Op,
    call: Run,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    forced: Forced | None,
) -> Any:
    op.still_itself()
    if kwargs and op.fused:  # calls that come again are found by place
        everything = by_place(op, bind(op, args, kwargs))
        if not any(v is inspect.Parameter.empty for v in everything):
            return call(*everything)
    if torch.is_inference_mode_enabled():  # in which enable_grad() records nothing
        with torch.no_grad():
            return call(*args, **kwargs)
    if is_tracing():
        return as_pytorch(op, args, kwargs)
    if any_without_memory((*args, *kwargs.values())):
        return _unlike_plain_tensors(op, call, args, kwargs, forced)
    if state.enabled:
        found = _with_own_gradients(recent, op, call, args, kwargs, forced)
        if found is not None:
            return found
    dtypes = {a.dtype for a in (*args, *kwargs.values()) if isinstance(a, Tensor)}
    if not op.fallback and (len(dtypes) > 1 or op.outputs_like is not None):
        op.workload_of(*args, **kwargs)  # dtypes that PyTorch might promote, and operators refuse
    answer = outliving_indices if state.enabled else as_pytorch
    return or_why(op, args, kwargs, lambda: answer(op, args, kwargs))


def _with_own_gradients(
    recent: Recent,
    op: Op,
    call: Run,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    forced: Forced | None,
) -> Any:
    """The result of a call that has a way of its own, gradients included; None of others."""
    if (alike := with_scalars_alike(op, args, kwargs)) is not None:
        return call(**alike)
    bound = bind(op, args, kwargs)
    found = None
    if op.indexed is not None:
        found = _by_its_index(op, call, args, kwargs, bound, forced)
    elif op.form_of is not None:
        _refuse_shared(op, bound)
    if found is None and op.form_of is None:
        if forced is None:
            found = _generated(recent, op, args, kwargs, bound)
        else:
            found = _recomputed(op, args, kwargs)
    if found is None and op.indexed is not None:
        look_first(op, bound)
    return found


def _by_its_index(
    op: Op,
    call: Run,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    bound: dict[str, Any],
    forced: Forced | None,
) -> Any:
    """The result of a call of an operator with an index that is another call, or keeps what the
    operator promises; None of others."""
    if (read := with_numbers_read(op, args, kwargs)) is not None:
        return call(**read)
    if (named := _named_slice(bound)) is not None:
        return call(**{**bound, "src": named})
    if is_of_another_dtype(op, args, kwargs):
        return of_another_dtype(op, operators, bound)
    if op.form_of is not None:
        _refuse_shared(op, bound)
        if keeps_order(op, bound.get("x")):
            return bound["x"].copy_(operators[op.form_of](**bound))
    if moves(op, bound):
        return Moved.apply(op, operators, *by_place(op, bound))
    if forced is None and keeps_bits(op, bound):
        if op.form_of is not None:  # backward needs x as it was
            x = bound["x"]
            return x.copy_(operators[op.form_of](**{**bound, "x": x.clone()}))
        w, tensors = op.workload_of(*args, **kwargs)
        return Recomputed.apply(op, operators[op.name], *w.call(tensors).values())
    return None


def _generated(
    recent: Recent, op: Op, args: Sequence[Any], kwargs: dict[str, Any], bound: dict[str, Any]
) -> Any:
    """The result of a call that is differentiated by an operator of ours, and so are those like it
    from now on; None where PyTorch is to differentiate it."""
    if op.fused:  # to which a list of numbers is a tuple, as to workloads
        bound = {n: tuple(v) if type(v) is list else v for n, v in bound.items()}
    generation = state.generation
    way = generated_backward(op, bound)
    op.still_itself()  # which tracing may have taken long enough to change
    if way is None:
        return None
    run = along(way, bound, operators)
    found = run(*[v for v in bound.values() if isinstance(v, Tensor)])
    positional = not kwargs and type(args[0]) in PLAIN
    same = way.numbers == numbers_of(op, bound)  # numbers that change would fill the room there is
    if positional and same and op.indexed is None:  # what comes before an index may be another call
        with state.lock:
            if state.generation == generation:  # else everything was forgotten meanwhile
                recent.keep(tuple(args), run, True)
    return found


def _recomputed(op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A call for which an implementation was named; backward is PyTorch's, computed anew."""
    w, tensors = op.workload_of(*args, **kwargs)
    given = w.call(tensors)
    if op.draws(w):
        given[str(op.seed)] = fresh_seed(tensors[0].device)
    reach = known_reach(w, given)
    if reach is not None:
        given = reach.given(given)
    found = Recomputed.apply(op, operators[op.name], *given.values())
    return found if reach is None else reach.returned(found)


def _named_slice(bound: Mapping[str, Any]) -> Tensor | None:
    """Of a larger src whose gradient is wanted, what the index has positions for: the rest of it
    gets zeros, where PyTorch's formulas fail."""
    src, index = bound.get("src"), bound.get("index")
    if not (isinstance(src, Tensor) and src.requires_grad and isinstance(index, Tensor)):
        return None
    pairs = [*zip(src.shape, index.shape, strict=False)]
    if src.dim() != index.dim() or all(n == m for n, m in pairs) or any(n < m for n, m in pairs):
        return None
    return src[tuple(slice(n) for n in index.shape)]


def _refuse_shared(form: Op, bound: Mapping[str, Any]) -> None:
    """Whatever runs: some ways copy what they read before they write."""
    tensors = {
        n: v
        for n, v in bound.items()
        if type(v) in (Tensor, Parameter) and v.layout is torch.strided and v.dtype in DTYPE_NAMES
    }
    for name in form.writes or ("x",):
        if name in tensors:
            read = {n: t for n, t in tensors.items() if n != name}
            refuse_shared(str(form.form_of), name, tensors[name], **read)


# --- tensors that are not what lies at their address -------------------------------------------


def _not_as_in_memory(
    op: Op, call: Run, args: Sequence[Any], kwargs: dict[str, Any], forced: Forced | None
) -> Any:
    """The call on copies of such tensors; of those that it writes to, what was written is copied
    back."""
    given = bind(op, args, kwargs)
    plain = {n: _in_memory(v) for n, v in given.items()}
    found = call(**plain)
    if op.form_of is None:
        return found
    written = op.writes or [*op.parameters][:1]
    outs = tuple(given[n] if given[n] is plain[n] else given[n].copy_(plain[n]) for n in written)
    return outs if isinstance(found, tuple) else outs[0]


def _in_memory(value: Any) -> Any:
    """The sign of a negated view (the imaginary part of a conjugated tensor) is a flag, and
    autograd's zeros have no memory; kernels see neither."""
    if not isinstance(value, Tensor):
        return value
    return torch.zeros_like(value) if value._is_zerotensor() else value.resolve_neg()


def _operator_or_form(name: str) -> Op:
    form = OPS[name[:-1]].in_place_form if name[:-1] in OPS and name.endswith("_") else None
    return form or OPS[name]


class _Operators:
    """Every registered operator, and its in-place form, as a public function made at first use."""

    def __init__(self) -> None:
        self._made: dict[str, Callable[..., Any]] = {}

    def __getitem__(self, name: str) -> Callable[..., Any]:
        if name not in self._made:
            _operator_or_form(name)  # loads what operators there are, not under the lock
            with state.lock:
                if name not in self._made:
                    op = _operator_or_form(name)
                    self._made[name] = public_operator(op)
                    for other in called_by(op):
                        self[other]
                    if op.form_of is not None:  # which a trace may call in its place
                        self[op.form_of]
        return self._made[name]

    def forget(self, name: str) -> None:
        with state.lock:  # another thread may just be making it of the operator taken back
            self._made.pop(name, None)


operators = _Operators()
OPS.when_removed(operators.forget)


def as_called(
    store: str | None, w: Workload, sets: Sequence[Sequence[Tensor]]
) -> list[Callable[[], Any]]:
    """Calls of the public function as a person writes them, with the records of a store, one for
    each argument set.

    For a process that does nothing else: records stay those of `store`.
    """
    reload_records(store)
    public = operators[f"{w.op}_" if w.operator.destinations(w) else w.op]
    return [functools.partial(public, *w.call(tensors).values()) for tensors in sets]
