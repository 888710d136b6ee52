"""What follows from the numbers of a call alone: computed once a call, on the host.

Python and PyTorch's formulas of derivatives compute with numbers in fp64, as the 1 - weight of the
gradient of lerp. A kernel is given what tensors meet, rounded once: near a weight of 1 the same
difference in fp32 keeps few digits, or none.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tilewright.fusion.ir import COMPARISONS, POINTWISE, Graph, Node, Rewriter
from tilewright.tensor_spec import DTYPES, HALVES

_IN_PYTHON: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "neg", "abs", *COMPARISONS)},
    **{"where": lambda condition, a, b: a if condition else b, "div": operator.truediv},
    **{"pow": operator.pow, "sqrt": math.sqrt, "exp": math.exp, "log": math.log},
    **{"reciprocal": lambda a: 1.0 / a, "rsqrt": lambda a: 1.0 / math.sqrt(a)},
}
"""Steps that Python takes at once; of what it raises for, PyTorch makes infinities and NaN."""
_NEVER_RAISE = ("add", "sub", "mul", "neg", "abs", "where", *COMPARISONS)
_OF_TORCH = {"and": "logical_and", "or": "logical_or", "not": "logical_not"}


@dataclass(frozen=True)
class Numbers:
    """How the run-time scalars of a graph follow from the numbers of a call.

    Attributes:
        steps: in order; the `scalar`s among them are the numbers of the call.
        results: those steps that are the scalars of the graph.
    """

    steps: tuple[Node, ...]
    results: tuple[int, ...]

    @classmethod
    def unchanged(cls, dtypes: Sequence[str]) -> Numbers:
        """The numbers of a call themselves, of these dtypes."""
        steps = tuple(Node("scalar", (), dtype, (), k) for k, dtype in enumerate(dtypes))
        return cls(steps, tuple(range(len(steps))))

    def beside(self, constants: Sequence[Node]) -> Numbers:
        """These, and behind them others that are the same in every call."""
        more = range(len(self.steps), len(self.steps) + len(constants))
        return Numbers((*self.steps, *constants), (*self.results, *more))

    def __call__(self, given: tuple[float, ...]) -> tuple[float, ...]:
        """In fp64, whatever the steps' dtypes are; what rounds to halves does so."""
        values = list(self._at_hand)
        for place, number in self._given:
            values[place] = given[number]
        for place, step, operands in self._computed:
            values[place] = step(*[values[a] for a in operands])
        return tuple([float(values[i]) for i in self.results])

    @functools.cached_property
    def _at_hand(self) -> list[Any]:
        return [n.attr if n.op == "const" else None for n in self.steps]

    @functools.cached_property
    def _given(self) -> list[tuple[int, int]]:
        return [(i, n.attr) for i, n in enumerate(self.steps) if n.op == "scalar"]

    @functools.cached_property
    def _computed(self) -> list[tuple[int, Callable[..., Any], tuple[int, ...]]]:
        steps = enumerate(self.steps)
        return [(i, _function(n), n.args) for i, n in steps if n.op not in ("const", "scalar")]


def _function(n: Node) -> Callable[..., Any]:
    if n.op == "cast":
        if n.dtype in HALVES:
            return lambda a: torch.tensor(a, dtype=torch.float64).to(DTYPES[n.dtype]).item()
        return bool if n.dtype == "bool" else float
    found = _IN_PYTHON.get(n.op)

    def step(*operands: Any) -> Any:
        try:
            value = found(*operands) if found else None
        except (ArithmeticError, ValueError):
            value = None
        return value if isinstance(value, (float, bool)) else _by_torch(n.op, *operands)

    return _IN_PYTHON[n.op] if n.op in _NEVER_RAISE else step


def _by_torch(op: str, *operands: Any) -> Any:
    tensors = [torch.tensor(x, dtype=torch.float64) for x in operands]
    return getattr(torch, _OF_TORCH.get(op, op))(*tensors).item()


def hoist_numbers(graph: Graph) -> Graph:
    """What follows from numbers alone is computed once a call: to kernels it is a number given."""
    follows = _following(graph)
    met = [i for i in sorted(follows) if _meets_others(graph, i, follows)]
    if all(graph.nodes[i].op == "scalar" for i in met):
        return graph
    wide = "f64" if "f64" in graph.scalars else "f32"
    place = {i: k for k, i in enumerate(met)}
    dtypes = [
        n.dtype if n.dtype in ("f32", "f64") else wide for n in map(graph.nodes.__getitem__, met)
    ]

    def rule(r: Rewriter, i: int, n: Node) -> int | None:
        if i not in place:
            return None
        number = replace(n, op="scalar", args=(), dtype=dtypes[place[i]], attr=place[i])
        if n.dtype == number.dtype:
            return r.add(number)
        if n.dtype == "bool":
            zero = r.add(replace(number, op="const", attr=0.0))
            return r.add(replace(n, op="ne", args=(r.add(number), zero), attr=None))
        return r.add(replace(n, op="cast", args=(r.add(number),), attr=None))

    hoisted = graph.rewritten(rule)
    return replace(hoisted, scalars=tuple(dtypes), numbers=_numbers(graph, met))


def _following(graph: Graph) -> set[int]:
    """The steps that follow from scalars, of these and of constants alone."""
    found, constant = set[int](), set[int]()
    for i, n in enumerate(graph.nodes):
        if n.op == "const":
            constant.add(i)
        elif n.op == "scalar":
            found.add(i)
        elif n.op == "cast" or n.op in POINTWISE:
            single = set(n.shape) <= {1} and n.dtype in ("f32", "f64", "bool", *HALVES)
            if single and not found.isdisjoint(n.args) and (found | constant).issuperset(n.args):
                found.add(i)
    return found


def _meets_others(graph: Graph, i: int, follows: set[int]) -> bool:
    """Whether a result, or a step of which tensors are operands, takes it."""
    return any(k == i for k, _ in graph.outputs) or not follows.issuperset(graph.users(i))


def _numbers(graph: Graph, results: Iterable[int]) -> Numbers:
    wanted = set(results)
    for i in reversed(range(len(graph.nodes))):
        if i in wanted:
            wanted.update(graph.nodes[i].args)
    new = {i: k for k, i in enumerate(sorted(wanted))}
    steps = tuple(graph.nodes[i].moved(tuple(new[a] for a in graph.nodes[i].args), ()) for i in new)
    return Numbers(steps, tuple(new[i] for i in results))
