"""A tile kernel in CUDA: blocks walk their tiles and leave results, or parts of results.

Names that the emitted lines share:

x, y: the thread's lane, and its share of the walk.
piece, chunk, grid0..: the block's place along the lane, on the walk, and on the other axes.
column: where the thread's vector starts along the lane; inside: whether there is one.
w, walk0..: the step of the walk and its coordinates; live: whether it is one of this thread's.
"""

from __future__ import annotations

import math

from tilewright.fusion.cuda.kernel import JOINS, TYPES, Kernel
from tilewright.fusion.cuda.schedule import access_bytes
from tilewright.fusion.cuda.tiles import WARP, Tiles
from tilewright.fusion.ir import Access
from tilewright.fusion.plan import Phase, needed_in


class TileKernel(Kernel):
    """The body of a tile kernel as a device function of the number of its block."""

    def __init__(self, tiles: Tiles):
        super().__init__(tiles.plan.graph)
        self.tiles, self.area, self.s = tiles, tiles.area, tiles.s
        self.plan = tiles.plan
        self.ends = {i: k for k, i in tiles.area.added.items()}
        """By reduction that is added up: the position of the output that takes its parts."""
        self.names: dict[int, str] = {}
        """Per node that does not vary along the walk: its expression."""
        self.shared_bytes = 0
        # 64-bit where an index of twice the elements would not stay within 32.
        self.index = "int" if max(self.area.width, self.area.steps) < 2**30 else "i64"
        self.coordinate = {a: f"grid{a}" for a in self.area.grid}

    def emit(self, name: str) -> str:
        self.draw(range(len(self.graph.inputs)))
        self.place()
        self.pointers()
        if self.area.added:
            self.add_up()
        else:
            self.complete()
        shared = f"  __shared__ Quad shared[{math.ceil(self.shared_bytes / 16)}];"
        parameters = ", ".join(["i64 block", *self.tensors(), *self.numbers()])
        head = f"TW_DEVICE void {name}({parameters}) {{"
        return "\n".join([head, *([shared] if self.shared_bytes else []), *self.lines, "}", ""])

    def tensors(self) -> list[str]:
        return self.parameters_of_kernel()[: len(self.graph.inputs) + len(self.graph.outputs)]

    def numbers(self) -> list[str]:
        return [f"{TYPES[d]} scalar{i}" for i, d in enumerate(self.graph.scalars)]

    # ---- where a thread is ---------------------------------------------------------------------

    def place(self) -> None:
        t = self.tiles
        self.line(f"const int x = threadIdx.x % {t.lanes}, y = threadIdx.x / {t.lanes};")
        self.line("i64 rest = block;")
        for name, count in (("piece", t.pieces), ("chunk", t.chunks)):
            self.line(f"const int {name} = rest % {count};")
            self.line(f"rest /= {count};")
        for a in reversed(self.area.grid[1:]):
            self.line(f"const i64 grid{a} = rest % {self.graph.space[a]};")
            self.line(f"rest /= {self.graph.space[a]};")
        if self.area.grid:
            self.line(f"const i64 grid{self.area.grid[0]} = rest;")
        self.line(f"const {self.index} begin = ({self.index})chunk * {t.chunk_steps};")
        end = f"begin + {t.chunk_steps}"
        steps = self.area.steps
        self.line(f"const {self.index} end = {end} < {steps} ? {end} : {steps};")

    def pointers(self) -> None:
        """Where the block's own coordinates lead in every tensor."""
        grid = self.area.grid
        for i, access in enumerate(self.graph.inputs):
            offset = self.offset(access, grid, self.coordinate)
            self.line(f"const auto from{i} = in{i} + {offset};")
        for k, (i, access) in enumerate(self.graph.outputs):
            offset = self.offset(access, grid, self.coordinate)
            if i in self.ends and k == self.ends[i]:
                whole = math.prod(self.graph.nodes[i].shape)
                offset += f" + {self.part(i)} * {whole}"
            self.pointer_to(k, offset)

    def pointer_to(self, k: int, offset: str) -> None:
        """Where the block's results of output `k` begin."""
        self.line(f"auto* to{k} = out{k} + {offset};")

    def part(self, i: int) -> str:
        """The number of the part of reduction `i` that this block, or warp, leaves."""
        number = "(i64)0"
        for name, count in self.tiles.parts_of(i):
            number = f"({number} * {count} + {name})"
        return number

    def open_columns(self, turn: str = "") -> None:
        s, t = self.s, self.tiles
        place = f"(piece * {s.turns}{turn})" if s.turns > 1 else "piece"
        column = f"(({self.index}){place} * {t.lanes} + x) * {s.vector}"
        self.line(f"const {self.index} lane_column = {column};")
        self.line(f"const bool inside = lane_column < {self.area.width};")
        last = self.area.width - s.vector
        self.line(f"const i64 column = inside ? lane_column : {last};")

    # ---- values --------------------------------------------------------------------------------

    def walked(self, i: int) -> bool:
        """Whether a value differs from step to step."""
        return any(self.graph.nodes[i].shape[a] != 1 for a in self.area.walk)

    def vectorised(self, i: int) -> bool:
        return self.graph.nodes[i].shape[self.area.lane] != 1

    def kind(self, i: int) -> str:
        one = TYPES[self.graph.nodes[i].dtype]
        return f"Vec<{one}, {self.s.vector}>" if self.vectorised(i) else one

    def load(self, i: int, at: dict[int, str]) -> str:
        index = self.graph.nodes[i].attr
        access = self.graph.inputs[index]
        axes = [a for a in (*self.area.walk, self.area.lane) if a in at]
        pointer = f"from{index} + {self.offset(access, axes, at)}"
        if not self.vectorised(i):
            return f"load_one({pointer})"
        once = all(s or n == 1 for s, n in zip(access.strides, self.graph.space, strict=True))
        wide = access_bytes(access, self.s.vector)
        return self.fetch(access, pointer, str(self.s.vector), wide, self.s.stream_loads and once)

    def value(self, i: int, operands: list[str]) -> str:
        n = self.graph.nodes[i]
        return self.expression(n, operands, str(self.s.vector) if self.vectorised(i) else None)

    def steady_values(self, wanted: set[int], phase: int, vectors: bool) -> None:
        """What does not vary along the walk and is known before `phase`."""
        at = {self.area.lane: "column"} if vectors else {}
        for i in needed_in(self.graph, wanted, frozenset(self.names)):
            n = self.graph.nodes[i]
            later = self.plan.ready[i] > phase or i in self.graph.reductions
            if self.walked(i) or i in self.names or self.vectorised(i) > vectors or later:
                continue
            if any(a not in self.names for a in n.args):
                continue
            value = (
                self.load(i, at)
                if n.op == "load"
                else self.value(i, [self.names[a] for a in n.args])
            )
            self.line(f"const {self.kind(i)} v{i} = {value};")
            self.names[i] = f"v{i}"

    # ---- parts of results ----------------------------------------------------------------------

    def add_up(self) -> None:
        phase, *later = self.plan.phases
        stored = {self.graph.outputs[k][0] for p in self.plan.phases for k in p.stores}
        added = {self.graph.nodes[i].args[0] for i in self.ends}
        wanted = stored | added
        numbers = [i for i in self.ends if self.area.along_lane(i) and self.area.walks_through(i)]
        columns = [i for i in self.ends if not self.area.along_lane(i)]
        self.steady_values(wanted, 0, vectors=False)
        for i in numbers:
            self.line(f"{self.start_of(i)};")
        if self.s.turns > 1:
            unroll = f'_Pragma("unroll {1 if self.area.walk else self.s.unroll}")'
            self.open(f"{unroll} for (int turn = 0; turn < {self.s.turns}; ++turn)")
            self.open_columns(" + turn")
        else:
            self.open_columns()
        outside = dict(self.names)
        self.steady_values(wanted, 0, vectors=True)
        for i in columns:
            self.line(f"{self.start_of(i)};")
        self.sweep(phase, added if later else wanted, frozenset())
        if not later:
            self.steady_stores("chunk == 0 && y == 0")
        for i in columns:
            self.leave_columns(i)
        if self.s.turns > 1:
            self.close()
            self.names = outside
        self.line("release_next();")
        for i in numbers:
            self.leave_number(i)
        for each in later:
            self.sweep(each, stored, each.carried_in)
            self.steady_stores("chunk == 0 && y == 0")
        self.after_parts()

    def after_parts(self) -> None:
        """What a block does when it has left all of its parts."""

    def start_of(self, i: int) -> str:
        n = self.graph.nodes[i]
        kind = TYPES[n.dtype]
        start = f"{JOINS[n.op]}::start<{kind}>()"
        if self.vectorised(i):
            start = f"splat<{self.s.vector}>({start})"
        return f"{self.kind(i)} acc{i} = {start}"

    def leave_columns(self, i: int) -> None:
        self.join_shares(i)
        k = self.ends[i]
        access = self.graph.outputs[k][1]
        wide = access_bytes(access, self.s.vector)
        if self.tiles.parts_of(i):
            whole = math.prod(self.graph.nodes[i].shape)
            wide = max(math.gcd(wide, whole * access.itemsize), access.itemsize)
        self.line(f"if (y == 0 && inside) {self.written(k, f'to{k} + column', wide, f'acc{i}')}")

    def leave_number(self, i: int) -> None:
        self.join_numbers(i)
        self.line(f"if (threadIdx.x == 0) *to{self.ends[i]} = acc{i};")

    def join_numbers(self, i: int) -> None:
        n, threads = self.graph.nodes[i], self.tiles.lanes * self.tiles.shares
        self.need_shared(threads // WARP, n.dtype)
        kind = TYPES[n.dtype]
        self.line(f"acc{i} = join_block<{JOINS[n.op]}, {threads}>(acc{i}, ({kind}*)shared);")

    def join_shares(self, i: int, everywhere: bool = False) -> None:
        n, t = self.graph.nodes[i], self.tiles
        if t.shares == 1:
            return
        warps = t.shares // max(WARP // t.lanes, 1)
        places = warps // 2 if warps > 8 else max(warps - 1, 1)
        self.need_shared(t.lanes * places * self.width_of(i), n.dtype)
        how = f"{JOINS[n.op]}, {t.lanes}, {t.shares}, {str(everywhere).lower()}"
        self.line(f"acc{i} = join_shares<{how}>(acc{i}, ({self.kind(i)}*)shared, x, y);")

    def width_of(self, i: int) -> int:
        return self.s.vector if self.vectorised(i) else 1

    def need_shared(self, values: int, dtype: str) -> None:
        self.shared_bytes = max(self.shared_bytes, values * (8 if dtype == "f64" else 4))

    # ---- complete results ----------------------------------------------------------------------

    def complete(self) -> None:
        wanted = {i for i, _ in self.graph.outputs} | set(self.graph.reductions)
        wanted |= {self.graph.nodes[i].args[0] for i in self.graph.reductions}
        self.steady_values(wanted, 0, vectors=False)
        self.open_columns()
        for p, phase in enumerate(self.plan.phases):
            self.steady_values(wanted, p, vectors=True)
            for i in phase.reductions:
                self.line(f"{self.start_of(i)};")
            known = phase.carried_in if self.tiles.kept_steps else frozenset()
            operands = {self.graph.nodes[i].args[0] for i in phase.reductions}
            self.sweep(phase, operands | {self.graph.outputs[k][0] for k in phase.stores}, known)
            for i in phase.reductions:
                self.join_shares(i, everywhere=True)
                self.names[i] = f"acc{i}"
        self.line("release_next();")
        self.steady_values(wanted, len(self.plan.phases), vectors=True)
        self.steady_stores("y == 0")

    # ---- one sweep -----------------------------------------------------------------------------

    def sweep(self, phase: Phase, wanted: set[int], known: frozenset[int]) -> None:
        """Walk the steps of this thread: loads of several first, so that they are in flight
        together, then their arithmetic. All threads of a block make as many turns."""
        keeping = self.tiles.kept_steps
        carried = phase.carried_out - known if keeping else frozenset()
        steps = [
            i
            for i in needed_in(self.graph, wanted | carried, known | frozenset(self.names))
            if self.walked(i)
        ]
        stores = [k for k in phase.stores if self.walked(self.graph.outputs[k][0])]
        if not (steps or stores or phase.added or phase.reductions):
            return
        for i in sorted(carried):
            self.line(f"{self.kind(i)} keep{i}[{keeping}];")
        count = keeping or (self.s.unroll if self.area.walk else 1)
        loads = [i for i in steps if self.graph.nodes[i].op == "load" and not self.graph.draws(i)]
        early = self.s.ahead and bool(loads)
        each = f"int u = 0; u < {count}; ++u"
        rounds = bool(keeping and self.area.added and loads and self.s.unroll < count)
        step, first = self.tiles.shares * count, "begin" if keeping else "from"
        if early or keeping:
            self.open("")
        if early:
            self.load_steps(loads, "ahead", count, "begin")
        if not keeping:
            self.open(f"for ({self.index} from = begin; from < end; from += {step})")
        if early:
            self.load_steps(loads, "next", count, f"from + {step}")
        elif rounds:
            self.declare_steps(loads, "ahead", count)
            at_once = self.s.unroll
            self.open(f"TW_UNROLL for (int round = 0; round < {count}; round += {at_once})")
            each = f"int u = round; u < round + {at_once} && u < {count}; ++u"
            self.fill_steps(loads, "ahead", each, first)
        elif loads:
            self.load_steps(loads, "ahead", count, first)
        place = f"{first} + u * {self.tiles.shares} + y"
        self.open(f"TW_UNROLL for ({each})")
        self.line(f"const {self.index} w = {place};")
        self.line(f"const bool within = {self.surely()}w < end, live = within && inside;")
        at = self.walk_coordinates()
        self.step(phase, steps, loads, stores, known, at)
        self.close()
        for i in loads if early else ():
            self.line(f"TW_UNROLL for (int u = 0; u < {count}; ++u) ahead{i}[u] = next{i}[u];")
        if rounds or not keeping:
            self.close()
        if early or keeping:
            self.close()

    def surely(self) -> str:
        """Which of the steps that are kept every thread has: they need no address of their own."""
        t = self.tiles
        least = self.area.steps - (t.chunks - 1) * t.chunk_steps
        sure = max(least // t.shares, 0) if t.kept_steps else 0
        return f"u < {sure} || " if sure else ""

    def load_steps(self, loads: list[int], name: str, count: int, first: str) -> None:
        """Loads of so many steps of this thread; past the end the last one's again."""
        self.declare_steps(loads, name, count)
        self.fill_steps(loads, name, f"int u = 0; u < {count}; ++u", first)

    def declare_steps(self, loads: list[int], name: str, count: int) -> None:
        for i in loads:
            self.line(f"{self.kind(i)} {name}{i}[{count}];")

    def fill_steps(self, loads: list[int], name: str, each: str, first: str) -> None:
        self.open(f"TW_UNROLL for ({each})")
        self.line(f"const {self.index} to = {first} + u * {self.tiles.shares} + y;")
        self.line(f"const {self.index} w = {self.surely()}to < end ? to : end - 1;")
        at = self.walk_coordinates()
        for i in loads:
            self.line(f"{name}{i}[u] = {self.load(i, at)};")
        self.close()

    def step(
        self,
        phase: Phase,
        steps: list[int],
        loads: list[int],
        stores: list[int],
        known: frozenset[int],
        at: dict[int, str],
    ) -> None:
        names = {**self.names, **{i: f"keep{i}[u]" for i in known}}
        names |= {i: f"ahead{i}[u]" for i in loads}
        for i in steps:
            if i not in names:
                operands = [names[a] for a in self.graph.nodes[i].args]
                value = self.load(i, at) if self.graph.draws(i) else self.value(i, operands)
                self.line(f"const {self.kind(i)} v{i} = {value};")
                names[i] = f"v{i}"
            if self.tiles.kept_steps and i in phase.carried_out - known:
                self.line(f"keep{i}[u] = {names[i]};")
        for i in (*phase.reductions, *phase.added):
            self.add(i, names[self.graph.nodes[i].args[0]], at)
        for k in stores:
            self.store(k, names[self.graph.outputs[k][0]], at, ["live"])

    def add(self, i: int, value: str, at: dict[int, str]) -> None:
        n = self.graph.nodes[i]
        join, kind = JOINS[n.op], TYPES[n.dtype]
        operand = n.args[0]
        if self.vectorised(operand) and not self.vectorised(i):
            value = f"fold<{join}>({value})"
        if i not in self.ends or self.area.walks_through(i):
            # No branch: loads of later steps would not pass it. What lanes outside add is dropped.
            counts = "live" if self.area.along_lane(i) else "within"
            self.line(f"acc{i} = join_if<{join}>({counts}, acc{i}, {value});")
            return
        # A step's own result: joined along the lane, one part for each warp.
        threads = min(self.tiles.lanes, WARP)
        alone = f"live ? {value} : {join}::start<{kind}>()"
        self.line(f"const {kind} all{i} = reduce_warp<{join}, {threads}>({alone});")
        k = self.ends[i]
        offset = self.offset(self.graph.outputs[k][1], self.area.walk, at)
        self.line(f"if (w < end && x % {threads} == 0) to{k}[{offset}] = all{i};")

    def walk_coordinates(self) -> dict[int, str]:
        """Coordinates of step `w`, and of the thread's vector."""
        at, axes = {self.area.lane: "column"}, self.area.walk
        if len(axes) == 1:
            return {**at, axes[0]: "(i64)w"}
        rest = "w"
        for a in reversed(axes[1:]):
            self.line(f"const i64 walk{a} = {rest} % {self.graph.space[a]};")
            rest = f"({rest} / {self.graph.space[a]})"
            at[a] = f"walk{a}"
        for a in axes[:1]:
            self.line(f"const i64 walk{a} = {rest};")
            at[a] = f"walk{a}"
        return at

    # ---- stores --------------------------------------------------------------------------------

    def steady_stores(self, condition: str) -> None:
        """Outputs that do not vary along the walk."""
        for k, (i, _) in enumerate(self.graph.outputs):
            if i not in self.ends and not self.walked(i):
                self.store(k, self.names[i], {self.area.lane: "column"}, ["inside", condition])

    def store(self, k: int, value: str, at: dict[int, str], conditions: list[str]) -> None:
        """Write a value once, whatever it does not vary over."""
        i, access = self.graph.outputs[k]
        shape = self.graph.nodes[i].shape
        for a, n in enumerate(shape):
            if n == 1 != self.graph.space[a] and (a in at or a in self.coordinate):
                conditions.append(f"{at.get(a) or self.coordinate[a]} == 0")
        axes = [a for a in (*self.area.walk, self.area.lane) if a in at]
        pointer = f"to{k} + {self.offset(access, axes, at)}"
        wide = access_bytes(access, self.s.vector)
        self.line(f"if ({' && '.join(conditions)}) {self.written(k, pointer, wide, value)}")

    def written(self, k: int, pointer: str, wide: int, value: str) -> str:
        i, access = self.graph.outputs[k]
        if not self.vectorised(i):
            return f"*({pointer}) = {value};"
        return self.kept_in(access, pointer, wide, value)

    def kept_in(self, access: Access, pointer: str, wide: int, value: str) -> str:
        innermost = access.strides[-1]
        if innermost == 1:
            return f"store<{wide}>({pointer}, {value});"
        return f"scatter({pointer}, {innermost}, {value});"
