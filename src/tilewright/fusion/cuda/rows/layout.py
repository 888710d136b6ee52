"""How a row kernel lays rows over threads, and memory over shared memory."""

from __future__ import annotations

import math
from dataclasses import replace

from tilewright.device import WARP
from tilewright.fusion.cuda.kernel import ENTRY, TYPES, Kernel, input_type
from tilewright.fusion.cuda.rows.schedule import RowSchedule
from tilewright.fusion.cuda.rows.shifting import shifted_alike, vectors_of
from tilewright.fusion.cuda.vectors import WIDEST_ACCESS, access_bytes, held_bytes
from tilewright.fusion.extents import Extent, several, with_extents
from tilewright.fusion.ir import Access
from tilewright.fusion.plan import Plan


class RowLayout(Kernel):
    """Names that the emitted lines share:

    lane, group: the thread's place in its row's threads, and which of the block's rows it serves.
    rank: the block's place among those that share a row.
    first_row, r: the thread serves rows first_row + r.
    k, vector, column: turn of the thread along the row; the vector and the element it stands at.
    """

    def __init__(self, plan: Plan, schedule: RowSchedule, entry: str = ENTRY):
        lane = len(plan.graph.space) - 1
        plan = replace(plan, graph=with_extents(plan.graph, several(plan.graph.kept), lane))
        super().__init__(plan.graph, entry)
        self.plan, self.s = plan, schedule
        self.persistent = schedule.persistent
        self.vectors = vectors_of(plan.width, schedule.vector, schedule.shifted)
        if self.is_counted:
            self.vectors = Extent(self.vectors, "row_size")
        self.lanes = schedule.row_threads * schedule.row_blocks
        self.turns = math.ceil(self.vectors / self.lanes)
        self.full_turns = self.vectors // self.lanes
        self.step = self.lanes
        if schedule.tail == "predicated":
            self.full_turns = 0
        if schedule.contiguous:
            self.full_turns = self.turns if self.vectors % self.lanes == 0 else 0
            self.step = WARP
        self.warps = max(schedule.row_threads // WARP, 1)
        self.names: dict[int, str] = {}
        """Per node that holds one value per row: its expression."""
        self.shared: list[str] = []
        self.dynamic_bytes = 0
        self.number = "blockIdx.x"
        """Of the block."""

    @property
    def is_counted(self) -> bool:
        """Whether the width is given: that of a loss says how many rows there are."""
        of_moments = any(n.op == "m2" for n in self.graph.nodes)
        one_row = not (self.graph.kept or of_moments or self.s.shifted)
        return one_row and self.graph.is_total

    def every_extent(self) -> dict[str, int]:
        every = super().every_extent()
        return every | {"row_size": int(self.vectors)} if self.is_counted else every

    # -- rows ------------------------------------------------------------------------------------

    def place(self) -> None:
        """Which lane of which row this thread is."""
        s = self.s
        if s.rows_per_block == 1:
            self.line("const int lane = threadIdx.x;")
            self.line("const int group = 0;")
        else:
            self.line(f"const int lane = threadIdx.x % {s.row_threads};")
            self.line(f"const int group = threadIdx.x / {s.row_threads};")
        if s.cluster > 1:
            self.line("const u32 rank = cluster_rank();")
            self.line(f"const i64 block = blockIdx.x / {s.cluster};")
            of_row = f"(rank * {s.row_threads} + lane)"
        elif s.blocks_per_row > 1:
            self.line(f"const u32 rank = blockIdx.x % {s.blocks_per_row};")
            self.line(f"const i64 block = blockIdx.x / {s.blocks_per_row};")
            of_row = f"(rank * {s.row_threads} + lane)"
        else:
            self.line(f"const i64 block = {self.number};")
            of_row = "lane"
        if s.contiguous:
            of_row = f"{of_row} / {WARP} * {WARP * self.turns} + lane % {WARP}"
        self.line(f"const int first_vector = {of_row};")

    def each_row(self) -> str:
        return f"TW_UNROLL for (int r = 0; r < {self.s.rows_per_thread}; ++r)"

    def declare_row_pointers(self) -> None:
        """Base addresses per row; a row past the end reads the last one and stores nothing."""
        found = [("in", i, a) for i, a in enumerate(self.graph.inputs)]
        found += [("out", k, a) for k, (_, a) in enumerate(self.graph.outputs)]
        found = [each for each in found if self.over_rows(each[2])]
        for kind, i, a in found:
            pointer = input_type(a) if kind == "in" else f"{TYPES[a.dtype]}*"
            self.line(f"{pointer} row_{kind}{i}[{self.s.rows_per_thread}];")
        if self.s.shifted and not self.persistent:
            self.line("int shift;")
        self.open(self.each_row())
        at = self.row_coordinates("first_row")
        if self.s.shifted and not self.persistent:
            self.line(f"shift = {self.shift(at)};")
        for kind, i, a in found:
            self.line(f"row_{kind}{i}[r] = {kind}{i} + {self.row_offset(a, at)};")
        self.close()

    def shift(self, at: dict[int, str]) -> str:
        """How far behind a vector's start the row begins, in elements."""
        by = shifted_alike(self.graph, self.s.vector)
        assert by is not None, "offered for rows that begin alike only"
        return f"(int)(({self.offset(by, self.graph.kept, at)}) & {self.s.vector - 1})"

    @property
    def exists(self) -> str:
        """Whether row r of the group is there, as the start of a statement; empty if it must be."""
        walks_alone = self.persistent and self.s.row_threads >= WARP
        sure = walks_alone and self.s.rows_per_thread == 1
        return "" if sure else "if (first_row + r < count) "

    def row_coordinates(self, first_row: str) -> dict[int, str]:
        row = f"{first_row} + r"
        if self.exists and (self.persistent or self.s.rows_per_block * self.s.rows_per_thread > 1):
            row = f"{row} < count ? {row} : count - 1"  # else no group is without a row
        self.line(f"const i64 row = {row};")
        return self.coordinates("row", "row", self.graph.kept, "i64") if self.graph.kept else {}

    def row_offset(self, access: Access, at: dict[int, str]) -> str:
        """Where the row begins; of what lies side by side along it, where this thread's share does.

        Its turns are then at distances that instructions hold, and need no arithmetic.
        """
        start = self.offset(access, self.graph.kept, at)
        return f"{start} + first_vector * {self.s.vector}" if self.side_by_side(access) else start

    def side_by_side(self, access: Access) -> bool:
        return not self.s.shifted and self.column_offset(access) == "column"

    def turn_offset(self, access: Access) -> str:
        """Of turn k, from there."""
        if self.side_by_side(access):
            return f"k * {self.step * self.s.vector}"
        return self.column_offset(access)

    def over_rows(self, access: Access) -> bool:
        return any(access.strides[k] for k in self.graph.kept)

    def base(self, kind: str, i: int, access: Access) -> str:
        return f"row_{kind}{i}[r]" if self.over_rows(access) else f"{kind}{i}"

    def pointer(self, kind: str, i: int, access: Access) -> str:
        """Address of the vector of row r at turn k."""
        if self.over_rows(access):
            return f"row_{kind}{i}[r] + {self.turn_offset(access)}"
        return f"{kind}{i} + {self.column_offset(access)}"

    # -- columns ---------------------------------------------------------------------------------

    def open_turns(self, at_once: int = 0) -> None:
        """`at_once` of the turns are unrolled, or all."""
        unroll = f'_Pragma("unroll {at_once}")' if at_once else "TW_UNROLL"
        self.open(f"{unroll} for (int k = 0; k < {self.turns}; ++k)")
        self.open_turn()

    def close_turns(self) -> None:
        self.close_turn()
        self.close()

    def open_turn(self) -> None:
        """What follows is done where turn k meets a vector of the row."""
        self.line(f"const int vector = first_vector + k * {self.step};")
        masked = self.full_turns < self.turns
        self.open(self.within_row if masked else "")
        if not self.s.shifted:
            self.line(f"const int column = vector * {self.s.vector};")
            return
        self.line(f"const int column = vector * {self.s.vector} - shift;")
        inside = f"column >= 0 && column <= {self.plan.width - self.s.vector}"
        sure = self.plan.width // (self.lanes * self.s.vector)
        if sure > 1 and not self.s.contiguous:
            inside = f"(k > 0 && k < {sure}) || ({inside})"
        self.line(f"const bool whole = {inside};")

    @property
    def within_row(self) -> str:
        full = f"k < {self.full_turns} || " if self.full_turns else ""
        return f"if ({full}vector < {self.vectors})"

    def close_turn(self) -> None:
        self.close()

    def column_offset(self, access: Access) -> str:
        axes = self.graph.reduced
        if len(axes) == 1:
            column = "column" if access.strides[axes[0]] == 1 else "(i64)column"
            return self.offset(access, axes, {axes[0]: column})
        at, step, flat = {}, 1, True
        for a in reversed(axes):
            flat = flat and (access.strides[a] == step or self.graph.space[a] == 1)
            at[a] = f"(i64)(column / {step} % {self.graph.space[a]})"
            step *= self.graph.space[a]
        return "column" if flat else self.offset(access, axes, at)

    def load(self, i: int, stream: bool) -> str:
        """The load of node `i` at the current row and column."""
        index = self.graph.nodes[i].attr
        access = self.graph.inputs[index]
        pointer = self.pointer("in", index, access)
        wide = self.access_bytes(access)
        if self.s.shifted:
            how = f"{self.s.vector}, {wide}, {str(stream).lower()}"
            return f"load_within<{how}>({pointer}, {self.place_in_row})"
        return self.fetch(access, pointer, str(self.s.vector), wide, stream)

    def access_bytes(self, access: Access) -> int:
        if not self.s.shifted:
            return access_bytes(access, self.s.vector)
        moves = not self.graph.kept or self.over_rows(access)
        return min(self.s.vector * access.itemsize, WIDEST_ACCESS) if moves else access.itemsize

    @property
    def place_in_row(self) -> str:
        return f"column, {self.plan.width}, whole"

    def folded(self, join: str, value: str) -> str:
        """What reduces a vector to one value."""
        if self.s.shifted:
            return f"fold_within<{join}>({value}, {self.place_in_row})"
        return f"fold<{join}>({value})"

    def reads_row(self, i: int) -> bool:
        """Whether node `i` reads memory of the row itself."""
        return self.is_row_load(i) and not self.graph.generated(i)

    def is_row_load(self, i: int) -> bool:
        """Whether node `i` loads the row itself; in a graph of one row, every load does."""
        n = self.graph.nodes[i]
        return n.op == "load" and (not self.graph.kept or self.over_rows(self.graph.inputs[n.attr]))

    # -- memory ----------------------------------------------------------------------------------

    def vector_type(self, i: int) -> str:
        return f"Vec<{TYPES[self.graph.nodes[i].dtype]}, {self.s.vector}>"

    def in_shared(self, name: str, i: int, vectors: int, vector: int | None = None) -> None:
        """Declare dynamic shared memory for so many vectors of node `i`'s dtype."""
        vector = vector or self.s.vector
        dtype = self.graph.nodes[i].dtype
        self.declare_shared(
            f"Vec<{TYPES[dtype]}, {vector}>", name, vectors * held_bytes(dtype, vector)
        )

    def share_again(self, kind: str, name: str, size_bytes: int) -> None:
        """Declare all dynamic shared memory under one more name, for when the rows are walked."""
        if self.dynamic_bytes == 0:
            self.shared.append("extern __shared__ Quad on_chip[];")
        self.shared.append(f"{kind}* const {name} = ({kind}*)on_chip;")
        self.dynamic_bytes = max(self.dynamic_bytes, math.ceil(size_bytes / 16) * 16)

    def declare_shared(self, kind: str, name: str, size_bytes: int) -> None:
        if self.dynamic_bytes == 0:
            self.shared.append("extern __shared__ Quad on_chip[];")
        start = f"(u8*)on_chip + {self.dynamic_bytes}"
        self.shared.append(f"{kind}* const {name} = ({kind}*)({start});")
        self.dynamic_bytes += math.ceil(size_bytes / 16) * 16
