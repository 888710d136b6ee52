"""What a persistent row kernel keeps on chip: parameter vectors, and a queue of rows to come."""

from __future__ import annotations

from tilewright.fusion.cuda.schedule import access_bytes
from tilewright.fusion.cuda.walking import Walking
from tilewright.fusion.ir import REDUCTIONS
from tilewright.fusion.plan import needed_in


class Residents(Walking):
    """What a persistent kernel loads before it is needed.

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
            shared = [i for i in loads if not (self.is_row_load(i) or self.graph.draws(i))]
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
            if s.parameters == "registers":
                self.line(f"{self.vector_type(i)} parameter{i}[{self.turns}];")
            else:
                self.in_shared(f"parameter{i}", i, self.turns * s.row_threads)
        if not self.parameters:
            return
        if s.parameters == "shared" and s.rows_per_block > 1:
            self.open("if (group == 0)")
        self.open_turns(True)
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
        self.close_turns()
        if s.parameters == "shared" and s.rows_per_block > 1:
            self.close()
            self.line("__syncthreads();")

    def parameter(self, i: int) -> str:
        at = "k" if self.s.parameters == "registers" else f"k * {self.s.row_threads} + lane"
        return f"parameter{i}[{at}]"

    def forget_parameters(self) -> None:
        """Parameters that are read again per row must not be kept in registers over the rows."""
        if self.s.parameters == "reload":
            loads = [
                n.attr
                for i, n in enumerate(self.graph.nodes)
                if n.op == "load" and self.plan.inner[i]
                and not (self.is_row_load(i) or self.graph.draws(i))
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
        self.open(f"TW_UNROLL for (int stage = 0; stage < {s.stages}; ++stage)")
        self.enqueue(self.row_at_start("stage"))
        self.close()
        self.line("int stage = 0;")

    def await_rows(self) -> None:
        if self.s.stages:
            self.line(f"await_batch<{self.s.stages - 1}>();")

    def enqueue(self, first_row: str) -> None:
        """Copy the rows from `first_row` on into the slots of `stage`, as one batch."""
        s = self.s
        self.open(f"if ({self.is_walked(first_row)})")
        self.open(self.each_row())
        at = self.row_coordinates(first_row)
        for i in (*self.queued, *self.queued_scalars):
            index = self.graph.nodes[i].attr
            offset = self.offset(self.graph.inputs[index], self.graph.kept, at)
            self.line(f"const auto* from{i} = in{index} + {offset};")
        for i in self.queued_scalars:
            itemsize = self.graph.inputs[self.graph.nodes[i].attr].itemsize
            self.line(f"enqueue<1, {itemsize}>(&{self.scalar_slot(i)}, from{i});")
        self.open_turns(True)
        for i in self.queued:
            access = self.graph.inputs[self.graph.nodes[i].attr]
            wide = access_bytes(access, s.vector)
            pointer = f"from{i} + {self.column_offset(access)}"
            self.line(f"enqueue<{s.vector}, {wide}>(&{self.slot(i)}, {pointer});")
        self.close_turns()
        self.close()
        self.close()
        self.line("close_batch();")

    @property
    def place_in_queue(self) -> str:
        rows = self.s.rows_per_thread
        return f"(stage * {rows} + r)" if rows > 1 else "stage"

    def slot(self, i: int) -> str:
        threads = self.s.block_threads
        return f"queue{i}[({self.place_in_queue} * {self.turns} + k) * {threads} + threadIdx.x]"

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
