"""Operators and workloads: what is to be computed, on which shapes.

A workload is one problem instance: an operator plus the spec of every argument. Its text form is
its key, its name in files and records, and what the command line takes:

    layer_norm(x=f16[8192,5140], weight=f16[5140], bias=f16[5140], eps=1e-06)!nondeterministic

An argument is shown only where it differs from its default, and a workload parsed from its text
equals the one it came from.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch

from tilewright.errors import InvalidArgument
from tilewright.examples import random_tensors
from tilewright.fakes import without_hooks, without_memory
from tilewright.indexed import Indexed
from tilewright.outputs import dtypes_like, specs_of, tensors_of
from tilewright.registry import Registry
from tilewright.settings import trusts_indices
from tilewright.signature import Signature, Value, of_python
from tilewright.tensor_spec import (
    DEFAULT_ALIGN,
    DTYPE_NAMES,
    DTYPES,
    HALVES,
    WHOLE,
    TensorSpec,
    other_layout,
)
from tilewright.text import canonical_flags, parse_call, split_flags, value_text


@dataclass(frozen=True, eq=False)
class Workload:
    """One problem instance. `args` holds every parameter of the operator, in its order.

    `flags` are the modifiers written after `!` in the text form: `donate=x`, `relaxed`,
    `nondeterministic`.
    """

    op: str
    args: tuple[tuple[str, Value], ...]
    flags: tuple[str, ...] = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Workload) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @functools.cached_property
    def _key(self) -> tuple[Any, ...]:
        return self.op, tuple((n, told_apart(v)) for n, v in self.args), self.flags

    @staticmethod
    def parse(text: str) -> Workload:
        """Read the text form. Raises InvalidArgument naming what could not be read."""
        call, flags = split_flags(text)
        name, given = parse_call(call, TensorSpec.written)
        return OPS.named(name, given).workload(flags=flags, **given)

    def __getitem__(self, name: str) -> Value:
        return self._by_name[name]

    @functools.cached_property
    def _by_name(self) -> dict[str, Value]:
        return dict(self.args)

    @property
    def operator(self) -> Op:
        return OPS.named(self.op, self._by_name)

    @property
    def program(self) -> str:
        """What tells a person's function from others of its name; empty for other operators."""
        return self.operator.program(self)

    def promises_more(self, device: str) -> bool:
        """Whether it promises what PyTorch's kernel on a kind of device does not keep."""
        return self.operator.outlives_indices(device) or self.promises_values(device)

    def promises_values(self, device: str) -> bool:
        """As the operator does, but for what is no sum and so has no rounding to do once."""
        indexed = self.operator.indexed
        if indexed is None or (device == "cpu" and indexed.exact(self)):
            return False
        return indexed.promises_values(self.main.dtype, device)

    @property
    def donated(self) -> tuple[str, ...]:
        """Tensor arguments that may be written to: `!donate=x` is the in-place form."""
        return self._listed("donate")

    @property
    def distribution(self) -> str | None:
        """How the values of its indices are spread; None for an operator without any."""
        if self.operator.indexed is None:
            return None
        return next(iter(self._listed("indices")), "uniform")

    def _listed(self, key: str) -> tuple[str, ...]:
        given = dict(flag.split("=", 1) for flag in self.flags if "=" in flag)
        return tuple(given[key].split(",")) if key in given else ()

    @functools.cached_property
    def tensors(self) -> dict[str, TensorSpec]:
        """The tensor arguments that are there, by name, in the operator's order."""
        return {name: v for name, v in self.args if isinstance(v, TensorSpec)}

    @functools.cached_property
    def scalars(self) -> dict[str, float]:
        """The numbers that may change from call to call without another kernel, by name."""
        return {n: v for n, v in self.args if n in self.operator.scalars and isinstance(v, float)}

    @property
    def seed(self) -> int | None:
        """The position among the tensors of the one that decides what is drawn, if one does."""
        names = list(self.tensors)
        return names.index(self.operator.seed) if self.operator.seed in names else None

    @property
    def main(self) -> TensorSpec:
        """The first tensor argument: it decides the dtype of the result."""
        return next(iter(self.tensors.values()))

    @property
    def arithmetic(self) -> str:
        """The dtype that implementations compute in: f32 for halves, as PyTorch's kernels do, and
        where none is floating, if it is a person's function or there are booleans only. Beside
        tensors of f64, what is not of them stays in f32."""
        floating = [s.dtype for s in self.tensors.values() if s.torch_dtype.is_floating_point]
        dtype = next((d for d in floating if d != "f64"), (floating or [self.main.dtype])[0])
        whole = WHOLE if self.operator.fused else ()
        return "f32" if dtype in (*HALVES, "bool", *whole) else dtype

    @functools.cached_property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return self.operator.output_specs(self)

    @functools.cached_property
    def bytes(self) -> tuple[int, int]:
        """Compulsory traffic: (read, written) bytes."""
        return self.operator.bytes(self)

    @functools.cached_property
    def flops(self) -> int:
        return self.operator.flops(self)

    def call(self, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
        """Keyword arguments for the reference, with `tensors` in place of the specs."""
        values = iter(tensors)
        return {n: next(values) if isinstance(v, TensorSpec) else v for n, v in self.args}

    def with_args(self, **changes: Value) -> Workload:
        return self.operator.workload(flags=self.flags, **{**dict(self.args), **changes})

    def with_seed(self) -> Workload:
        """The same with the seed that decides what it draws."""
        return self.with_args(**{str(self.operator.seed): TensorSpec("i64", ())})

    def __str__(self) -> str:
        return self._text

    @functools.cached_property
    def _text(self) -> str:
        operator, given = self.operator, dict(self.args)
        for name in list(given):
            rest = {n: v for n, v in given.items() if n != name}
            with contextlib.suppress(InvalidArgument, KeyError, TypeError):
                if told_apart(operator.resolve(rest)[name]) == told_apart(self[name]):
                    given = rest
        inside = ", ".join(f"{n}={value_text(v)}" for n, v in given.items())
        return f"{self.op}({inside})" + "".join(f"!{flag}" for flag in self.flags)


@dataclass(frozen=True, eq=False)
class Op:
    """An operator: a reference in plain PyTorch plus what the engine must know about it.

    It equals itself alone: another one may have its name later, see `tw.fuse`.

    Attributes:
        name: as in `tw.<name>` and in the text of workloads.
        reference: the mathematics. It must not cast: fed fp64 tensors it is the truth.
        flops: floating-point operations of one call.
        check: takes the arguments by name (specs for tensors), fills in what defaults from other
            arguments, and returns them; raises InvalidArgument for what PyTorch would refuse.
        bytes: compulsory (read, written) bytes; by default each input that the outputs follow from
            once and each output once.
        examples: (workload, kind, seed, device) -> tensors; kind is "random" or "integer".
        integer_exact: integer examples have exactly representable results in every dtype.
        autocasts: autocast may change what the reference computes; it casts for no gradient of a
            convolution.
        tensor_cores: whether the work of a workload is a matrix product, whose rate bounds it.
        scalars: float arguments that change from call to call: kernels take them at run time.
        aliases: PyTorch's keyword for a parameter where it differs: {"input": "x"}.
        casts_first: the public function takes PyTorch's `dtype=`, which converts the first tensor
            before anything else.
        keywords: what else the public function takes, by keyword alone: PyTorch's `out`, `reduce`
            of scatter, `sparse_grad` of gather (dispatch/keywords.py); no workload has them.
        inplace: PyTorch's in-place form of the reference: it writes to one of the tensors, or some
            of them, and returns these. Workloads that donate them (`!donate=x`) mean this form.
        writes: the names of those tensors, one for each output, where it is not the first alone.
        form_of: the operator whose in-place form this is, see `in_place_form`.
        indexed: for operators with an index tensor; None for all others.
        wide: tensor arguments in the arithmetic type, fp32 beside halves: statistics of rows.
        outputs_like: (arguments by name) -> for each output the name of the argument whose dtype
            it has, or None for the arithmetic type; by default all have the first tensor's.
        gradient_of: the operator whose gradients this one computes; its reference differentiates
            that one's with torch.func.vjp, or calls the backward that PyTorch's autograd calls.
            PyTorch's result is then the reference less every step that the gradients do not need.
        reads: of a gradient operator: {gradient: the arguments that its formula uses}.
        fused: it came from tw.fuse: dtypes promote as in PyTorch, and a generated kernel runs it
            where no record speaks for another.
        fallback: with `fused`: PyTorch runs what no kernel can be generated for.
        seed: the int64 scalar that decides what the reference draws (philox.py); without it, None
            in a workload, PyTorch's generator does.
        outside: of a fused function: reads what its last parameters are now, by name; the public
            function passes them (dispatch/functions/outside.py).
        training_of: the operator of which it is the forward and, after that, the backward.
        returns: its outputs' names, for a backward that takes one of them as a parameter;
            `<name>_forward` returns them, and after them what its backward names `wide`.
        same_gradient: of a gradient operator: {argument: another one that has its gradient}.
    """

    name: str
    reference: Callable[..., Any]
    flops: Callable[[Workload], int]
    check: Callable[[dict[str, Value]], dict[str, Value]] = lambda args: args
    bytes: Callable[[Workload], tuple[int, int]] = field(default=lambda w: compulsory_bytes(w))
    examples: Callable[..., list[torch.Tensor]] = lambda w, *how, **named: list(
        random_tensors(w.tensors, *how, **named).values()
    )
    integer_exact: bool = False
    autocasts: bool = True
    tensor_cores: Callable[[Workload], bool] = lambda w: False
    scalars: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    casts_first: bool = False
    keywords: tuple[str, ...] = ()
    inplace: Callable[..., Any] | None = None
    writes: tuple[str, ...] = ()
    indexed: Indexed | None = None
    wide: tuple[str, ...] = ()
    outputs_like: Callable[[Mapping[str, Any]], Sequence[str | None]] | None = None
    gradient_of: str | None = None
    reads: Mapping[str, Sequence[str]] = field(default_factory=dict)
    fused: bool = False
    fallback: bool = False
    form_of: str | None = None
    seed: str | None = None
    outside: Callable[[], Mapping[str, Value]] | None = None
    training_of: str | None = None
    returns: tuple[str, ...] = ("output",)
    same_gradient: Mapping[str, str] = field(default_factory=dict)

    @functools.cached_property
    def signature(self) -> Signature:
        return Signature.of(self.reference, self.name, self.aliases, self.keywords)

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        return self.signature.parameters

    @functools.cached_property
    def returns_any_number(self) -> bool:
        """Whether it is a gradients' operator that returns a tuple of those that are asked for."""
        returned = str(self.reference.__annotations__.get("return"))
        of_another = (self.gradient_of or self.training_of) is not None
        return of_another and returned.startswith("tuple[") and "..." in returned

    def destinations(self, w: Workload) -> tuple[str, ...]:
        """The tensors that the in-place form writes to, where the workload means that form."""
        names = self.writes or tuple(w.tensors)[:1]
        return names if self.inplace is not None and set(names) <= set(w.donated) else ()

    @functools.cached_property
    def in_place_form(self) -> Op | None:
        """The operator as PyTorch spells it with an underscore; its workloads donate what it
        writes to."""
        if self.inplace is None:
            return None
        inplace = self.inplace

        @functools.wraps(self.reference)
        def reference(*args: Any, **kwargs: Any) -> Any:
            return inplace(*args, **kwargs)

        return replace(
            self,
            name=f"{self.name}_",
            reference=reference,
            form_of=self.name,
            keywords=tuple(k for k in self.keywords if k != "out"),
        )

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return self.reference.__doc__

    def resolve(self, given: Mapping[str, Value]) -> dict[str, Value]:
        """All arguments in declaration order, with defaults filled in and checked."""
        return self.check(self.signature.complete(given))

    def workload(self, /, *, flags: Iterable[str] = (), **given: Value) -> Workload:
        """A workload of this operator. Raises InvalidArgument for what PyTorch would refuse."""
        args = self.resolve(given)
        tensors = [name for name, value in args.items() if isinstance(value, TensorSpec)]
        if self.form_of is not None:
            destinations = self.writes or tensors[:1]
            for name in destinations:
                if name not in tensors:
                    raise InvalidArgument(f"{self.name}: {name} is missing: it is written to")
                if self.indexed is None:  # else PyTorch refuses it, before it is written to
                    self._refuse_expanded(name, args[name])
            flags = [*flags, f"donate={','.join(destinations)}"]
        flags = canonical_flags(self.name, flags, tensors)
        w = Workload(self.form_of or self.name, tuple(args.items()), flags)
        if not w._listed("indices"):
            return w
        if self.indexed is None:
            raise InvalidArgument(f"{self.name}: '!indices=' is for operators with an index tensor")
        return replace(w, flags=self.indexed.named(w))

    def _refuse_expanded(self, name: str, spec: TensorSpec) -> None:
        sizes = zip(spec.shape, spec.real_strides, strict=True)
        if any(n > 1 and not stride for n, stride in sizes):
            raise InvalidArgument(
                f"{self.name}: {name}={spec} is written to, but is expanded: several of its "
                "elements are one in memory; clone it before the call"
            )

    def _of_unknown_dtype(self, name: str, given: Mapping[str, Any]) -> TensorSpec:
        """A tensor of a dtype that nothing here has, which does not matter of an empty index.

        Raises:
            InvalidArgument: it matters; the message tells which ones the call could be made in.
        """
        taken = []
        for dtype in DTYPES:
            specs: dict[str, Any] = {
                n: TensorSpec(DTYPE_NAMES.get(v.dtype, dtype), tuple(v.shape), v.stride())
                if isinstance(v, torch.Tensor)
                else v
                for n, v in given.items()
            }
            with contextlib.suppress(InvalidArgument):
                self.workload(**specs)
                taken.append(dtype)
        wanted = f"one of {', '.join(taken or DTYPES)}"
        if self.indexed is not None and name == "index":
            if len(taken) == len(DTYPES):
                return specs[name]
            wanted = "i64 or i32; convert it: index.long()"
        raise InvalidArgument(f"{self.name}: {name} is {given[name].dtype}, expected {wanted}")

    def workload_of(self, /, *args: Any, **kwargs: Any) -> tuple[Workload, list[torch.Tensor]]:
        """The workload of a call with real tensors, and those tensors in order."""
        tensors, given = [], {}
        bound = self.signature.bind(args, kwargs)
        for name, value in bound.items():
            if isinstance(value, torch.Tensor):
                tensors.append(value)
                if (kind := other_layout(value)) is not None:
                    raise InvalidArgument(
                        f"{self.name}: {name} is {kind}, expected a strided tensor; convert it"
                    )
                known = value.dtype in DTYPE_NAMES
                value = TensorSpec.of(value) if known else self._of_unknown_dtype(name, bound)
            elif isinstance(value, (list, tuple)):
                value = tuple(of_python(v) for v in value)
            elif (kind := self.parameters[name].annotation) != "bool":
                value = of_python(value)
                if isinstance(value, bool) and kind == "float" and self.indexed is not None:
                    value = float(value)  # as PyTorch takes alpha
            if isinstance(value, torch.dtype):
                if self.fused:
                    raise InvalidArgument(
                        f"{self.name}: {name}={value}: a dtype is no argument of a fused function; "
                        "write it inside"
                    )
                value = DTYPE_NAMES.get(value, str(value))
            given[name] = value
        devices = {t.device for t in tensors}
        if len(devices) > 1:
            found = ", ".join(sorted(map(str, devices)))
            raise InvalidArgument(f"{self.name}: tensors are on {found}; move them to one device")
        return self.workload(**given), tensors

    def output_specs(self, w: Workload) -> tuple[TensorSpec, ...]:
        """Shape, dtype and layout of each output, as PyTorch lays it out."""
        if names := self.destinations(w):
            return tuple(replace(w.tensors[name], align=DEFAULT_ALIGN) for name in names)
        with without_memory(fake=self.indexed is None) as device, without_hooks():
            fakes = [
                torch.empty_strided(s.shape, s.real_strides, dtype=dtype, device=device)
                for s, dtype in zip(w.tensors.values(), _dtypes_for_layout(w), strict=True)
            ]
            out = self.reference(**w.call(fakes))
        outs = self.returned(out)
        dtypes: Sequence[torch.dtype] = [o.dtype for o in outs]
        if self.outputs_like is not None:
            dtypes = self.output_dtypes(dict(w.args))
        return specs_of(self.name, outs, dtypes)

    def output_dtypes(self, args: Mapping[str, Any]) -> list[torch.dtype]:
        """The dtype of each output, from `outputs_like`; `args` holds tensors or their specs."""
        assert self.outputs_like is not None
        return dtypes_like(self.outputs_like(args), args)

    def outlives_indices(self, device: str) -> bool:
        """Whether an index out of range has to leave the process the use of the device: PyTorch's
        kernels have an assertion there, or write."""
        return self.indexed is not None and device == "cuda" and not trusts_indices()

    def still_itself(self) -> None:
        """Refuse a call under a name that a person has given to another function since.

        Raises:
            InvalidArgument: always then.
        """
        if self.fused and not OPS.holds(self.name, self):
            raise InvalidArgument(
                f"{self.name}: another function was fused under this name since; "
                "give each a name: tw.fuse(..., name=...)"
            )

    def read(self, w: Workload) -> frozenset[str]:
        """The tensor arguments whose values the outputs follow from."""
        if not self.reads:
            return frozenset(w.tensors)
        gradients: Any = w["grads"]
        return frozenset(n for g in gradients for n in self.reads[g] if n in w.tensors)

    def backward(self, arguments: Iterable[str] = ()) -> Op:
        """Of a fused function: the operator of its gradients that takes these arguments."""
        raise NotImplementedError(self.name)

    def composed(self, w: Workload) -> Callable[..., Any] | None:
        """PyTorch's kernels in place of one of ours that promises more than PyTorch's result."""
        return None

    def draws(self, w: Workload) -> bool:
        """Whether the reference draws random masks that a seed could decide, and none is given."""
        return False

    def program(self, w: Workload) -> str:
        """A hash of what it computes, where its name does not say: records hold it."""
        return ""

    def truth(self, w: Workload, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The reference in fp64, on the tensors' own device; of an operator with an index tensor,
        what the stated order of writes gives."""
        if self.indexed is not None:
            return (self.indexed.terms(w, tensors).value,)
        wide = [t.double() if t.is_floating_point() else t for t in tensors]
        return self.returned(self.reference(**w.call(wide)))

    def returned(self, out: Any) -> tuple[torch.Tensor, ...]:
        """The tensors that the reference returned. Raises NoImplementation if these are none."""
        return tensors_of(self.name, out)


class Operators(Registry[Op]):
    """Of all names, `<name>_backward` of a fused function is made when it is first looked up: what
    it takes depends on how many tensors the function returns."""

    def __init__(self) -> None:
        super().__init__(
            "ops", "operator", "; a function of tw.fuse is known once its file is: --import FILE"
        )

    def named(self, name: str, arguments: Iterable[str] = ()) -> Op:
        """The operator of this name that takes these arguments, where there may be several."""
        function = self._function_of(name)
        return super().__getitem__(name) if function is None else function.backward(arguments)

    def __getitem__(self, name: str) -> Op:
        return self.named(name)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or self._function_of(name) is not None

    def _function_of(self, name: object) -> Op | None:
        """The fused function of which `name` is the backward, unless that is another operator."""
        if not isinstance(name, str) or not name.endswith("_backward"):
            return None
        op, made = self.get(name.removesuffix("_backward")), self.get(name)
        if op is None or not op.fused or op.gradient_of is not None:
            return None
        return op if made is None or made.gradient_of == op.name else None


OPS = Operators()


def op(**declared: Any) -> Callable[[Callable[..., Any]], Op]:
    """Declare an operator by decorating its reference; see Op for the keywords."""

    def register(reference: Callable[..., Any]) -> Op:
        return OPS.add(reference.__name__, Op(reference.__name__, reference, **declared))

    return register


def told_apart(value: Any) -> Any:
    """With type, text and parts, where values are equal to others: 0.0 equals -0.0 and 1 True, and
    NaN not even itself. Objects of other types are as equal as these have it, and their parts."""
    kind = type(value)
    if kind in _EQUAL_TO_THEMSELVES_ALONE:
        return value
    if isinstance(value, float):
        return float, float.__repr__(value)
    if kind is bool or kind is complex:
        return kind, repr(value)
    if isinstance(value, (tuple, list)):
        parts = tuple([told_apart(v) for v in value])
        return parts if kind is tuple else (kind, parts)
    if isinstance(value, frozenset):
        return kind, frozenset(map(told_apart, value))
    if is_dataclass(value):
        names = [f.name for f in fields(value)]
        return kind, value, tuple([told_apart(getattr(value, n, None)) for n in names])
    return kind, value


_EQUAL_TO_THEMSELVES_ALONE = frozenset({int, str, type(None), TensorSpec})


def _dtypes_for_layout(w: Workload) -> list[torch.dtype]:
    """Parameters wider than a half input do not widen the result."""
    arithmetic, main = DTYPES[w.arithmetic], w.main.torch_dtype
    if w.operator.fused:
        return [s.torch_dtype for s in w.tensors.values()]
    return [
        (arithmetic if name in w.operator.wide else main)
        if s.torch_dtype.is_floating_point
        else s.torch_dtype
        for name, s in w.tensors.items()
    ]


def compulsory_bytes(w: Workload) -> tuple[int, int]:
    used = w.operator.read(w)
    read = sum(s.distinct_bytes for n, s in w.tensors.items() if n in used)
    return read, sum(o.numel * o.itemsize for o in w.outputs)
