"""What a step of a trace is given, as values: of what dtype, in pieces or whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from tilewright.fusion.frontend.axes import Value, constant
from tilewright.fusion.frontend.pieces import Pieces
from tilewright.fusion.frontend.steps import Unsupported
from tilewright.fusion.frontend.storing import StoringBuilder
from tilewright.op import Workload
from tilewright.tensor_spec import DTYPE_NAMES, HALVES, WHOLE

COUNTED = {"f32": 2**24, "f64": 2**53}
"""Whole numbers to these are exact."""
COUNTS = (torch.int32, torch.int64)
INSTEAD = {
    **dict.fromkeys(
        ("index", "index_select", "embedding", "index_put"),
        "of indexing, slices are taken, masks in where, and gather and scatter of one element of "
        "each row",
    ),
    **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm"), "of products, (x * y).sum(dim) is taken"),
    **dict.fromkeys(
        ("rand", "rand_like", "randn", "randn_like"),
        "give random numbers as an argument; dropout is taken",
    ),
}
"""What may be done about a step that is not taken."""


class ValueBuilder(StoringBuilder):
    """
    Attributes:
        trace: whose steps they are.
    """

    def __init__(self, w: Workload, trace: fx.GraphModule, kept: Mapping[fx.Node, str]):
        super().__init__(w, kept)
        self.trace = trace

    def value(self, arg: Any) -> Value:
        if isinstance(arg, fx.Node):
            if arg.op == "get_attr":
                told = "a tensor that is no argument of the reference: make it one"
                whole = getattr(self.trace, str(arg.target)).dtype in COUNTS
                raise Unsupported(f"{told}, of floats; {INSTEAD['index']}" if whole else told)
            if isinstance(self.values[arg], Pieces):
                raise Unsupported(f"{arg.target} of the reference may be returned, not used again")
            return self.values[arg]
        if isinstance(arg, (bool, int, float)):
            return self.number(arg)
        raise Unsupported(f"argument {arg!r} of the reference")

    def number_of(self, arg: fx.Node) -> Value | None:
        """Of a tensor of one element that the reference makes of a number."""
        made = getattr(self.trace, str(arg.target)) if arg.op == "get_attr" else None
        if made is None or made.numel() != 1 or made.is_complex():
            return None
        return Value(self.number(made.item()).node, constant(made.shape))

    def whole(self, arg: Any) -> Value | Pieces:
        """What may be returned: a value, or pieces of one."""
        found = self.values.get(arg) if isinstance(arg, fx.Node) else None
        return found if isinstance(found, Pieces) else self.value(arg)

    def whole_as(self, arg: Any, dtype: str) -> Value | Pieces:
        return self.mapped(self.whole(arg), lambda value: self.converted(value, dtype))

    def holding(self, value: float, node: Any) -> Value:
        """One number in the dtype and the shape of a step's result."""
        out = node.meta["val"]
        try:
            number = torch.full((), value, dtype=out.dtype).item()
        except RuntimeError as reason:  # PyTorch's own: beyond the dtype's range
            raise Unsupported(f"{node.target} of {value} in {out.dtype}: {reason}") from None
        return Value(self.add("const", (), DTYPE_NAMES[out.dtype], (), number), constant(out.shape))

    def rounded(self, value: Value, dtype: str) -> Value:
        if dtype == "f64":
            return value
        narrow = self.add("cast", (value.node,), dtype, self.steps[value.node].axes)
        return Value(self.upcast(narrow), value.dims)

    def converted(self, value: Value, dtype: str) -> Value:
        """Values stay in the arithmetic type: a narrower one that the program asks for rounds."""
        step = self.steps[value.node]
        if dtype == step.dtype:
            return value
        if dtype in HALVES or (dtype, self.arithmetic) == ("f32", "f64"):
            return self.rounded(self.converted(value, self.arithmetic), dtype)
        written = step.op == "const" and isinstance(step.attr, int)
        if dtype in WHOLE and (written or step.dtype in (*WHOLE, "bool")):
            return self.integer(value, dtype)
        if dtype in WHOLE:  # a whole number in the arithmetic type
            number = self.converted(value, self.arithmetic)
            whole = self.combine("trunc", [number])
            return self.combine("add", [whole, self.number(0.0)])  # integers have no -0
        if dtype not in (self.arithmetic, "bool"):
            raise Unsupported(f"a cast to {dtype} among values of {self.arithmetic}")
        return Value(self.add("cast", (value.node,), dtype, step.axes), value.dims)
