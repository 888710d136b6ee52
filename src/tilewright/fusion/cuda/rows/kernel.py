"""A graph that reduces its rows as a CUDA kernel."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tilewright.fusion.cuda.kernel import TYPES, Launch
from tilewright.fusion.cuda.registers import launch_bounds
from tilewright.fusion.cuda.rows.moments import Moments
from tilewright.fusion.cuda.rows.residents import Residents
from tilewright.fusion.cuda.rows.schedule import RowSchedule
from tilewright.fusion.cuda.rows.space import LEAST_COPY
from tilewright.fusion.cuda.vectors import access_bytes, side_by_side
from tilewright.fusion.far_means import corrected_far_means
from tilewright.fusion.ir import Graph, Node
from tilewright.fusion.plan import Phase, Plan, plan_rows
from tilewright.tensor_spec import HALVES


def planned(graph: Graph, schedule: RowSchedule, recompute: bool = True) -> Plan:
    """What a kernel of rows does, sweep after sweep."""
    return plan_rows(corrected_far_means(graph), schedule.moments, recompute)


class RowKernel(Moments, Residents):
    """Sweeps over a row, one for each phase of the plan; persistent kernels do so row after row."""

    def emit(self) -> tuple[str, Launch]:
        s = self.s
        self.body()
        bounds = launch_bounds(s.block_threads, s.min_blocks, s.max_registers)
        cluster = f"__cluster_dims__({s.cluster}, 1, 1) " if s.cluster > 1 else ""
        parameters = ", ".join(self.parameters_of_kernel())
        head = f'extern "C" __global__ void {cluster}{bounds} {self.entry}({parameters}) {{'
        launch = Launch(
            s.block_threads,
            s.rows_per_block * s.rows_per_thread,
            self.dynamic_bytes,
            s.cluster,
            self.signature(),
            persistent=self.persistent,
            counters=self.counters,
            extents=tuple(self.extents.values()),
            blocks_per_row=s.blocks_per_row,
        )
        return self.source(head), launch

    def emit_part(self) -> str:
        """A device function of the number of its block, and of what the kernel is given."""
        assert not self.persistent, self.s
        assert self.s.row_blocks == 1, self.s
        self.number = "number"
        self.body()
        assert not self.dynamic_bytes, self.s
        parameters = ", ".join(["u32 number", *self.parameters_of_kernel()])
        return "\n".join([f"TW_DEVICE void {self.entry}({parameters}) {{", *self.lines, "}", ""])

    def body(self) -> None:
        """All lines of the body."""
        s = self.s
        self.declare_generated(range(len(self.graph.inputs)))
        self.place()
        self.prepare_joining()
        self.find_residents()
        if self.persistent:
            self.open_rows()
        else:
            self.fixed_values()
            rows = f"(block * {s.rows_per_block} + group) * {s.rows_per_thread}"
            self.line(f"const i64 first_row = {rows};")
            self.load_parameters()
        self.declare_row_pointers()
        self.row_values(0)
        self.sweeps()
        if self.persistent:
            self.close_walk()
            self.after_rows()
        self.find_extents()
        self.lines = [f"  {text}" for text in self.shared] + self.lines

    def expression(self, n: Node, operands: list[str], vector: str | None) -> str:
        """Reciprocals of a vector at once, which hides the time of each where threads are few.
        Elsewhere it costs registers, and so threads, which do that: with 48, not 39, the gradients
        of a focal loss took 78.4 us on an H100, not 76.5 (no file kept)."""
        if n.op == "reciprocal":
            return f"reciprocals({operands[0]})"
        return super().expression(n, operands, vector)

    @property
    def counters(self) -> int:
        """Zeroed words that a launch takes, and leaves zero."""
        return 1 if self.s.in_turn else 0

    def sweeps(self) -> None:
        """All sweeps over the rows at hand, and what follows from them."""
        joined = 0
        for p, phase in enumerate(self.plan.phases):
            with self.where_wanted(phase):
                self.sweep(p, phase)
                if phase.reductions:
                    self.combine(joined, phase)
                    joined += 1
            if p == 0 and self.s.bulk:
                self.all_have_read(bool(phase.reductions))
                self.refill()
            self.row_values(p + 1)
        self.row_stores()

    @contextlib.contextmanager
    def where_wanted(self, phase: Phase) -> Iterator[None]:
        """Around a sweep for rows that are rare, if the phase is one: it is for all rows at hand,
        or for none, whose sums stay as they start, outside."""
        chosen = self.rare_operands(phase)
        if not chosen:
            yield
            return
        self.start_sums(phase)
        wanted = f"wanted{self.plan.phases.index(phase)}"
        self.line(f"bool {wanted} = false;")
        nodes = self.graph.nodes
        for i in sorted({nodes[i].args[0] for i in chosen if nodes[i].op == "where"}):
            self.line(f"{self.each_row()} {wanted} |= {self.names[i]};")
        self.line(f"{wanted} = __any_sync(0xffffffffu, {wanted});")
        self.open(f"if ({wanted})")
        yield
        if self.s.cluster > 1:
            self.line(f"++rare{self.joining.index(phase)};")
        self.close()

    def open_rows(self) -> None:
        """What is done once, and the loop over rows."""
        self.start_walk()
        self.fixed_values()
        self.start_queue()
        self.load_parameters()
        self.await_cluster()
        self.open_walk()
        self.forget_parameters()
        self.await_rows()

    def after_rows(self) -> None:
        """What a persistent kernel does when it has walked all of its rows."""

    # -- values that do not vary along the row ---------------------------------------------------

    def fixed_values(self) -> None:
        """The numbers of the whole kernel: constants, scalars, and what follows from them."""
        for i, n in enumerate(self.graph.nodes):
            if self.fixed(i) and i not in self.names:
                value = (
                    f"load_one(in{n.attr})"
                    if n.op == "load"
                    else self.expression(n, [self.names[a] for a in n.args], None)
                )
                value = f"in_register({value})" if n.op == "scalar" else value
                self.line(f"const {TYPES[n.dtype]} s{i} = {value};")
                self.names[i] = f"s{i}"

    def row_values(self, phase: int) -> None:
        """Compute every single value per row that is known before `phase`."""
        for i in range(len(self.graph.nodes)):
            if not self.plan.inner[i] and i not in self.names and self.plan.ready[i] == phase:
                self.row_value(i)

    def row_value(self, i: int) -> None:
        n = self.graph.nodes[i]
        self.line(f"{TYPES[n.dtype]} s{i}[{self.s.rows_per_thread}];")
        self.names[i] = f"s{i}[r]"
        value = (
            self.row_scalar(i)
            if n.op == "load"
            else self.expression(n, [self.names[a] for a in n.args], None)
        )
        self.line(f"{self.each_row()} s{i}[r] = {value};")

    def row_stores(self) -> None:
        """Outputs that hold one value per row; the row's first thread writes them."""
        for k, (i, access) in enumerate(self.graph.outputs):
            if not self.plan.inner[i]:
                first = "lane == 0" + (" && rank == 0" if self.s.cluster > 1 else "")
                target = self.base("out", k, access)
                store = f"{self.exists}if ({first}) *{target} = {self.names[i]};"
                self.line(f"{self.each_row()} {store}")

    # -- one sweep over the row ------------------------------------------------------------------

    def sweep(self, p: int, phase: Phase) -> None:
        registers = self.s.storage == "registers"
        wanted = {self.graph.nodes[i].args[0] for i in phase.reductions}
        wanted |= {self.graph.outputs[k][0] for k in phase.stores}
        known = phase.carried_in if self.s.storage != "reread" else frozenset()
        carried = phase.carried_out if self.s.storage != "reread" else frozenset()
        self.declare_kept(carried - known)
        self.keep_packed(known)
        steps = self.needed((wanted | carried) - known, known)
        moments, exponentials = (
            [i for i in phase.reductions if self.graph.nodes[i].op == op]
            for op in ("m2", "sum_exp")
        )
        lanes = moments if self.s.moments == "lanes" else []
        if not self.rare_operands(phase):
            self.start_sums(phase)
        kept = carried - known
        early = self.load_ahead(p, steps) if registers else self.copy_ahead(steps, kept)
        if not registers:
            kept -= set(early)
        if lanes:
            self.weigh_lanes()
            self.declare_lanes(lanes)
        self.open_turns(0 if registers else self.s.unroll)
        values = self.steps(steps, known, early, per_row=False)
        self.open(self.each_row())
        values |= self.steps(steps, known, early, per_row=True, values=values)
        for i in sorted(kept):
            self.line(f"{self.kept_name(i)} = {values[i]};")
        self.join_sums(phase, lanes, values, known)
        for k in phase.stores:
            self.store(k, self.value_of(self.graph.outputs[k][0], values, known))
        self.close()
        self.close_turns()
        if p == 0 and not self.s.bulk:  # of its own slots a thread is the only reader
            self.refill()
        if moments:
            self.warp_moments(moments, carried | known)
        if exponentials:
            self.warp_exponentials(exponentials, carried | known)

    def start_sums(self, phase: Phase) -> None:
        for name, join, dtype in self.accumulators(phase):
            self.line(f"{TYPES[dtype]} {name}[{self.s.rows_per_thread}];")
            self.line(f"{self.each_row()} {name}[r] = {join}::start<{TYPES[dtype]}>();")

    def join_sums(
        self, phase: Phase, lanes: list[int], values: dict[int, str], known: frozenset[int]
    ) -> None:
        """What this thread has of each sum, with the vector at hand; lanes have moments apart."""
        sums = self.accumulators(phase)
        for (name, join, _), source in zip(sums, self.sum_sources(phase), strict=True):
            narrow = self.narrow_extreme(join, source, values, known)
            named = self.named_element(join, source, values, known)
            folded = narrow or named or self.folded(join, self.value_of(source, values, known))
            self.line(f"{name}[r] = {join}::join({name}[r], {folded});")
        for i in lanes:
            value = self.value_of(self.graph.nodes[i].args[0], values, known)
            self.line(f"add_vector(total{i}[r], squares{i}[r], {value}, k);")

    def narrow_extreme(
        self, join: str, i: int, values: dict[int, str], known: frozenset[int]
    ) -> str | None:
        """The greatest or least element of a vector of widened halves, found among the halves."""
        n = self.graph.nodes[i]
        if join not in ("Max", "Min") or n.op != "cast" or self.s.shifted:
            return None
        halves = n.args[0]
        at_hand = halves in values or halves in known
        if not at_hand or self.graph.nodes[halves].dtype not in HALVES:
            return None
        found = f"fold_pairs<{join}>({self.value_of(halves, values, known)})"
        return f"cast<{TYPES[n.dtype]}>({found})"

    def named_element(
        self, join: str, i: int, values: dict[int, str], known: frozenset[int]
    ) -> str | None:
        """The element of a vector that an index names, where zeros beside it are added up."""
        named = self.named(i, values) if join == "Sum" else None
        if named is None:
            return None
        _, element, other = self.graph.nodes[i].args
        rest = self.graph.nodes[other]
        if rest.op != "const" or rest.attr != 0 or not self.plan.inner[element]:
            return None
        if element not in values and element not in known:
            return None
        given = ", ".join([self.value_of(element, values, known), *named])
        if self.s.shifted:
            return f"fold_named_within({given}, {self.place_in_row})"
        return f"fold_named({given})"

    def all_have_read(self, joined: bool) -> None:
        """Nobody of the group reads the slots of this stage any more."""
        if self.warps == 1:
            self.line("__syncwarp();")
        elif self.s.cluster > 1 or not joined:
            self.sync_group()

    def declare_kept(self, values: frozenset[int]) -> None:
        s = self.s
        for i in sorted(values):
            if s.storage == "registers":
                kind = self.vector_type(i)
                self.line(f"{kind} keep{i}[{s.rows_per_thread}][{self.turns}];")
            elif (slot := self.plan.slots[i]) != i:
                self.line(f"auto* const keep{i} = keep{slot};")
            else:
                self.in_shared(f"keep{i}", i, self.turns * s.block_threads)

    def keep_packed(self, known: frozenset[int]) -> None:
        halves = [i for i in sorted(known) if self.graph.nodes[i].dtype in HALVES]
        if self.s.rematerialize and halves:
            self.open(f"TW_UNROLL for (int k = 0; k < {self.turns}; ++k)")
            for i in halves:
                self.line(f"{self.each_row()} forget_widened({self.kept_name(i)});")
            self.close()

    def load_ahead(self, p: int, steps: list[int]) -> dict[int, str]:
        """Issue the row's own loads for all turns before any arithmetic waits for one."""
        loads = [i for i in steps if self.reads_row(i)]
        if not loads:
            return {}
        for i in loads:
            shape = f"[{self.s.rows_per_thread}][{self.turns}]"
            self.line(f"{self.vector_type(i)} ahead{p}_{i}{shape};")
        self.open_turns()
        self.open(self.each_row())
        for i in loads:
            value = self.slot(i) if i in self.queued else self.load(i, self.s.stream_loads)
            self.line(f"ahead{p}_{i}[r][k] = {value};")
        self.close()
        self.close_turns()
        return {i: f"ahead{p}_{i}[r][k]" for i in loads}

    def copy_ahead(self, steps: list[int], kept: frozenset[int]) -> dict[int, str]:
        """Copy the row's own loads to where they are kept, if all of them are kept as they are: all
        turns are on their way at once, and take no registers."""
        loads = [i for i in steps if self.reads_row(i)]
        accesses = {i: self.graph.inputs[self.graph.nodes[i].attr] for i in loads}
        wide = {i: access_bytes(a, self.s.vector) for i, a in accesses.items()}
        own = all(i in kept and self.plan.slots[i] == i for i in loads)
        if self.s.shifted or not own or min(wide.values(), default=0) < LEAST_COPY:
            return {}
        if self.s.vector > 1 and not all(map(side_by_side, accesses.values())):
            return {}
        self.open_turns()
        self.open(self.each_row())
        for i, access in accesses.items():
            pointer = self.pointer("in", self.graph.nodes[i].attr, access)
            self.line(f"enqueue<{self.s.vector}, {wide[i]}>(&{self.kept_name(i)}, {pointer});")
        self.close()
        self.close_turns()
        self.line("close_batch();")
        self.line("await_batch<0>();")
        return {i: self.kept_name(i) for i in loads}

    def store(self, k: int, value: str) -> None:
        _, access = self.graph.outputs[k]
        pointer = self.pointer("out", k, access)
        if self.s.shifted:
            wide = self.access_bytes(access)
            call = f"store_within<{wide}>({pointer}, {value}, {self.place_in_row});"
        elif access.strides[-1] == 1:
            call = f"store<{access_bytes(access, self.s.vector)}>({pointer}, {value});"
        else:
            call = f"scatter({pointer}, {access.strides[-1]}, {value});"
        self.line(f"{self.exists}{call}")
