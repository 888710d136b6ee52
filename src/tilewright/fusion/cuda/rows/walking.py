"""How the groups of a persistent row kernel go from rows to rows."""

from __future__ import annotations

from tilewright.device import WARP
from tilewright.fusion.cuda.rows.layout import RowLayout


class Walking(RowLayout):
    """Either with the stride of the grid, or in turn.

    With the stride, what is left at the end goes to the first groups of all blocks, not to all
    groups of the first blocks: every SM has as much to do as the others.

    In turn, a group takes its next rows from a counter. All groups then work side by side in
    memory, however fast each of them is, and none is left with more rows than the others at the
    end. The group's first thread takes a turn one step before it tells the other threads; it does
    so along with the row's first reduction, at no price. So the rows of the first `stages` + 2
    steps are known without asking. Every step takes one turn, and so who takes the last one knows
    it, and leaves the counter at zero for the next launch.

    batch: which rows the group walks now, in units of `rows_per_thread`.
    coming: those of the next steps.
    """

    @property
    def leads(self) -> str:
        return "lane == 0 && rank == 0" if self.s.cluster > 1 else "lane == 0"

    def parameters_of_kernel(self) -> list[str]:
        every = super().parameters_of_kernel()
        if self.s.in_turn:
            every.insert(every.index("i64 count") + 1, "u32* turns")
        return every

    def signature(self) -> str:
        found = super().signature()
        return found.replace("q", "qP", 1) if self.s.in_turn else found

    def start_walk(self) -> None:
        s = self.s
        self.line(f"const i64 blocks = (i64)gridDim.x / {s.cluster};")
        if not s.in_turn:
            per_block = s.rows_per_block * s.rows_per_thread
            self.line(f"const i64 row_step = blocks * {per_block};")
            self.line(f"i64 first_row = (group * blocks + block) * {s.rows_per_thread};")
            return
        self.line(f"const i64 groups = blocks * {s.rows_per_block};")
        self.line(f"const i64 batches = (count + {s.rows_per_thread - 1}) / {s.rows_per_thread};")
        self.line(f"const i64 first_batch = block * {s.rows_per_block} + group;")
        self.line("i64 batch = first_batch;")
        self.line(f"i64 coming[{s.stages + 1}];")
        self.line(
            f"TW_UNROLL for (int n = 0; n < {s.stages}; ++n)"
            " coming[n] = first_batch + (n + 1) * groups;"
        )
        self.line(f"i64 taken = first_batch + {s.stages + 1} * groups;")

    def open_walk(self) -> None:
        """The loop over the group's rows."""
        s = self.s
        if not s.in_turn:
            self.open(f"for (; {self.is_walked('first_row')}; first_row += row_step)")
            return
        self.open("while (batch < batches)")
        self.line(f"const i64 first_row = batch * {s.rows_per_thread};")
        self.line("const i64 told = taken;")
        turn = f"{s.stages + 2} * groups + take_turn(turns, batches)"
        self.line(f"if ({self.leads}) taken = {turn};")

    def close_walk(self) -> None:
        s = self.s
        self.line("++steps;")
        if s.in_turn:
            self.line("batch = coming[0];")
            self.line(f"TW_UNROLL for (int n = 0; n < {s.stages}; ++n) coming[n] = coming[n + 1];")
        self.close()

    def is_walked(self, first_row: str) -> str:
        """Whether there are rows from `first_row` on; for any group where several share a warp."""
        others = f" - group * blocks * {self.s.rows_per_thread}"
        return f"{first_row}{others if self.s.row_threads < WARP else ''} < count"

    def row_at_start(self, stage: str) -> str:
        """The first row of an early step."""
        if self.s.in_turn:
            return f"((first_batch + {stage} * groups) * {self.s.rows_per_thread})"
        return f"(first_row + {stage} * row_step)"

    def row_ahead(self) -> str:
        """The first row of the step that is `stages` steps ahead."""
        stages = self.s.stages
        if self.s.in_turn:
            return f"(coming[{stages - 1}] * {self.s.rows_per_thread})"
        return f"(first_row + {stages} * row_step)"

    def sync_group(self) -> None:
        """A barrier of the threads of a block that serve the same rows."""
        several = self.s.rows_per_block > 1
        self.line(f"group_sync(group, {self.s.row_threads});" if several else "__syncthreads();")
