"""The truth in fp64, and how far from it a correct implementation can be.

The operator's reference is traced in fp64 and interpreted on pairs (value, error): the exact value
of each intermediate, and a first-order bound of what rounding makes of it in the operator's
arithmetic, in units of the arithmetic's unit roundoff u (2^-24 for fp32; 2^-53 for a step that the
program has in fp64). A correct implementation holds each output in [value - t, value + t] with
t = SAFETY * u * error before it rounds to the output's dtype; rounding is monotone, so what it
returns lies between the two ends rounded alike.
These two ends, `lo` and `hi`, are the whole check: no constant is added for the output's own
rounding, which makes one term missing from a sum of 65536 visible in fp16.

Where the operands are exact and the result is representable in the arithmetic, an operation has no
error; integers are therefore checked bit for bit wherever they stay exact.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from tilewright.errors import NoErrorRule, NoImplementation
from tilewright.fusion.frontend.lower import lower
from tilewright.fusion.frontend.steps import Unsupported
from tilewright.fusion.frontend.trace import arithmetics, trace_truth
from tilewright.indexed import Terms
from tilewright.measure import (  # noqa: F401 - their rules register
    error_rules_convolution,
    error_rules_indexing,
    error_rules_reductions,
    error_rules_steps,
)
from tilewright.measure.error_rules import RULES, SAFETY, Arithmetic, Pair, integer_ends
from tilewright.op import Workload
from tilewright.tensor_spec import DTYPES


def truth_and_tolerance(
    w: Workload,
    tensors: Sequence[Tensor],
    graph: fx.GraphModule | None = None,
    decided: bool = False,
    choices: list[str] | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """For each output of the workload: its exact value, and how far an implementation may be off.

    Args:
        w: the workload; the flag `relaxed` allows written roundings to be dropped.
        tensors: its tensor arguments, of its dtypes, on any one device.
        graph: of `trace_truth`, where the caller keeps it.
        decided: what rounding decides (comparisons, `floor`, ...) ends as with exact operands.
        choices: gets the names of the steps that rounding decides somewhere.

    Returns:
        (value, tolerance) in fp64, or (value, 0) in the output's dtype where that is not floating.
        The tolerance is that of the arithmetic; rounding to the output's dtype comes on top.

    Raises:
        NoErrorRule: the reference uses an operation that has no rule here.
    """
    if w.operator.indexed is not None:
        return [_of_terms(w, tensors, w.operator.indexed.terms(w, tensors))]
    graph = graph or trace_truth(w)
    arithmetic = Arithmetic(
        DTYPES[w.arithmetic], w.main.torch_dtype, "relaxed" in w.flags, tensors[0].device,
        tf32=bool(dict(w.args).get("allow_tf32")),
        decided=decided, choices=[] if choices is None else choices,
    )  # fmt: skip
    pairs = [Pair(t.double() if t.is_floating_point() else t) for t in tensors]
    return [
        (p.value, torch.zeros_like(p.value) if p.error is None else p.error * SAFETY)
        for p in _interpret(w, graph, pairs, arithmetic)
    ]


def _of_terms(w: Workload, tensors: Sequence[Tensor], terms: Terms) -> tuple[Tensor, Tensor]:
    """Of an operator that sums or multiplies what its indices bring together.

    Integers and copies are exact, and so are whole numbers that stay below 1/u in any order. No
    order of a product spares a rounding: each is relative to the whole.
    """
    value = terms.value
    if not value.is_floating_point():
        return value, torch.zeros_like(value)
    u = torch.finfo(DTYPES[w.arithmetic]).eps / 2
    scale = SAFETY * u * (2 if w.arithmetic == "f64" else 1)
    count = terms.count.double()
    growth = count - 1 if terms.product else count.clamp_min(1).log2() + count.sqrt() / 8
    growth.masked_fill_(count <= 1, 0.0)
    error = growth.mul_(terms.magnitude.nan_to_num(0.0, 0.0)).mul_(scale)
    if all(bool((t == t.round()).all()) for t in tensors if t.is_floating_point()):
        whole = (value == value.round()) & (terms.magnitude * count < 1 / u)
        error.masked_fill_(whole, 0.0)
    return value, error


def bounds(value: Tensor, tolerance: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Least and greatest result of `dtype` that a correct implementation can return.

    Where the value is infinite or NaN, both are that value; of an infinite tolerance, -inf and inf.
    """
    if not dtype.is_floating_point:
        whole = value.to(dtype)
        if dtype == torch.bool:
            return whole & (tolerance == 0), whole | (tolerance > 0)
        return integer_ends(whole, tolerance.double())
    anything = tolerance == math.inf
    tolerance = tolerance.masked_fill(~value.isfinite() | anything, 0.0)
    low, high = ((value + sign * tolerance).to(dtype) for sign in (-1, 1))
    return low.masked_fill_(anything, -math.inf), high.masked_fill_(anything, math.inf)


def _interpret(
    w: Workload, graph: fx.GraphModule, inputs: list[Pair], arithmetic: Arithmetic
) -> list[Pair]:
    env: dict[fx.Node, Any] = {}
    arguments = iter(inputs)
    last_use = _last_uses(graph)
    within = {n: replace(arithmetic, dtype=DTYPES[d]) for n, d in arithmetics(w, graph).items()}
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            env[node] = next(arguments)
        elif node.op == "output":
            return [
                _scaled(within[n].lift(env[n]), within[n].u)
                if isinstance(n, fx.Node)
                else _scaled(arithmetic.lift(n), arithmetic.u)
                for n in node.args[0]
            ]
        elif node.op == "get_attr":
            env[node] = arithmetic.lift(getattr(graph, node.target))
        elif node.users or _is_mutable(node.target):
            name = _name(node.target)
            rule = RULES.get(name.rstrip("_"))
            if rule is None:
                raise NoErrorRule(_without_rule(w, node.target, name))
            own = within[node]
            taken = {n: _entering(within[n], own, env[n]) for n in node.all_input_nodes}
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), taken.__getitem__)
            env[node] = rule(own, *args, **kwargs)
            if _is_mutable(node.target):
                env[node.args[0]] = env[node]
        for done in last_use.get(node, ()):
            env.pop(done, None)
    raise AssertionError("a traced graph ends in an output node")


def _without_rule(w: Workload, target: Any, name: str) -> str:
    verified = (
        f"uses {target}, which has no error rule: no result can be verified; leave that step out "
        f"of the function, or add a rule for {name!r} to measure/error_rules.py"
    )
    try:
        if w.operator.fused:
            lower(w)
    except (Unsupported, NoImplementation) as reason:  # the user's own line comes first
        return f"{w.op} cannot be fused: {reason}; change that step. Its reference {verified}"
    return f"{w.op}: its reference {verified}"


def _entering(given: Arithmetic, own: Arithmetic, result: Any) -> Any:
    """What a step in `own` takes of one in `given`: rounded if that is wider, in its own units."""
    narrows = given.u < own.u and isinstance(result, Pair)
    if narrows and result.value.is_floating_point():
        result = RULES["convert_element_type"](given, result, own.dtype)
    return _scaled(result, given.u / own.u)


def _scaled(result: Any, ratio: float) -> Any:
    """The same errors in other units."""
    if ratio == 1:
        return result
    if isinstance(result, (tuple, list)):
        return type(result)(_scaled(r, ratio) for r in result)
    if not isinstance(result, Pair) or result.error is None:
        return result
    return replace(result, error=result.error * ratio)


def _name(target: Any) -> str:
    """Of the operation: `add` for aten.add.Tensor; `getitem` picks one of several outputs."""
    return "getitem" if target is operator.getitem else target._schema.name.split("::")[1]


def _is_mutable(target: Any) -> bool:
    return target is not operator.getitem and target._schema.is_mutable


def _last_uses(graph: fx.GraphModule) -> dict[fx.Node, list[fx.Node]]:
    """By node, those nodes whose value is not needed after it."""
    last = {used: node for node in graph.graph.nodes for used in node.all_input_nodes}
    by_node: dict[fx.Node, list[fx.Node]] = {}
    for used, node in last.items():
        by_node.setdefault(node, []).append(used)
    return by_node
