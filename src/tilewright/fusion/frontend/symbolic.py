"""Whether a reference takes the same steps at all sizes, by a trace with symbols for sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from tilewright.fakes import fake_tensors
from tilewright.fusion.frontend.trace import Layouts, arguments_of, traced
from tilewright.op import Workload


def same_at_all_sizes(
    w: Workload, sizes: Sequence[int], layouts: Callable[[Sequence[Any]], Layouts]
) -> bool:
    """Whether the workload's reference takes the same steps when these sizes, of at least 2, are
    others, and each number in them that varies is a product of sizes and a constant.

    PyTorch notes each question that a trace asks about a size, as a guard, a value or a range of
    it: there must be none.

    Args:
        layouts: of the workload's tensors, made of sizes.
    """
    try:
        trace, asked = _with_symbols(w, sizes, layouts)
        return not asked and all(map(_is_of_products, trace.graph.nodes))
    except Exception:  # of a person's function, or of a step that takes no symbols
        return False


def _with_symbols(
    w: Workload, sizes: Sequence[int], layouts: Callable[[Sequence[Any]], Layouts]
) -> tuple[GraphModule, bool]:
    """A trace, and whether it depends on what the sizes are."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    env = ShapeEnv()
    symbols = []
    for k, size in enumerate(sizes):
        source = ConstantSource(f"size{k}")
        symbol = env.create_symbol(
            size, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None
        )
        symbols.append(env.create_symintnode(symbol, hint=size, source=source))
    ranges = dict(env.var_to_range)
    trace = traced(w, fake_tensors(env), layouts(symbols), scalars=w.scalars)
    asked = env.guards or env.replacements or env.deferred_runtime_asserts
    return trace, bool(asked) or dict(env.var_to_range) != ranges


def _is_of_products(step: Node) -> bool:
    return _of_products(step.meta.get("val")) and not _takes_more_than_products(step)


def _of_products(value: Any) -> bool:
    if isinstance(value, Tensor):
        return all(map(_is_product, (*value.shape, *value.stride(), value.storage_offset())))
    if isinstance(value, (tuple, list)):
        return all(map(_of_products, value))
    return not isinstance(value, torch.SymBool) and _is_product(value)


def _is_product(value: Any) -> bool:
    from torch.utils._sympy.functions import ToFloat

    if not isinstance(value, (torch.SymInt, torch.SymFloat)):
        return True
    expression = value.node.expr
    if isinstance(expression, ToFloat):
        (expression,) = expression.args
    _, factors = expression.as_coeff_mul()
    return all(f.is_Symbol for f in factors)


def _takes_more_than_products(step: Node) -> bool:
    """Whether lowering takes another number from how much it runs over than its trace tells: of
    booleans there may be too many to count, and a variance may divide by fewer than there are."""
    name = str(step.target)
    if "sum" not in name and "var" not in name:
        return False
    x, out = step.all_input_nodes[0].meta["val"], step.meta["val"]
    counts = "sum" in name and x.dtype == torch.bool
    fewer = "var" in name and arguments_of(step).get("correction") != 0
    return (counts or fewer) and bool(_symbols(x) - _symbols(out))


def _symbols(t: Tensor) -> Counter[str]:
    return Counter(str(n) for n in t.shape if isinstance(n, torch.SymInt))
