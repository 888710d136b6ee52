"""Whether a reference takes the same steps at all sizes, by a trace with symbols for sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from tilewright.fakes import fake_tensors
from tilewright.fusion.frontend.trace import Layouts, traced
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
    except Exception:  # of a person's function, or of a step that takes no symbols
        return False
    return not asked and all(
        _of_products(n.meta.get("val")) and not _counts(n) for n in trace.graph.nodes
    )


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


def _of_products(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
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


def _counts(node: Node) -> bool:
    """Whether it adds up booleans, of which there may be too many."""
    before = [n.meta.get("val") for n in node.all_input_nodes]
    booleans = any(isinstance(t, torch.Tensor) and t.dtype == torch.bool for t in before)
    return booleans and "sum" in str(node.target)
