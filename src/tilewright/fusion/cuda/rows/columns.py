"""A graph that also reduces over its rows, in one pass: the backward of a normalisation.

A persistent kernel walks rows as ever, and each thread adds up, for the columns it serves, what it
meets on the way. In the end the groups of a block join their sums in a fixed order, and every block
(or cluster) writes one partial result per column. A second, small kernel joins those; or all blocks
wait until the last one is there, and each then joins a slice of the columns.
"""

from __future__ import annotations

import math
from dataclasses import replace

from tilewright.fusion.cuda.column_graph import RowGraph, followers
from tilewright.fusion.cuda.finishing import FINISH, FinishKernel
from tilewright.fusion.cuda.kernel import ENTRY, JOINS, TYPES, Finish, Launch
from tilewright.fusion.cuda.rows.kernel import RowKernel, planned
from tilewright.fusion.cuda.rows.schedule import RowSchedule
from tilewright.fusion.cuda.rows.shifting import rows_alike
from tilewright.fusion.cuda.vectors import WIDEST_ACCESS
from tilewright.fusion.extents import Extent
from tilewright.fusion.ir import Graph


def emit_columns(graph: Graph, rows: RowGraph, schedule: RowSchedule) -> tuple[str, Launch]:
    """One kernel or both: their source and how to launch them."""
    first, second, launch = emit_both(graph, rows, schedule)
    return first + second, launch


def emit_both(
    graph: Graph,
    rows: RowGraph,
    schedule: RowSchedule,
    entry: str = ENTRY,
    last_entry: str = FINISH,
) -> tuple[str, str, Launch]:
    """The source of the kernel, of the one that joins its partial results, if any does, and how to
    launch them."""
    meets = schedule.combine == "grid"
    second = FinishKernel(graph, rows, schedule.block_threads if meets else None, last_entry)
    text, launch = ColumnKernel(graph, rows, schedule, second if meets else None, entry).emit()
    last = tuple(k for k, (i, _) in enumerate(graph.outputs) if i in second.after)
    first = tuple(k for k in range(len(graph.outputs)) if k not in last)
    # Sums are of the same rows whatever registers a compiler takes, and so are their bits.
    launch = replace(
        launch,
        most_per_sm=schedule.min_blocks,
        multiple=rows_alike(rows, schedule.vector) if schedule.shifted else 1,
        samples=rows.samples,
        outputs=(*first, *last) if meets else first,
        partials=second.width * len(rows.columns),
        partial_dtype=graph.nodes[rows.columns[0]].dtype,
        counters=1 if meets else 0,
        meets=meets,
    )
    if meets:
        return text, "", launch
    inputs = tuple(second.loads)
    finish = Finish(second.slices, second.threads, second.signature(), inputs, last)
    return text, second.emit(), replace(launch, finish=finish)


class ColumnKernel(RowKernel):
    """Rows in, rows out, and one partial result per column; with `finish` all of them joined."""

    def __init__(
        self,
        graph: Graph,
        rows: RowGraph,
        schedule: RowSchedule,
        finish: FinishKernel | None,
        entry: str,
    ):
        super().__init__(planned(rows, schedule), schedule, entry)
        self.persistent = True
        kernel_graph = self.graph
        assert isinstance(kernel_graph, RowGraph)
        self.first_column = kernel_graph.first_column
        self.columns = [graph.nodes[i] for i in kernel_graph.columns]
        dtypes = {n.dtype for n in self.columns}
        assert len(dtypes) == 1, dtypes
        self.finish = finish
        self.apart = rows.sample_axis is not None
        self.of_samples: list[tuple[str, int, Extent]] = []
        """Inputs and outputs that differ from sample to sample: kind, place and stride."""
        if rows.sample_axis is not None:
            memory = [("in", i, a) for i, a in enumerate(graph.inputs)]
            own = [(i, a) for i, a in graph.outputs if i not in followers(graph, rows.columns)]
            memory += [("out", k, a) for k, (_, a) in enumerate(own)]
            self.of_samples = [
                (name, i, Extent(stride, f"{name}{i}_sample"))
                for name, i, a in memory if (stride := a.strides[rows.sample_axis])
            ]  # fmt: skip
        self.kind = TYPES[dtypes.pop()]
        self.itemsize = 8 if self.kind == "double" else 4

    def parameters_of_kernel(self) -> list[str]:
        inputs = len(self.graph.inputs)
        every = super().parameters_of_kernel()
        kept, rest = every[: inputs + self.first_column], every[inputs + len(self.graph.outputs) :]
        if self.finish is None:
            return [*kept, f"{self.kind}* __restrict__ partials", *rest]
        # Read again after it was written, by others: not restricted.
        kept += [f"{kind}* __restrict__ {name}" for kind, name in self.finished()]
        return [*kept, f"{self.kind}* partials", rest[0], "u32* counter", *rest[1:]]

    def finished(self) -> list[tuple[str, str]]:
        """Type and name of what follows from the sums."""
        assert self.finish is not None
        outputs = enumerate(self.finish.graph.outputs)
        return [(TYPES[a.dtype], f"end{k}") for k, (i, a) in outputs if i in self.finish.after]

    def signature(self) -> str:
        dropped = len(self.columns) - 1
        found = super().signature()[dropped:]
        if self.finish is None:
            return found
        return "P" * len(self.finished()) + found.replace("q", "qP", 1)

    def every_extent(self) -> dict[str, int]:
        return super().every_extent() | {e.name: int(e) for *_, e in self.of_samples}

    def kind_of_extent(self, name: str) -> str:
        of_samples = any(name == e.name for *_, e in self.of_samples)
        return "i64" if of_samples else super().kind_of_extent(name)

    def first_generated(self, i: int) -> str:
        strides = {place: e for kind, place, e in self.of_samples if kind == "in"}
        return f"(u64)(blockIdx.y * {strides[i]})" if i in strides else super().first_generated(i)

    def place(self) -> None:
        """What follows is about the sample that blockIdx.y names, and, in rows that are shifted,
        about those that begin where the block's first one does."""
        super().place()
        if self.s.shifted:
            self.line(f"const int shift = {self.shift({self.graph.kept[0]: 'block'})};")
        for kind, i, stride in self.of_samples:
            if kind == "out" or self.graph.inputs[i].generator is None:
                self.line(f"{kind}{i} += blockIdx.y * {stride};")

    def load_parameters(self) -> None:
        """Also begin the sums."""
        if self.finish is None and self.s.early:
            self.line("release_next();")
        super().load_parameters()
        for c, n in enumerate(self.columns):
            self.line(f"Vec<{self.kind}, {self.s.vector}> column{c}[{self.turns}];")
            self.open(f"TW_UNROLL for (int k = 0; k < {self.turns}; ++k)")
            start = f"{JOINS[n.op]}::start<{self.kind}>()"
            self.line(f"column{c}[k] = splat<{self.s.vector}>({start});")
            self.close()

    def store(self, k: int, value: str) -> None:
        if k < self.first_column:
            super().store(k, value)
            return
        c = k - self.first_column
        joined = f"join_each<{JOINS[self.columns[c].op]}>(column{c}[k], {value})"
        self.line(f"{self.exists}column{c}[k] = {joined};")

    def after_rows(self) -> None:
        """Join the sums of the block's groups and write one result."""
        groups, every = self.s.rows_per_block, range(len(self.columns) * self.turns)
        block = "(blockIdx.y * blocks + block)" if self.apart else "block"
        at = f"partials + ({block} * {len(self.columns)} + {{c}}) * {self.plan.width} + column"
        wide = math.gcd(self.s.vector * self.itemsize, self.plan.width * self.itemsize)
        leave = f"store<{min(wide, WIDEST_ACCESS)}>({at}, {{own}});"
        if self.s.shifted:
            leave = f"store_within<{self.itemsize}>({at}, {{own}}, {self.place_in_row});"
        if self.finish is None and not self.s.early:
            self.line("release_next();")
        if groups == 1:
            self.each_sum(every, leave)
        else:
            self.join_groups(
                [
                    every[len(every) * g // groups : len(every) * (g + 1) // groups]
                    for g in range(groups)
                ],
                leave,
            )
        if self.finish is not None:
            self.meet(self.finish)

    def join_groups(self, shares: list[range], leave: str) -> None:
        """Each group is given its share of the others' vectors of sums where the queue of rows was,
        joins them in a fixed order, and writes what that makes."""
        others = len(shares) - 1
        sums = len(self.columns) * self.turns
        size = others * sums * self.s.row_threads * self.s.vector * self.itemsize
        self.share_again(f"Vec<{self.kind}, {self.s.vector}>", "given", size)
        self.line("__syncthreads();")
        slot = f"given[({{giver}} * {sums} + {{n}}) * {self.s.row_threads} + lane]"
        for group, share in enumerate(shares):
            self.open(f"if (group != {group})")
            giver = f"(group - (group > {group}))"
            self.each_sum(share, f"{slot.replace('{giver}', giver)} = {{own}};")
            self.close()
        self.line("__syncthreads();")
        each = f"TW_UNROLL for (int other = 0; other < {others}; ++other)"
        joined = f"{{own}} = join_each<{{join}}>({{own}}, {slot.replace('{giver}', 'other')});"
        for group, share in enumerate(shares):
            self.open(f"if (group == {group})")
            self.each_sum(share, f"{each} {joined}", leave)
            self.close()

    def each_sum(self, share: range, *texts: str) -> None:
        """`texts` for a share of the vectors of sums, of which {n} is the number."""
        for c, node in enumerate(self.columns):
            before = c * self.turns
            first, last = max(share.start - before, 0), min(share.stop - before, self.turns)
            if first >= last:
                continue
            self.open(f"TW_UNROLL for (int k = {first}; k < {last}; ++k)")
            self.open_turn()
            names = {"own": f"column{c}[k]", "n": f"({before} + k)", "c": c, "join": JOINS[node.op]}
            for text in texts:
                self.line(text.format(**names))
            self.close_turn()
            self.close()

    def meet(self, finish: FinishKernel) -> None:
        """Once all blocks have left their partial results, each joins slices of the columns."""
        if finish.shared_bytes:
            self.share_again(self.kind, "finishing", finish.shared_bytes)
        shared = "finishing" if finish.shared_bytes else "nullptr"
        names = [f"{'seed' if self.graph.inputs[i].generator else 'in'}{i}" for i in finish.loads]
        names += [name for _, name in self.finished()]
        scalars = [f"scalar{i}" for i in range(len(self.graph.scalars))]
        results = f"(i64)gridDim.x / {self.s.cluster}"
        call = ", ".join(["partials", *names, results, *scalars, "slice", shared])
        self.line("meet(counter, gridDim.x);")
        self.line("const u32 before = start_leaving(counter);")
        self.open(f"for (int slice = blockIdx.x; slice < {finish.slices}; slice += gridDim.x)")
        self.line(f"{FINISH}({call});")
        self.line("__syncthreads();")
        self.close()
        self.line("leave(counter, before, gridDim.x);")

    def source(self, head: str) -> str:
        before = "" if self.finish is None else self.finish.emit()
        return super().source(f"{before}{head}")
