"""Which values are stored: those that would be computed anew too often, slice by slice."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch import fx

from tilewright.fusion import instructions
from tilewright.fusion.frontend.axes import Value
from tilewright.fusion.frontend.builder import MOST_STEPS
from tilewright.fusion.frontend.indexing import IndexBuilder
from tilewright.fusion.frontend.pieces import Pieces
from tilewright.fusion.frontend.steps import Step, values_of
from tilewright.fusion.frontend.trace import name_of, written_by
from tilewright.fusion.ir import POINTWISE, REDUCTIONS, Node
from tilewright.op import Workload

FEWEST_ANEW = 4
"""Times that a value is computed anew in all, at least, where it is worthwhile to store it."""
MOST_ANEW = 128
"""Instructions that compute an element of it anew: to write and read one takes a GPU as long as
some hundred of them, and a CPU that finds it in no cache."""
IDENTITIES = (
    *("clone", "alias", "detach", "view_of", "contiguous"),
    "copy_strided",  # strides of the outputs come from the operator, not from the trace
)
_IN_ORDER = (*IDENTITIES, "permute", "transpose", "t")
_FEW = 10
"""Instructions, which are as well repeated where a value that they take is stored."""


class StoringBuilder(IndexBuilder):
    """Finds the next value to store, once a trace was walked.

    Attributes:
        values: the results of its steps.
        reasons: the steps whose results are stored, and why.
    """

    def __init__(self, w: Workload, kept: Mapping[fx.Node, str]):
        super().__init__(w)
        self.values: dict[fx.Node, Any] = {}
        self.reasons = kept

    def keep_result(self, node: fx.Node) -> None:
        """Of a step, which other steps may have the result of, too."""
        held = self.values[node]
        found = self.keep(held, self.reasons[node])
        self.values |= {other: found for other, known in self.values.items() if known is held}

    def costliest(self) -> tuple[fx.Node, str] | None:
        """The step to store the result of where steps have become too many: whose copies, with what
        is behind them, are most of them; and why, in words."""
        found = {
            node: sum(self.steps_behind(i) * len(self.copies.get(i, ())) for i in made)
            for node, made in self.taken_results()
        }
        if not any(found.values()):
            return None
        node = max(found, key=found.__getitem__)
        return node, self.told(node, f"more than {MOST_STEPS} steps")

    def costlier_than_memory(self, outputs: list[Value | Pieces]) -> tuple[fx.Node, str] | None:
        """The step whose result takes most to compute anew, if that is longer than to store it."""
        if not self.taken:
            return None
        ends = [v.node for one in (*outputs, *(k.held for k in self.kept)) for v in values_of(one)]
        live = set(self.ancestors(ends))
        found: dict[fx.Node, float] = {}
        for node, made in self.taken_results():
            size, anew, elements = math.prod(self.values[node].shape), 0, 0
            for i in made:
                copies = sum(self.size(k) for k in self.copies.get(i, ()) if k in live)
                elements += copies
                anew += copies * self.instructions_behind(i) if copies else 0
            if elements >= FEWEST_ANEW * size and anew >= MOST_ANEW * size:
                found[node] = anew / size
        if not found:
            return None
        node = max(found, key=found.__getitem__)
        return node, self.told(node, f"more than {MOST_ANEW} instructions for each element")

    def told(self, node: Any, anew: str) -> str:
        line = written_by(node).meta.get("stack_trace")
        reason = f"a value is stored: slices of it would be computed anew in {anew}"
        return f"{reason} ({line})" if line else reason

    def taken_results(self) -> Iterator[tuple[fx.Node, set[int]]]:
        """Steps of the trace whose results were taken in slices, or what few instructions make of
        one of these, and may be stored; and the steps of each."""
        made: dict[fx.Node, set[int]] = {}
        known = set[int]()
        for node, held in self.values.items():
            own = {v.node for v in values_of(held)} - known if held is not None else set()
            known |= own
            if own and node.op == "call_function" and len(self.dtypes(held)) == 1:
                made[node] = own
        sources = set[fx.Node]()
        for node in (n for n, own in made.items() if not own.isdisjoint(self.taken)):
            source = node
            while _is_of_one(node) and node not in self.reasons:
                (node,) = node.all_input_nodes
                if node in made and node not in self.reasons:
                    source = node
            sources.add(source)
        return ((n, own) for n, own in made.items() if n in sources and n not in self.reasons)

    def size(self, i: int) -> int:
        """Elements of a step."""
        return math.prod(self.axes.size(a) for a in self.axes.roots(self.steps[i].axes))

    def computed_behind(self, i: int) -> list[Step]:
        behind = map(self.steps.__getitem__, self.ancestors([i]))
        return [step for step in behind if step.op not in ("load", "const", "scalar", "cast")]

    def steps_behind(self, i: int) -> int:
        return len(self.computed_behind(i))

    def instructions_behind(self, i: int) -> int:
        """0 of what holds a reduction: rows that are cut into pieces may be walked once."""
        computed = self.computed_behind(i)
        if any(step.op in REDUCTIONS for step in computed):
            return 0
        return sum(instructions.of(Node(step.op, (), step.dtype, ())) for step in computed)


def _is_of_one(node: fx.Node) -> bool:
    """Whether few instructions make each element of an element of one other tensor."""
    if node.op != "call_function" or len(node.all_input_nodes) != 1:
        return False
    name = name_of(node)
    few = name in POINTWISE and instructions.of(Node(name, (), "f32", ())) <= _FEW
    return few or name in _IN_ORDER
