"""What a row kernel loads before it is needed: parameter vectors, and a queue of rows to come."""

from __future__ import annotations

import math

from tilewright.fusion.cuda.rows.walking import Walking
from tilewright.fusion.ir import REDUCTIONS, Access
from tilewright.fusion.plan import needed_in


class Residents(Walking):
    """What a persistent kernel loads before it is needed; any other, its parameters only.

    `parameters` are values that vary along the row only: loads, or what is computed from them
    alone (a widened weight); `queued` are the row's own loads, and `queued_scalars` those of which
    a row has one.
    """

    parameters: tuple[int, ...] = ()
    queued: tuple[int, ...] = ()
    queued_scalars: tuple[int, ...] = ()

    def find_residents(self) -> None:
        loads = [i for i, n in enumerate(self.graph.nodes) if n.op == "load" and self.plan.inner[i]]
        if self.s.parameters != "reload":
            shared = [i for i in loads if not (self.is_row_load(i) or self.graph.generated(i))]
            self.parameters = tuple(self.computed_from(shared) if self.s.widened else shared)
        if self.s.stages:
            self.queued = tuple(i for i in loads if self.reads_row(i))
            self.queued_scalars = tuple(
                i
                for i, n in enumerate(self.graph.nodes)
                if n.op == "load" and not self.plan.inner[i] and self.reads_row(i)
                and self.graph.inputs[n.attr].itemsize >= 4
            )  # fmt: skip

    # -- parameter vectors -----------------------------------------------------------------------

    def computed_from(self, loads: list[int]) -> list[int]:
        """The last values that follow from `loads` and numbers alone, which other steps use."""
        nodes = self.graph.nodes
        alone = set(loads)
        for i, n in enumerate(nodes):
            if self.plan.inner[i] and n.args and all(a in alone or self.fixed(a) for a in n.args):
                alone.add(i)
        ends = {i for i, _ in self.graph.outputs}
        return [
            i
            for i in sorted(alone)
            if i in ends or any(user not in alone for user in self.graph.users(i))
        ]

    def fixed(self, i: int) -> bool:
        """Whether node `i` is one number for the whole kernel."""
        n = self.graph.nodes[i]
        if n.op == "load":
            return not any(self.graph.inputs[n.attr].strides)
        single = n.op in ("const", "scalar") or (bool(n.args) and not self.plan.inner[i])
        return single and n.op not in REDUCTIONS and all(self.fixed(a) for a in n.args)

    def load_parameters(self) -> None:
        """Once per kernel. In shared memory the groups of a block share them."""
        s = self.s
        for i in self.parameters:
            if s.parameters != "shared":
                self.line(f"{self.vector_type(i)} parameter{i}[{self.turns}] = {{}};")
            else:
                self.in_shared(f"parameter{i}", i, self.turns * s.row_threads)
        if not self.parameters:
            return
        if s.parameters == "shared" and s.rows_per_block > 1:
            self.open("if (group == 0)")
        self.open_turns()
        if s.parameters == "ahead":
            self.open("if (first_row < count)")
        wanted = needed_in(self.graph, set(self.parameters), frozenset(self.names))
        values: dict[int, str] = {}
        for i in wanted:
            n = self.graph.nodes[i]
            operands = [values.get(a) or self.names[a] for a in n.args]
            value = (
                self.load(i, stream=False)
                if n.op == "load"
                else self.expression(n, operands, str(self.s.vector))
            )
            self.line(f"const auto v{i} = {value};")
            values[i] = f"v{i}"
        for i in self.parameters:
            self.line(f"{self.parameter(i)} = {values[i]};")
        if s.parameters == "ahead":
            self.close()
        self.close_turns()
        if s.parameters == "shared" and s.rows_per_block > 1:
            self.close()
            self.line("__syncthreads();")

    def parameter(self, i: int) -> str:
        at = f"k * {self.s.row_threads} + lane" if self.s.parameters == "shared" else "k"
        return f"parameter{i}[{at}]"

    def forget_parameters(self) -> None:
        """Parameters that are read again per row must not be kept in registers over the rows."""
        if self.s.parameters == "reload":
            loads = [
                n.attr
                for i, n in enumerate(self.graph.nodes)
                if n.op == "load" and self.plan.inner[i]
                and not (self.is_row_load(i) or self.graph.generated(i))
            ]  # fmt: skip
            for i in dict.fromkeys(loads):
                self.line(f"in{i} = afresh(in{i});")

    # -- the queue of rows -----------------------------------------------------------------------

    def start_queue(self) -> None:
        """Put the first `stages` rows of this thread on their way."""
        s = self.s
        if not s.stages:
            return
        places = s.stages * s.rows_per_thread
        for i in self.queued:
            self.in_shared(f"queue{i}", i, places * self.turns * s.block_threads)
        for i in self.queued_scalars:
            self.in_shared(f"queue{i}", i, places * s.block_threads, vector=1)
        if s.bulk:
            self.start_bulk()
        self.open(f"TW_UNROLL for (int stage = 0; stage < {s.stages}; ++stage)")
        self.enqueue(self.row_at_start("stage"))
        self.close()
        self.line("int stage = 0;")
        if s.bulk:
            self.line("u32 lap = 0;")

    def start_bulk(self) -> None:
        """A barrier for each group and stage, and how much of a row is this block's."""
        s = self.s
        barriers = s.rows_per_block * s.stages
        self.shared.append(f"__shared__ u64 arrived[{barriers}];")
        self.line(f"if (threadIdx.x < {barriers}) barrier_init(&arrived[threadIdx.x]);")
        self.line("barriers_known();")
        self.line("int row_vectors = 0;")
        self.line(
            f"TW_UNROLL for (int k = 0; k < {self.turns}; ++k) row_vectors += {self.piece('k')};"
        )

    def piece(self, turn: str) -> str:
        """Vectors of a row that the block takes in a turn."""
        s = self.s
        rank = f" - (int)rank * {s.row_threads}" if s.cluster > 1 else ""
        left = f"{self.vectors} - {turn} * {self.lanes}{rank}"
        return f"min(max({left}, 0), {s.row_threads})"

    @property
    def own_barrier(self) -> str:
        return f"&arrived[group * {self.s.stages} + stage]"

    def await_rows(self) -> None:
        if self.s.stages and (self.queued_scalars or not self.s.bulk):
            self.line(f"await_batch<{self.s.stages - 1}>();")
        if self.s.bulk:
            self.line(f"barrier_wait({self.own_barrier}, lap);")

    def enqueue(self, first_row: str) -> None:
        """Copy the rows from `first_row` on into the slots of `stage`, as one batch."""
        s = self.s
        single = (*(() if s.bulk else self.queued), *self.queued_scalars)
        self.open(f"if ({self.is_walked(first_row)})")
        if s.bulk:
            self.enqueue_bulk(first_row)
        if single:
            self.open(self.each_row())
            self.row_starts(first_row, single)
            for i in self.queued_scalars:
                itemsize = self.graph.inputs[self.graph.nodes[i].attr].itemsize
                self.line(f"enqueue<1, {itemsize}>(&{self.scalar_slot(i)}, from{i});")
        if s.shifted:
            self.open(f"if (row + {self.last_rows} < count)")
            self.enqueue_vectors()
            self.close()
            self.open("else")
            self.enqueue_vectors(within=True)
            self.close()
        elif not s.bulk:
            self.enqueue_vectors()
        if single:
            self.close()
        self.close()
        if single:
            self.line("close_batch();")

    def enqueue_vectors(self, within: bool = False) -> None:
        """A row's, or those that are `within` the tensor of one of its last rows."""
        self.open_turns(1 if within else 0)
        for i in self.queued:
            access = self.graph.inputs[self.graph.nodes[i].attr]
            how = f"{self.s.vector}, {self.access_bytes(access)}"
            pointer = f"from{i} + {self.turn_offset(access)}"
            left = f", {self.left(access)}" if within else ""
            self.line(f"enqueue<{how}>(&{self.slot(i)}, {pointer}{left});")
        self.close_turns()

    @property
    def last_rows(self) -> int:
        """Of shifted rows: those from which a vector may reach beyond the end of a tensor."""
        (rows,) = self.graph.kept
        steps = [self.graph.inputs[self.graph.nodes[i].attr].strides[rows] for i in self.queued]
        return math.ceil((self.s.vector - 1) / min(steps))

    def left(self, access: Access) -> str:
        """Elements of a tensor from `column` of `row` on, or enough of them."""
        (rows,) = self.graph.kept
        behind = f"(int)min((count - 1 - row) * {access.strides[rows]}, (i64){2 * self.s.vector})"
        return f"{behind} + {self.plan.width} - column"

    def row_starts(self, first_row: str, loads: tuple[int, ...], own: bool = True) -> None:
        """Where the rows of `loads` begin, or this thread's `own` share of them."""
        at = self.row_coordinates(first_row)
        for i in loads:
            index = self.graph.nodes[i].attr
            access = self.graph.inputs[index]
            offset = (
                self.row_offset(access, at) if own else self.offset(access, self.graph.kept, at)
            )
            self.line(f"const auto* from{i} = in{index} + {offset};")

    def enqueue_bulk(self, first_row: str) -> None:
        """The lanes of the group's first warp tell the copy engine one piece of a row each."""
        s = self.s
        itemsizes = [self.graph.inputs[self.graph.nodes[i].attr].itemsize for i in self.queued]
        self.open("if (lane < 32)")
        size = f"row_vectors * {s.rows_per_thread * s.vector * sum(itemsizes)}"
        self.line(f"if (lane == 0) barrier_expect({self.own_barrier}, {size});")
        self.line("__syncwarp();")
        self.open(self.each_row())
        self.row_starts(first_row, self.queued, own=False)
        self.open(f"for (int k = lane; k < {self.turns}; k += 32)")
        self.line(f"const int vectors = {self.piece('k')};")
        rank = f" + (int)rank * {s.row_threads}" if s.cluster > 1 else ""
        self.line(f"const int column = (k * {self.lanes}{rank}) * {s.vector};")
        self.open("if (vectors > 0)")
        for i, itemsize in zip(self.queued, itemsizes, strict=True):
            at = f"({self.place_in_queue} * {self.turns} + k) * {s.block_threads}"
            to = f"&queue{i}[{at} + group * {s.row_threads}]"
            size = f"vectors * {s.vector * itemsize}"
            self.line(f"copy_bulk({to}, from{i} + column, {size}, {self.own_barrier});")
        for _ in range(4):
            self.close()

    @property
    def place_in_queue(self) -> str:
        rows = self.s.rows_per_thread
        return f"(stage * {rows} + r)" if rows > 1 else "stage"

    def slot(self, i: int) -> str:
        rows, threads = self.s.rows_per_thread, self.s.block_threads
        turn = f"(r * {self.turns} + k)" if rows > 1 else "k"
        stage = f"stage * {rows * self.turns * threads}"
        return f"(queue{i} + {stage} + threadIdx.x)[{turn} * {threads}]"

    def scalar_slot(self, i: int) -> str:
        return f"queue{i}[{self.place_in_queue} * {self.s.block_threads} + threadIdx.x]"

    def row_scalar(self, i: int) -> str:
        """The value of load `i`, of which row r has one."""
        if i in self.queued_scalars:
            return f"{self.scalar_slot(i)}[0]"
        index = self.graph.nodes[i].attr
        return f"load_one({self.base('in', index, self.graph.inputs[index])})"

    def refill(self) -> None:
        """Use the slots just read for the row that is `stages` steps ahead."""
        if self.s.stages:
            self.enqueue(self.row_ahead())
            self.line(f"stage = stage + 1 < {self.s.stages} ? stage + 1 : 0;")
            if self.s.bulk:
                self.line("lap ^= stage == 0;")
