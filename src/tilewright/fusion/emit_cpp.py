"""From a graph and a schedule to C++ with OpenMP.

One axis is the lane axis: vectors run along it. There are three shapes of kernel:

    pointwise   no reductions: a work item is a block of the lane axis, of one or a few rows
    rows        the lane axis is reduced: an item is one or a few rows; accumulators are vectors
                whose lanes are folded at the end of a sweep
    columns     the reduced axes are not contiguous, the lane axis is kept: an item is one or a
                few vectors of neighbouring columns, and nothing is folded

In all of them a work item walks `replicas` (rows, or vectors of columns) together and sweeps once
per phase of the plan. The outermost axis is counted at run time unless it is reduced; all other
sizes and strides are constants of the source.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib import resources

from tilewright.fusion.cpp_schedule import LoopSchedule
from tilewright.fusion.ir import REDUCTIONS, Access, Graph, Node
from tilewright.fusion.plan import Phase, Plan, needed_in, plan_rows
from tilewright.op import HALVES, TensorSpec

ENTRY = "tw_kernel"
POINTWISE_BLOCK = 16384
"""Elements of the lane axis in one work item: enough to hide its start, few enough to share out."""

_C_TYPES = {
    **{"f16": "f16", "bf16": "bf16", "f32": "float", "f64": "double"},
    **{"i32": "i32", "i64": "i64", "bool": "boolean"},
}
_OPERATORS = {
    **{"add": "+", "sub": "-", "mul": "*", "div": "/"},
    **{"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="},
}
_EXPRESSIONS = {
    "neg": "-{0}",
    "rsqrt": "1 / square_root({0})",
    "reciprocal": "1 / {0}",
    "isnan": "{0} != {0}",
}
_FUNCTIONS = {
    **{"pow": "power", "maximum": "maximum", "minimum": "minimum", "and": "both", "or": "either"},
    **{"not": "negated", "where": "where", "abs": "absolute", "sqrt": "square_root"},
    **{"exp": "exponential", "exp2": "exponential2", "expm1": "exponential_m1"},
    **{"log": "logarithm", "log2": "logarithm2", "log1p": "logarithm1p"},
    **{"tanh": "hyperbolic_tangent", "erf": "error_function", "sin": "sine", "cos": "cosine"},
    **{"floor": "rounded_down", "ceil": "rounded_up", "round": "rounded_even"},
    **{"trunc": "truncated", "sign": "sign_of"},
}
_COMBINE = {
    "sum": ("added", "0"),
    "prod": ("multiplied", "1"),
    "amax": ("maximum", "-__builtin_inf()"),
    "amin": ("minimum", "__builtin_inf()"),
}


@dataclass(frozen=True)
class Loops:
    """How a plan's axes become loops.

    Attributes:
        lane: the axis that vectors run along.
        swept: axes that one work item walks: the reduced ones, or the lane axis.
        rows: the axes that number the work items, the lane axis not among them.
    """

    plan: Plan
    lane: int
    swept: tuple[int, ...]
    rows: tuple[int, ...]

    @property
    def kind(self) -> str:
        if not self.plan.graph.reductions:
            return "pointwise"
        return "rows" if self.lane in self.swept else "columns"

    @property
    def row_width(self) -> int:
        return math.prod(self.plan.graph.space[a] for a in self.swept)

    def is_vector(self, i: int) -> bool:
        return self.plan.graph.nodes[i].shape[self.lane] != 1

    def is_replicated(self, i: int) -> bool:
        """Whether the rows (or vectors of columns) of a work item have different values."""
        shape = self.plan.graph.nodes[i].shape
        axes = (*self.rows, self.lane) if self.kind == "columns" else self.rows
        return any(shape[a] != 1 for a in axes)


def arrange(graph: Graph, keep: str) -> Loops:
    """Choose the lane axis, the one along which most bytes are contiguous, and the phases."""
    if not graph.space:
        graph = _with_one_axis(graph)
    accesses = [*graph.inputs, *(a for _, a in graph.outputs)]
    contiguous = [
        sum(_bytes(graph, access) for access in accesses if access.strides[axis] == 1)
        for axis in range(len(graph.space))
    ]
    last = graph.reduced[-1] if graph.reductions else len(graph.space) - 1
    lane = max(range(len(graph.space)), key=lambda a: (contiguous[a], a == last))
    if lane in graph.reduced:
        lane = last if contiguous[lane] == contiguous[last] else lane
    if graph.reductions:
        plan = plan_rows(graph, "two_pass", recompute=keep == "bytes")
        swept = (*(a for a in graph.reduced if a != lane), *(a for a in graph.reduced if a == lane))
    else:
        plan, swept = _pointwise_plan(graph, lane), (lane,)
    rows = tuple(a for a in range(len(graph.space)) if a not in swept and a != lane)
    loops = Loops(plan, lane, swept, rows)
    phases = plan.phases
    kept = [frozenset(i for i in p.carried_out if _worth_keeping(loops, i, keep)) for p in phases]
    trimmed = tuple(
        replace(phase, carried_in=before, carried_out=after)
        for phase, before, after in zip(phases, [frozenset[int](), *kept], kept, strict=False)
    )
    return replace(loops, plan=replace(plan, phases=trimmed))


def kept_values(loops: Loops) -> list[int]:
    """Values that some sweep keeps for a later one."""
    return sorted(frozenset[int]().union(*(p.carried_out for p in loops.plan.phases)))


def emit(graph: Graph, schedule: LoopSchedule) -> str:
    """The complete source of a kernel, with an `extern "C"` function ENTRY.

    Its arguments are input pointers, output pointers, the outermost axis' size, the run-time
    scalars, the number of threads, and whether to ask for huge pages: see `signature`.
    """
    return _Emitter(arrange(graph, schedule.keep), schedule).source()


def signature(graph: Graph) -> str:
    """Struct codes of the entry's arguments, as compile.launch has them."""
    pointers = "P" * (len(graph.inputs) + len(graph.outputs))
    return f"{pointers}q{''.join('d' if s == 'f64' else 'f' for s in graph.scalars)}qq"


class _Emitter:
    def __init__(self, loops: Loops, schedule: LoopSchedule):
        self.loops, self.schedule = loops, schedule
        self.plan, self.graph = loops.plan, loops.plan.graph
        self.nodes = self.graph.nodes
        self.kept_values = kept_values(loops)
        self.lines: list[str] = []
        self.replicas = 1

    def source(self) -> str:
        space, reduced = self.graph.space, self.graph.reduced
        sizes = [f"constexpr i64 n{a} = {n};" for a, n in enumerate(space) if a or 0 in reduced]
        fields = [f"const {_c(a)}* x{k};" for k, a in enumerate(self.graph.inputs)]
        fields += [f"{_c(a)}* y{k};" for k, (_, a) in enumerate(self.graph.outputs)]
        fields += [f"{_C_TYPES[s]} s{k};" for k, s in enumerate(self.graph.scalars)]
        fields += ["i64 n0;"] if 0 not in reduced else []
        wide = any(n.dtype in ("f64", "i64") for n in self.nodes)
        bodies = [self.item(r) for r in sorted({1, self.schedule.rows})]
        return "\n".join(
            [
                f"#define TW_WORD_BYTES {8 if wide else 4}",
                _prelude(),
                "namespace {",
                *sizes,
                f"struct Arguments {{ {' '.join(fields)} }};",
                *bodies,
                "}  // namespace",
                self.entry(),
                "",
            ]
        )

    # ---- one work item ----

    def item(self, replicas: int) -> str:
        """The function that computes `replicas` rows (or vectors of columns)."""
        self.lines, self.replicas = [], replicas
        parameters, template = "const Arguments& a, i64 first", ""
        if self.loops.kind == "pointwise":
            parameters += ", i64 begin, i64 end"
        elif self.loops.kind == "rows":
            parameters += ", char* kept"
        else:
            parameters += ", i64 column, Lanes lanes, char* kept"
            template = "template <class Lanes> "
        self.pointers()
        self.row_values(0)
        for p, phase in enumerate(self.plan.phases):
            self.sweep(phase)
            self.row_values(p + 1)
        self.row_stores()
        body = "\n".join(f"  {line}" for line in self.lines)
        return f"{template}void item_{replicas}({parameters}) {{\n{body}\n}}"

    def pointers(self) -> None:
        """Where each tensor's part begins, and the memory for kept values."""
        rows = self.loops.rows
        if 0 not in self.graph.reduced:
            self.lines.append("const i64 n0 = a.n0; (void)n0;")
        for r in range(self.replicas):
            step = r if self.loops.kind != "columns" else 0
            self.lines.append(f"i64 q_{r} = first + {step};")
            for axis in reversed(rows[1:]):
                self.lines.append(f"const i64 c{axis}_{r} = q_{r} % n{axis}; q_{r} /= n{axis};")
            if rows:
                self.lines.append(f"const i64 c{rows[0]}_{r} = q_{r};")
            self.lines.append(f"(void)q_{r};")
        accesses = [(f"x{k}", a) for k, a in enumerate(self.graph.inputs)]
        accesses += [(f"y{k}", a) for k, (_, a) in enumerate(self.graph.outputs)]
        for name, access in accesses:
            for r in range(self.replicas):
                parts = [f"c{a}_{r} * {access.strides[a]}" for a in rows if access.strides[a]]
                if self.loops.kind == "columns" and access.strides[self.loops.lane]:
                    parts.append(f"(column + {r} * LANES) * {access.strides[self.loops.lane]}")
                offset = "".join(f" + {part}" for part in parts)
                self.lines.append(f"const auto {name}_{r} = a.{name}{offset}; (void){name}_{r};")
        offset = 0
        for i, r in itertools.product(self.kept_values, range(self.replicas)):
            kind = _C_TYPES[self.nodes[i].dtype]
            place = f"kept + {offset} * {self.kept_lanes}"
            self.lines.append(f"const auto k{i}_{r} = ({kind}*)({place}); (void)k{i}_{r};")
            offset += self.kept_bytes(i)

    @property
    def kept_lanes(self) -> str:
        """Kept values of one element of the row: one, or one for each of a vector of columns."""
        return "LANES" if self.loops.kind == "columns" else "1"

    def kept_bytes(self, i: int) -> int:
        size = TensorSpec(self.nodes[i].dtype, ()).itemsize
        return math.ceil(self.loops.row_width * size / 64) * 64

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
            if not self.plan.inner[i]:
                for r in range(self.replicas):
                    self.store(k, i, access, r, swept=False)

    def sweep(self, phase: Phase) -> None:
        """Walk the row once: the phase's reductions, stores and kept values."""
        sums = [(i, r) for i in phase.reductions for r in self.copies(i)]
        self.lines += [self.accumulator(i, r) for i, r in sums]
        swept, lane = self.loops.swept, self.loops.lane
        for axis in swept:
            if axis != lane:
                self.lines.append(f"for (i64 i{axis} = 0; i{axis} < n{axis}; ++i{axis})")
        self.lines.append("{")
        if self.loops.kind == "columns":
            self.lines.append(f"const i64 j = ({_linear(swept)}) * LANES; (void)j;")
        else:
            before = _linear([a for a in swept if a != lane])
            self.lines.append(f"const i64 row = ({before}) * n{lane}; (void)row;")
            limits = "begin, end" if self.loops.kind == "pointwise" else f"0, n{lane}"
            unroll = self.schedule.unroll
            self.lines.append(
                f"sweep<{unroll}>({limits}, [&](auto lanes, i64 i{lane}, auto u) TW_LAMBDA {{"
            )
            self.lines.append(f"const i64 j = row + i{lane}; (void)j; (void)u;")
        self.body(phase)
        self.lines.append("}" if self.loops.kind == "columns" else "}); }")
        self.lines += [self.folded(i, r) for i, r in sums]

    def body(self, phase: Phase) -> None:
        wanted = {self.nodes[i].args[0] for i in phase.reductions} | set(phase.carried_out)
        wanted |= {self.graph.outputs[k][0] for k in phase.stores}
        for i in sorted(phase.carried_in):
            for r in self.copies(i):
                self.lines.append(f"const auto v{i}_{r} = load(k{i}_{r} + j, {self.kept_mask});")
        for i in needed_in(self.graph, wanted, phase.carried_in):
            if self.plan.inner[i]:
                self.define(i, swept=True)
        for k in phase.stores:
            i, access = self.graph.outputs[k]
            for r in range(self.replicas):
                self.store(k, i, access, r, swept=True)
        for i in sorted(phase.carried_out - phase.carried_in):
            for r in self.copies(i):
                self.lines.append(f"store(k{i}_{r} + j, v{i}_{r}, {self.kept_mask});")
        for i in phase.reductions:
            combine, identity = _COMBINE[self.nodes[i].op]
            kind = _C_TYPES[self.nodes[i].dtype]
            for r in self.copies(i):
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

    def accumulator(self, i: int, r: int) -> str:
        kind, (_, identity) = _C_TYPES[self.nodes[i].dtype], _COMBINE[self.nodes[i].op]
        start = f"splat(({kind}){identity})"
        if self.loops.kind == "columns":
            return f"Vec<{kind}> a{i}_{r} = {start};"
        starts = ", ".join([start] * self.schedule.unroll)
        return f"Vec<{kind}> a{i}_{r}[{self.schedule.unroll}] = {{{starts}}};"

    def folded(self, i: int, r: int) -> str:
        combine, _ = _COMBINE[self.nodes[i].op]
        name = self.name(i, r)
        if self.loops.kind == "columns":
            return f"const auto {name} = a{i}_{r};"
        function = f"[](auto p, auto q) TW_LAMBDA {{ return {combine}(p, q); }}"
        kind = _C_TYPES[self.nodes[i].dtype]
        return f"const {kind} {name} = fold<{kind}>(a{i}_{r}, {function});"

    # ---- steps ----

    def define(self, i: int, swept: bool) -> None:
        if self.nodes[i].op == "const":
            return
        for r in self.copies(i):
            value = self.load(i, r, swept) if self.nodes[i].op == "load" else self.step(i, r)
            self.lines.append(f"const auto {self.name(i, r)} = {value}; (void){self.name(i, r)};")

    def name(self, i: int, r: int) -> str:
        n = self.nodes[i]
        if n.op == "const":
            return literal(n)
        return f"v{i}_{r if self.loops.is_replicated(i) else 0}"

    def vector(self, i: int, r: int) -> str:
        return self.name(i, r) if self.loops.is_vector(i) else f"splat({self.name(i, r)})"

    def address(self, name: str, access: Access, r: int, swept: bool) -> str:
        terms = [f"{name}_{r}"]
        for axis in self.loops.swept if swept else ():
            if access.strides[axis]:
                terms.append(f"i{axis} * {access.strides[axis]}")
        return " + ".join(terms)

    def load(self, i: int, r: int, swept: bool) -> str:
        index = self.nodes[i].attr
        access = self.graph.inputs[index]
        address = self.address(f"x{index}", access, r, swept)
        if not self.loops.is_vector(i):
            return f"load({address})"
        stride = access.strides[self.loops.lane]
        return f"load({address}, lanes)" if stride == 1 else f"gather({address}, {stride}, lanes)"

    def store(self, k: int, i: int, access: Access, r: int, swept: bool) -> None:
        address = self.address(f"y{k}", access, r, swept)
        stride = access.strides[self.loops.lane]
        n = self.nodes[i]
        if n.op == "cast" and n.dtype in HALVES and self.nodes[n.args[0]].dtype == "f32":
            i = n.args[0]  # a store rounds: the cast need not
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
            return f"a.s{n.attr}"
        vector = self.loops.is_vector(i)
        args = [self.vector(a, r) if vector else self.name(a, r) for a in n.args]
        if n.op == "cast":
            return self.cast(n, args[0], vector)
        if n.op == "where":
            args[0] = self.name(n.args[0], r)
        if n.op in _OPERATORS:
            value = f"{args[0]} {_OPERATORS[n.op]} {args[1]}"
        elif n.op in _EXPRESSIONS:
            value = _EXPRESSIONS[n.op].format(*args)
        else:
            value = f"{_FUNCTIONS[n.op]}({', '.join(args)})"
        return f"rounded<{n.dtype}>({value})" if n.dtype in HALVES else value

    def cast(self, n: Node, value: str, vector: bool) -> str:
        kind = _C_TYPES[n.dtype]
        if vector and self.nodes[n.args[0]].dtype == "bool":
            return f"cast_mask<{kind}>({value})"
        return f"cast<{kind}>({value})"

    # ---- the entry ----

    def entry(self) -> str:
        graph, loops = self.graph, self.loops
        parameters = [f"const void* x{k}" for k in range(len(graph.inputs))]
        parameters += [f"void* y{k}" for k in range(len(graph.outputs))]
        parameters += ["i64 count"]
        parameters += [f"{_C_TYPES[s]} s{k}" for k, s in enumerate(graph.scalars)]
        values = [f"(const {_c(a)}*)x{k}" for k, a in enumerate(graph.inputs)]
        values += [f"({_c(a)}*)y{k}" for k, (_, a) in enumerate(graph.outputs)]
        values += [f"s{k}" for k in range(len(graph.scalars))]
        values += ["count"] if 0 not in graph.reduced else []
        size = "n0" if 0 in graph.reduced else "count"
        advice = [
            f"  if (huge_pages) advise_huge_pages(y{k}, {_extent(graph, access, size)});"
            for k, (_, access) in enumerate(graph.outputs)
        ]
        rows = " * ".join([size if a == 0 else f"n{a}" for a in loops.rows]) or "1"
        lane_size = size if loops.lane == 0 else f"n{loops.lane}"
        kept = sum(map(self.kept_bytes, self.kept_values)) * self.schedule.rows
        allocate = f"(char*)aligned_alloc(64, {kept} * {self.kept_lanes})" if kept else "nullptr"
        return "\n".join(
            [
                f'extern "C" void {ENTRY}({", ".join(parameters)}, i64 threads, i64 huge_pages) {{',
                f"  const Arguments a = {{{', '.join(values)}}};",
                *advice,
                f"  const i64 rows = {rows}, together = {self.schedule.rows};",
                *self.items(lane_size),
                "#pragma omp parallel num_threads(threads) if (threads > 1 && items > 1)",
                "  {",
                f"    char* kept = {allocate};",
                "    (void)kept;",
                *(["    if (!kept) abort();"] if kept else []),
                "#pragma omp for schedule(static)",
                "    for (i64 item = 0; item < items; ++item) {",
                *self.dispatch(lane_size),
                "    }",
                *(["    free(kept);"] if kept else []),
                *(["    finish_streams();"] if self.schedule.stream_stores else []),
                "  }",
                "}",
            ]
        )

    def items(self, lane_size: str) -> list[str]:
        groups = "(rows + together - 1) / together"
        if self.loops.kind == "rows":
            return [f"  const i64 items = {groups};"]
        if self.loops.kind == "columns":
            stripes = f"({lane_size} + together * LANES - 1) / (together * LANES)"
            return [f"  const i64 stripes = {stripes}, items = rows * stripes;"]
        blocks = f"({lane_size} + {POINTWISE_BLOCK - 1}) / {POINTWISE_BLOCK}"
        return [f"  const i64 blocks = {blocks}, items = ({groups}) * blocks;"]

    def dispatch(self, lane_size: str) -> list[str]:
        rows = self.schedule.rows
        if self.loops.kind == "columns":
            return [
                "      const i64 first = item / stripes, column = item % stripes * together * LANES;",
                f"      if (column + together * LANES <= {lane_size})",
                f"        item_{rows}(a, first, column, All{{}}, kept);",
                "      else",
                f"        for (i64 c = column; c < {lane_size}; c += LANES) {{",
                f"          if (c + LANES <= {lane_size}) item_1(a, first, c, All{{}}, kept);",
                f"          else item_1(a, first, c, First{{{lane_size} - c}}, kept);",
                "        }",
            ]
        if self.loops.kind == "rows":
            head, rest = ["      const i64 first = item * together;"], "kept"
        else:
            head, rest = (
                [
                    "      const i64 first = item / blocks * together;",
                    f"      const i64 begin = item % blocks * {POINTWISE_BLOCK};",
                    f"      const i64 last = begin + {POINTWISE_BLOCK};",
                    f"      const i64 end = last < {lane_size} ? last : {lane_size};",
                ],
                "begin, end",
            )
        return [
            *head,
            f"      if (first + together <= rows) item_{rows}(a, first, {rest});",
            f"      else for (i64 r = first; r < rows; ++r) item_1(a, r, {rest});",
        ]


def literal(n: Node) -> str:
    """A constant of a graph as exact C++ text."""
    kind = _C_TYPES[n.dtype]
    if n.dtype == "bool":
        return "true" if n.attr else "false"
    if n.dtype in ("i32", "i64"):
        return f"({kind}){int(n.attr)}"
    value = float(n.attr)
    register = "double" if n.dtype == "f64" else "float"
    if math.isnan(value):
        return f'({register})__builtin_nan("")'
    if math.isinf(value):
        return f"({register}){'-' if value < 0 else ''}__builtin_inf()"
    return f"({register}){value.hex()}"


def _with_one_axis(graph: Graph) -> Graph:
    def widened(access: Access) -> Access:
        return replace(access, strides=(0,))

    return replace(
        graph,
        space=(1,),
        nodes=tuple(replace(n, shape=(1,)) for n in graph.nodes),
        inputs=tuple(widened(a) for a in graph.inputs),
        outputs=tuple((i, widened(a)) for i, a in graph.outputs),
    )


def _pointwise_plan(graph: Graph, lane: int) -> Plan:
    inner = tuple(n.shape[lane] != 1 for n in graph.nodes)
    stores = tuple(k for k, (i, _) in enumerate(graph.outputs) if inner[i])
    phase = Phase((), stores, frozenset(), frozenset())
    return Plan(graph, (phase,), inner, (0,) * len(graph.nodes))


def _worth_keeping(loops: Loops, i: int, keep: str) -> bool:
    """A contiguous load is its own memory; what is no vector is cheap."""
    n = loops.plan.graph.nodes[i]
    if keep == "nothing" or not loops.is_vector(i):
        return False
    return n.op != "load" or loops.plan.graph.inputs[n.attr].strides[loops.lane] != 1


def _linear(axes: Iterable[int]) -> str:
    """The row-major index over `axes`."""
    index = "0"
    for a in axes:
        index = f"i{a}" if index == "0" else f"({index}) * n{a} + i{a}"
    return index


def _extent(graph: Graph, access: Access, count: str) -> str:
    steps = [
        f"({count if axis == 0 else graph.space[axis]} - 1) * {stride}"
        for axis, stride in enumerate(access.strides)
        if stride
    ]
    return f"({' + '.join([*steps, '1'])}) * {access.itemsize}"


def _bytes(graph: Graph, access: Access) -> int:
    sizes = [n for n, s in zip(graph.space, access.strides, strict=True) if s]
    return math.prod(sizes) * access.itemsize


def _c(access: Access) -> str:
    return _C_TYPES[access.dtype]


@functools.cache
def _prelude() -> str:
    return (resources.files("tilewright") / "kernels" / "prelude.hpp").read_text()
