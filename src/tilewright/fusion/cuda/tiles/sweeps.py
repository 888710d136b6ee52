"""How a thread of a tile kernel walks its steps: loads, arithmetic, sums, stores."""

from __future__ import annotations

from dataclasses import replace

from tilewright.device import WARP
from tilewright.fusion.cuda.kernel import DIVISOR, JOINS, TYPES, Kernel
from tilewright.fusion.cuda.tiles.tiling import Tiles
from tilewright.fusion.cuda.vectors import access_bytes
from tilewright.fusion.extents import Extent, with_extents
from tilewright.fusion.ir import Access
from tilewright.fusion.plan import Phase, needed_in
from tilewright.tensor_spec import HALVES


class TileSweeps(Kernel):
    """What tile kernels emit once they know where a thread is; for the names see kernel."""

    def __init__(self, tiles: Tiles):
        area, graph = tiles.area, tiles.plan.graph
        # 64-bit where an index of twice the elements would not stay within 32.
        self.index = "int" if max(area.width, area.steps) < 2**30 else "i64"
        # Strides that are compiled in lie at distances that instructions hold, from one address;
        # and a constant divides 64 bits. Those over a lane of several dims are of no dim.
        several = tiles.kept_steps or (tiles.at_once > 1 and tiles.stores_steps)
        several = several and area.lane not in graph.joined
        compiled = tiles.s.sizes == "compiled"
        fixed = area.walk if compiled or self.index == "i64" or several else ()
        self.steps_fixed = bool(fixed)
        axes = [a for a in range(len(graph.space)) if a not in fixed]
        super().__init__(graph if compiled else with_extents(graph, axes, area.lane, shared=True))
        self.tiles, self.area, self.s = tiles, area, tiles.s
        self.plan = replace(tiles.plan, graph=self.graph)
        self.counted: dict[str, int] = {}
        """By name, further numbers that the kernel is given: they follow from sizes."""
        self.ends = {i: k for k, i in tiles.area.added.items()}
        """By reduction that is added up: the position of the output that takes its partials."""
        self.names: dict[int, str] = {}
        """Per node that does not vary along the walk: its expression."""
        self.shared_bytes = 0
        self.coordinate = {a: f"(i64)grid{a}" for a in self.area.grid}

    # ---- numbers that the kernel is given ------------------------------------------------------

    def given(self, name: str, value: int) -> int:
        """A number under its name in the kernel; 0 and 1, which tell what there is, stay."""
        if value <= 1 or self.s.sizes == "compiled":
            return value
        self.counted[name] = value
        return Extent(value, name)

    def every_extent(self) -> dict[str, int]:
        every = dict(self.counted)
        for name in ("pieces", "splits"):
            if name in every:
                every |= self.divisor_of(Extent(every[name], name))
        return super().every_extent() | every

    def kind_of_extent(self, name: str) -> str:
        """A signed type: by it one instruction multiplies a coordinate and adds to an address."""
        if name.endswith(DIVISOR):
            return self.index_type
        return "int" if self.extents[name] < 2**31 else "i64"

    @property
    def index_type(self) -> str:
        """The numbers of blocks are divided."""
        return "u32"

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
        pointer = self.walked_to(self.base("from", index, access, at), access, at)
        if not self.vectorised(i):
            return f"load_one({pointer})"
        once = all(s or n == 1 for s, n in zip(access.strides, self.graph.space, strict=True))
        wide = access_bytes(access, self.s.vector)
        return self.fetch(access, pointer, str(self.s.vector), wide, self.s.stream_loads and once)

    def base(self, kind: str, k: int, access: Access, at: dict[int, str]) -> str:
        """Where a tensor's elements of this block begin, or of this thread, which has a column."""
        own = not self.steps_fixed and access.strides[self.area.lane] and self.area.lane in at
        return f"column_{kind}{k}" if own else f"{kind}{k}"

    def column_pointers(self) -> None:
        """Where the thread's column begins in every tensor that has more than one."""
        if self.steps_fixed:
            return
        stored = [k for k in range(len(self.graph.outputs)) if k not in self.area.added]
        accesses = [("from", i, a) for i, a in enumerate(self.graph.inputs)]
        accesses += [("to", k, self.graph.outputs[k][1]) for k in stored]
        for kind, k, access in accesses:
            if access.strides[self.area.lane]:
                offset = self.offset(access, [self.area.lane], {self.area.lane: "column"})
                self.line(f"const auto column_{kind}{k} = {kind}{k} + {offset};")

    def walked_to(self, base: str, access: Access, at: dict[int, str]) -> str:
        """The address that the walk's coordinates lead to from there, by strides in bytes."""
        if self.steps_fixed:
            axes = [a for a in (*self.area.walk, self.area.lane) if a in at]
            return f"({base} + {self.offset(access, axes, at)})"
        itemsize = 1 if access.generator else access.itemsize
        terms = []
        for a in self.area.walk:
            if (stride := access.strides[a]) and a in at:
                step = stride * itemsize
                if itemsize > 1 and isinstance(stride, Extent):
                    step = self.given(f"{stride.name}_by{itemsize}", step)
                terms.append(f"{at[a]} * {stride if itemsize == 1 else step}")
        return f"along({base}, {' + '.join(terms)})" if terms else base

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
        loads = [i for i in steps if self.graph.nodes[i].op == "load"]
        loads = [i for i in loads if not self.graph.generated(i)]
        early = self.s.ahead and bool(loads)
        rounds = bool(keeping and self.area.only_adds and loads and self.s.unroll < keeping)
        if early or keeping:
            self.open("")
        if keeping:
            self.keep_packed(known)
        each, first = self.open_walk(loads, early, rounds)
        place = f"{first} + u * {self.tiles.shares} + y"
        self.open(f"TW_UNROLL for ({each})")
        self.line(f"const {self.index} w = {place};")
        self.line(f"const bool within = {self.surely()}w < end, live = within && inside;")
        at = self.walk_coordinates()
        self.step(phase, steps, loads, stores, known, at)
        self.close()
        for i in loads if early else ():
            at_once = f"int u = 0; u < {keeping or self.tiles.at_once}; ++u"
            self.line(f"TW_UNROLL for ({at_once}) ahead{i}[u] = next{i}[u];")
        if rounds or not keeping:
            self.close()
        if early or keeping:
            self.close()

    def keep_packed(self, known: frozenset[int]) -> None:
        """Halves stay packed between sweeps: each widens them again, where compilers would keep
        what the last one made of them in twice the registers."""
        halves = [i for i in sorted(known) if self.graph.nodes[i].dtype in HALVES]
        halves = [i for i in halves if self.vectorised(i)]
        if halves:
            self.open(f"TW_UNROLL for (int u = 0; u < {self.tiles.kept_steps}; ++u)")
            for i in halves:
                self.line(f"forget_widened(keep{i}[u]);")
            self.close()

    def open_walk(self, loads: list[int], early: bool, rounds: bool) -> tuple[str, str]:
        """The loop over what is loaded at once, and its loads; where steps are kept there is no
        such loop, unless they come in rounds. Returns the loop over those steps and the first of
        them."""
        keeping = self.tiles.kept_steps
        count = keeping or self.tiles.at_once
        each = f"int u = 0; u < {count}; ++u"
        step, first = self.tiles.shares * count, "begin" if keeping else "from"
        if early:
            self.load_steps(loads, "ahead", count, "begin")
        if not keeping and self.tiles.rounds:
            self.open(f"for (int round = 0; round < {self.tiles.rounds}; ++round)")
            self.line(f"const {self.index} from = begin + round * {step};")
        elif not keeping:
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
        return each, first

    def surely(self) -> str:
        """Which of the steps that are kept every thread has: they need no address of their own."""
        sure = self.tiles.sure_steps
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
                value = self.load(i, at) if self.graph.generated(i) else self.value(i, operands)
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
            self.join_value(i, value)
            return
        # A step's own result: joined along the lane, one partial for each warp.
        threads = min(self.tiles.lanes, WARP)
        alone = f"live ? {value} : {join}::start<{kind}>()"
        self.line(f"const {kind} all{i} = reduce_warp<{join}, {threads}>({alone});")
        k = self.ends[i]
        to = self.walked_to(f"to{k}", self.graph.outputs[k][1], at)
        self.line(f"if (w < end && x % {threads} == 0) *{to} = {self.rounded(i, f'all{i}')};")

    def rounded(self, i: int, total: str) -> str:
        """What reduction `i` has been added up to, as it is stored."""
        stored = self.graph.outputs[self.ends[i]][1].dtype
        return total if stored == self.graph.nodes[i].dtype else f"cast<{TYPES[stored]}>({total})"

    def join_value(self, i: int, value: str) -> None:
        """Without a branch, which loads of later steps would not pass; but of wide vectors so many
        are then under way that registers leave room for fewer blocks (of lerp's gradients 91
        instead of 63, and on an H200 18.0 us instead of 15.4, 2026-11-21)."""
        join = JOINS[self.graph.nodes[i].op]
        if self.tiles.kept_steps or self.s.vector <= 2:
            # What lanes outside add up is dropped.
            counts = "live" if self.area.along_lane(i) else "within"
            self.line(f"acc{i} = join_if<{join}>({counts}, acc{i}, {value});")
        else:
            self.line(f"if (live) acc{i} = join_each<{join}>(acc{i}, {value});")

    def walk_coordinates(self) -> dict[int, str]:
        """Coordinates of step `w`, and of the thread's vector."""
        at, axes = {self.area.lane: "column"}, self.area.walk
        if len(axes) == 1:
            return {**at, axes[0]: "(i64)w"}
        rest = "w"
        for a in reversed(axes[1:]):
            rest = self.split(rest, f"walk{a}", self.graph.space[a], self.index)
        for a in axes[:1]:
            self.line(f"const {self.index} walk{a} = {rest};")
        return at | {a: f"(i64)walk{a}" for a in axes}

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
        pointer = self.walked_to(self.base("to", k, access, at), access, at)
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
