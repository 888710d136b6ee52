"""The steps of a sweep over a row: which are needed, and where their operands are."""

from __future__ import annotations

from tilewright.fusion.cuda.rows.joining import Joining
from tilewright.fusion.cuda.rows.residents import Residents
from tilewright.fusion.plan import needed_in
from tilewright.fusion.remembered import remembered


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

    def value_of(self, i: int, values: dict[int, str], known: frozenset[int]) -> str:
        if i in values:
            return values[i]
        if i in self.parameters:
            return self.parameter(i)
        return self.kept_name(i) if i in known else self.names[i]
