"""Rows that blocks anywhere on the device share, in one launch and without waiting for one another.

Each block sums its share of a row, leaves that in a word of memory, and only then stores what the
row holds of results. The block that was the last to begin joins the partials, always in the same
order: it waits for blocks that all run already, and of which none waits.
"""

from __future__ import annotations

from tilewright.device import WARP
from tilewright.fusion.cuda.kernel import ENTRY, JOINS, TYPES, Launch
from tilewright.fusion.cuda.partials import words_of_row
from tilewright.fusion.cuda.rows.kernel import RowKernel, planned
from tilewright.fusion.cuda.rows.schedule import RowSchedule
from tilewright.fusion.ir import Graph
from tilewright.fusion.plan import Phase, Plan, with_stores_last


def emit_rows(graph: Graph, schedule: RowSchedule, entry: str = ENTRY) -> tuple[str, Launch]:
    """A kernel that reduces rows; its source and its launch."""
    plan = planned(graph, schedule, schedule.recompute)
    kernel = SharedRowKernel if schedule.blocks_per_row > 1 else RowKernel
    return kernel(plan, schedule, entry).emit()


class SharedRowKernel(RowKernel):
    """A kernel of `blocks_per_row` blocks for each row."""

    def __init__(self, plan: Plan, schedule: RowSchedule, entry: str):
        later = schedule.storage == "registers"
        super().__init__(with_stores_last(plan) if later else plan, schedule, entry)
        (self.sums,) = (phase.reductions for phase in plan.phases)
        self.words = words_of_row(schedule.blocks_per_row, len(self.sums))

    def parameters_of_kernel(self) -> list[str]:
        every = super().parameters_of_kernel()
        every.insert(every.index("i64 count") + 1, "u32* counters")
        return every

    def signature(self) -> str:
        return super().signature().replace("q", "qP", 1)

    @property
    def counters(self) -> int:
        return self.words * self.plan.rows

    def sweeps(self) -> None:
        self.line(f"u32* const tickets = counters + first_row * {self.words};")
        self.line("u64* const partials = (u64*)tickets + 1;")
        self.line("u32 ticket = 0;")
        self.open("if (threadIdx.x == 0)")
        self.line(f"ticket = take_ticket<{self.s.blocks_per_row}>(tickets);")
        for n in range(len(self.sums)):
            self.line(f"expect_partials<1>({self.own_partial(n)}, 1);")
        self.close()
        first, *others = self.plan.phases
        self.sweep(0, first)
        self.leave_partials(first)
        for p, phase in enumerate(others, 1):
            self.sweep(p, phase)
        self.open(f"if (threadIdx.x < {WARP})")
        self.line("ticket = __shfl_sync(0xffffffffu, ticket, 0);")
        self.open(f"if (ticket == {self.s.blocks_per_row - 1})")
        for n, i in enumerate(self.sums):
            how = f"{JOINS[self.graph.nodes[i].op]}, {self.s.blocks_per_row}"
            at = f"partials + {n * self.s.blocks_per_row}"
            self.line(f"acc{i}[0] = join_partials<{how}>({at}, 1);")
            self.names[i] = f"acc{i}[r]"
        self.row_values(1)
        self.row_stores()
        self.close()
        self.close()

    def leave_partials(self, phase: Phase) -> None:
        """What all threads of the block found, by its first one."""
        if self.warps > 1:
            for i in phase.reductions:
                kind = TYPES[self.graph.nodes[i].dtype]
                self.shared.append(f"__shared__ {kind} all_acc{i}[{self.warps}];")
                join = JOINS[self.graph.nodes[i].op]
                self.line(f"acc{i}[0] = reduce_warp<{join}, {WARP}>(acc{i}[0]);")
                self.line(f"if (lane % {WARP} == 0) all_acc{i}[lane / {WARP}] = acc{i}[0];")
            self.line("__syncthreads();")
        self.open(f"if (threadIdx.x < {WARP})")
        for n, i in enumerate(phase.reductions):
            join = JOINS[self.graph.nodes[i].op]
            if self.warps > 1:
                start = f"{join}::start<{TYPES[self.graph.nodes[i].dtype]}>()"
                mine = f"lane < {self.warps} ? all_acc{i}[lane] : {start}"
                self.line(f"acc{i}[0] = {mine};")
            self.line(f"acc{i}[0] = reduce_warp<{join}, {WARP}>(acc{i}[0]);")
            self.line(f"if (lane == 0) leave_partial({self.own_partial(n)}, acc{i}[0]);")
        self.close()

    def own_partial(self, n: int) -> str:
        """Where this block leaves its partial of the row's sum number `n`."""
        return f"partials + {n * self.s.blocks_per_row} + rank"

    def load_ahead(self, p: int, steps: list[int]) -> dict[int, str]:
        """What rows have in common first: the little that everybody waits for should not stand
        behind all the rest."""
        shared = [i for i in steps if self.is_shared_load(i)]
        if not shared:
            return super().load_ahead(p, steps)
        for i in shared:
            self.line(f"{self.vector_type(i)} shared{p}_{i}[{self.turns}];")
        self.open_turns()
        for i in shared:
            self.line(f"shared{p}_{i}[k] = {self.load(i, False)};")
        self.close_turns()
        found = {i: f"shared{p}_{i}[k]" for i in shared}
        return {**found, **super().load_ahead(p, steps)}

    def is_shared_load(self, i: int) -> bool:
        computed = self.graph.nodes[i].op != "load" or self.graph.generated(i)
        return not computed and self.plan.inner[i] and not self.is_row_load(i)
