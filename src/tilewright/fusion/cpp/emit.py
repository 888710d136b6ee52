"""From a graph and a schedule to C++ with OpenMP.

One axis is the lane axis: vectors run along it. There are three shapes of kernel:

    pointwise   no reductions: a work item is a block of the lane axis, of one or a few rows
    rows        the lane axis is reduced: an item is one or a few rows; accumulators are vectors
                whose lanes are folded at the end of a sweep
    columns     the reduced axes are not contiguous, the lane axis is kept: an item is one or a
                few vectors of neighbouring columns, and nothing is folded

A kernel may also add up reductions over other axes than those of its rows (segments.py says which):
each split of the work items adds to memory of its own, which the next kernel puts together.

In all of them a work item walks `replicas` (rows, or vectors of columns) together and sweeps once
per phase of the plan. Rows and columns are counted at run time (see extents); widths of rows are
constants of the source.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from importlib import resources

from tilewright.fusion.cpp.entry import (
    C_TYPES,
    COMBINE,
    POINTWISE_BLOCK,
    c_type,
    entry,
    input_type,
    runner,
)
from tilewright.fusion.cpp.loops import Loops, arrange
from tilewright.fusion.cpp.schedule import LoopSchedule, fitted, main_kernel
from tilewright.fusion.cpp.steps import constant, expression
from tilewright.fusion.ir import REDUCTIONS, Access, Graph
from tilewright.fusion.plan import Phase, needed_in
from tilewright.fusion.program import Program
from tilewright.fusion.remembered import remembered
from tilewright.fusion.segments import cut
from tilewright.tensor_spec import HALVES

CHAIN = 64
"""Additions one after another, beyond which sums are added up in blocks and blocks in groups: of a
thousand in a chain verification refuses the roundings."""
FEWEST_LANES = 4
"""Of a vector, which the compiler knows: 16 bytes."""


def program_of(graph: Graph, schedule: LoopSchedule) -> Program:
    """The kernels that a schedule makes of a graph."""
    return _cut(graph, schedule.splits, schedule.split_rows)


@remembered
def _cut(graph: Graph, splits: int, split_rows: bool) -> Program:
    return cut(graph, splits, split_rows)


def emit(graph: Graph, schedule: LoopSchedule) -> str:
    """The complete source of a graph's kernels, with an `extern "C"` function ENTRY.

    Its arguments are pointers to inputs, outputs and temporaries, the dynamic extents of each
    kernel, the run-time scalars, the number of threads, and whether to ask for huge pages: see
    `signature`.
    """
    program = program_of(graph, schedule)
    wide = any(n.dtype in ("f64", "i64") for n in graph.nodes)
    lines = [f"#define TW_WORD_BYTES {8 if wide else 4}", f"#define TW_CHAIN {CHAIN}", _prelude()]
    loops = loops_of(program, schedule)
    for k, (each, own) in enumerate(loops):
        kernel = _Emitter(each, own).source()
        lines += [f"namespace kernel{k} {{", "namespace {", kernel, "}  // namespace", "}"]
    extents = [list(each.extents) for each, _ in loops]
    return "\n".join([*lines, entry(program, extents, graph.scalars), ""])


def loops_of(program: Program, schedule: LoopSchedule) -> list[tuple[Loops, LoopSchedule]]:
    """The loops of each kernel, and its own schedule."""
    main, segments = main_kernel(program), program.segments
    own = [schedule if k == main else fitted(schedule, s) for k, s in enumerate(segments)]
    return [(arrange(s, c.keep), c) for s, c in zip(segments, own, strict=True)]


class _Emitter:
    def __init__(self, loops: Loops, schedule: LoopSchedule):
        self.loops, self.schedule = loops, schedule
        self.plan, self.graph = loops.plan, loops.plan.graph
        self.nodes = self.graph.nodes
        self.lines: list[str] = []
        self.replicas = 1

    def source(self) -> str:
        given = self.loops.extents
        space = [(f"n{a}", n) for a, n in enumerate(self.graph.space)]
        sizes = [f"constexpr i64 {name} = {n};" for name, n in space if name not in given]
        fields = [f"{input_type(a)} x{k};" for k, a in enumerate(self.graph.inputs)]
        fields += [f"{c_type(a)}* y{k};" for k, (_, a) in enumerate(self.graph.outputs)]
        fields += [f"{C_TYPES[s]} s{k};" for k, s in enumerate(self.graph.scalars)]
        fields += [f"i64 {name};" for name in given]
        bodies = [self.item(r) for r in sorted({1, self.schedule.rows})]
        return "\n".join(
            [
                *sizes,
                f"struct Arguments {{ {' '.join(fields)} }};",
                *bodies,
                runner(self.loops, self.schedule),
            ]
        )

    # ---- one work item ----

    def item(self, replicas: int) -> str:
        """The function that computes `replicas` rows (or vectors of columns)."""
        self.lines, self.replicas = [], replicas
        outer = [f"i64 c{axis}" for axis in self.loops.outer]
        parameters, template = ", ".join(["const Arguments& a", *outer, "i64 at"]), ""
        if self.loops.kind == "pointwise":
            parameters += ", i64 begin, i64 end"
        elif self.loops.kind == "rows":
            parameters += ", char* kept"
        else:
            parameters += ", Lanes lanes, char* kept"
            template = "template <class Lanes> "
        parameters += ", i64 split" if self.loops.added else ""
        self.pointers()
        self.row_values(0)
        for p, phase in enumerate(self.plan.phases):
            self.sweep(phase)
            self.row_values(p + 1)
        self.row_stores()
        body = "\n".join(f"  {line}" for line in self.lines)
        return f"{template}void item_{replicas}({parameters}) {{\n{body}\n}}"

    def pointers(self) -> None:
        """Where each tensor's rows begin, and the memory for kept values."""
        self.lines += [f"const i64 {name} = a.{name};" for name in self.loops.extents]
        accesses = [(f"x{k}", a) for k, a in enumerate(self.graph.inputs)]
        accesses += [(f"y{k}", a) for k, (_, a) in enumerate(self.graph.outputs)]
        walked, each = self.loops.walked, " * LANES" if self.loops.kind == "columns" else ""
        for (name, access), r in itertools.product(accesses, range(self.replicas)):
            outer = [a for a in self.loops.outer if access.strides[a]]
            terms = [f"a.{name}", *(_step(f"c{a}", access.strides[a]) for a in outer)]
            if walked is not None and access.strides[walked]:
                terms.append(_step(f"(at + {r}{each})", access.strides[walked]))
            if name[0] == "y" and int(name[1:]) in self.loops.added:
                shape = self.nodes[self.loops.added[int(name[1:])]].shape
                sizes = [f"n{a}" for a, n in enumerate(shape) if n != 1]
                terms.append(" * ".join(["split", *sizes]))
            self.lines.append(f"const auto {name}_{r} = {' + '.join(terms)};")
        before: list[int] = []
        for i, r in itertools.product(self.loops.kept_values, range(self.replicas)):
            kind = C_TYPES[self.nodes[i].dtype]
            place = f"kept + ({self.loops.kept_place(before)}) * {self.loops.kept_lanes}"
            self.lines.append(f"const auto k{i}_{r} = ({kind}*)({place});")
            before.append(i)

    def copies(self, i: int) -> range:
        """The replicas in which a value differs."""
        return range(self.replicas if self.loops.is_replicated(i) else 1)

    def row_values(self, phase: int) -> None:
        """Steps that do not vary within a row, as soon as they can be known."""
        for i, n in enumerate(self.nodes):
            known = self.plan.ready[i] == phase and n.op not in REDUCTIONS
            if known and not self.plan.inner[i] and n.op != "const":
                self.define(i, swept=False)

    def row_stores(self) -> None:
        for k, (i, access) in enumerate(self.graph.outputs):
            if k in self.loops.added:
                operand = self.nodes[i].args[0]
                if not self.plan.inner[operand]:
                    self.add_up(k, i, functools.partial(self.name, operand), "")
            elif not self.plan.inner[i]:
                for r in range(self.replicas):
                    self.store(k, i, access, r, swept=False)

    def sweep(self, phase: Phase) -> None:
        """Walk the row once: the phase's reductions, stores and kept values."""
        folds = [i for i in phase.added if self.is_folded(i)]
        sums = [(i, r) for i in phase.reductions for r in self.copies(i)]
        sums += [(i, r) for i in folds for r in self.copies(self.nodes[i].args[0])]
        self.lines += [self.accumulator(i, r) for i, r in sums]
        high = [(i, r) for i, r in sums if self.is_long(i)]
        turn = f"turn{high[0][0]}" if high else ""  # phases share a scope
        self.open_walk(turn)
        self.body(phase)
        self.close_walk(turn, high)
        self.lines += [self.folded(i, r) for i, r in sums]
        for k, i in self.loops.added.items():
            if i in folds:
                self.add_up(k, i, f"v{i}_{{}}".format, "")

    def open_walk(self, turn: str) -> None:
        """The loops over a row; of long sums in blocks, which `turn` counts."""
        swept, lane, unroll = self.loops.swept, self.loops.lane, self.schedule.unroll
        outer = [a for a in swept if a != lane]
        self.lines += [f"i64 {turn} = 0;"] if turn else []
        self.lines += [f"for (i64 i{a} = 0; i{a} < n{a}; ++i{a})" for a in outer]
        if self.loops.kind == "columns":
            self.lines += ["{", f"const i64 j = {_linear(swept)} * LANES;"]
        else:
            first, last = ("begin", "end") if self.loops.kind == "pointwise" else ("0", f"n{lane}")
            if turn:
                self.lines += [
                    f"for (i64 from = {first}; from < {last}; "
                    f"from += BLOCK<{unroll}>, ++{turn}) {{",
                    f"const i64 to = from + BLOCK<{unroll}> < {last} ? from + BLOCK<{unroll}>"
                    f" : {last};",
                ]
                first, last = "from", "to"
            self.lines += [
                f"sweep<{unroll}>({first}, {last},",
                f"      [&](auto lanes, i64 i{lane}, auto u) TW_LAMBDA {{",
                f"const i64 j = {_linear([*outer, lane])};",
            ]

    def close_walk(self, turn: str, high: list[tuple[int, int]]) -> None:
        """Ends what `open_walk` began. Of the long sums `high` blocks are joined by levels."""
        blocks = [self.raised(i, r, "a", "b") for i, r in high]
        groups = [self.raised(i, r, "b", "c") for i, r in high]
        if self.loops.kind != "columns":
            self.lines.append("});")
            if high:
                self.lines += [*blocks, f"if ({turn} % TURNS == TURNS - 1) {{", *groups, "}", "}"]
                self.lines += groups
        else:
            if high:
                self.lines += [f"if (++{turn} % CHAIN == 0) {{", *blocks]
                self.lines += [f"if ({turn} % (CHAIN * TURNS) == 0) {{", *groups, "}", "}"]
            self.lines += ["}", *blocks, *groups]

    def is_folded(self, i: int) -> bool:
        """Whether a sweep adds up a reduction over other axes in registers, lanes and all."""
        operand = self.nodes[i].args[0]
        return self.plan.inner[operand] and self.nodes[i].shape[self.loops.lane] == 1

    def add_up(self, k: int, i: int, value: Callable[[int], str], lanes: str) -> None:
        """Add values to the partial of a result that output `k` holds. Rows that it does not tell
        apart are joined first: memory is touched once for all of them."""
        join = COMBINE[self.nodes[i].op][0]
        access = self.graph.outputs[k][1]
        copies = self.copies(self.nodes[i].args[0])
        apart = self.loops.walked is not None and self.nodes[i].shape[self.loops.walked] != 1
        groups = [[r] for r in copies] if apart else [list(copies)]
        for group in groups:
            total = value(group[0])
            for r in group[1:]:
                total = f"{join}({total}, {value(r)})"
            address = self.address(f"y{k}", access, group[0], swept=bool(lanes))
            self.lines.append(f"store({address}, {join}(load({address}{lanes}), {total}){lanes});")

    def body(self, phase: Phase) -> None:
        wanted = {self.nodes[i].args[0] for i in phase.reductions} | set(phase.carried_out)
        wanted |= {self.graph.outputs[k][0] for k in phase.stores}
        added = [i for i in phase.added if self.plan.inner[self.nodes[i].args[0]]]
        wanted |= {self.nodes[i].args[0] for i in added}
        for i in sorted(phase.carried_in):
            for r in self.copies(i):
                self.lines.append(f"const auto v{i}_{r} = load(k{i}_{r} + j, {self.kept_mask});")
        for i in needed_in(self.graph, wanted, phase.carried_in):
            if self.plan.inner[i]:
                self.define(i, swept=True)
                if self.schedule.prefetch and phase is self.plan.phases[0]:
                    self.prefetch(i)
        for k in phase.stores:
            i, access = self.graph.outputs[k]
            for r in range(self.replicas):
                self.store(k, i, access, r, swept=True)
        for i in sorted(phase.carried_out - phase.carried_in):
            for r in self.copies(i):
                self.lines.append(f"store(k{i}_{r} + j, v{i}_{r}, {self.kept_mask});")
        for k, i in self.loops.added.items():
            if i in added and not self.is_folded(i):
                operand = self.nodes[i].args[0]
                self.add_up(k, i, functools.partial(self.vector, operand), ", lanes")
        for i in (*phase.reductions, *(i for i in added if self.is_folded(i))):
            combine, identity = COMBINE[self.nodes[i].op]
            kind = C_TYPES[self.nodes[i].dtype]
            for r in self.copies(self.nodes[i].args[0] if i in added else i):
                value = self.vector(self.nodes[i].args[0], r)
                if self.loops.kind == "columns":
                    self.lines.append(f"a{i}_{r} = {combine}(a{i}_{r}, {value});")
                else:
                    value = f"live({value}, ({kind}){identity}, lanes)"
                    self.lines.append(f"a{i}_{r}[u] = {combine}(a{i}_{r}[u], {value});")

    @property
    def kept_mask(self) -> str:
        return "All{}" if self.loops.kind == "columns" else "lanes"

    # ---- reductions ----

    def is_long(self, i: int) -> bool:
        """Whether a sum's chains of additions would be so long that their roundings show: then it
        is added up in blocks, and the blocks in groups."""
        width = POINTWISE_BLOCK if self.loops.kind == "pointwise" else self.loops.row_width
        together = 1 if self.loops.kind == "columns" else FEWEST_LANES
        return self.nodes[i].op in ("sum", "prod") and width > CHAIN * together

    @property
    def several_blocks(self) -> str:
        """Whether a row has more than one, a constant of the source; "true" if it may."""
        given = self.loops.lane in self.loops.dynamic
        if given or self.loops.kind == "pointwise" or self.loops.swept != (self.loops.lane,):
            return "true"
        return f"(n{self.loops.lane} > BLOCK<{self.schedule.unroll}>)"

    def raised(self, i: int, r: int, level: str, to: str) -> str:
        join, identity = COMBINE[self.nodes[i].op]
        kind = C_TYPES[self.nodes[i].dtype]
        function = f"[](auto p, auto q) TW_LAMBDA {{ return {join}(p, q); }}"
        several = f"raise<{self.several_blocks}>"
        return f"{several}({level}{i}_{r}, {to}{i}_{r}, splat(({kind}){identity}), {function});"

    def accumulator(self, i: int, r: int) -> str:
        kind, (_, identity) = C_TYPES[self.nodes[i].dtype], COMBINE[self.nodes[i].op]
        start = f"splat(({kind}){identity})"
        levels = [f"{level}{i}_{r}" for level in ("abc" if self.is_long(i) else "a")]
        if self.loops.kind == "columns":
            return f"Vec<{kind}> {', '.join(f'{level} = {start}' for level in levels)};"
        starts = ", ".join([start] * self.schedule.unroll)
        sums = [f"{level}[{self.schedule.unroll}] = {{{starts}}}" for level in levels]
        return f"Vec<{kind}> {', '.join(sums)};"

    def folded(self, i: int, r: int) -> str:
        combine, _ = COMBINE[self.nodes[i].op]
        name = f"v{i}_{r}"
        level = "c" if self.is_long(i) else "a"
        if self.loops.kind == "columns":
            alike = "" if self.loops.is_vector(i) else "[0]"  # of columns that are all the same
            return f"const auto {name} = {level}{i}_{r}{alike};"
        function = f"[](auto p, auto q) TW_LAMBDA {{ return {combine}(p, q); }}"
        kind = C_TYPES[self.nodes[i].dtype]
        return f"const {kind} {name} = fold<{kind}>({level}{i}_{r}, {function});"

    # ---- steps ----

    def define(self, i: int, swept: bool) -> None:
        if self.nodes[i].op == "const":
            return
        for r in self.copies(i):
            value = self.load(i, r, swept) if self.nodes[i].op == "load" else self.step(i, r)
            self.lines.append(f"const auto {self.name(i, r)} = {value};")

    def name(self, i: int, r: int) -> str:
        n = self.nodes[i]
        if n.op == "const":
            return constant(n)
        return f"v{i}_{r if self.loops.is_replicated(i) else 0}"

    def vector(self, i: int, r: int) -> str:
        return self.name(i, r) if self.loops.is_vector(i) else f"splat({self.name(i, r)})"

    def address(self, name: str, access: Access, r: int, swept: bool) -> str:
        terms = [f"{name}_{r}"]
        for axis in self.loops.swept if swept else ():
            if access.strides[axis]:
                terms.append(_step(f"i{axis}", access.strides[axis]))
        return " + ".join(terms)

    def load(self, i: int, r: int, swept: bool) -> str:
        index = self.nodes[i].attr
        access = self.graph.inputs[index]
        address = self.address(f"x{index}", access, r, swept)
        stride = access.strides[self.loops.lane]
        if not self.loops.is_vector(i):
            value = f"load({address})"
        elif stride == 1:
            value = f"load({address}, lanes)"
        else:
            value = f"gather({address}, {stride}, lanes)"
        return self.entering(value, access.dtype)

    def prefetch(self, i: int) -> None:
        """Ask for what the next rows read where these read node `i`."""
        if self.nodes[i].op != "load" or self.graph.generated(i):
            return
        index = self.nodes[i].attr
        access, walked = self.graph.inputs[index], self.loops.walked
        if walked is None or not access.strides[walked]:
            return
        for r in range(self.replicas):
            address = self.address(f"x{index}", access, r, swept=True)
            ahead = _step(str(self.replicas), access.strides[walked])
            self.lines.append(f"__builtin_prefetch({address} + {ahead}, 0, 2);")

    def entering(self, value: str, dtype: str) -> str:
        """A value from outside of the kernel, of which roundings to bf16 ask for plain NaNs."""
        rounds = dtype in ("f16", "f32", "f64") and any(n.dtype == "bf16" for n in self.nodes)
        return f"plain_nan({value})" if rounds else value

    def store(self, k: int, i: int, access: Access, r: int, swept: bool) -> None:
        address = self.address(f"y{k}", access, r, swept)
        stride = access.strides[self.loops.lane]
        n = self.nodes[i]
        rounds = n.op == "cast" and n.dtype in HALVES and self.nodes[n.args[0]].dtype == "f32"
        if rounds and i not in self.loops.kept_values:
            i = n.args[0]  # the store rounds
        if not stride:
            self.lines.append(f"store({address}, {self.name(i, r)});")
        elif stride != 1:
            self.lines.append(f"scatter({address}, {stride}, {self.vector(i, r)}, lanes);")
        else:
            write = "stream" if self.schedule.stream_stores else "store"
            self.lines.append(f"{write}({address}, {self.vector(i, r)}, lanes);")

    def step(self, i: int, r: int) -> str:
        n = self.nodes[i]
        if n.op == "scalar":
            return self.entering(f"a.s{n.attr}", n.dtype)
        vector = self.loops.is_vector(i)
        args = [self.vector(a, r) if vector else self.name(a, r) for a in n.args]
        if n.op == "where":
            args[0] = self.name(n.args[0], r)
        if n.op in ("maximum", "minimum") and {*self.nodes[n.args[1]].shape} <= {1}:
            args.reverse()  # of two zeros they give the second: not the bound, as PyTorch's clamp
        of_booleans = bool(n.args) and self.nodes[n.args[0]].dtype == "bool"
        if of_booleans and n.op in ("eq", "ne"):
            differ = f"differing({', '.join(args)})"
            return differ if n.op == "ne" else f"negated({differ})"
        return expression(n, args, vector and n.op == "cast" and of_booleans)


def _linear(axes: Iterable[int]) -> str:
    """The row-major index over `axes`."""
    first, *rest = axes
    index = f"i{first}"
    for a in rest:
        index = f"({index} * n{a} + i{a})"
    return index


def _step(index: str, stride: int) -> str:
    return index if stride == 1 else f"{index} * {stride}"


@functools.cache
def _prelude() -> str:
    folder = resources.files("tilewright") / "kernels"
    names = ("prelude.hpp", "prelude_steps.hpp", "prelude_functions.hpp")
    return "\n".join((folder / name).read_text() for name in names)
