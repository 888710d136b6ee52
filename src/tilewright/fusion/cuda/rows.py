"""A graph that reduces its rows as a CUDA kernel."""

from __future__ import annotations

import functools
import math

from tilewright.fusion.cuda.kernel import ENTRY, TYPES, Kernel, Launch
from tilewright.fusion.cuda.schedule import RowSchedule, access_bytes, held_bytes
from tilewright.fusion.ir import Access
from tilewright.fusion.plan import Phase, Plan, needed_in

_JOINS = {"sum": "Sum", "prod": "Prod", "amax": "Max", "amin": "Min"}
_WARP = 32


def emit_rows(plan: Plan, schedule: RowSchedule) -> tuple[str, Launch]:
    """A kernel that reduces rows; its source and its launch."""
    return RowKernel(plan, schedule).emit()


class RowKernel(Kernel):
    def __init__(self, plan: Plan, schedule: RowSchedule):
        super().__init__(plan.graph)
        self.plan, self.s = plan, schedule
        self.vectors = plan.width // schedule.vector
        self.lanes = schedule.row_threads * schedule.cluster
        self.turns = math.ceil(self.vectors / self.lanes)
        self.full_turns = self.vectors // self.lanes
        self.warps = max(schedule.row_threads // _WARP, 1)
        self.names: dict[int, str] = {}
        self.shared: list[str] = []
        self.dynamic_bytes = 0

    # -- the kernel, from top to bottom ----------------------------------------------------------

    def emit(self) -> tuple[str, Launch]:
        s = self.s
        self.head()
        for p, phase in enumerate(self.plan.phases):
            self.sweep(p, phase)
            if phase.reductions:
                self.combine(p, phase)
            self.row_values(p + 1)
        self.row_stores()
        bounds = f"__launch_bounds__({s.block_threads}, {s.min_blocks})"
        cluster = f"__cluster_dims__({s.cluster}, 1, 1) " if s.cluster > 1 else ""
        parameters = ", ".join(self.parameters())
        head = f'extern "C" __global__ void {cluster}{bounds} {ENTRY}({parameters}) {{'
        rows = s.rows_per_block * s.rows_per_thread
        launch = Launch(s.block_threads, rows, self.dynamic_bytes, s.cluster, self.signature())
        self.lines = [f"  {text}" for text in self.shared] + self.lines
        return self.source(head), launch

    def head(self) -> None:
        s = self.s
        block = "blockIdx.x" if s.cluster == 1 else f"(blockIdx.x / {s.cluster})"
        if s.rows_per_block == 1:
            self.line("const int lane = threadIdx.x;")
            self.line("const int group = 0;")
        else:
            self.line(f"const int lane = threadIdx.x % {s.row_threads};")
            self.line(f"const int group = threadIdx.x / {s.row_threads};")
        if s.cluster > 1:
            self.line("const u32 rank = cluster_rank();")
            self.line(f"const int first_vector = rank * {s.row_threads} + lane;")
        else:
            self.line("const int first_vector = lane;")
        self.line(
            f"const i64 first_row ="
            f" ((i64){block} * {s.rows_per_block} + group) * {s.rows_per_thread};"
        )
        self.declare_row_pointers()
        self.row_values(0)

    def declare_row_pointers(self) -> None:
        """Base addresses per row; a row past the end reads the last one and stores nothing."""
        rows = self.s.rows_per_thread
        kept = self.graph.kept
        for kind, accesses in (
            ("in", self.graph.inputs),
            ("out", [a for _, a in self.graph.outputs]),
        ):
            for i, a in enumerate(accesses):
                const = "const " if kind == "in" else ""
                if any(a.strides[k] for k in kept):
                    self.line(f"{const}{TYPES[a.dtype]}* row_{kind}{i}[{rows}];")
        self.open(f"TW_UNROLL for (int r = 0; r < {rows}; ++r)")
        self.line("const i64 row = first_row + r < count ? first_row + r : count - 1;")
        at = self.coordinates("row", "row", kept, "i64") if kept else {}
        for kind, accesses in (
            ("in", self.graph.inputs),
            ("out", [a for _, a in self.graph.outputs]),
        ):
            for i, a in enumerate(accesses):
                if any(a.strides[k] for k in kept):
                    self.line(f"row_{kind}{i}[r] = {kind}{i} + {self.offset(a, kept, at)};")
        self.close()

    def base(self, kind: str, i: int, access: Access) -> str:
        over_rows = any(access.strides[k] for k in self.graph.kept)
        return f"row_{kind}{i}[r]" if over_rows else f"{kind}{i}"

    # -- values that do not vary along the row ---------------------------------------------------

    def row_values(self, phase: int) -> None:
        """Compute every single value per row (or per kernel) that is known before `phase`."""
        plan, rows = self.plan, self.s.rows_per_thread
        for i, n in enumerate(self.graph.nodes):
            if plan.inner[i] or i in self.names or plan.ready[i] != phase:
                continue
            if self.uniform(i):
                if n.op == "load":
                    value = f"load_one(in{n.attr})"
                else:
                    value = self.expression(n, [self.names[a] for a in n.args], None)
                self.line(f"const {TYPES[n.dtype]} s{i} = {value};")
                self.names[i] = f"s{i}"
                continue
            self.line(f"{TYPES[n.dtype]} s{i}[{rows}];")
            self.names[i] = f"s{i}[r]"
            if n.op == "load":
                access = self.graph.inputs[n.attr]
                value = f"load_one({self.base('in', n.attr, access)})"
            else:
                value = self.expression(n, [self.names[a] for a in n.args], None)
            self.line(f"TW_UNROLL for (int r = 0; r < {rows}; ++r) s{i}[r] = {value};")

    def uniform(self, i: int) -> bool:
        n = self.graph.nodes[i]
        if n.op == "load":
            return not any(self.graph.inputs[n.attr].strides)
        return n.op in ("const", "scalar") or (
            bool(n.args) and not self.plan.inner[i] and all(self.is_uniform_name(a) for a in n.args)
        )

    def is_uniform_name(self, i: int) -> bool:
        return i in self.names and "[r]" not in self.names[i]

    def row_stores(self) -> None:
        """Outputs that hold one value per row; the row's first thread writes them."""
        for k, (i, access) in enumerate(self.graph.outputs):
            if not self.plan.inner[i]:
                first = "lane == 0" + (" && rank == 0" if self.s.cluster > 1 else "")
                rows = f"for (int r = 0; r < {self.s.rows_per_thread}; ++r)"
                live = f"first_row + r < count && {first}"
                target = self.base("out", k, access)
                self.line(f"TW_UNROLL {rows} if ({live}) *{target} = {self.names[i]};")

    # -- one sweep over the row ------------------------------------------------------------------

    def sweep(self, p: int, phase: Phase) -> None:
        rows, registers = self.s.rows_per_thread, self.s.storage == "registers"
        wanted = {self.graph.nodes[i].args[0] for i in phase.reductions}
        wanted |= {self.graph.outputs[k][0] for k in phase.stores}
        known = phase.carried_in if self.s.storage != "reread" else frozenset()
        carried = phase.carried_out if self.s.storage != "reread" else frozenset()
        self.declare_kept(carried - known)
        steps = needed_in(self.graph, (wanted | carried) - known, known | frozenset(self.names))
        steps = [i for i in steps if self.plan.inner[i]]
        moments = [i for i in phase.reductions if self.graph.nodes[i].op == "m2"]
        sums = self.accumulators(phase)
        for name, join, dtype in sums:
            self.line(f"{TYPES[dtype]} {name}[{rows}];")
            self.line(
                f"TW_UNROLL for (int r = 0; r < {rows}; ++r)"
                f" {name}[r] = {join}::start<{TYPES[dtype]}>();"
            )
        early = self.load_ahead(p, steps, known) if registers else {}
        self.open_turns(registers)
        values = self.steps(steps, known, early, per_row=False)
        self.open(f"TW_UNROLL for (int r = 0; r < {rows}; ++r)")
        values |= self.steps(steps, known, early, per_row=True, values=values)
        for i in sorted(carried - known):
            self.line(f"{self.kept_name(i)} = {values[i]};")
        for (name, join, _), source in zip(sums, self.sum_sources(phase), strict=True):
            value = self.value_of(source, values, known)
            self.line(f"{name}[r] = {join}::join({name}[r], fold<{join}>({value}));")
        for k in phase.stores:
            self.store(k, self.value_of(self.graph.outputs[k][0], values, known))
        self.close()
        self.close_turns()
        if moments:
            self.thread_moments(p, moments, carried | known)

    def declare_kept(self, values: frozenset[int]) -> None:
        s = self.s
        for i in sorted(values):
            kind = f"Vec<{TYPES[self.graph.nodes[i].dtype]}, {s.vector}>"
            if s.storage == "registers":
                self.line(f"{kind} keep{i}[{s.rows_per_thread}][{self.turns}];")
            else:
                if self.dynamic_bytes == 0:
                    self.shared.append("extern __shared__ Quad kept_rows[];")
                self.line(
                    f"{kind}* const keep{i} = ({kind}*)((u8*)kept_rows + {self.dynamic_bytes});"
                )
                held = held_bytes(self.graph.nodes[i].dtype, s.vector)
                size = self.turns * s.block_threads * held
                self.dynamic_bytes += math.ceil(size / 16) * 16

    def kept_name(self, i: int) -> str:
        if self.s.storage == "registers":
            return f"keep{i}[r][k]"
        return f"keep{i}[k * {self.s.block_threads} + threadIdx.x]"

    def open_turns(self, unroll_all: bool) -> None:
        unroll = "TW_UNROLL" if unroll_all else '_Pragma("unroll 4")'
        self.open(f"{unroll} for (int k = 0; k < {self.turns}; ++k)")
        self.line(f"const int vector = first_vector + k * {self.lanes};")
        if self.full_turns < self.turns:
            self.open(f"if (k < {self.full_turns} || vector < {self.vectors})")
        self.line(f"const int column = vector * {self.s.vector};")

    def close_turns(self) -> None:
        if self.full_turns < self.turns:
            self.close()
        self.close()

    def load_ahead(self, p: int, steps: list[int], known: frozenset[int]) -> dict[int, str]:
        """Issue the row's own loads for all turns before any arithmetic waits for one."""
        rows = self.s.rows_per_thread
        loads = [i for i in steps if self.graph.nodes[i].op == "load" and self.over_rows(i)]
        if not loads:
            return {}
        for i in loads:
            kind = f"Vec<{TYPES[self.graph.nodes[i].dtype]}, {self.s.vector}>"
            self.line(f"{kind} ahead{p}_{i}[{rows}][{self.turns}];")
        self.open_turns(True)
        self.open(f"TW_UNROLL for (int r = 0; r < {rows}; ++r)")
        for i in loads:
            self.line(f"ahead{p}_{i}[r][k] = {self.load(i, self.s.stream_loads)};")
        self.close()
        self.close_turns()
        return {i: f"ahead{p}_{i}[r][k]" for i in loads}

    def over_rows(self, i: int) -> bool:
        strides = self.graph.inputs[self.graph.nodes[i].attr].strides
        return any(strides[k] for k in self.graph.kept) or not self.graph.kept

    def load(self, i: int, stream: bool) -> str:
        input_index = self.graph.nodes[i].attr
        access = self.graph.inputs[input_index]
        base = self.base("in", input_index, access)
        pointer = f"{base} + {self.column_offset(access)}"
        wide = access_bytes(access, self.s.vector)
        return self.fetch(access, pointer, str(self.s.vector), wide, stream)

    def column_offset(self, access: Access) -> str:
        axes = self.graph.reduced
        if len(axes) == 1:
            return self.offset(access, axes, {axes[0]: "column"})
        at, step = {}, 1
        for a in reversed(axes):
            at[a] = f"(column / {step} % {self.graph.space[a]})"
            step *= self.graph.space[a]
        return self.offset(access, axes, at)

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

    @functools.cache  # noqa: B019  (a kernel object lives for one emission)
    def by_row(self, i: int, known: frozenset[int]) -> bool:
        n = self.graph.nodes[i]
        if i in known:
            return True
        if not self.plan.inner[i]:
            return not self.is_uniform_name(i)
        if n.op == "load":
            return self.over_rows(i)
        return any(self.by_row(a, known) for a in n.args)

    def value_of(self, i: int, values: dict[int, str], known: frozenset[int]) -> str:
        if i in values:
            return values[i]
        return self.kept_name(i) if i in known else self.names[i]

    def store(self, k: int, value: str) -> None:
        _, access = self.graph.outputs[k]
        pointer = f"{self.base('out', k, access)} + {self.column_offset(access)}"
        if access.strides[-1] == 1:
            call = f"store<{access_bytes(access, self.s.vector)}>({pointer}, {value});"
        else:
            call = f"scatter({pointer}, {access.strides[-1]}, {value});"
        self.line(f"if (first_row + r < count) {call}")

    # -- reductions ------------------------------------------------------------------------------

    def accumulators(self, phase: Phase) -> list[tuple[str, str, str]]:
        """(name, join, dtype) of what a thread accumulates; moments start from a sum."""
        found = []
        for i in phase.reductions:
            n = self.graph.nodes[i]
            if n.op in _JOINS:
                found.append((f"acc{i}", _JOINS[n.op], n.dtype))
            elif n.op == "m2":
                found.append((f"total{i}", "Sum", n.dtype))
        return found

    def sum_sources(self, phase: Phase) -> list[int]:
        nodes = self.graph.nodes
        return [nodes[i].args[0] for i in phase.reductions if nodes[i].op != "mean"]

    def thread_moments(self, p: int, moments: list[int], known: frozenset[int]) -> None:
        """Each thread's own mean and m2, in a second pass over what it holds."""
        rows, s = self.s.rows_per_thread, self.s
        own = f"{self.full_turns * s.vector}"
        if self.full_turns < self.turns:
            tail = f"first_vector + {self.full_turns * self.lanes} < {self.vectors}"
            own = f"({own} + ({tail} ? {s.vector} : 0))"
        for i in moments:
            n = self.graph.nodes[i]
            kind = TYPES[n.dtype]
            self.line(f"Moments<{kind}> part{i}[{rows}];")
            self.open(f"TW_UNROLL for (int r = 0; r < {rows}; ++r)")
            self.line(f"part{i}[r].count = ({kind}){own};")
            self.line(
                f"part{i}[r].mean = part{i}[r].count > 0 ? total{i}[r] / part{i}[r].count : 0;"
            )
            self.line(f"part{i}[r].m2 = 0;")
            self.close()
        wanted = {self.graph.nodes[i].args[0] for i in moments}
        steps = needed_in(self.graph, wanted - known, known | frozenset(self.names))
        steps = [i for i in steps if self.plan.inner[i]]
        self.open_turns(s.storage == "registers")
        values = self.steps(steps, known, {}, per_row=False)
        self.open(f"TW_UNROLL for (int r = 0; r < {rows}; ++r)")
        values |= self.steps(steps, known, {}, per_row=True, values=values)
        for i in moments:
            value = self.value_of(self.graph.nodes[i].args[0], values, known)
            self.line(f"const auto apart{i} = sub({value}, part{i}[r].mean);")
            self.line(f"part{i}[r].m2 += fold<Sum>(mul(apart{i}, apart{i}));")
        self.close()
        self.close_turns()

    def combine(self, p: int, phase: Phase) -> None:
        """Join what the threads of a row found; every thread ends with the same bits."""
        s, rows = self.s, self.s.rows_per_thread
        parts: list[tuple[str, str, str]] = []  # (name, join, type of a partial result)
        for i in phase.reductions:
            n = self.graph.nodes[i]
            if n.op in _JOINS:
                parts.append((f"acc{i}", _JOINS[n.op], TYPES[n.dtype]))
            elif n.op == "m2":
                parts.append((f"part{i}", "", f"Moments<{TYPES[n.dtype]}>"))
        threads = min(s.row_threads, _WARP)
        for name, join, _ in parts:
            equal = str(self.vectors % self.lanes == 0).lower()
            how = f"{join}, {threads}" if join else f"{threads}, {equal}"
            self.line(
                f"TW_UNROLL for (int r = 0; r < {rows}; ++r)"
                f" {name}[r] = reduce_warp<{how}>({name}[r]);"
            )
        if self.warps * s.cluster > 1:
            self.combine_warps(p, parts)
        for i in phase.reductions:
            n = self.graph.nodes[i]
            if n.op in _JOINS:
                self.names[i] = f"acc{i}[r]"
            else:
                nodes = self.graph.nodes
                same = (j for j in phase.reductions if nodes[j].args == n.args)
                m2 = next(j for j in same if nodes[j].op == "m2")
                self.names[i] = f"part{m2}[r].{n.op}"

    def combine_warps(self, p: int, parts: list[tuple[str, str, str]]) -> None:
        """Through shared memory, in a buffer of this phase's own, so that one barrier suffices."""
        s, rows = self.s, self.s.rows_per_thread
        count = self.warps * s.cluster
        groups = s.rows_per_block
        for name, _, kind in parts:
            self.shared.append(f"__shared__ {kind} all_{name}[{groups}][{rows}][{count}];")
        if s.cluster > 1 and p == 0:
            self.line("cluster_sync();")
        slot = "lane / 32" if s.cluster == 1 else f"rank * {self.warps} + lane / 32"
        self.open(f"TW_UNROLL for (int r = 0; r < {rows}; ++r)")
        for name, join, _ in parts:
            target = f"all_{name}[group][r][{slot}]"
            if s.cluster == 1:
                self.line(f"if (lane % 32 == 0) {target} = {name}[r];")
            elif join:
                self.line(
                    f"if (lane % 32 < {s.cluster}) store_remote(&{target}, lane % 32, {name}[r]);"
                )
            else:
                self.open(f"if (lane % 32 < {s.cluster})")
                for part in ("count", "mean", "m2"):
                    self.line(f"store_remote(&{target}.{part}, lane % 32, {name}[r].{part});")
                self.close()
        self.close()
        self.line("__syncthreads();" if s.cluster == 1 else "cluster_sync();")
        self.open(f"TW_UNROLL for (int r = 0; r < {rows}; ++r)")
        for name, join, kind in parts:
            self.join_all(name, join, kind, count)
        self.close()

    def join_all(self, name: str, join: str, kind: str, count: int) -> None:
        """Few partial results: each thread joins them in order; many: one per lane of a warp."""
        source = f"all_{name}[group][r]"
        if count <= 8:
            call = f"{join}::join" if join else "merge"
            self.line(f"{name}[r] = {source}[0];")
            self.line(
                f"TW_UNROLL for (int i = 1; i < {count}; ++i)"
                f" {name}[r] = {call}({name}[r], {source}[i]);"
            )
            return
        width = min(1 << (count - 1).bit_length(), _WARP)
        start = f"{join}::start<{kind}>()" if join else f"{kind}{{0, 0, 0}}"
        how = f"{join}, {width}" if join else f"{width}, false"
        call = f"{join}::join" if join else "merge"
        mine = f"threadIdx.x % {width}"
        self.line(f"{name}[r] = {mine} < {count} ? {source}[{mine}] : {start};")
        if count > width:
            self.line(
                f"for (int i = {mine} + {width}; i < {count}; i += {width})"
                f" {name}[r] = {call}({name}[r], {source}[i]);"
            )
        self.line(f"{name}[r] = reduce_warp<{how}>({name}[r]);")
