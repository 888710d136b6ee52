"""Positions that a function counts itself, and the one element of each row that an index names.

Both are computed as other elements are: an index is compared with all positions of its row. One
that is outside the row, which PyTorch refuses, names no element.
"""

from __future__ import annotations

from typing import Any

from tilewright.fusion.frontend.axes import Value
from tilewright.fusion.frontend.integers import IntegerBuilder
from tilewright.fusion.frontend.steps import Unsupported
from tilewright.fusion.frontend.trace import arguments_of
from tilewright.fusion.ir import Positions
from tilewright.tensor_spec import DTYPE_NAMES, WHOLE, TensorSpec


class IndexBuilder(IntegerBuilder):
    """Builds such steps."""

    def converted(self, value: Value, dtype: str) -> Value:
        """In another dtype."""
        raise NotImplementedError

    def counted(self, node: Any) -> Value:
        """arange: whole numbers, also as floats."""
        given, out = arguments_of(node), node.meta["val"]
        first, step = given.get("start", 0), given.get("step", 1)
        whole = all(not isinstance(n, float) or n.is_integer() for n in (first, step))
        if not whole or step <= 0:
            raise Unsupported(
                f"{node.target} from {first} by {step}; whole numbers that grow are taken"
            )
        dtype = DTYPE_NAMES.get(out.dtype, "i64")  # of eye, which counts in as few bits as do
        counted = self.positions(
            len(out), dtype if dtype in WHOLE else "i64", int(first), int(step)
        )
        return self.converted(counted, dtype)

    def positions(self, count: int, dtype: str, first: int = 0, step: int = 1) -> Value:
        return self.load(0, TensorSpec(dtype, (count,), (step,)), Positions(first))

    def picked(self, node: Any) -> Value:
        """gather: the element that is named, and zeros, added up."""
        named, dim = self.named(node)
        value = self.float_of(node, "self")
        alone = self.combine("where", [named, value, self.number(0.0)])
        over = self.axes.along((alone.dims[dim],))
        if not over:
            return alone
        dims = tuple(() if d == dim else rest for d, rest in enumerate(alone.dims))
        dtype = self.steps[alone.node].dtype
        return Value(self.add("sum", (alone.node,), dtype, self.axes.along(dims)), dims)

    def put(self, node: Any, name: str) -> Value:
        """scatter and scatter_add: the element that is named is another one, or grows."""
        given = arguments_of(node)
        if given.get("reduce") is not None:
            raise Unsupported(f"{node.target} with reduce={given['reduce']!r}")
        named, _ = self.named(node)
        into = self.float_of(node, "self")
        if "src" not in given:
            return self.combine("where", [named, self.number(float(given["value"])), into])
        src = self.float_of(node, "src")
        if src.shape != tuple(given["index"].meta["val"].shape):
            raise Unsupported(f"{node.target} of {list(src.shape)}: slice it to the index's shape")
        if name == "scatter_add":
            return self.binary("add", into, self.combine("where", [named, src, self.number(0.0)]))
        return self.combine("where", [named, src, into])

    def float_of(self, node: Any, name: str) -> Value:
        argument = arguments_of(node)[name]
        if not argument.meta["val"].is_floating_point():
            raise Unsupported(f"{node.target} of {argument.meta['val'].dtype}; floats are taken")
        return self.converted(self.value(argument), self.arithmetic)

    def named(self, node: Any) -> tuple[Value, int]:
        """Where along a dim an index of one element for each row names one, and the dim."""
        given = arguments_of(node)
        shape, index = (tuple(given[n].meta["val"].shape) for n in ("self", "index"))
        dim = given["dim"] % max(len(shape), 1)
        if not shape or index != (*shape[:dim], 1, *shape[dim + 1 :]):
            raise Unsupported(
                f"{node.target} by an index of {list(index)} along dim {dim} of {list(shape)}; one "
                "element of each row is taken"
            )
        value = self.integer(self.value(given["index"]), "i64")
        along = [n if d == dim else 1 for d, n in enumerate(shape)]
        positions = self.regrouped(self.positions(shape[dim], "i64"), along)
        assert isinstance(positions, Value)
        return self.combine("eq", [value, positions]), dim
