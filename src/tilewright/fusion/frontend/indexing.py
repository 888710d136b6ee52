"""Positions that a function counts itself, and the one element of each row that an index names.

Both are computed as other elements are: an index is compared with all positions of its row. What
comes of one outside the row, for which PyTorch raises, is open.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from tilewright.fusion.frontend.axes import Value
from tilewright.fusion.frontend.integers import IntegerBuilder
from tilewright.fusion.frontend.pieces import Pieces
from tilewright.fusion.frontend.piecewise import Held
from tilewright.fusion.frontend.steps import Unsupported
from tilewright.fusion.frontend.trace import arguments_of
from tilewright.fusion.ir import POINTWISE, REDUCTIONS, Positions
from tilewright.tensor_spec import DTYPE_NAMES, WHOLE, TensorSpec


class IndexBuilder(IntegerBuilder):
    """Builds such steps."""

    def converted(self, value: Value, dtype: str) -> Value:
        """In another dtype."""
        raise NotImplementedError

    def whole(self, arg: Any) -> Held:
        """An argument of a step, in pieces where it was put together of some."""
        raise NotImplementedError

    def whole_as(self, arg: Any, dtype: str) -> Held:
        """The same in another dtype."""
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
        dtype = DTYPE_NAMES.get(out.dtype, "i64")
        last = int(first) + max(len(out) - 1, 0) * int(step)
        if out.dtype not in DTYPE_NAMES and last > torch.iinfo(out.dtype).max:  # eye's do not
            raise Unsupported(f"{node.target} to {last} in {out.dtype}; int32 and int64 are taken")
        counted = self.positions(
            len(out), dtype if dtype in WHOLE else "i64", int(first), int(step)
        )
        return self.converted(counted, dtype)

    def positions(self, count: int, dtype: str, first: int = 0, step: int = 1) -> Value:
        return self.load(0, TensorSpec(dtype, (count,), (step,)), Positions(first))

    def picked(self, node: Any) -> Held:
        """gather: the same steps of what an index names in each tensor that they read, which is
        added up with zeros in place of other elements."""
        named, dim = self.named(node)
        given = self.floats_of(node, "self")
        if isinstance(given, Pieces) or isinstance(named, Pieces):
            return self.picked_of_pieces(named, given, dim)
        alone = self.combine("where", [named, given, self.number(0.0)])
        at, whole, _ = self.steps[alone.node].args  # which may run along other axes by now
        along = self.axes.along(alone.dims[dim : dim + 1])  # of a row of one element nothing
        dims = tuple(() if d == dim else rest for d, rest in enumerate(alone.dims))
        runs = self.axes.roots(self.steps[whole].axes)
        if along.isdisjoint(runs):  # not along all that the index does, either
            return Value(whole, tuple(self.axes.along_only(dim, runs) for dim in dims))
        return Value(self.picked_step(whole, at, along), dims)

    def picked_of_pieces(self, named: Held, whole: Held, dim: int) -> Held:
        """All pieces but one add a zero."""

        def total(value: Value) -> Value:
            along = self.axes.along((value.dims[dim],))
            dims = tuple(() if d == dim else rest for d, rest in enumerate(value.dims))
            step = self.steps[value.node]
            if not along:
                return Value(value.node, dims)
            left = self.axes.roots(step.axes) - along
            return Value(self.add("sum", (value.node,), step.dtype, left), dims)

        def alone(values: list[Value]) -> Value:
            return self.combine("where", [*values, self.number(0.0)])

        masked = self.of_each(alone, [named, whole], whole.shape)
        if isinstance(masked, Value):
            return total(masked)
        add = functools.partial(self.binary, "add")
        return self.reduced_by_piece(masked, (dim,), True, total, add)

    def picked_step(self, whole: int, at: int, along: frozenset[int]) -> int:
        def axes(*steps: int) -> frozenset[int]:
            return self.axes.roots(a for i in steps for a in self.steps[i].axes)

        found: dict[int, int] = {}
        read, computed = self.read_by(whole, along)
        for i in read:
            dtype = self.steps[i].dtype
            zero = self.add("const", (), dtype, (), 0.0)
            alone = self.add("where", (at, i, zero), dtype, axes(at, i))
            over = not along.isdisjoint(axes(alone))
            found[i] = self.add("sum", (alone,), dtype, axes(alone) - along) if over else alone
        for i in computed:
            step = self.steps[i]
            args = tuple(found.get(a, a) for a in step.args)
            found[i] = self.add(step.op, args, step.dtype, axes(*args), step.attr)
        return found[whole]

    def read_by(self, whole: int, along: frozenset[int]) -> tuple[list[int], list[int]]:
        """Floats that a step reads along these axes, and the steps that follow from them; the step
        alone where it follows from others too, from masks or positions."""
        read, computed, seen, left = list[int](), list[int](), set[int](), [whole]
        while left:
            i = left.pop()
            step = self.steps[i]
            if i in seen or along.isdisjoint(self.axes.roots(step.axes)):
                continue
            seen.add(i)
            widened = step.op == "cast" and self.steps[step.args[0]].op == "load"
            if step.dtype in ("f32", "f64") and (widened or step.op in ("load", *REDUCTIONS)):
                read.append(i)
            elif step.op == "cast" or step.op in POINTWISE:
                computed.append(i)
                left += step.args
            else:
                return [whole], []
        return read, sorted(computed)

    def put(self, node: Any, name: str) -> Held:
        """scatter and scatter_add: the element that is named is another one, or grows."""
        given = arguments_of(node)
        if given.get("reduce") is not None:
            raise Unsupported(f"{node.target} with reduce={given['reduce']!r}")
        named, _ = self.named(node)
        into = self.floats_of(node, "self")
        if "src" not in given:
            src: Held = self.number(float(given["value"]))
        else:
            src = self.floats_of(node, "src")
            if src.shape != tuple(given["index"].meta["val"].shape):
                told = f"{node.target} of {list(src.shape)}"
                raise Unsupported(f"{told}: slice it to the index's shape")

        def step(values: list[Value]) -> Value:
            named, src, into = values
            if name == "scatter_add":
                src = self.binary("add", into, src)
            return self.combine("where", [named, src, into])

        if isinstance(named, Value) and isinstance(src, Value) and isinstance(into, Value):
            return step([named, src, into])
        return self.of_each(step, [named, src, into], into.shape)

    def floats_of(self, node: Any, name: str) -> Held:
        argument = arguments_of(node)[name]
        if not argument.meta["val"].is_floating_point():
            raise Unsupported(f"{node.target} of {argument.meta['val'].dtype}; floats are taken")
        return self.whole_as(argument, self.arithmetic)

    def named(self, node: Any) -> tuple[Held, int]:
        """Where along a dim an index of one element for each row names one, and the dim."""
        given = arguments_of(node)
        shape, index = (tuple(given[n].meta["val"].shape) for n in ("self", "index"))
        dim = given["dim"] % max(len(shape), 1)
        size = shape[dim] if shape else 1  # a number is a row of one
        if index != tuple(1 if d == dim else n for d, n in enumerate(shape)):
            raise Unsupported(
                f"{node.target} by an index of {list(index)} along dim {dim} of {list(shape)}; one "
                "element of each row is taken"
            )
        index_of = self.mapped(
            self.whole(given["index"]), lambda v: self.within(self.integer(v, "i64"), size)
        )
        along = [n if d == dim else 1 for d, n in enumerate(shape)]
        positions = self.regrouped(self.positions(size, "i32"), along)
        assert isinstance(positions, Value)
        if isinstance(index_of, Value):
            return self.combine("eq", [index_of, positions]), dim
        return self.of_each(lambda v: self.combine("eq", v), [index_of, positions], shape), dim

    def within(self, index: Value, size: int) -> Value:
        """In 32 bits, which take half the steps to compare; -1 where it names no element."""
        if size >= 2**31:
            raise Unsupported(f"an index along a dim of {size} elements, beyond 32 bits")
        inside = [
            self.binary("ge", index, self.whole_number(0, "i64")),
            self.binary("lt", index, self.whole_number(size, "i64")),
        ]
        narrow = self.integer(index, "i32")
        none = self.whole_number(-1, "i32")
        return self.combine("where", [self.combine("and", inside), narrow, none])
