"""A graph that also reduces over its rows, in one pass: the backward of a normalisation.

A persistent kernel walks rows as ever, and each thread adds up, for the columns it serves, what it
meets on the way. In the end the groups of a block join their sums in a fixed order, every block (or
cluster) writes one partial result per column, and a second, small kernel joins those.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tilewright.fusion.cuda.kernel import JOINS, TYPES, Finish, Kernel, Launch, input_parameter
from tilewright.fusion.cuda.rows import RowKernel
from tilewright.fusion.cuda.schedule import WIDEST_ACCESS, RowSchedule
from tilewright.fusion.ir import REDUCTIONS, Access, Graph, Node
from tilewright.fusion.passes import remove_dead
from tilewright.fusion.plan import plan_rows

FINISH = "finish"
FINISH_THREADS = 256
"""Threads of a block of the second kernel: so few that they find room beside the first."""
FINISH_BUSY = 1 << 16
"""Threads it should have in all: about 512 for each SM of a large GPU."""
FINISH_LOADS = 24
"""Of partial results that one of its threads has under way."""


def finish_shares(width: int) -> int:
    """Threads that share a column's partial results in the second kernel: at most a warp."""
    return next((n for n in (1, 2, 4, 8, 16) if n * width >= FINISH_BUSY), 32)


@dataclass(frozen=True)
class RowGraph(Graph):
    """A graph whose rows are said, not derived: what it adds up over rows leaves no trace in it.

    Attributes:
        row_axes: the axes along a row.
        columns: per sum over rows: the node of the whole graph.
        first_column: outputs from here on are the operands of `columns`, to be added up.
    """

    row_axes: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()
    first_column: int = 0

    @property
    def reduced(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.row_axes


def split(graph: Graph) -> RowGraph | str:
    """The row kernel's part of a graph that reduces over rows, or why there is none.

    Columns are reductions over all axes outside the row; whatever follows from them is left to
    the second kernel.
    """
    rank = len(graph.space)
    inner = [axes for axes in graph.reduction_sets if rank - 1 in axes]
    outer = [axes for axes in graph.reduction_sets if rank - 1 not in axes]
    if len(inner) > 1 or len(outer) != 1:
        return f"reductions over {len(graph.reduction_sets)} different sets of dims in one kernel"
    row_axes = tuple(a for a in range(rank) if a not in outer[0])
    if (inner and inner[0] != row_axes) or row_axes != tuple(range(len(outer[0]), rank)):
        return "reductions over rows and columns that are no matrix in memory order"
    columns = tuple(i for i in graph.reductions if graph.axes(i) == outer[0])
    after = followers(graph, columns)
    if any(graph.nodes[i].op not in JOINS for i in columns):
        return "a mean or variance over rows"
    if any(not set(graph.axes(i)) & set(outer[0]) for i in after if i in graph.reductions):
        return "a reduction of what was reduced over rows"
    operands = [graph.nodes[i].args[0] for i in columns]
    if any(graph.nodes[i].shape != graph.space for i in operands):
        return "a reduction over rows of what does not vary over all of them"
    rows = [(i, access) for i, access in graph.outputs if i not in after]
    if any(graph.nodes[i].shape[a] == 1 for i, _ in rows for a in outer[0] if graph.space[a] > 1):
        return "an output that does not vary over rows"
    sums = [(i, Access((0,) * rank, graph.nodes[i].dtype, 16)) for i in operands]
    found = RowGraph(
        graph.nodes, graph.space, graph.inputs, (*rows, *sums), graph.scalars,
        row_axes, columns, len(rows),
    )  # fmt: skip
    pruned = remove_dead(found)
    assert isinstance(pruned, RowGraph)
    return pruned


def followers(graph: Graph, sources: tuple[int, ...]) -> set[int]:
    """The nodes that depend on `sources`, these included."""
    found = set(sources)
    for i, n in enumerate(graph.nodes):
        if any(a in found for a in n.args):
            found.add(i)
    return found


def emit_columns(graph: Graph, rows: RowGraph, schedule: RowSchedule) -> tuple[str, Launch]:
    """Both kernels: their source and how to launch them."""
    text, launch = ColumnKernel(graph, rows, schedule).emit()
    second = FinishKernel(graph, rows)
    width = math.prod(graph.space[a] for a in rows.row_axes)
    finish = Finish(
        blocks=math.ceil(width * finish_shares(width) / FINISH_THREADS),
        block_threads=FINISH_THREADS,
        signature=second.signature(),
        inputs=tuple(second.loads),
        outputs=tuple(k for k, (i, _) in enumerate(graph.outputs) if i in second.after),
        dtype=graph.nodes[rows.columns[0]].dtype,
    )
    first = tuple(k for k in range(len(graph.outputs)) if k not in finish.outputs)
    partials = width * len(rows.columns)
    # Sums are of the same rows whatever registers a compiler takes, and so are their bits.
    launch = replace(launch, most_per_sm=schedule.min_blocks)
    return text + second.emit(), replace(launch, outputs=first, partials=partials, finish=finish)


class ColumnKernel(RowKernel):
    """The first kernel: rows in, rows out, and one partial result per column."""

    def __init__(self, graph: Graph, rows: RowGraph, schedule: RowSchedule):
        super().__init__(plan_rows(rows, schedule.moments), schedule)
        self.persistent = True
        kernel_graph = self.graph
        assert isinstance(kernel_graph, RowGraph)
        self.first_column = kernel_graph.first_column
        self.columns = [graph.nodes[i] for i in kernel_graph.columns]
        dtypes = {n.dtype for n in self.columns}
        assert len(dtypes) == 1, dtypes
        self.kind = TYPES[dtypes.pop()]

    def parameters_of_kernel(self) -> list[str]:
        inputs = len(self.graph.inputs)
        every = super().parameters_of_kernel()
        kept = [*every[: inputs + self.first_column], f"{self.kind}* __restrict__ partials"]
        return kept + every[inputs + len(self.graph.outputs) :]

    def signature(self) -> str:
        dropped = len(self.columns) - 1
        return super().signature()[dropped:]

    def load_parameters(self) -> None:
        """Also begin the sums; and by now all blocks run, so that the second kernel may wait."""
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
        self.line(f"if (first_row + r < count) column{c}[k] = {joined};")

    def after_rows(self) -> None:
        """Join the sums of the block's groups, half of them at a time, and write one result."""
        s = self.s
        size = 8 if self.kind == "double" else 4
        groups = s.rows_per_block
        if groups > 1:
            vectors = groups // 2 * len(self.columns) * self.turns * s.row_threads
            kind = f"Vec<{self.kind}, {s.vector}>"
            self.declare_shared(kind, "together", vectors * s.vector * size)
        while groups > 1:
            given = groups // 2  # the last give theirs to the first; a middle one keeps its own
            kept = groups - given
            self.each_column(f"if (group >= {kept} && group < {groups})", "{shared} = {own};", kept)
            self.line("__syncthreads();")
            joined = "{own} = join_each<{join}>({own}, {shared});"
            self.each_column(f"if (group < {given})", joined)
            groups = kept
            if groups > 1:
                self.line("__syncthreads();")
        at = f"partials + (block * {len(self.columns)} + {{c}}) * {self.plan.width} + column"
        wide = math.gcd(s.vector * size, self.plan.width * size, WIDEST_ACCESS)
        self.each_column("if (group == 0)", f"store<{wide}>({at}, {{own}});")

    def each_column(self, condition: str, text: str, first: int = 0) -> None:
        """`text` for every vector of sums; `{shared}` is the place of group - `first`."""
        self.open(condition)
        self.open_turns(True)
        for c, n in enumerate(self.columns):
            sums = f"(group - {first}) * {len(self.columns)} + {c}"
            place = f"(({sums}) * {self.turns} + k) * {self.s.row_threads} + lane"
            self.line(
                text.format(own=f"column{c}[k]", shared=f"together[{place}]", join=JOINS[n.op], c=c)
            )
        self.close_turns()
        self.close()


class FinishKernel(Kernel):
    """The second kernel: per column, the partial results in order, then what follows from them."""

    def __init__(self, graph: Graph, rows: RowGraph):
        super().__init__(graph)
        self.rows = rows
        self.after = followers(graph, rows.columns)
        wanted = [i for i, _ in graph.outputs if i in self.after]
        needed, stack = set(), list(wanted)
        while stack:
            i = stack.pop()
            if i not in needed:
                needed.add(i)
                if i not in rows.columns:
                    stack += graph.nodes[i].args
        self.nodes = sorted(needed)
        self.loads = sorted(
            {graph.nodes[i].attr for i in self.nodes if graph.nodes[i].op == "load"}
        )
        self.kind = TYPES[graph.nodes[rows.columns[0]].dtype]

    def parameters_of_kernel(self) -> list[str]:
        inputs = self.graph.inputs
        named = [f"const {self.kind}* __restrict__ partials"]
        named += [input_parameter(i, inputs[i]) for i in self.loads]
        named += [
            f"{TYPES[a.dtype]}* __restrict__ out{k}"
            for k, (i, a) in enumerate(self.graph.outputs) if i in self.after
        ]  # fmt: skip
        scalars = [f"{TYPES[d]} scalar{i}" for i, d in enumerate(self.graph.scalars)]
        return [*named, "i64 count", *scalars]

    def signature(self) -> str:
        pointers = len(self.parameters_of_kernel()) - 1 - len(self.graph.scalars)
        codes = "".join("d" if d == "f64" else "f" for d in self.graph.scalars)
        return "P" * pointers + "q" + codes

    def emit(self) -> str:
        self.draw(self.loads)
        columns = [self.graph.nodes[i] for i in self.rows.columns]
        width = math.prod(self.graph.space[a] for a in self.rows.row_axes)
        shares = finish_shares(width)
        per_block = FINISH_THREADS // shares
        for c in range(len(columns)) if shares > 1 else ():
            self.line(f"__shared__ {self.kind} shares{c}[{per_block}][{shares} + 1];")
        self.line(f"const int lane = threadIdx.x % {per_block};")
        self.line(f"const int share = threadIdx.x / {per_block};")
        self.line(f"const int column = blockIdx.x * {per_block} + lane;")
        for c, n in enumerate(columns):
            self.line(f"{self.kind} sum{c} = {JOINS[n.op]}::start<{self.kind}>();")
        self.line("await_previous();")
        self.open(f"if (column < {width})")
        self.add_partials(columns, width, shares)
        self.close()
        if shares > 1:
            self.join_shares(columns, per_block, shares)
        self.line(f"if (threadIdx.x >= {per_block} || column >= {width}) return;")
        self.values()
        parameters = ", ".join(self.parameters_of_kernel())
        bounds = f"__launch_bounds__({FINISH_THREADS}, 4)"
        head = f'extern "C" __global__ void {bounds} {FINISH}({parameters}) {{'
        return "\n".join([head, *self.lines, "}", ""])

    def add_partials(self, columns: list[Node], width: int, shares: int) -> None:
        """All loads of a batch are under way before one of them is waited for."""
        batch = max(FINISH_LOADS // len(columns), 1)
        self.open(f"for (i64 first = share; first < count; first += {batch * shares})")
        for c in range(len(columns)):
            self.line(f"{self.kind} part{c}[{batch}];")
        self.open(f"TW_UNROLL for (int n = 0; n < {batch}; ++n)")
        self.line(f"const i64 p = first + n * {shares};")
        for c, n in enumerate(columns):
            at = f"(p * {len(columns)} + {c}) * {width} + column"
            start = f"{JOINS[n.op]}::start<{self.kind}>()"
            self.line(f"part{c}[n] = p < count ? partials[{at}] : {start};")
        self.close()
        self.open(f"TW_UNROLL for (int n = 0; n < {batch}; ++n)")
        for c, n in enumerate(columns):
            self.line(f"sum{c} = {JOINS[n.op]}::join(sum{c}, part{c}[n]);")
        self.close()
        self.close()

    def join_shares(self, columns: list[Node], per_block: int, shares: int) -> None:
        """Neighbouring lanes take the shares of a column; its own thread is given their sum."""
        for c in range(len(columns)):
            self.line(f"shares{c}[lane][share] = sum{c};")
        self.line("__syncthreads();")
        for c, n in enumerate(columns):
            place = f"shares{c}[threadIdx.x / {shares}]"
            self.line(f"sum{c} = {place}[threadIdx.x % {shares}];")
            self.line(f"sum{c} = reduce_warp<{JOINS[n.op]}, {shares}>(sum{c});")
            self.line(f"if (threadIdx.x % {shares} == 0) {place}[0] = sum{c};")
        self.line("__syncthreads();")
        for c in range(len(columns)):
            self.line(f"if (threadIdx.x < {per_block}) sum{c} = shares{c}[threadIdx.x][0];")

    def values(self) -> None:
        """Everything that follows from the sums, for one column, and the stores."""
        at, step = {}, 1
        for a in reversed(self.rows.row_axes):
            at[a] = f"(column / {step} % {self.graph.space[a]})"
            step *= self.graph.space[a]
        names = {i: f"sum{c}" for c, i in enumerate(self.rows.columns)}
        for i in self.nodes:
            n = self.graph.nodes[i]
            if i in names:
                continue
            assert n.op not in REDUCTIONS, n
            if n.op == "load":
                offset = self.offset(self.graph.inputs[n.attr], self.rows.row_axes, at)
                value = f"load_one(in{n.attr} + {offset})"
            else:
                value = self.expression(n, [names[a] for a in n.args], None)
            self.line(f"const {TYPES[n.dtype]} v{i} = {value};")
            names[i] = f"v{i}"
        for k, (i, access) in enumerate(self.graph.outputs):
            if i in self.after:
                offset = self.offset(access, self.rows.row_axes, at)
                self.line(f"out{k}[{offset}] = {names[i]};")
