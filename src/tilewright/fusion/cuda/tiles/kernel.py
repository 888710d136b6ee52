"""A tile kernel in CUDA: blocks walk their tiles and leave results, or partials of them.

Names that the emitted lines share:

x, y: the thread's lane, and its share of the walk.
piece, split, grid0..: the block's place along the lane, on the walk, and on the other axes.
column: where the thread's vector starts along the lane; inside: whether there is one.
w, walk0..: the step of the walk and its coordinates; live: whether it is one of this thread's.
"""

from __future__ import annotations

import math

from tilewright.device import WARP
from tilewright.fusion.cuda.kernel import JOINS, TYPES
from tilewright.fusion.cuda.tiles.sweeps import TileSweeps
from tilewright.fusion.cuda.vectors import access_bytes


class TileKernel(TileSweeps):
    """The body of a tile kernel as a device function of the number of its block."""

    def emit(self, name: str, apart: bool = True) -> str:
        """The function; if not `apart`, it is given shared memory, of `shared_bytes`, first."""
        self.declare_generated(range(len(self.graph.inputs)))
        self.place()
        self.pointers()
        if self.area.only_adds:
            self.add_up()
        else:
            self.complete()
        self.find_extents()
        own = self.shared_bytes and apart
        shared = [f"  __shared__ Quad shared[{math.ceil(self.shared_bytes / 16)}];"] if own else []
        given = [] if apart else ["Quad* shared"]
        parameters = ", ".join([*given, "u32 block", *self.tensors(), *self.numbers()])
        return "\n".join([f"TW_DEVICE void {name}({parameters}) {{", *shared, *self.lines, "}", ""])

    def tensors(self) -> list[str]:
        return self.parameters_of_kernel()[: len(self.graph.inputs) + len(self.graph.outputs)]

    def numbers(self) -> list[str]:
        """What the function is given behind its tensors, in order."""
        return [*self.extent_parameters(), *self.scalar_parameters()]

    # ---- where a thread is ---------------------------------------------------------------------

    def place(self) -> None:
        t = self.tiles
        self.line(f"const int x = threadIdx.x % {t.lanes}, y = threadIdx.x / {t.lanes};")
        rest = "block"
        for name, count in (("piece", self.pieces), ("split", self.splits)):
            if count == 1:
                self.line(f"const int {name} = 0;")
            else:
                rest = self.split(rest, name, count, "int")
        for a in reversed(self.area.grid[1:]):
            rest = self.split(rest, f"grid{a}", self.graph.space[a], "int")
        if self.area.grid:
            self.line(f"const int grid{self.area.grid[0]} = {rest};")
        steps = self.given("steps", self.area.steps)
        if t.splits == 1:
            self.line(f"const {self.index} begin = 0, end = {steps};")
            return
        split_steps = self.given("split_steps", t.split_steps)
        self.line(f"const {self.index} begin = ({self.index})split * {split_steps};")
        end = f"begin + {split_steps}"
        self.line(f"const {self.index} end = {end} < {steps} ? {end} : {steps};")

    @property
    def pieces(self) -> int:
        return self.given("pieces", self.tiles.pieces)

    @property
    def splits(self) -> int:
        return self.given("splits", self.tiles.splits)

    def pointers(self) -> None:
        """Where the block's own coordinates lead in every tensor."""
        grid = self.area.grid
        for i, access in enumerate(self.graph.inputs):
            offset = self.offset(access, grid, self.coordinate)
            self.line(f"const auto from{i} = in{i} + {offset};")
        for k, (i, access) in enumerate(self.graph.outputs):
            offset = self.offset(access, grid, self.coordinate)
            if i in self.ends and k == self.ends[i]:
                offset += f" + {self.partial(i)} * {self.elements(i)}"
            self.pointer_to(k, offset)

    def pointer_to(self, k: int, offset: str) -> None:
        """Where the block's results of output `k` begin."""
        self.line(f"auto* to{k} = out{k} + {offset};")

    def elements(self, i: int) -> int:
        """Of one partial of reduction `i`."""
        return self.given(f"elements{i}", math.prod(self.graph.nodes[i].shape))

    def partial(self, i: int) -> str:
        """The number of the partial of reduction `i` that this block, or warp, leaves."""
        number = "(i64)0"
        for name, count in self.tiles.partials_of(i):
            number = f"({number} * {self.size_of(name, count)} + {name})"
        return number

    def size_of(self, coordinate: str, count: int) -> int:
        """How many there are of what numbers partials: `count`, as the kernel knows it."""
        known = {f"grid{a}": self.graph.space[a] for a in self.area.grid}
        return {**known, "piece": self.pieces, "split": self.splits}.get(coordinate, count)

    def open_columns(self, turn: str = "") -> None:
        s, t = self.s, self.tiles
        place = f"(piece * {s.turns}{turn})" if s.turns > 1 else "piece"
        column = f"(({self.index}){place} * {t.lanes} + x) * {s.vector}"
        self.line(f"const {self.index} lane_column = {column};")
        width = self.graph.space[self.area.lane]
        if self.covers_exactly:
            self.line("const bool inside = true;")
            self.line("const i64 column = lane_column;")
        else:
            self.line(f"const bool inside = lane_column < {width};")
            self.line(f"const i64 column = inside ? lane_column : {width} - {s.vector};")
        self.column_pointers()

    @property
    def covers_exactly(self) -> bool:
        """Whether all columns of tiles are there; of several dims only some sizes' would be."""
        counted = self.s.sizes == "given" and self.area.lane in self.graph.joined
        tile = self.tiles.lanes * self.s.vector * self.s.turns
        return self.area.width % tile == 0 and not counted

    # ---- partials ------------------------------------------------------------------------------

    def add_up(self) -> None:
        # The kernel that joins the partials finds room once all blocks have begun, and then waits.
        self.line("release_next();")
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
            self.steady_stores("split == 0 && y == 0")
        for i in columns:
            self.leave_columns(i)
        if self.s.turns > 1:
            self.close()
            self.names = outside
        for i in numbers:
            self.leave_number(i)
        for each in later:
            self.sweep(each, stored, each.carried_in)
            self.steady_stores("split == 0 && y == 0")
        self.after_partials()

    def after_partials(self) -> None:
        """What a block does when it has left all of its partials."""

    def start_of(self, i: int) -> str:
        return f"{self.kind(i)} acc{i} = {self.start(i)}"

    def start(self, i: int) -> str:
        n = self.graph.nodes[i]
        start = f"{JOINS[n.op]}::start<{TYPES[n.dtype]}>()"
        return f"splat<{self.s.vector}>({start})" if self.vectorised(i) else start

    def leave_columns(self, i: int) -> None:
        self.join_shares(i)
        k = self.ends[i]
        access = self.graph.outputs[k][1]
        wide = access_bytes(access, self.s.vector)
        if self.tiles.partials_of(i):
            whole = math.prod(self.graph.nodes[i].shape)
            wide = max(math.gcd(wide, whole * access.itemsize), access.itemsize)
        total = self.rounded(i, f"acc{i}")
        self.line(f"if (y == 0 && inside) {self.written(k, f'to{k} + column', wide, total)}")

    def leave_number(self, i: int) -> None:
        self.join_numbers(i)
        self.line(f"if (threadIdx.x == 0) *to{self.ends[i]} = {self.rounded(i, f'acc{i}')};")

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
            self.sweep(phase, self.plan.ends(phase), known)
            self.join_walk(phase.reductions)
            self.names |= {i: f"acc{i}" for i in phase.reductions}
        self.line("release_next();")
        self.steady_values(wanted, len(self.plan.phases), vectors=True)
        self.steady_stores(self.first_share)

    @property
    def first_share(self) -> str:
        """Who stores what does not vary along the walk."""
        return "y == 0"

    def join_walk(self, sums: tuple[int, ...]) -> None:
        """Every thread of a column ends with what its whole walk adds up to."""
        for i in sums:
            self.join_shares(i, everywhere=True)
