"""Steps of whole numbers in their own dtype, exactly: of tensors, and of what meets them.

Counts, and floats that were cast, are kept in the arithmetic type until they meet such numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from tilewright.fusion.frontend.axes import Value
from tilewright.fusion.frontend.piecewise import PieceBuilder
from tilewright.fusion.frontend.steps import Unsupported
from tilewright.fusion.ir import COMPARISONS
from tilewright.tensor_spec import DTYPE_NAMES, WHOLE

_STEPS = ("add", "sub", "mul", "neg", "abs", "maximum", "minimum", "where", "clamp")
"""That kernels have for whole numbers, beside comparisons and remainders by a positive number."""
_TAKEN = (
    "of whole numbers as they are, comparisons, where, clamp, +, -, *, abs, minimum, maximum and % "
    "by a positive number are taken"
)


class IntegerBuilder(PieceBuilder):
    """Builds such steps."""

    def value(self, arg: Any) -> Value:
        """Of an argument of a step."""
        raise NotImplementedError

    def is_integer(self, value: Value) -> bool:
        """Whether it is of whole numbers in their dtype; those of Python are in the arithmetic
        type."""
        return self.steps[value.node].dtype in WHOLE

    def integer_step(self, node: Any, name: str) -> Value | None:
        """The step, if its result is of such numbers, or compares them; None of any other.

        Raises:
            Unsupported: kernels have no such step.
        """
        out = node.meta["val"].dtype
        compares = name in COMPARISONS
        if out.is_floating_point or (out == torch.bool and not compares):
            return None
        taken = name in _STEPS or (name == "remainder" and _is_positive(node.args[1], out))
        if not compares and not (taken and DTYPE_NAMES.get(out) in WHOLE):
            raise Unsupported(
                f"{node.target} gives {out}: integer arithmetic; cast first: .float(); {_TAKEN}"
            )
        operands = node.args[1:] if name == "where" else node.args
        given = [a for a in operands if a is not None]
        if compares and not all(map(_is_whole, given)):
            return None
        values = [self.value(a) for a in given]
        if compares and not any(map(self.is_integer, values)):
            return None
        dtype = _compared_as(given) if compares else DTYPE_NAMES[out]
        found = [self.integer(v, dtype) for v in values]
        alpha = node.kwargs.get("alpha", 1)
        if alpha != 1:
            _check_held(node, [alpha], out)
            found[1] = self.binary("mul", found[1], self.whole_number(alpha, dtype))
        if name == "where":
            return self.combine("where", [self.value(node.args[0]), *found])
        if name == "clamp":
            _check_held(node, given[1:], out)
            value, *bounds = found
            names = ("maximum", "minimum") if node.args[1] is not None else ("minimum",)
            for extreme, bound in zip(names, bounds, strict=False):
                value = self.integers_combined(extreme, [value, bound], dtype)
            return value
        return self.integers_combined(name, found, dtype)

    def integers_combined(self, name: str, values: Sequence[Value], dtype: str) -> Value:
        if name in ("neg", "abs"):
            negated = self.binary("sub", self.whole_number(0, dtype), values[0])
            if name == "neg":
                return negated
            return self.integers_combined("maximum", [values[0], negated], dtype)
        if name == "remainder":
            rest = self.combine("fmod", list(values))
            negative = self.binary("lt", rest, self.whole_number(0, dtype))
            return self.combine("where", [negative, self.binary("add", rest, values[1]), rest])
        if name in ("maximum", "minimum"):
            first = self.binary("gt" if name == "maximum" else "lt", *values)
            return self.combine("where", [first, *values])
        return self.combine(name, list(values))

    def integer(self, value: Value, dtype: str) -> Value:
        step = self.steps[value.node]
        if step.dtype == dtype:
            return value
        if step.op == "const":
            return Value(self.whole_number(int(step.attr), dtype).node, value.dims)
        return Value(self.add("cast", (value.node,), dtype, step.axes), value.dims)

    def whole_number(self, number: int, dtype: str) -> Value:
        return Value(self.add("const", (), dtype, (), number), ())


def _is_whole(argument: Any) -> bool:
    if isinstance(argument, fx.Node):
        return not argument.meta["val"].dtype.is_floating_point
    return not isinstance(argument, float)


def _check_held(node: Any, numbers: Sequence[Any], dtype: torch.dtype) -> None:
    """PyTorch takes no bound beyond the dtype, and no alpha; other operands wrap, there as here."""
    info = torch.iinfo(dtype)
    for number in numbers:
        if isinstance(number, int) and not info.min <= number <= info.max:
            raise Unsupported(
                f"{node.target} with {number} of {dtype}, which ends at {info.min} and {info.max}; "
                "give a number in between, or cast first: .long()"
            )


def _is_positive(divisor: Any, dtype: torch.dtype) -> bool:
    """Whether it is a number by which remainders are from 0 on, as those of an index are."""
    return isinstance(divisor, int) and 0 < divisor <= torch.iinfo(dtype).max


def _compared_as(given: Sequence[Any]) -> str:
    """A dtype that holds all operands."""
    wide = (
        a.meta["val"].dtype == torch.int64 if isinstance(a, fx.Node) else abs(a) >= 2**31
        for a in given
    )
    return "i64" if any(wide) else "i32"
