"""Trace an operator's reference to torch.fx, over torch's own decompositions."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import logging
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import fx
from torch.fx.traceback import preserve_node_meta, set_stack_trace
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from tilewright.errors import InvalidArgument, NoImplementation, TilewrightError
from tilewright.fakes import fake_tensors, tracing_lock, without_hooks
from tilewright.fusion.frontend.decompositions import decompositions_of
from tilewright.fusion.frontend.given_dtypes import Calls, Following, Noting
from tilewright.fusion.frontend.refused import Refusing, untraceable
from tilewright.fusion.remembered import ByOperator
from tilewright.op import Op, Workload
from tilewright.rounding import traced_roundings
from tilewright.tensor_spec import DTYPES, HALVES, TensorSpec

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode


def trace_reference(
    w: Workload, dtype: str | None = None, runtime_scalars: bool = False
) -> fx.GraphModule:
    """The reference as a graph of core aten and prims operators.

    Every floating tensor is traced as `dtype` (default: what it is computed in, fp32 for halves),
    so that the graph holds no casts but those the program wrote: `rounded(t)` appears as
    a `tilewright.rounded` node. Placeholders stand in the order of `w.tensors`, followed, with
    `runtime_scalars`, by one 0-d tensor for each of `w.scalars`. Every node's `meta["val"]` is a
    fake tensor with its shape; its `meta["stack_trace"]` names the line of the reference, of a
    gradient's steps that of the step which they differentiate.

    Raises:
        NoImplementation: the reference decides by a tensor's values, or returns no tensors.
        InvalidArgument: it is a person's function, and raises.
    """
    scalars = w.scalars if runtime_scalars else {}
    layouts = [(s.shape, s.real_strides) for s in w.tensors.values()]
    return traced(w, fake_tensors(), layouts, dtype, scalars)


Layouts = Sequence[tuple[Sequence[Any], Sequence[Any]]]
"""Shape and strides of each tensor."""


def traced(
    w: Workload,
    fake: FakeTensorMode,
    layouts: Layouts,
    dtype: str | None = None,
    scalars: Collection[str] = (),
) -> fx.GraphModule:
    """The same of tensors with these layouts, whose sizes may be symbols of the fake mode's."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def traced_as(s: TensorSpec) -> torch.dtype:
        if not s.torch_dtype.is_floating_point:
            return s.torch_dtype
        return DTYPES[dtype or ("f64" if s.dtype == "f64" else "f32")]

    with torch.inference_mode(False), fake:
        fakes = [
            torch.empty_strided(*layout, dtype=traced_as(s), device="cpu")
            for layout, s in zip(layouts, w.tensors.values(), strict=True)
        ]
        kind = DTYPES[dtype or w.arithmetic]
        fakes += [torch.empty((), dtype=kind, device="cpu") for _ in scalars]

    def call(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        given = w.call(tensors[: len(w.tensors)])
        given.update(zip(scalars, tensors[len(w.tensors) :], strict=True))
        return w.operator.returned(w.operator.reference(**given))

    calls = _calls_as_given(w, call, fakes, fake) if w.operator.fused else None

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with by_shapes(w.operator, w):
            if calls is None:
                return call(tensors)
            with Following(calls, tensors) as following:
                out = call(tensors)
            following.finish(out)
            return out

    outside = torch.inference_mode(False)  # in which nothing is differentiated
    lines = preserve_node_meta()
    # What a reference or a decomposition makes of a shape alone must be fake as well: it would take
    # the memory, and autograd replays the views through which it is written to.
    with outside, tracing_lock(), traced_roundings(), lines, without_hooks(), fake:
        trace = None
        if w.operator not in _writing:
            trace = make_fx(run, decomposition_table=decompositions_of(w))(*fakes)
        if trace is None or any(map(_writes, trace.graph.nodes)):
            _writing.add(w.operator)
            differentiated = make_fx(run)(*fakes)
            again = fx.Interpreter(differentiated).run  # it passes lines on
            functional = torch.func.functionalize(again, remove="mutations")
            trace = make_fx(functional, decomposition_table=decompositions_of(w))(*fakes)
    trace.graph.eliminate_dead_code()  # a gradient's forward, where only its shape was needed
    trace.recompile()
    return trace


_writing = WeakSet[Op]()
"""Operators with a step that writes in place, as far as known: their traces have to be made
functional, and before decompositions, which make views that cannot be."""


def _writes(step: fx.Node) -> bool:
    return isinstance(step.target, torch._ops.OpOverload) and step.target._schema.is_mutable


def arguments_of(step: fx.Node) -> dict[str, Any]:
    """By name, those that are given."""
    names = (a.name for a in step.target._schema.arguments)  # type: ignore[union-attr]
    return {**dict(zip(names, step.args, strict=False)), **step.kwargs}


@ByOperator
def program_of(w: Workload) -> str:
    """A hash of the traced steps and of the constants among them."""
    try:
        traced = trace_reference(w, runtime_scalars=True)
    except (NoImplementation, InvalidArgument):  # another of its name may have taken such tensors
        return "untraced"
    found = hashlib.sha256(traced.code.encode())
    for name, constant in [*traced.named_parameters(), *traced.named_buffers()]:
        found.update(f"{name} {constant.dtype} {constant.tolist()}".encode())
    return found.hexdigest()[:16]


def _calls_as_given(
    w: Workload,
    call: Callable[[Sequence[torch.Tensor]], Any],
    traced: Sequence[torch.Tensor],
    fake: FakeTensorMode,
) -> Calls | None:
    """The steps of a function in its tensors' own dtypes, where a trace has halves in another."""
    if not any(s.dtype in HALVES for s in w.tensors.values()):
        return None
    calls = Calls(getattr(inspect.unwrap(w.operator.reference), "__code__", None))
    own = [s.torch_dtype for s in w.tensors.values()]
    dtypes = [*own, *(t.dtype for t in traced[len(own) :])]
    outside = torch.inference_mode(False)
    with outside, tracing_lock(), traced_roundings(), without_hooks(), fake:
        given = [
            torch.empty_strided(t.shape, t.stride(), dtype=d, device="cpu")
            for t, d in zip(traced, dtypes, strict=True)
        ]
        with by_shapes(w.operator, w), Noting(calls, given):
            call(given)
    return calls


def trace_truth(w: Workload) -> fx.GraphModule:
    """The reference as it is computed in fp64 to be held against.

    A person's function may follow from its dtype (rms_norm's default eps): it is traced in its own.
    """
    return trace_reference(w, None if w.operator.fused else "f64")


def arithmetics(w: Workload, trace: fx.GraphModule) -> dict[fx.Node, str]:
    """What each step of a trace is computed in: fp64 where the program asks for it, fp32 where it
    asks for less, else what the workload is. Whole numbers and booleans are found in what they are
    made of."""
    found: dict[fx.Node, str] = {}
    for node in trace.graph.nodes:
        dtype = _promoted([node]) or _promoted(node.all_input_nodes)
        wide = dtype == torch.float64
        if dtype is None:
            wide = "f64" in {found[n] for n in node.all_input_nodes}
        found[node] = w.arithmetic
        if w.operator.fused and (wide or dtype is not None):
            found[node] = "f64" if wide else "f32"
    return found


def _promoted(nodes: list[fx.Node]) -> torch.dtype | None:
    """As PyTorch promotes floating tensors: one without dims widens no other. None of none, nor of
    fp8, which it does not promote."""
    tensors = [n.meta.get("val") for n in nodes]
    floating = [t for t in tensors if isinstance(t, torch.Tensor) and t.is_floating_point()]
    floating = [t for t in floating if t.dtype.itemsize > 1]
    dtypes = [t.dtype for t in ([t for t in floating if t.dim()] or floating)]
    return functools.reduce(torch.promote_types, dtypes) if dtypes else None


@contextlib.contextmanager
def by_shapes(op: Op, w: Workload) -> Iterator[None]:
    """While the operator's reference is called on tensors that have no values.

    Raises:
        NoImplementation: naming the line at which it asks for one.
        InvalidArgument: it is a person's function, and raises; naming the line.
    """
    from torch._subclasses import fake_tensor

    lines, formulas = _Lines(op), _ByOtherFormulas()
    # Under a default device calls disable modes, ours too; and it need not be these tensors'.
    enabled, at_home = torch._C._EnableTorchFunction(), torch.device("cpu")
    try:
        refusing = Refusing() if op.fused else contextlib.nullcontext()
        casts_of_the_call, quietly = torch._C._DisableAutocast(), _told_once(fake_tensor.log)
        with enabled, at_home, casts_of_the_call, formulas, lines, quietly, refusing:
            yield
    except (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
    ) as reason:
        raise _by_values(str(reason.func), lines.last, w) from None
    except TilewrightError:
        raise
    except Exception as error:  # whatever a person's function raises
        if not op.fused:
            raise
        told = str(error).split("\n")[0]
        if asked := _ASKED_OF_A_TRACE.search(told):
            raise _by_values(asked[1], lines.last, w) from None
        where = f" ({line})" if (line := lines.raising(error)) else ""
        raise InvalidArgument(
            f"{op.name} raises {type(error).__name__}{': ' * bool(told)}{told}{where}, called with "
            f"{', '.join(f'{n}={v}' for n, v in w.tensors.items())}"
        ) from error


_ASKED_OF_A_TRACE = re.compile("get value out of a tracing tensor with (\\S+)")
"""make_fx has no exception of its own for the steps that fake tensors would answer."""


def _by_values(step: str, line: str | None, w: Workload) -> NoImplementation:
    where = f" ({line})" if line else ""
    told = f"{step} of the reference decides by values of a tensor{where}"
    numbers = [
        *w.scalars,
        *(n for n, s in w.tensors.items() if not s.shape and n != w.operator.seed),
    ]
    if "_local_scalar_dense" in step and numbers:
        told += (
            f"; if that is {' or '.join(numbers)}: it is a tensor of no dims here, so give a "
            "Python number, and leave it out of scalars="
        )
    return NoImplementation(told)


@contextlib.contextmanager
def _told_once(log: logging.Logger) -> Iterator[None]:
    """Without the stack traces that torch logs of what it raises as well."""

    def silent(record: logging.LogRecord) -> bool:
        return not record.exc_info

    log.addFilter(silent)
    try:
        yield
    finally:
        log.removeFilter(silent)


class _Lines(TorchFunctionMode):
    """Notes for each step of a trace which line of the reference it comes from."""

    def __init__(self, op: Op):
        super().__init__()
        self.code = getattr(inspect.unwrap(op.reference), "__code__", None)
        self.persons = op.fused
        self.last: str | None = None
        self.noted: set[Any] = set()

    def raising(self, error: BaseException) -> str | None:
        """The line of the reference that raised."""
        for frame, number in traceback.walk_tb(error.__traceback__):
            if frame.f_code is self.code:
                return f"{frame.f_code.co_filename}:{number}"
        return self.last

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        frame = sys._getframe(1)
        while frame is not None and frame.f_code is not self.code:
            frame = frame.f_back  # type: ignore[assignment]
        if frame is None:
            return function(*args, **(kwargs or {}))
        self.last = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if self.persons and (reason := untraceable(function, sys._getframe(1))):
            raise NoImplementation(f"{reason} ({self.last})")
        set_stack_trace([self.last])
        out = function(*args, **(kwargs or {}))
        self.note([t.grad_fn for t in tree_leaves(out) if isinstance(t, torch.Tensor)], [self.last])
        return out

    def note(self, behind: list[Any], line: list[str]) -> None:
        """Give what differentiates the last step its line, too."""
        while behind:
            step = behind.pop()
            if step is not None and step not in self.noted:
                self.noted.add(step)
                step.register_prehook(lambda gradients: set_stack_trace(line))
                behind += [before for before, _ in step.next_functions]


class _ByOtherFormulas(TorchFunctionMode):
    """Inside, steps are differentiated by reductions where PyTorch's formulas have steps that
    kernels have not: they scan for a product, and list the places of a mask that one element was
    written to."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function == torch.Tensor.__setitem__ and _fills_by_mask(*args):
            x, mask, value = args
            mask = mask.reshape(*mask.shape, *[1] * (x.dim() - mask.dim()))
            x.masked_fill_(mask, value.to(x.dtype))
            return None
        taken = {"input", "dim", "keepdim", "dtype"}
        if function not in (torch.prod, torch.Tensor.prod) or not taken.issuperset(kwargs):
            return function(*args, **kwargs)
        x, dim, keepdim, dtype = _product_of(*args, **kwargs)
        return _Product.apply(x if dtype is None else x.to(dtype), dim, keepdim)


def _fills_by_mask(x: torch.Tensor, mask: Any, value: Any) -> bool:
    """Whether `x[mask] = value` writes one element, of which there is a gradient."""
    if not (isinstance(mask, torch.Tensor) and isinstance(value, torch.Tensor)):
        return False
    fits = mask.dtype == torch.bool and mask.shape == x.shape[: mask.dim()]
    return fits and not value.dim() and value.requires_grad


def _product_of(
    input: Any, dim: int | None = None, keepdim: bool = False, *, dtype: Any = None
) -> tuple[Any, int | None, bool, Any]:
    return input, dim, keepdim, dtype


class _Product(torch.autograd.Function):
    """A product over a dim, or over all."""

    @staticmethod
    def forward(x: torch.Tensor, dim: int | None, keepdim: bool) -> torch.Tensor:
        return x.prod() if dim is None else x.prod(dim, keepdim)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.dim, _ = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Each factor's gradient is the product of the others: none of them may be zero."""
        (x,) = ctx.saved_tensors
        dims = range(x.dim()) if ctx.dim is None else [ctx.dim % max(x.dim(), 1)]
        kept = [1 if d in dims else n for d, n in enumerate(x.shape)]
        gradient = gradient.reshape(kept)
        if kept == list(x.shape):  # of one factor
            return gradient, None, None
        zero = x == 0
        factors = torch.where(zero, 1.0, x)
        product = (factors.prod() if ctx.dim is None else factors.prod(ctx.dim)).reshape(kept)
        zeros = zero.to(x.dtype).sum(list(dims), keepdim=True)
        others = torch.where(zeros == zero.to(x.dtype), product / factors, 0.0)
        return gradient * others, None, None


def written_by(node: Any) -> Any:
    """The step that a write to an argument comes from, which has its line; any other by itself."""
    return node.args[1] if name_of(node) == "copy_" else node


def name_of(node: fx.Node) -> str:
    """Of the operation, without its namespace and overload."""
    target = node.target
    assert isinstance(target, torch._ops.OpOverload), target
    return target._schema.name.split("::")[1]
