"""What becomes of the partial results over rows: columns are joined, and what follows is computed.

Either a second kernel does so, or, once all of its blocks have met, the kernel that left them.
"""

from __future__ import annotations

import math

from tilewright.fusion.cuda.column_graph import RowGraph, followers, needed_after
from tilewright.fusion.cuda.kernel import JOINS, TYPES, Kernel, input_parameter
from tilewright.fusion.ir import REDUCTIONS, Graph, Node

FINISH = "finish"
FINISH_THREADS = 256
"""Threads of a block of the second kernel: so few that they find room beside the first."""
FINISH_BUSY = 1 << 16
"""Threads it should have in all: about 512 for each SM of a large GPU."""
FINISH_LOADS = 36
"""Registers of partial results that one of its threads has under way: all of two columns where 264
blocks left theirs to sixteen threads of each, or 528 to 32."""


def finish_shares(width: int) -> int:
    """Threads that share a column's partial results: at most a warp."""
    return next((n for n in (1, 2, 4, 8, 16) if n * width >= FINISH_BUSY), 32)


def finish_bytes(shares: int, columns: int, block_threads: int, itemsize: int) -> int:
    """Shared memory by which those threads join their sums."""
    return columns * (block_threads // shares) * (shares + 1) * itemsize if shares > 1 else 0


class FinishKernel(Kernel):
    """Per column of a sample, the partial results in order, then what follows from them.

    A slice of the columns is a block's work: of the second kernel, or, with `block_threads`, of the
    one that left the partial results. That one calls a function, and hands it shared memory.
    """

    def __init__(
        self,
        graph: Graph,
        rows: RowGraph,
        block_threads: int | None = None,
        entry: str = FINISH,
    ):
        super().__init__(graph, entry)
        self.rows = rows
        self.inside = block_threads is not None
        self.threads = block_threads or FINISH_THREADS
        rank = len(graph.space)
        self.row_axes = range(rank - len(rows.row_axes), rank)
        self.width = math.prod(graph.space[a] for a in self.row_axes)
        self.shares = finish_shares(self.width * rows.samples)
        self.per_slice = self.threads // self.shares
        self.slices = math.ceil(self.width / self.per_slice)
        self.after = followers(graph, rows.columns)
        self.nodes = needed_after(graph, rows.columns)
        self.loads = sorted(
            {graph.nodes[i].attr for i in self.nodes if graph.nodes[i].op == "load"}
        )
        self.kind = TYPES[graph.nodes[rows.columns[0]].dtype]

    @property
    def shared_bytes(self) -> int:
        itemsize = 8 if self.kind == "double" else 4
        return finish_bytes(self.shares, len(self.rows.columns), self.threads, itemsize)

    def parameters_of_kernel(self) -> list[str]:
        inputs = self.graph.inputs
        # Other SMs wrote them while this kernel ran: no cache that knows them from before will do.
        pointer = "const volatile" if self.inside else "const"
        named = [f"{pointer} {self.kind}* __restrict__ partials"]
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
        """A kernel, or a function of the same parameters, the slice, and shared memory."""
        parameters = ", ".join(self.parameters_of_kernel())
        if self.inside:
            head = f"TW_DEVICE void {self.entry}({parameters}, int slice, {self.kind}* shared) {{"
        else:
            bounds = f"__launch_bounds__({self.threads}, 4)"
            head = f'extern "C" __global__ void {bounds} {self.entry}({parameters}) {{'
            self.line("const int slice = blockIdx.x;")
            if self.shared_bytes:
                self.line(f"__shared__ u64 memory[{math.ceil(self.shared_bytes / 8)}];")
                self.line(f"{self.kind}* const shared = ({self.kind}*)memory;")
        self.declare_generated(self.loads)
        columns = [self.graph.nodes[i] for i in self.rows.columns]
        self.line(f"const int lane = threadIdx.x % {self.per_slice};")
        self.line(f"const int share = threadIdx.x / {self.per_slice};")
        self.line(f"const int column = slice * {self.per_slice} + lane;")
        if self.rows.sample_axis is not None:
            self.line("const i64 sample = blockIdx.y;")
            self.line(f"partials += sample * count * {len(columns) * self.width};")
        for c, n in enumerate(columns):
            self.line(f"{self.kind} sum{c} = {JOINS[n.op]}::start<{self.kind}>();")
        if not self.inside:
            # Written until the wait, partials are none that may come from caches for constants.
            self.line("await_previous();")
            self.line("partials = afresh(partials);")
        self.open(f"if (column < {self.width})")
        self.add_partials(columns)
        self.close()
        if self.shares > 1:
            self.join_shares(columns)
        self.line(f"if (threadIdx.x >= {self.per_slice} || column >= {self.width}) return;")
        self.values()
        return "\n".join([head, *self.lines, "}", ""])

    def add_partials(self, columns: list[Node]) -> None:
        """All loads of a batch are under way before one of them is waited for."""
        words = 2 if self.kind == "double" else 1
        batch = max(FINISH_LOADS // (len(columns) * words), 1)
        self.open(f"for (i64 first = share; first < count; first += {batch * self.shares})")
        for c in range(len(columns)):
            self.line(f"{self.kind} partial{c}[{batch}];")
        self.open(f"TW_UNROLL for (int n = 0; n < {batch}; ++n)")
        self.line(f"const i64 p = first + n * {self.shares};")
        for c, n in enumerate(columns):
            at = f"(p * {len(columns)} + {c}) * {self.width} + column"
            start = f"{JOINS[n.op]}::start<{self.kind}>()"
            self.line(f"partial{c}[n] = p < count ? partials[{at}] : {start};")
        self.close()
        self.open(f"TW_UNROLL for (int n = 0; n < {batch}; ++n)")
        for c, n in enumerate(columns):
            self.line(f"sum{c} = {JOINS[n.op]}::join(sum{c}, partial{c}[n]);")
        self.close()
        self.close()

    def join_shares(self, columns: list[Node]) -> None:
        """Neighbouring lanes take the shares of a column; its own thread is given their sum."""
        for c in range(len(columns)):
            at = f"shared + {c * self.per_slice * (self.shares + 1)}"
            self.line(f"{self.kind}* const shares{c} = {at};")
            self.line(f"shares{c}[lane * {self.shares + 1} + share] = sum{c};")
        self.line("__syncthreads();")
        for c, n in enumerate(columns):
            place = f"shares{c}[threadIdx.x / {self.shares} * {self.shares + 1}"
            self.line(f"sum{c} = {place} + threadIdx.x % {self.shares}];")
            self.line(f"sum{c} = reduce_warp<{JOINS[n.op]}, {self.shares}>(sum{c});")
            self.line(f"if (threadIdx.x % {self.shares} == 0) {place}] = sum{c};")
        self.line("__syncthreads();")
        for c in range(len(columns)):
            own = f"shares{c}[threadIdx.x * {self.shares + 1}]"
            self.line(f"if (threadIdx.x < {self.per_slice}) sum{c} = {own};")

    def values(self) -> None:
        """Everything that follows from the sums, for one column, and the stores."""
        at, step = {}, 1
        for a in reversed(self.row_axes):
            at[a] = f"(i64)(column / {step} % {self.graph.space[a]})"
            step *= self.graph.space[a]
        axes = [*self.row_axes]
        if (sample := self.rows.sample_axis) is not None:
            at[sample], axes = "sample", [sample, *axes]
        names = {i: f"sum{c}" for c, i in enumerate(self.rows.columns)}
        for i in self.nodes:
            n = self.graph.nodes[i]
            if i in names:
                continue
            assert n.op not in REDUCTIONS, n
            if n.op == "load":
                offset = self.offset(self.graph.inputs[n.attr], axes, at)
                value = f"load_one(in{n.attr} + {offset})"
            else:
                value = self.expression(n, [names[a] for a in n.args], None)
            self.line(f"const {TYPES[n.dtype]} v{i} = {value};")
            names[i] = f"v{i}"
        for k, (i, access) in enumerate(self.graph.outputs):
            if i in self.after:
                offset = self.offset(access, axes, at)
                self.line(f"out{k}[{offset}] = {names[i]};")
