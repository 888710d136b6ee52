"""From a torch.fx trace to the fusion compiler's graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from tilewright.fusion.frontend.axes import Value, constant
from tilewright.fusion.frontend.composed import COMPOSED
from tilewright.fusion.frontend.families import AcrossSizes
from tilewright.fusion.frontend.pieces import Pieces
from tilewright.fusion.frontend.reducing import OF_BOOLEANS, OVER_BOOLEANS, ReducingBuilder
from tilewright.fusion.frontend.steps import TooManySteps, Unsupported
from tilewright.fusion.frontend.storing import IDENTITIES
from tilewright.fusion.frontend.trace import (
    arguments_of,
    arithmetics,
    name_of,
    trace_reference,
    written_by,
)
from tilewright.fusion.frontend.values import COUNTED, COUNTS, INSTEAD
from tilewright.fusion.ir import POINTWISE, Draw, Graph
from tilewright.fusion.staged import Staged
from tilewright.op import Workload
from tilewright.tensor_spec import DTYPE_NAMES, TensorSpec

MOST_KEPT = 32
"""Values that are stored on the way."""
_RENAMED = {
    "true_divide": "div",
    "max": "maximum",
    "min": "minimum",
}
_LOGICAL = {
    **{f"{kind}_{name}": name for kind in ("logical", "bitwise") for name in ("and", "or", "not")},
    **{f"{kind}_xor": "ne" for kind in ("logical", "bitwise")},
}
_VIEWS = (
    "broadcast_in_dim",
    "expand",
    "view",
    "reshape",
    "_unsafe_view",
    "unsqueeze",
    "squeeze",
    "repeat",
)
_FILLED = ("full", "full_like", "scalar_tensor", "zeros", "zeros_like", "ones", "ones_like")
_EMPTY = (
    *("empty", "empty_like", "empty_permuted", "empty_strided"),
    *("new_empty", "new_empty_strided"),
)
_CASTS = ("convert_element_type", "_to_copy", "to")
_WHOLE = {"maximum": "amax", "minimum": "amin"}
"""`max` and `min` of one tensor."""
_SIGNS = ("sign", "sgn")


@AcrossSizes
def lower(w: Workload) -> Graph | Staged:
    """The workload's graph: inputs upcast to the arithmetic type, outputs cast to theirs. It is in
    stages where values are stored, since to compute them anew for each of their slices takes more.

    Raises:
        Unsupported: naming the first step that kernels are not made of, with its line.
    """
    trace = trace_reference(w, runtime_scalars=True)
    kept: dict[fx.Node, str] = {}
    while True:
        lowering = _Lowering(w, trace, kept)
        try:
            outputs = lowering.outputs()
        except TooManySteps:
            costly = lowering.costliest()
            if costly is None or len(kept) == MOST_KEPT:
                raise
        else:
            costly = lowering.costlier_than_memory(outputs)
            if costly is None or len(kept) == MOST_KEPT:
                break
        kept[costly[0]] = costly[1]
    return lowering.finish(outputs, lowering.numbers)


class _Lowering(ReducingBuilder):
    """One walk over a trace.

    Attributes:
        numbers: how many run-time scalars there are.
    """

    def __init__(self, w: Workload, trace: fx.GraphModule, kept: Mapping[fx.Node, str]):
        super().__init__(w, trace, kept)
        self.arithmetics: dict[fx.Node, str] = {}

    def outputs(self) -> list[Value | Pieces]:
        trace = self.trace
        inputs = list(self.w.tensors.values())
        self.arithmetics = arithmetics(self.w, trace)
        if "f64" in self.arithmetics.values():
            self.scalar = "f64"
        placeholders = [n for n in trace.graph.nodes if n.op == "placeholder"]
        for i, node in enumerate(placeholders):
            if i == self.w.seed:
                self.values[node] = None  # masks that follow from it stand for it
            elif i < len(inputs):
                self.values[node] = self.load(i, inputs[i])
            else:
                index = self.add("scalar", (), self.scalar, (), i - len(inputs))
                self.values[node] = Value(index, ())
        self.numbers = len(placeholders) - len(inputs)
        outputs: list[Value | Pieces] = []
        for node in trace.graph.nodes:
            if node.op == "call_function":
                if node.users or name_of(node).endswith("_"):
                    self.values[node] = self.placed(node)
                    if node in self.reasons:
                        self.keep_result(node)
            elif node.op == "output":
                outputs = [self.whole(o) for o in node.args[0]]
        return outputs

    def drawn(self, node: Any) -> Value:
        """A mask: an input whose buffer is the seed."""
        _, call, threshold, shape = node.args
        assert self.w.seed is not None, node
        return self.load(self.w.seed, TensorSpec("bool", tuple(shape)), Draw(call, threshold))

    def placed(self, node: Any) -> Value | Pieces | None:
        """The step's value; what cannot be lowered is named with its line."""
        self.line = written_by(node).meta.get("stack_trace")
        self.arithmetic = self.arithmetics[node]
        try:
            found = self.step(node)
        except Unsupported as reason:
            told = f"{reason} ({self.line})" if self.line else str(reason)
            raise type(reason)(told) from None
        # Kernels would read and write beyond what is there.
        out = node.meta.get("val")
        fits = found is None or found.shape == tuple(out.shape) or _only_returned(node)
        assert fits, (node, found, out.shape)
        pieces = [v for _, v in found.boxes] if isinstance(found, Pieces) else [found]
        for value in filter(None, pieces):
            runs = self.axes.roots(self.steps[value.node].axes)
            assert self.axes.along(value.dims) == runs, (node, value)
        return found

    def step(self, node: Any) -> Value | Pieces | None:
        if name_of(node) == "copy_" and node.args[0].op == "placeholder":
            raise Unsupported("it writes to an argument: return the new value instead")
        if node.target is torch.ops.aten.view.dtype:
            raise Unsupported("view(dtype) reads the bits of one dtype as another: use to(dtype)")
        out = node.meta.get("val")
        if isinstance(out, torch.Tensor) and not out.numel():
            return self.filled(node, "zeros")  # any number is right
        if isinstance(out, torch.Tensor) and out.is_complex():
            told = "of complex numbers, real arithmetic on their two parts is taken"
            raise Unsupported(f"{node.target} gives {out.dtype}: {told}")
        name = name_of(node).rstrip("_")
        name = _RENAMED.get(name, name)
        if name_of(node) == "div" and (mean := self.mean_beside(node)) is not None:
            return mean
        elementwise = name in (*POINTWISE, *_LOGICAL, *COMPOSED, *_CASTS, "clamp")
        if elementwise and any(
            isinstance(self.values.get(n), Pieces) for n in node.all_input_nodes
        ):
            return self.piecewise(node)
        if not isinstance(out, torch.Tensor):
            raise _unknown(node, name)
        if name in _WHOLE and len(node.args) == 1:
            return self.reduction(node, _WHOLE[name])
        if name in _STEPS:
            return _STEPS[name](self, node, name)
        return self.of_elements(node, name)

    def of_elements(self, node: Any, name: str) -> Value:
        if (mode := node.kwargs.get("rounding_mode")) is not None:
            name = f"{name}_{mode}"
        of_booleans = node.meta["val"].dtype == torch.bool and name in OF_BOOLEANS
        if name in COMPOSED or name in POINTWISE or name in _LOGICAL or of_booleans:
            result = self.integer_step(node, name)
            if result is None and name in COMPOSED and not of_booleans:
                result = COMPOSED[name](self, *self.operands(node, name))
            elif result is None:
                result = self.pointwise(node, name)
            if name_of(node).endswith("_"):
                self.values[node.args[0]] = result
            return result
        raise _unknown(node, name)

    def lifted(self, node: Any, name: str) -> Value | Pieces:
        """A tensor that the reference makes of a number, or another as it is."""
        return self.number_of(node.args[0]) or self.whole(node.args[0])

    def together(self, node: Any) -> Value | Pieces:
        """Tensors one after another along a dim."""
        given = node.args[0]
        dim = (node.args[1] if len(node.args) > 1 else 0) % node.meta["val"].dim()
        dtype = DTYPE_NAMES[node.meta["val"].dtype]
        if any(n.meta["val"].dim() != node.meta["val"].dim() for n in given):
            raise Unsupported("cat of tensors of different ranks")
        some = [n for n in given if n.meta["val"].shape[dim]]
        return self.concatenated([self.whole_as(n, dtype) for n in some], dim)

    def written_over(self, node: Any) -> Value | Pieces:
        """A tensor with some elements of a dim replaced."""
        out, given = node.meta["val"], arguments_of(node)
        into, src = (self.whole_as(given[n], DTYPE_NAMES[out.dtype]) for n in ("self", "src"))
        dim = given.get("dim", 0) % out.dim()
        return self.replaced(into, src, dim, _elements(given, out.shape[dim]))

    def piecewise(self, node: Any) -> Value | Pieces:
        """A step of each piece, with the same slice of the other operands."""
        given = {n: self.values[n] for n in node.all_input_nodes}

        def step(values: list[Value]) -> Value:
            self.values.update(zip(given, values, strict=True))
            piece = self.step(node)
            assert isinstance(piece, Value), node
            return piece

        try:
            return self.of_each(step, list(given.values()), tuple(node.meta["val"].shape))
        finally:
            self.values.update(given)

    def filled(self, node: Any, name: str) -> Value:
        """A tensor that holds one number."""
        out = node.meta["val"]
        if out.dtype not in DTYPE_NAMES:
            raise Unsupported(f"{node.target} gives {out.dtype}")
        fixed = {"zeros": 0, "zeros_like": 0, "ones": 1, "ones_like": 1}
        value = fixed[name] if name in fixed else node.args[0 if name == "scalar_tensor" else 1]
        if isinstance(value, fx.Node):
            return Value(self.value(value).node, constant(out.shape))
        return self.holding(value, node)

    def slice_of(self, node: Any, name: str) -> Value | Pieces:
        """Some elements of a dim, or one, whose dim is dropped."""
        given = arguments_of(node)
        whole, size = self.whole(given["self"]), given["self"].meta["val"].shape
        dim = given.get("dim", 0) % len(size)
        if name == "select":
            one = range(size[dim])[given["index"]]
            found = self.elements(whole, dim, range(one, one + 1))
            return self.regrouped(found, node.meta["val"].shape)
        return self.elements(whole, dim, _elements(given, size[dim]))

    def permuted(self, node: Any, name: str) -> Value | Pieces:
        whole = self.whole(node.args[0])
        order = list(range(len(whole.shape)))
        if name == "permute":
            order = [d % len(order) for d in node.args[1]]
        elif len(order) > 1:
            a, b = node.args[1:3] if name == "transpose" else (0, 1)
            order[a], order[b] = order[b], order[a]
        return self.moved(whole, order)

    def cast(self, node: Any) -> Value:
        value, dtype = self.value(node.args[0]), node.meta["val"].dtype
        if dtype not in DTYPE_NAMES:
            raise Unsupported(f"a cast to {dtype}; of whole numbers, int32 and int64 are taken")
        return self.converted(value, DTYPE_NAMES[dtype])

    def copied(self, node: Any) -> Value | Pieces:
        """What is written over another tensor, in its dtype and shape."""
        out = node.meta["val"]
        return self.expanded(self.whole_as(node.args[1], DTYPE_NAMES[out.dtype]), out.shape)

    def clamped(self, node: Any) -> Value:
        if (found := self.integer_step(node, "clamp")) is not None:
            return found
        of_booleans = node.meta["val"].dtype == torch.bool

        def operand(argument: Any) -> Value:
            return self.alike([self.value(argument)], of_booleans)[0]

        value = operand(node.args[0])
        for bound, name in zip(node.args[1:], ("maximum", "minimum"), strict=False):
            if bound is not None:
                value = self.binary(name, value, operand(bound))
        return value

    def viewed(self, node: Any, name: str) -> Value | Pieces:
        whole, shape = self.whole(node.args[0]), tuple(node.meta["val"].shape)
        if name == "repeat":
            whole = self.expanded(whole, [1] * (len(shape) - len(whole.shape)) + [*whole.shape])
            pairs = [*zip(node.args[1], whole.shape, strict=True)]
            whole = self.regrouped(whole, [n for _, size in pairs for n in (1, size)])
            whole = self.expanded(whole, [n for pair in pairs for n in pair])
        elif name == "broadcast_in_dim":
            own = dict(zip(node.args[2], whole.shape, strict=True))
            whole = self.regrouped(whole, [own.get(d, 1) for d in range(len(shape))])
        if name in ("expand", "broadcast_in_dim"):
            return self.expanded(whole, shape)
        try:
            return self.regrouped(whole, shape)
        except Unsupported:
            if isinstance(whole, Value) and _only_returned(node):
                return whole  # it may be stored along other dims than the result's
            raise

    def operands(self, node: Any, name: str) -> list[Value]:
        """Of a step of elements, in one dtype: booleans are 0 and 1 beside numbers."""
        known = {"alpha", "dtype", "layout", "device", "pin_memory", "rounding_mode"}
        if unknown := [n for n, v in node.kwargs.items() if n not in known and v is not None]:
            raise Unsupported(f"{node.target} with {unknown[0]}={node.kwargs[unknown[0]]!r}")
        values = [self.value(a) for a in node.args]
        dtype = node.meta["val"].dtype
        if any(_is_whole(a) for a in node.all_input_nodes):
            self.check_whole(values)
        if name in _LOGICAL:
            return [self.converted(v, "bool") for v in values]
        if dtype == torch.bool and name in OF_BOOLEANS:
            return values
        first = 1 if name == "where" else 0
        booleans = dtype == torch.bool and name not in COMPOSED
        return [*values[:first], *self.alike(values[first:], booleans)]

    def check_whole(self, values: list[Value]) -> None:
        """Counts, and floats that were cast, are kept in the arithmetic type beside floats."""
        most = COUNTED[self.arithmetic]
        for number in (self.steps[v.node].attr for v in values):
            if type(number) is int and abs(number) > most:
                told = f"{number} beside whole numbers in {self.arithmetic}"
                raise Unsupported(f"{told}, which holds these to {most}")

    def pointwise(self, node: Any, name: str) -> Value:
        values = self.operands(node, name)
        if name in _SIGNS and self.steps[values[0].node].dtype == "bool":
            return values[0]
        if name in _LOGICAL:
            return self.combine(_LOGICAL[name], values)
        alpha = node.kwargs.get("alpha", 1)
        if node.meta["val"].dtype == torch.bool and name in OF_BOOLEANS:
            if not alpha:
                values[1] = self.combine("and", [values[1], self.number(False)])
            return self.combine(OF_BOOLEANS[name], values)
        if alpha != 1:
            scaled = self.binary("mul", values[1], self.value(float(alpha)))
            values = [values[0], scaled]
        return self.combine(name, values)

    def alike(self, values: list[Value], booleans: bool) -> list[Value]:
        """Booleans become 0 and 1 beside numbers, and where a number is made of them."""
        if booleans and all(self.steps[v.node].dtype == "bool" for v in values):
            return values
        return [self.converted(v, self.arithmetic) for v in values]


_STEPS: dict[str, Callable[[_Lowering, Any, str], Value | Pieces | None]] = {
    **dict.fromkeys(IDENTITIES, lambda self, node, _: self.whole(node.args[0])),
    **dict.fromkeys(_VIEWS, _Lowering.viewed),
    **dict.fromkeys(_CASTS, lambda self, node, _: self.cast(node)),
    **dict.fromkeys(_FILLED, _Lowering.filled),
    **dict.fromkeys(
        _EMPTY, lambda self, node, _: self.filled(node, "zeros")
    ),  # any number is right
    **dict.fromkeys(("slice", "select"), _Lowering.slice_of),
    **dict.fromkeys(("permute", "transpose", "t"), _Lowering.permuted),
    **dict.fromkeys(("sum", "amax", "amin", "prod", "mean", "var"), _Lowering.reduction),
    **dict.fromkeys(OVER_BOOLEANS, _Lowering.reduction),
    "lift_fresh_copy": _Lowering.lifted,
    "cat": lambda self, node, _: self.together(node),
    "slice_scatter": lambda self, node, _: self.written_over(node),
    "rounded": lambda self, node, _: self.rounded(self.value(node.args[0]), self.w.main.dtype),
    "philox_bernoulli": lambda self, node, _: self.drawn(node),
    "copy": lambda self, node, _: self.copied(node),
    "clamp": lambda self, node, _: self.clamped(node),
    "arange": lambda self, node, _: self.counted(node),
    "gather": lambda self, node, _: self.picked(node),
    **dict.fromkeys(("scatter", "scatter_add"), _Lowering.put),
}
"""How each step is lowered that is none of elements alone: (lowering, node, name) -> its value."""


def _unknown(node: Any, name: str) -> Unsupported:
    told = f"step {node.target} of the reference is none of those that kernels are made of"
    return Unsupported(f"{told}: {INSTEAD[name]}" if name in INSTEAD else told)


def _elements(given: Mapping[str, Any], size: int) -> range:
    """Of a dim, those that a slice's arguments name."""
    return range(size)[slice(given.get("start"), given.get("end"), given.get("step"))]


def _is_whole(node: Any) -> bool:
    """Whether a step's result is of whole numbers."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in COUNTS


def _only_returned(node: fx.Node) -> bool:
    return all(user.op == "output" for user in node.users)
