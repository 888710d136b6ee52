"""How the threads of a row join what each of them found: warps, blocks, clusters."""

from __future__ import annotations

import functools

from tilewright.device import WARP
from tilewright.fusion.cuda.kernel import JOINS, TYPES
from tilewright.fusion.cuda.rows.walking import Walking
from tilewright.fusion.far_means import RARELY
from tilewright.fusion.plan import Phase
from tilewright.fusion.remembered import remembered

FIELDS = {"Moments": (".mean", ".m2"), "Scaled": (".greatest", ".sum")}
"""Of a partial result of several numbers."""
SHARES = "HeldBy"
"""What tells how many elements of a row lanes, and warps, hold."""
FACTORS = {"exp": "Exact", "quick_exp": "Quick", "raised_exp": "Raised", "shifted_exp": "Shifted"}


class Joining(Walking):
    """The part of a row kernel that ends a sweep.

    Every joining sweep has a buffer of its own, so that one barrier suffices. A persistent kernel
    with one such sweep takes two buffers in turn: whoever writes to a buffer again has then passed
    a barrier that every thread reaches after its last reading. The blocks of a cluster send what
    they found to each other; a barrier in each block's memory counts the bytes that arrive.
    """

    weighed = False

    def accumulators(self, phase: Phase) -> list[tuple[str, str, str]]:
        """(name, join, dtype) of what a thread accumulates; `merge` starts from a sum, or from the
        greatest value."""
        return [found[:3] for found in self._accumulated(phase)]

    def sum_sources(self, phase: Phase) -> list[int]:
        return [source for *_, source in self._accumulated(phase)]

    def _accumulated(self, phase: Phase) -> list[tuple[str, str, str, int]]:
        found = []
        for i in phase.reductions:
            n = self.graph.nodes[i]
            if n.op in JOINS and not self.scaled_with(i, phase):
                found.append((f"acc{i}", JOINS[n.op], n.dtype, n.args[0]))
            elif n.op == "m2" and self.s.moments == "merge":
                found.append((f"total{i}", "Sum", n.dtype, n.args[0]))
            elif n.op == "sum_exp":
                found.append((f"greatest{i}", "Max", n.dtype, n.args[0]))
        return found

    def scaled_with(self, i: int, phase: Phase) -> int | None:
        """The sum of exponentials below what reduction `i` finds, if one is found along with it."""
        n = self.graph.nodes[i]
        nodes = self.graph.nodes
        below = (
            j for j in phase.reductions if nodes[j].op == "sum_exp" and nodes[j].args == n.args
        )
        return next(below, None) if n.op == "amax" else None

    @functools.cached_property
    def joining(self) -> list[Phase]:
        """The sweeps that end so."""
        return [phase for phase in self.plan.phases if phase.reductions]

    @remembered
    def rare_operands(self, phase: Phase) -> list[int]:
        """What a sweep adds up that is for rows far from zero alone; none if it is for others, too.
        Between two of them there is a sweep for all rows, so their buffers need not alternate."""
        nodes, added = self.graph.nodes, [self.graph.nodes[i].args[0] for i in phase.reductions]
        others = phase.stores or phase.added or phase.carried_out - phase.carried_in
        return [] if others or any(nodes[i].attr != RARELY for i in added) else added

    @property
    def cluster_barriers(self) -> list[str]:
        """What a cluster's blocks tell one another by; all are made before any block is let on."""
        return [f"joined{n}" for n in range(len(self.joining))]

    @functools.cached_property
    def alternates(self) -> bool:
        several = self.warps * self.s.cluster > 1
        always = [phase for phase in self.joining if not self.rare_operands(phase)]
        return self.persistent and len(always) == 1 and several

    @property
    def buffers(self) -> int:
        return self.s.rows_per_block * (2 if self.alternates else 1)

    def buffer(self, sweep: int) -> str:
        alternates = self.alternates and not self.rare_operands(self.joining[sweep])
        return f"group + steps % 2 * {self.s.rows_per_block}" if alternates else "group"

    @property
    def warp_threads(self) -> int:
        return min(self.s.row_threads, WARP)

    def prepare_joining(self) -> None:
        """Barriers of a cluster, and the count of rows walked, which tells their phase."""
        if self.persistent:
            self.line("u32 steps = 0;")
        moments = [n for n in self.plan.graph.nodes if n.op == "m2"]
        if moments:
            self.count_elements(TYPES[moments[0].dtype])
        if self.s.cluster > 1:
            for n, phase in enumerate(self.joining):
                if self.rare_operands(phase):
                    self.line(f"u32 rare{n} = 0;")
            names = self.cluster_barriers
            self.shared += [f"__shared__ u64 {name}[{self.buffers}];" for name in names]
            self.open(f"if (threadIdx.x < {self.buffers})")
            for name in names:
                self.line(f"barrier_init(&{name}[threadIdx.x]);")
            self.close()
            self.line("barriers_made();")

    def await_cluster(self) -> None:
        """Before anything is sent: the other blocks have begun, and have made their barriers."""
        if self.s.cluster > 1:
            self.line("barriers_ready();")

    def count_elements(self, kind: str) -> None:
        """What a warp, and a lane, hold of a row."""
        s = self.s
        turns = f"{self.turns}, {self.full_turns}, {self.step}"
        warp_step = WARP * self.turns if s.contiguous else WARP
        self.line(f"using {SHARES} = Shares<{s.vector}, {self.vectors}, {turns}, {warp_step}>;")
        first = f"first_vector - lane % {self.warp_threads}"
        self.line(f"const {kind} warp_count = {SHARES}::of({first}, {self.warp_threads});")
        self.line(f"const {kind} warp_inverse = warp_count > 0 ? quick_inverse(warp_count) : 0;")

    def weigh_lanes(self) -> None:
        """Once the row is on its way: this takes long where lanes hold more than others. Sweeps
        behind the first that does so have the same weights."""
        if self.weighed:
            return
        self.weighed = True
        kind = next(TYPES[n.dtype] for n in self.plan.graph.nodes if n.op == "m2")
        self.line("int at_vector = first_vector;")
        if self.full_turns < self.turns:
            self.line("after_loads(at_vector);")
        how = f"{SHARES}, {self.warp_threads}, {kind}"
        self.line(f"const auto weights = weights_of_lanes<{how}>(at_vector);")

    def combine(self, sweep: int, phase: Phase) -> None:
        """Join what the threads of a row found; every thread ends with the same bits."""
        s = self.s
        partials: list[tuple[str, str, str]] = []  # (name, join, type of a partial result)
        for i in phase.reductions:
            n = self.graph.nodes[i]
            if n.op in JOINS and not self.scaled_with(i, phase):
                partials.append((f"acc{i}", JOINS[n.op], TYPES[n.dtype]))
            elif n.op == "m2":
                partials.append((f"partial{i}", "", f"Moments<{TYPES[n.dtype]}>"))
            elif n.op == "sum_exp":
                partials.append((f"partial{i}", "", f"Scaled<{TYPES[n.dtype]}>"))
        for name, join, _ in partials:
            if join:
                value = f"{name}[r]"
                how = f"{join}, {self.warp_threads}"
                self.line(f"{self.each_row()} {value} = reduce_warp<{how}>({value});")
        if self.warps * s.cluster > 1:
            self.combine_warps(sweep, partials)
        elif self.tells_turn(sweep):
            self.line(f"coming[{s.stages}] = __shfl_sync(0xffffffffu, told, 0);")
        for i in phase.reductions:
            n = self.graph.nodes[i]
            scaled = i if n.op == "sum_exp" else self.scaled_with(i, phase)
            if scaled is not None:
                self.names[i] = f"partial{scaled}[r].{'sum' if i == scaled else 'greatest'}"
            elif n.op in JOINS:
                self.names[i] = f"acc{i}[r]"
            else:
                nodes = self.graph.nodes
                same = (j for j in phase.reductions if nodes[j].args == n.args)
                m2 = next(j for j in same if nodes[j].op == "m2")
                self.names[i] = f"partial{m2}[r].{n.op}"

    def combine_warps(self, sweep: int, partials: list[tuple[str, str, str]]) -> None:
        """Through shared memory; see the class for why one barrier suffices."""
        s, buffer = self.s, self.buffer(sweep)
        count = self.warps * s.cluster
        for name, _, kind in partials:
            shape = f"[{self.buffers}][{s.rows_per_thread}][{count}]"
            self.shared.append(f"__shared__ {kind} all_{name}{shape};")
        if self.tells_turn(sweep):
            self.shared.append(f"__shared__ i64 turn[{self.buffers}];")
        if s.cluster > 1:
            self.exchange(sweep, partials)
        else:
            if self.tells_turn(sweep):
                self.line(f"if ({self.leads}) turn[{buffer}] = told;")
            self.open(self.each_row())
            for name, _, _ in partials:
                self.line(f"if (lane % 32 == 0) all_{name}[{buffer}][r][lane / 32] = {name}[r];")
            self.close()
            self.sync_group()
        if self.tells_turn(sweep):
            self.line(f"coming[{s.stages}] = turn[{buffer}];")
        self.open(self.each_row())
        for name, join, kind in partials:
            self.join_all(name, join, kind, count, f"all_{name}[{buffer}][r]")
        self.close()

    def tells_turn(self, sweep: int) -> bool:
        """Whether this sweep's joining tells the group which rows it takes later."""
        return self.s.in_turn and sweep == 0

    def exchange(self, sweep: int, partials: list[tuple[str, str, str]]) -> None:
        """Every warp sends what it found to every block of the cluster, its own included."""
        s, buffer = self.s, self.buffer(sweep)
        barrier = f"&joined{sweep}[{buffer}]"
        values = [
            (name, field, 8 if "double" in kind else 4)
            for name, join, kind in partials
            for field in ([""] if join else FIELDS[kind.partition("<")[0]])
        ]
        arriving = s.rows_per_thread * self.warps * s.cluster * sum(size for *_, size in values)
        if self.tells_turn(sweep):
            arriving += 8
        if sweep == 0 and not self.persistent:
            self.await_cluster()
        self.line(f"if (lane == 0) barrier_expect({barrier}, {arriving});")
        self.open(self.each_row())
        self.open(f"if (lane % 32 < {s.cluster})")
        for name, field, _ in values:
            to = f"&all_{name}[{buffer}][r][rank * {self.warps} + lane / 32]{field}"
            self.line(f"store_remote({to}, {barrier}, lane % 32, {name}[r]{field});")
        self.close()
        self.close()
        if self.tells_turn(sweep):
            self.line("const i64 turn_told = __shfl_sync(0xffffffffu, told, 0);")
            to = f"(double*)&turn[{buffer}], {barrier}, lane"
            value = "__longlong_as_double(turn_told)"
            self.line(f"if (rank == 0 && lane < {s.cluster}) store_remote({to}, {value});")
        if self.rare_operands(self.joining[sweep]):
            step = f"rare{sweep} % 2"
        else:
            step = "steps / 2 % 2" if self.alternates else "steps % 2" if self.persistent else "0"
        self.line(f"barrier_wait({barrier}, {step});")

    def join_all(self, name: str, join: str, kind: str, count: int, source: str) -> None:
        """Few partial results: each thread joins them in order; many: one per lane of a warp."""
        width = min(1 << (count - 1).bit_length(), WARP)
        if kind.startswith("Scaled"):
            how = FACTORS[self.graph.nodes[int(name.removeprefix("partial"))].attr]
            self.line(f"{name}[r] = join_scaled<{how}, {count}, {width}>({source});")
            return
        if not join:
            number = kind.removeprefix("Moments<").removesuffix(">")
            size = self.plan.width
            counted = f"({number}){size}, ({number})(1.0 / {size})"
            how = f"{SHARES}, {count}, {width}"
            self.line(f"{name}[r] = join_moments<{how}>({source}, {counted});")
            return
        if count <= 8:
            self.line(f"{name}[r] = {source}[0];")
            self.line(
                f"TW_UNROLL for (int i = 1; i < {count}; ++i)"
                f" {name}[r] = {join}::join({name}[r], {source}[i]);"
            )
            return
        mine = f"threadIdx.x % {width}"
        start = f"{join}::start<{kind}>()"
        self.line(f"{name}[r] = {mine} < {count} ? {source}[{mine}] : {start};")
        if count > width:
            self.line(
                f"for (int i = {mine} + {width}; i < {count}; i += {width})"
                f" {name}[r] = {join}::join({name}[r], {source}[i]);"
            )
        self.line(f"{name}[r] = reduce_warp<{join}, {width}>({name}[r]);")
