"""From a torch.fx trace to the fusion compiler's graph."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from tilewright.fusion.builder import GraphBuilder, Pieces, Unsupported, Value
from tilewright.fusion.composed import COMPOSED
from tilewright.fusion.ir import POINTWISE, Draw, Graph
from tilewright.fusion.trace import arithmetics, trace_reference
from tilewright.op import Workload
from tilewright.tensor_spec import DTYPE_NAMES, HALVES, TensorSpec

_RENAMED = {
    "true_divide": "div",
    "max": "maximum",
    "min": "minimum",
}
_LOGICAL = {
    **{f"{kind}_{name}": name for kind in ("logical", "bitwise") for name in ("and", "or", "not")},
    **{f"{kind}_xor": "ne" for kind in ("logical", "bitwise")},
}
_OF_BOOLEANS = {"add": "or", "maximum": "or", "mul": "and", "minimum": "and"}
"""What arithmetic makes of two booleans."""
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
_OVER_BOOLEANS = {"any": "amax", "all": "amin"}


def lower(w: Workload) -> Graph:
    """The workload's graph: inputs upcast to the arithmetic type, outputs cast to theirs.

    Raises:
        Unsupported: naming the first step that is neither pointwise, broadcast, cast, a size-1
            view nor a supported reduction.
    """
    return _Lowering(w).graph()


class _Lowering(GraphBuilder):
    def __init__(self, w: Workload):
        super().__init__(w)
        self.values: dict[fx.Node, Any] = {}
        self.arithmetics: dict[fx.Node, str] = {}

    def graph(self) -> Graph:
        trace = trace_reference(self.w, runtime_scalars=True)
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
        outputs: list[Value | Pieces] = []
        for node in trace.graph.nodes:
            if node.op == "call_function":
                if node.users or _name(node).endswith("_"):
                    self.values[node] = self.placed(node)
            elif node.op == "output":
                outputs = [self.whole(o) for o in node.args[0]]
        return self.finish(outputs, len(placeholders) - len(inputs))

    def drawn(self, node: Any) -> Value:
        """A mask: an input whose buffer is the seed."""
        _, call, threshold, shape = node.args
        assert self.w.seed is not None, node
        return self.load(self.w.seed, TensorSpec("bool", tuple(shape)), Draw(call, threshold))

    def placed(self, node: Any) -> Value | Pieces | None:
        """The step's value; what cannot be lowered is named with its line."""
        self.line = _written(node).meta.get("stack_trace")
        self.arithmetic = self.arithmetics[node]
        try:
            return self.step(node)
        except Unsupported as reason:
            raise Unsupported(f"{reason} ({self.line})" if self.line else str(reason)) from None

    def step(self, node: Any) -> Value | Pieces | None:
        if _name(node) == "copy_" and node.args[0].op == "placeholder":
            raise Unsupported("it writes to an argument: return the new value instead")
        name = _name(node).rstrip("_")
        name = _RENAMED.get(name, name)
        elementwise = name in (*POINTWISE, *_LOGICAL, *COMPOSED, *_CASTS, "clamp")
        if elementwise and any(
            isinstance(self.values.get(n), Pieces) for n in node.all_input_nodes
        ):
            return self.piecewise(node)
        if (mode := node.kwargs.get("rounding_mode")) is not None:
            name = f"{name}_{mode}"
        if not isinstance(node.meta.get("val"), torch.Tensor):
            raise Unsupported(f"step {node.target} of the reference gives more than one tensor")
        if name in _IDENTITIES:
            return self.whole(node.args[0])
        if name == "cat":
            return self.pieces(node)
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
        if name in ("slice", "select"):
            return self.part_of(node, name)
        if name in ("permute", "transpose", "t"):
            return self.permuted(node, name)
        if name in ("sum", "amax", "amin", "prod", "mean", "var", *_OVER_BOOLEANS):
            return self.reduction(node, name)
        if name in COMPOSED:
            return COMPOSED[name](self, *self.operands(node, name))
        if name == "clamp":
            return self.clamped(node)
        if name in POINTWISE or name in _LOGICAL:
            result = self.pointwise(node, name)
            if _name(node).endswith("_"):
                self.values[node.args[0]] = result
            return result
        raise Unsupported(
            f"step {node.target} of the reference is neither pointwise nor a reduction"
        )

    def whole(self, arg: Any) -> Value | Pieces:
        """What may be returned: a value, or pieces of one."""
        found = self.values.get(arg) if isinstance(arg, fx.Node) else None
        return found if isinstance(found, Pieces) else self.value(arg)

    def pieces(self, node: Any) -> Pieces:
        given = node.args[0]
        dim = (node.args[1] if len(node.args) > 1 else 0) % node.meta["val"].dim()
        dtype = DTYPE_NAMES[node.meta["val"].dtype]
        if any(n.meta["val"].dim() != node.meta["val"].dim() for n in given):
            raise Unsupported("cat of tensors of different ranks")
        some = [n for n in given if n.meta["val"].shape[dim]]
        values = tuple(self.converted(self.value(n), dtype) for n in some)
        return Pieces(dim, values, tuple(n.meta["val"].shape[dim] for n in some))

    def piecewise(self, node: Any) -> Pieces:
        """A step of each piece, with the same part of the other operands."""
        given = {n: self.values[n] for n in node.all_input_nodes}
        of = {n: v for n, v in given.items() if isinstance(v, Pieces)}
        # Dims are counted from the end, as broadcasting aligns them.
        cuts = {(v.dim - n.meta["val"].dim(), v.sizes) for n, v in of.items()}
        if len(cuts) > 1:
            raise Unsupported(f"{node.target} of tensors that were put together differently")
        ((dim, sizes),) = cuts
        found: list[Value] = []
        start = 0
        for k, size in enumerate(sizes):
            for n, v in given.items():
                if n in of:
                    self.values[n] = v.values[k]
                elif len(v.axes) >= -dim:
                    self.values[n] = self.part(v, dim + len(v.axes), start, size)
            piece = self.step(node)
            assert isinstance(piece, Value), node
            found.append(piece)
            start += size
        self.values.update(given)
        return Pieces(dim + node.meta["val"].dim(), tuple(found), sizes)

    def value(self, arg: Any) -> Value:
        if isinstance(arg, fx.Node):
            if arg.op == "get_attr":
                raise Unsupported("a tensor that is no argument of the reference: make it one")
            if self.values[arg] is None:
                raise Unsupported(f"{arg.target} of the reference: its values are undefined")
            if isinstance(self.values[arg], Pieces):
                raise Unsupported(f"{arg.target} of the reference may be returned, not used again")
            return self.values[arg]
        if isinstance(arg, (bool, int, float)):
            return self.number(arg)
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
            return Value(self.add("const", (), "bool", (), bool(value)), axes)
        return Value(self.add("const", (), DTYPE_NAMES[out.dtype], (), value), axes)

    def part_of(self, node: Any, name: str) -> Value:
        """Some elements of a dim, or one, whose dim is dropped."""
        value, size = self.value(node.args[0]), node.args[0].meta["val"].shape
        dim = (node.args[1] if len(node.args) > 1 else 0) % len(size)
        if name == "select":
            part = self.part(value, dim, node.args[2] % size[dim], 1)
            return Value(part.node, (*part.axes[:dim], *part.axes[dim + 1 :]))
        count = node.meta["val"].shape[dim]
        first, _, step = slice(*node.args[2:5]).indices(size[dim])
        return value if count == size[dim] else self.part(value, dim, first, count, step)

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
        if dtype == "f64":
            return value
        narrow = self.add("cast", (value.node,), dtype, self.steps[value.node].axes)
        return Value(self.upcast(narrow), value.axes)

    def cast(self, node: Any) -> Value:
        value, dtype = self.value(node.args[0]), node.meta["val"].dtype
        if dtype not in DTYPE_NAMES:
            raise Unsupported(f"a cast to {dtype}")
        return self.converted(value, DTYPE_NAMES[dtype])

    def copied(self, node: Any) -> Value:
        """What is written over another tensor, in its dtype and shape."""
        out = node.meta["val"]
        value = self.converted(self.value(node.args[1]), DTYPE_NAMES[out.dtype])
        return Value(value.node, (None,) * (out.dim() - len(value.axes)) + value.axes)

    def converted(self, value: Value, dtype: str) -> Value:
        """Values stay in the arithmetic type: a narrower one that the program asks for rounds."""
        step = self.steps[value.node]
        if dtype == step.dtype:
            return value
        if dtype in HALVES or (dtype, self.arithmetic) == ("f32", "f64"):
            return self.rounded(self.converted(value, self.arithmetic), dtype)
        if dtype in ("i32", "i64"):  # a whole number in the arithmetic type
            number = self.converted(value, self.arithmetic)
            return number if step.dtype == "bool" else self.combine("trunc", [number])
        if dtype not in (self.arithmetic, "bool"):
            raise Unsupported(f"a cast to {dtype} among values of {self.arithmetic}")
        return Value(self.add("cast", (value.node,), dtype, step.axes), value.axes)

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

    def operands(self, node: Any, name: str) -> list[Value]:
        """Of a step of elements, in one dtype: booleans are 0 and 1 beside numbers."""
        known = {"alpha", "dtype", "layout", "device", "pin_memory", "rounding_mode"}
        if unknown := [n for n, v in node.kwargs.items() if n not in known and v is not None]:
            raise Unsupported(f"{node.target} with {unknown[0]}={node.kwargs[unknown[0]]!r}")
        values = [self.value(a) for a in node.args]
        dtype = node.meta["val"].dtype
        chosen = name == "where" and all(self.steps[v.node].op == "const" for v in values[1:])
        if not (dtype.is_floating_point or dtype == torch.bool or chosen):
            raise Unsupported(f"{node.target} gives {dtype}: integer arithmetic")
        if name in _LOGICAL:
            return [self.converted(v, "bool") for v in values]
        if dtype == torch.bool and name in _OF_BOOLEANS:
            return values
        first = 1 if name == "where" else 0
        return [*values[:first], *self.alike(values[first:], dtype == torch.bool)]

    def pointwise(self, node: Any, name: str) -> Value:
        values = self.operands(node, name)
        if name in _LOGICAL:
            return self.combine(_LOGICAL[name], values)
        if node.meta["val"].dtype == torch.bool and name in _OF_BOOLEANS:
            return self.combine(_OF_BOOLEANS[name], values)
        alpha = node.kwargs.get("alpha", 1)
        if alpha != 1:
            scaled = self.binary("mul", values[1], self.value(float(alpha)))
            values = [values[0], scaled]
        return self.combine(name, values)

    def alike(self, values: list[Value], booleans: bool) -> list[Value]:
        """Booleans become 0 and 1 beside numbers, and where a number is made of them."""
        if booleans and all(self.steps[v.node].dtype == "bool" for v in values):
            return values
        return [self.converted(v, self.arithmetic) for v in values]

    def reduction(self, node: Any, name: str) -> Value:
        value, out = self.value(node.args[0]), node.meta["val"].dtype
        booleans = out == torch.bool
        if booleans:
            value, name = self.converted(value, "bool"), _OVER_BOOLEANS.get(name, name)
        # A count is a whole number in the arithmetic type, which holds a boolean as 0 or 1.
        counts = name == "sum" and self.steps[value.node].dtype == "bool"
        if not (out.is_floating_point or booleans or counts):
            raise Unsupported(f"{node.target} gives {out}: integer arithmetic")
        asked = node.kwargs.get("dtype")
        if asked is not None and asked.is_floating_point:
            value = self.converted(value, DTYPE_NAMES[asked])
        value = self.converted(value, self.arithmetic)
        shape = node.args[0].meta["val"].shape
        dims, keepdim, correction = _reduction_arguments(node, name, len(shape))
        over = self.axes.roots(value.axes[d] for d in dims)
        # A dim that the value was expanded along holds the same elements many times.
        repeats = math.prod(shape[d] for d in dims if value.axes[d] is None)
        left = [None if d in dims else a for d, a in enumerate(value.axes)]
        axes = tuple(a for d, a in enumerate(left) if keepdim or d not in dims)
        dtype, rest = self.arithmetic, self.axes.roots(axes)
        count = repeats * math.prod(map(self.axes.size, over))
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
        return self.converted(Value(result, axes), "bool" if booleans else dtype)

    def scaled(self, op: str, i: int, by: float, dtype: str, axes: Iterable[int]) -> int:
        if by == 1 and op != "div":
            return i
        return self.add(op, (i, self.add("const", (), dtype, (), float(by))), dtype, axes)


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


def _written(node: Any) -> Any:
    """The step that a write to an argument comes from, which has its line; any other by itself."""
    return node.args[1] if _name(node) == "copy_" else node


def _name(node: fx.Node) -> str:
    target = node.target
    assert isinstance(target, torch._ops.OpOverload), target
    return target._schema.name.split("::")[1]
