"""From a torch.fx trace to the fusion compiler's graph."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from tilewright.fusion.ir import COMPARISONS, POINTWISE, Access, Draw, Graph, Node
from tilewright.fusion.trace import trace_reference
from tilewright.op import Workload
from tilewright.tensor_spec import DEFAULT_ALIGN, DTYPE_NAMES, HALVES, TensorSpec


class Unsupported(Exception):
    """The graph holds a step that the fusion compiler cannot take; the message names it."""


_RENAMED = {
    "pow": "pow",
    "true_divide": "div",
    "max": "maximum",
    "min": "minimum",
    "logical_and": "and",
    "logical_or": "or",
    "logical_not": "not",
    "bitwise_and": "and",
    "bitwise_or": "or",
    "bitwise_not": "not",
}
_VIEWS = ("broadcast_in_dim", "expand", "view", "reshape", "_unsafe_view", "unsqueeze", "squeeze")
_IDENTITIES = (
    *("clone", "alias", "detach", "view_of", "contiguous", "lift_fresh_copy"),
    "copy_strided",  # strides of the outputs come from the operator, not from the trace
)
_FILLED = ("full", "full_like", "scalar_tensor", "zeros", "zeros_like", "ones", "ones_like")
_EMPTY = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty")
_CASTS = ("convert_element_type", "_to_copy", "to")


_WHOLE = {"maximum": "amax", "minimum": "amin"}
"""`max` and `min` of one tensor."""

Axes = tuple[int | None, ...]


@dataclass(frozen=True)
class Value:
    """A value of the trace: a node, and for each of its own dims the iteration axis it runs along.

    Axes count from the end (-1 is the last); None stands for a dim of size 1.
    """

    node: int
    axes: Axes


def lower(w: Workload) -> Graph:
    """The workload's graph: inputs upcast to the arithmetic type, outputs cast to theirs.

    Raises:
        Unsupported: naming the first step that is neither pointwise, broadcast, cast, a size-1
            view nor a supported reduction.
    """
    return _Lowering(w).graph()


class _Lowering:
    def __init__(self, w: Workload):
        self.w = w
        self.arithmetic = w.arithmetic
        self.nodes: list[tuple[str, tuple[int, ...], str, dict[int, int], Any]] = []
        self.sizes: dict[int, int] = {}
        self.values: dict[fx.Node, Any] = {}
        self.seed = w.seed
        self.draws: list[tuple[Draw, TensorSpec]] = []

    def graph(self) -> Graph:
        trace = trace_reference(self.w, runtime_scalars=True)
        inputs = list(self.w.tensors.values())
        placeholders = [n for n in trace.graph.nodes if n.op == "placeholder"]
        for i, node in enumerate(placeholders):
            if i == self.seed:
                self.values[node] = None  # masks that follow from it stand for it
            elif i < len(inputs):
                self.values[node] = self.load(i, inputs[i])
            else:
                index = self.add("scalar", (), self.arithmetic, {}, i - len(inputs))
                self.values[node] = Value(index, ())
        outputs: list[Value] = []
        for node in trace.graph.nodes:
            if node.op == "call_function":
                if node.users or _name(node).endswith("_"):
                    self.values[node] = self.placed(node)
            elif node.op == "output":
                outputs = [self.values[o] for o in node.args[0]]
        return self.finish(inputs, outputs, len(placeholders) - len(inputs))

    def add(
        self, op: str, args: tuple[int, ...], dtype: str, sizes: dict[int, int], attr: Any = None
    ) -> int:
        self.nodes.append((op, args, dtype, sizes, attr))
        self.sizes.update(sizes)
        return len(self.nodes) - 1

    def load(self, i: int, spec: TensorSpec) -> Value:
        """An input; it does not vary along dims that it was expanded along, of stride 0."""
        sizes_and_strides = zip(spec.shape, spec.real_strides, strict=True)
        axes = tuple(
            d - spec.rank if n != 1 and stride else None
            for d, (n, stride) in enumerate(sizes_and_strides)
        )
        sizes = {a: n for a, n in zip(axes, spec.shape, strict=True) if a is not None}
        return Value(self.upcast(self.add("load", (), spec.dtype, sizes, i)), axes)

    def drawn(self, node: Any) -> Value:
        """A mask: an input whose buffer is the seed. The first is the seed's own, others follow
        behind all tensors."""
        _, call, threshold, shape = node.args
        assert self.seed is not None, node
        place = len(self.w.tensors) + len(self.draws) - 1 if self.draws else self.seed
        spec = TensorSpec("bool", tuple(shape))
        self.draws.append((Draw(call, threshold), spec))
        return self.load(place, spec)

    def upcast(self, i: int) -> int:
        _, _, dtype, sizes, _ = self.nodes[i]
        narrow = dtype in HALVES or (dtype, self.arithmetic) == ("f32", "f64")
        return self.add("cast", (i,), self.arithmetic, sizes) if narrow else i

    def placed(self, node: Any) -> Value | None:
        """The step's value; what cannot be lowered is named with its line."""
        try:
            return self.step(node)
        except Unsupported as reason:
            line = node.meta.get("stack_trace")
            raise Unsupported(f"{reason} ({line})" if line else str(reason)) from None

    def step(self, node: Any) -> Value | None:
        name = _name(node).rstrip("_")
        name = _RENAMED.get(name, name)
        if name in _IDENTITIES:
            return self.value(node.args[0])
        if name in _WHOLE and len(node.args) == 1:
            return self.reduction(node, _WHOLE[name])
        if name in _VIEWS:
            return self.view(node, name)
        if name == "rounded":
            return self.rounded(self.value(node.args[0]), self.w.main.dtype)
        if name == "philox_bernoulli":
            return self.drawn(node)
        if name == "copy":
            return self.copied(node)
        if name in _CASTS:
            return self.cast(node)
        if name in _FILLED:
            return self.filled(node, name)
        if name in _EMPTY:
            return None  # what follows asks it for its shape only
        if name in ("permute", "transpose", "t"):
            return self.permuted(node, name)
        if name in ("sum", "amax", "amin", "prod", "mean", "var"):
            return self.reduction(node, name)
        if name in _COMPOSED:
            return _COMPOSED[name](self, *map(self.value, node.args))
        if name == "clamp":
            return self.clamped(node)
        if name in POINTWISE:
            result = self.pointwise(node, name)
            if _name(node).endswith("_"):
                self.values[node.args[0]] = result
            return result
        raise Unsupported(
            f"step {node.target} of the reference is neither pointwise nor a reduction"
        )

    def value(self, arg: Any) -> Value:
        if isinstance(arg, fx.Node):
            if self.values[arg] is None:
                raise Unsupported(f"{arg.target} of the reference: its values are undefined")
            return self.values[arg]
        if isinstance(arg, (bool, int, float)):
            dtype = "bool" if isinstance(arg, bool) else self.arithmetic
            return Value(self.add("const", (), dtype, {}, arg), ())
        raise Unsupported(f"argument {arg!r} of the reference")

    def filled(self, node: Any, name: str) -> Value:
        """A tensor that holds one number."""
        out = node.meta["val"]
        fixed = {"zeros": 0, "zeros_like": 0, "ones": 1, "ones_like": 1}
        value = fixed[name] if name in fixed else node.args[0 if name == "scalar_tensor" else 1]
        axes = (None,) * out.dim()
        if isinstance(value, fx.Node):
            return Value(self.value(value).node, axes)
        if out.dtype == torch.bool:
            return Value(self.add("const", (), "bool", {}, bool(value)), axes)
        return Value(self.add("const", (), DTYPE_NAMES[out.dtype], {}, value), axes)

    def permuted(self, node: Any, name: str) -> Value:
        value = self.value(node.args[0])
        order = list(range(len(value.axes)))
        if name == "permute":
            order = [d % len(order) for d in node.args[1]]
        elif len(order) > 1:
            a, b = node.args[1:3] if name == "transpose" else (0, 1)
            order[a], order[b] = order[b], order[a]
        return Value(value.node, tuple(value.axes[d] for d in order))

    def rounded(self, value: Value, dtype: str) -> Value:
        _, _, _, sizes, _ = self.nodes[value.node]
        narrow = self.add("cast", (value.node,), dtype, sizes)
        return Value(self.upcast(narrow), value.axes)

    def cast(self, node: Any) -> Value:
        value = self.value(node.args[0])
        dtype = DTYPE_NAMES[node.meta["val"].dtype]
        return self.converted(value, dtype)

    def copied(self, node: Any) -> Value:
        """What is written over another tensor, in its dtype and shape."""
        out = node.meta["val"]
        value = self.converted(self.value(node.args[1]), DTYPE_NAMES[out.dtype])
        return Value(value.node, (None,) * (out.dim() - len(value.axes)) + value.axes)

    def converted(self, value: Value, dtype: str) -> Value:
        """Values stay in the arithmetic type: a narrower one that the program asks for rounds."""
        _, _, old, sizes, _ = self.nodes[value.node]
        if dtype == old:
            return value
        if dtype in HALVES or (dtype, self.arithmetic) == ("f32", "f64"):
            return self.rounded(self.converted(value, self.arithmetic), dtype)
        if dtype not in (self.arithmetic, "bool"):
            raise Unsupported(f"a cast to {dtype} among values of {self.arithmetic}")
        return Value(self.add("cast", (value.node,), dtype, sizes), value.axes)

    def clamped(self, node: Any) -> Value:
        value = self.value(node.args[0])
        for bound, name in zip(node.args[1:], ("maximum", "minimum"), strict=False):
            if bound is not None:
                value = self.binary(name, value, self.value(bound))
        return value

    def view(self, node: Any, name: str) -> Value:
        value = self.value(node.args[0])
        shape = tuple(node.meta["val"].shape)
        if name == "broadcast_in_dim":
            axes: list[int | None] = [None] * len(shape)
            for own, to in enumerate(node.args[2]):
                axes[to] = value.axes[own]
            return Value(value.node, tuple(axes))
        if name == "expand":
            return Value(value.node, (None,) * (len(shape) - len(value.axes)) + value.axes)
        old = list(node.args[0].meta["val"].shape)
        along = [*[None] * (len(old) - len(value.axes)), *value.axes]
        if [n for n in shape if n != 1] != [n for n in old if n != 1]:
            raise Unsupported(
                f"{name} from {old} to {list(shape)}: it does more than move size-1 dims"
            )
        remaining = iter([axis for axis, n in zip(along, old, strict=True) if n != 1])
        return Value(value.node, tuple(next(remaining) if n != 1 else None for n in shape))

    def pointwise(self, node: Any, name: str) -> Value:
        values = [self.value(a) for a in node.args]
        dtype = node.meta["val"].dtype
        if not dtype.is_floating_point and dtype != torch.bool:
            raise Unsupported(f"{node.target} gives {dtype}: integer arithmetic")
        if name not in ("and", "or", "not"):
            first = 1 if name == "where" else 0
            values[first:] = self.alike(values[first:])
        alpha = node.kwargs.get("alpha", 1)
        if alpha != 1:
            scaled = self.binary("mul", values[1], self.value(float(alpha)))
            values = [values[0], scaled]
        return self.combine(name, values)

    def alike(self, values: list[Value]) -> list[Value]:
        """Booleans beside numbers become 0 and 1."""
        if all(self.nodes[v.node][2] == "bool" for v in values):
            return values
        return [self.converted(v, self.arithmetic) for v in values]

    def binary(self, name: str, a: Value, b: Value) -> Value:
        return self.combine(name, [a, b])

    def combine(self, name: str, values: list[Value]) -> Value:
        rank = max(len(v.axes) for v in values)
        axes: list[int | None] = []
        for dim in range(-rank, 0):
            found = {v.axes[dim] for v in values if len(v.axes) >= -dim} - {None}
            if len(found) > 1:
                raise Unsupported(f"{name} of values that vary along different dims (a transpose)")
            axes.append(found.pop() if found else None)
        sizes = {a: n for v in values for a, n in self.nodes[v.node][3].items()}
        dtype = "bool" if name in (*COMPARISONS, "isnan") else self.nodes[values[-1].node][2]
        return Value(self.add(name, tuple(v.node for v in values), dtype, sizes), tuple(axes))

    def reduction(self, node: Any, name: str) -> Value:
        counted = self.value(node.args[0])
        counts = name == "sum" and self.nodes[counted.node][2] == "bool"
        if not (node.meta["val"].dtype.is_floating_point or counts):
            raise Unsupported(f"{node.target} gives {node.meta['val'].dtype}: integer arithmetic")
        value = self.converted(counted, self.arithmetic)  # a count is a whole number in it
        shape = node.args[0].meta["val"].shape
        dims, keepdim, correction = _reduction_arguments(node, name, len(shape))
        over = {value.axes[d] for d in dims} - {None}
        # A dim that the value was expanded along holds the same elements many times.
        repeats = math.prod(shape[d] for d in dims if value.axes[d] is None)
        left = [None if d in dims else a for d, a in enumerate(value.axes)]
        axes = tuple(a for d, a in enumerate(left) if keepdim or d not in dims)
        _, _, dtype, sizes, _ = self.nodes[value.node]
        count = repeats * math.prod(sizes[a] for a in over if a is not None)
        rest = {a: n for a, n in sizes.items() if a not in over}
        if name == "var":
            # One element deviates from its own mean by x - x: 0, or NaN where x is not finite.
            inside = (value.node,) if over else (value.node, value.node)
            m2 = self.add("m2" if over else "sub", inside, dtype, rest)
            scaled = self.scaled("mul", m2, repeats, dtype, rest)
            degrees = max(count - correction, 0.0)
            return Value(self.scaled("div", scaled, degrees, dtype, rest), axes)
        result = self.add(name, (value.node,), dtype, rest) if over else value.node
        if name in ("sum", "prod"):
            result = self.scaled("mul" if name == "sum" else "pow", result, repeats, dtype, rest)
        return Value(result, axes)

    def scaled(self, op: str, i: int, by: float, dtype: str, sizes: dict[int, int]) -> int:
        if by == 1 and op != "div":
            return i
        return self.add(op, (i, self.add("const", (), dtype, {}, float(by))), dtype, sizes)

    def finish(self, inputs: list[TensorSpec], outputs: list[Value], scalars: int) -> Graph:
        given = zip(outputs, self.w.outputs, strict=True)
        stores = [self.stored(value, spec) for value, spec in given]
        rank = max((-a for a in self.sizes), default=0)
        space = tuple(self.sizes.get(a, 1) for a in range(-rank, 0))
        nodes = tuple(
            Node(op, args, dtype, tuple(sizes.get(a, 1) for a in range(-rank, 0)), attr)
            for op, args, dtype, sizes, attr in self.nodes
        )
        accesses = [self.access(s, _own_axes(s), rank) for s in inputs]
        if self.seed is not None:
            masks = [replace(self.access(s, _own_axes(s), rank), draw=d) for d, s in self.draws]
            unused = Access((0,) * rank, "bool", DEFAULT_ALIGN, Draw(0, 0))
            accesses[self.seed] = masks[0] if masks else unused
            accesses += masks[1:]
        written = tuple((out, self.access(spec, axes, rank)) for out, spec, axes in stores)
        numbers = (self.arithmetic,) * scalars
        return Graph(nodes, space, tuple(accesses), written, numbers).check()

    def stored(self, value: Value, spec: TensorSpec) -> tuple[int, TensorSpec, Axes]:
        """The output's last steps: to its dtype, and along dims on which it does not vary."""
        if value is None:
            raise Unsupported("an output of the reference is undefined memory")
        out = value.node
        _, _, dtype, sizes, _ = self.nodes[out]
        axes = list(value.axes or (None,) * spec.rank)
        for d, (n, stride) in enumerate(zip(spec.shape, spec.real_strides, strict=True)):
            if axes[d] is None and n != 1 and stride:  # PyTorch too expands what holds one value
                own = d - spec.rank
                free = (own, *range(-1, -spec.rank - len(self.sizes) - 1, -1))
                axis = next(a for a in free if a not in axes and self.sizes.get(a, n) == n)
                axes[d] = axis
                sizes = {**sizes, axis: n}
        if dtype != spec.dtype:
            out = self.add("cast", (out,), spec.dtype, self.nodes[out][3])
        if sizes != self.nodes[out][3]:
            out = self.add("broadcast", (out,), spec.dtype, sizes)
        return out, spec, tuple(axes)

    def access(self, spec: TensorSpec, axes: tuple[int | None, ...], rank: int) -> Access:
        strides = [0] * rank
        for axis, stride, n in zip(axes, spec.real_strides, spec.shape, strict=True):
            if axis is not None and n != 1 and stride:
                strides[axis] = stride
        return Access(tuple(strides), spec.dtype, spec.align)


def _own_axes(spec: TensorSpec) -> Axes:
    return tuple(d - spec.rank if n != 1 else None for d, n in enumerate(spec.shape))


def _sigmoid(lowering: _Lowering, x: Value) -> Value:
    exponential = lowering.combine("exp", [lowering.combine("neg", [x])])
    above_one = lowering.binary("add", exponential, lowering.value(1.0))
    return lowering.combine("reciprocal", [above_one])


_COMPOSED: dict[str, Callable[..., Value]] = {
    "relu": lambda lowering, x: lowering.binary("maximum", x, lowering.value(0.0)),
    "square": lambda lowering, x: lowering.binary("mul", x, x),
    "sigmoid": _sigmoid,
}
"""Operations that torch does not decompose, in steps of the graph."""


def _reduction_arguments(node: Any, name: str, rank: int) -> tuple[list[int], bool, float]:
    """The dims that a reduction runs over, whether it keeps them, and var's correction."""
    given = dict(zip((a.name for a in node.target._schema.arguments), node.args, strict=False))
    given.update(node.kwargs)
    dims = given.get("dim", given.get("dims"))
    listed = [dims] if isinstance(dims, int) else list(dims or range(rank))
    correction = given.get("correction")
    unbiased = given.get("unbiased", True)
    degrees = float(unbiased) if correction is None else float(correction)
    return [d % rank for d in listed if rank], bool(given.get("keepdim", False)), degrees


def _name(node: fx.Node) -> str:
    target = node.target
    assert isinstance(target, torch._ops.OpOverload), target
    return target._schema.name.split("::")[1]
