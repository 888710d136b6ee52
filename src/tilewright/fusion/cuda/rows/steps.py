"""The steps of a sweep over a row: which are needed, and where their operands are."""

from __future__ import annotations

import itertools

from tilewright.fusion.cuda.rows.joining import Joining
from tilewright.fusion.cuda.rows.residents import Residents
from tilewright.fusion.ir import Positions
from tilewright.fusion.plan import needed_in
from tilewright.fusion.remembered import remembered

LEAST_NAMED = 8
"""Elements of a vector that is passed by where it has none that an index names, unless what it
names is added up: gradients of losses by labels of 8192 rows of 32000 took 349 us on an H200 for
452 (bf16), of fp32 by four 540 for 534 (6ff8358, no file kept)."""


class Steps(Joining, Residents):
    """Emits the part of the graph that varies along the row, at the current turn and row."""

    def kept_name(self, i: int) -> str:
        if self.s.storage == "registers":
            return f"keep{i}[r][k]"
        return f"keep{i}[k * {self.s.block_threads} + threadIdx.x]"

    def steps(
        self,
        steps: list[int],
        known: frozenset[int],
        early: dict[int, str],
        per_row: bool,
        values: dict[int, str] | None = None,
    ) -> dict[int, str]:
        """Emit the steps that vary over rows, or those that all rows of the thread share."""
        done: dict[int, str] = dict(values or {})
        for i in steps:
            n = self.graph.nodes[i]
            if self.by_row(i, known) != per_row:
                continue
            if n.op == "load":
                value = early.get(i) or self.load(i, per_row and self.s.stream_loads)
            else:
                operands = [self.value_of(a, done, known) for a in n.args]
                value = self.expression(n, operands, str(self.s.vector))
                if self.s.vector >= LEAST_NAMED and (named := self.named(i, done)):
                    both = ", ".join([*named, *operands[1:]])
                    value = f"where_named<{self.s.vector}>({both})"
            self.line(f"const auto v{i} = {value};")
            done[i] = f"v{i}"
        return done

    def needed(self, wanted: set[int], known: frozenset[int]) -> list[int]:
        """The steps along the row that lead to `wanted` from what is at hand."""
        at_hand = known | frozenset(self.names) | frozenset(self.parameters)
        return [i for i in needed_in(self.graph, wanted, at_hand) if self.plan.inner[i]]

    @remembered
    def by_row(self, i: int, known: frozenset[int]) -> bool:
        n = self.graph.nodes[i]
        if i in known:
            return True
        if i in self.parameters:
            return False
        if not self.plan.inner[i]:
            return not self.fixed(i)
        if n.op == "load":
            return self.is_row_load(i)
        return any(self.by_row(a, known) for a in n.args)

    def named(self, i: int, values: dict[int, str]) -> tuple[str, str] | None:
        """An index of the row, and the vector of positions, where step `i` chooses by whether they
        are equal: at most one element of a vector is another, and of most vectors none."""
        nodes = self.graph.nodes
        if nodes[i].op != "where" or nodes[nodes[i].args[0]].op != "eq":
            return None
        for index, at in itertools.permutations(nodes[nodes[i].args[0]].args):
            if at in values and index in self.names and self.graph.generated(at):
                access = self.graph.inputs[nodes[at].attr]
                if isinstance(access.generator, Positions) and access.strides[-1] == 1:
                    return self.names[index], values[at]
        return None

    def value_of(self, i: int, values: dict[int, str], known: frozenset[int]) -> str:
        if i in values:
            return values[i]
        if i in self.parameters:
            return self.parameter(i)
        return self.kept_name(i) if i in known else self.names[i]
