"""Sums and other reductions of a trace, of values and of what was put together of pieces."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from tilewright.fusion.frontend.axes import Value
from tilewright.fusion.frontend.pieces import Pieces
from tilewright.fusion.frontend.steps import Unsupported
from tilewright.fusion.frontend.trace import arguments_of, name_of
from tilewright.fusion.frontend.values import COUNTED, COUNTS, ValueBuilder
from tilewright.op import Workload
from tilewright.tensor_spec import DTYPE_NAMES

OF_BOOLEANS = {
    **dict.fromkeys(("add", "maximum", "fmax"), "or"),
    **dict.fromkeys(("mul", "minimum", "fmin"), "and"),
}
"""What arithmetic makes of two booleans."""
OVER_BOOLEANS = {"any": "amax", "all": "amin"}
_JOINED = {
    **{"sum": "add", "prod": "mul"},
    **dict.fromkeys(("amax", "any"), "maximum"),
    **dict.fromkeys(("amin", "all"), "minimum"),
}
"""What makes one result of those of pieces."""
_OF_NOTHING = {
    **dict.fromkeys(("sum", "any"), 0),
    **dict.fromkeys(("prod", "all"), 1),
    **dict.fromkeys(("mean", "var"), math.nan),
}
"""What a reduction makes of no elements; PyTorch refuses `amax` and `amin` of none."""


class ReducingBuilder(ValueBuilder):
    def __init__(self, w: Workload, trace: fx.GraphModule, kept: Mapping[fx.Node, str]):
        super().__init__(w, trace, kept)
        self.found_moments: dict[Any, tuple[Value | Pieces, Value | Pieces]] = {}

    def reduction(self, node: Any, name: str) -> Value | Pieces:
        if not node.args[0].meta["val"].numel():
            if name not in _OF_NOTHING:
                raise Unsupported(f"{node.target} of no elements, which PyTorch refuses")
            return self.holding(_OF_NOTHING[name], node)
        whole = self.whole(node.args[0])
        if isinstance(whole, Value):
            return self.reduced(node, name, whole)
        dims, keepdim, correction = _reduction_arguments(node, len(whole.shape))
        if name == "var" and whole.are_cut(dims):
            _, m2 = self.moments_of(node)
            degrees = max(_count(whole, dims) - correction, 0.0)
            found = self.mapped(m2, lambda v: self.binary("div", v, self.number(degrees)))
            return self.regrouped(found, node.meta["val"].shape)
        if name == "mean" and whole.are_cut(dims):
            total, count = self.reduction(node, "sum"), self.number(float(_count(whole, dims)))
            return self.mapped(total, lambda v: self.binary("div", v, count))
        step = _JOINED.get(name)
        if node.meta["val"].dtype == torch.bool and step is not None:
            step = OF_BOOLEANS[step]
        join = functools.partial(self.binary, step) if step is not None else None
        reduced = functools.partial(self.reduced, node, name)
        return self.reduced_by_piece(whole, dims, keepdim, reduced, join)

    def moments_of(self, node: Any) -> tuple[Value | Pieces, Value | Pieces]:
        """Mean and m2 of what a step takes the variance of, in pieces; one pair for equal ones."""
        dims, *_ = _reduction_arguments(node, node.args[0].meta["val"].dim())
        key = node.args[0], frozenset(dims), self.arithmetic
        if key not in self.found_moments:
            whole = self.whole_as(node.args[0], self.arithmetic)
            assert isinstance(whole, Pieces), node
            step = functools.partial(self.reduced, node, "sum")
            add = functools.partial(self.binary, "add")
            self.found_moments[key] = self.moments(
                whole, dims, lambda held: self.reduced_by_piece(held, dims, True, step, add)
            )
        return self.found_moments[key]

    def mean_beside(self, node: Any) -> Value | Pieces | None:
        """Of a quotient of a sum and its count, if there is a variance of the same pieces, the mean
        that it is about."""
        total, out = node.args[0], node.meta["val"]
        while _is_step(total, "broadcast_in_dim"):
            total = total.args[0]
        given: Any = total.args[0] if _is_step(total, "sum") else None
        held = self.values.get(given)
        if not isinstance(held, Pieces) or node.kwargs:
            return None
        dims, *_ = _reduction_arguments(total, len(held.shape))
        count, theirs = _count(held, dims), given.meta["val"]
        right = count, theirs.dtype, theirs.numel()
        is_mean = (node.args[1], out.dtype, out.numel() * count) == right
        if not is_mean or not held.are_cut(dims):
            return None
        for other in given.users:
            if _is_step(other, "var"):
                its, *_ = _reduction_arguments(other, len(held.shape))
                if {*its} == {*dims}:
                    return self.regrouped(self.moments_of(other)[0], out.shape)
        return None

    def reduced(self, node: Any, name: str, value: Value) -> Value:
        out = node.meta["val"].dtype
        booleans = out == torch.bool
        if booleans:
            value, name = self.converted(value, "bool"), OVER_BOOLEANS.get(name, name)
        # A count is a whole number in the arithmetic type, which holds a boolean as 0 or 1.
        counts = name == "sum" and self.steps[value.node].dtype == "bool"
        if not (out.is_floating_point or booleans or (counts and out in COUNTS)):
            raise Unsupported(
                f"{node.target} gives {out}: integer arithmetic; cast first: .float()"
            )
        counted = node.args[0].meta["val"].numel() // max(node.meta["val"].numel(), 1)
        if counts and counted > COUNTED[self.arithmetic]:
            raise Unsupported(
                f"a count of {counted} elements in {self.arithmetic}, which holds whole numbers to "
                f"{COUNTED[self.arithmetic]}"
            )
        asked = node.kwargs.get("dtype")
        if asked is not None and asked.is_floating_point:
            value = self.converted(value, DTYPE_NAMES[asked])
        value = self.converted(value, self.arithmetic)
        given, keepdim, correction = _reduction_arguments(node, len(value.dims))
        within = [f for d in given for f in self.axes.factors(value.dims[d])]
        over = self.axes.roots(f.axis for f in within)
        # A dim that the value was expanded along holds the same elements many times.
        repeats = math.prod(f.size for f in within if f.axis is None)
        left = [() if d in given else dim for d, dim in enumerate(value.dims)]
        dims = tuple(dim for d, dim in enumerate(left) if keepdim or d not in given)
        dtype, rest = self.arithmetic, self.axes.along(dims)
        count = math.prod(f.size for f in within)
        if name == "var":
            # One element deviates from its own mean by x - x: 0, or NaN where x is not finite.
            inside = (value.node,) if over else (value.node, value.node)
            m2 = self.add("m2" if over else "sub", inside, dtype, rest)
            scaled = self.scaled("mul", m2, repeats, dtype, rest)
            degrees = max(count - correction, 0.0)
            return Value(self.scaled("div", scaled, degrees, dtype, rest), dims)
        result = self.add(name, (value.node,), dtype, rest) if over else value.node
        if name in ("sum", "prod"):
            result = self.scaled("mul" if name == "sum" else "pow", result, repeats, dtype, rest)
        return self.converted(Value(result, dims), "bool" if booleans else dtype)

    def scaled(self, op: str, i: int, by: float, dtype: str, axes: Iterable[int]) -> int:
        if by == 1 and op != "div":
            return i
        return self.add(op, (i, self.add("const", (), dtype, (), float(by))), dtype, axes)


def _reduction_arguments(node: Any, rank: int) -> tuple[list[int], bool, float]:
    """The dims that a reduction runs over, whether it keeps them, and var's correction."""
    given = arguments_of(node)
    dims = given.get("dim", given.get("dims"))
    if isinstance(dims, int):
        dims = [dims]
    elif dims is None or (not dims and name_of(node) not in OVER_BOOLEANS):
        dims = range(rank)  # of no dims `any` and `all` reduce nothing, the others everything
    correction = given.get("correction")
    unbiased = given.get("unbiased", True)
    degrees = float(unbiased) if correction is None else float(correction)
    return [d % rank for d in dims if rank], bool(given.get("keepdim", False)), degrees


def _count(held: Value | Pieces, dims: Iterable[int]) -> int:
    return math.prod(held.shape[d] for d in dims)


def _is_step(node: Any, name: str) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and name_of(node) == name
