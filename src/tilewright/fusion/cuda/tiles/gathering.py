"""Tile kernels whose own blocks put the partials of results together, so that one launch is all.

Blocks that add up partials of the same elements are a group. Each leaves its partials in words of
memory and goes on; the one that was the last of its group to begin joins them, in a fixed order,
and computes what follows. It waits for blocks that all run already, and none of them waits before
its own partials are there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tilewright.device import WARP
from tilewright.fusion.cuda.kernel import JOINS, TYPES, Kernel, input_parameter
from tilewright.fusion.cuda.partials import PARTIAL_WORDS, SECTOR_WORDS
from tilewright.fusion.cuda.tiles.kernel import TileKernel
from tilewright.fusion.cuda.tiles.tiling import Tiles
from tilewright.fusion.ir import REDUCTIONS, Access
from tilewright.fusion.program import Segment


@dataclass(frozen=True)
class Group:
    """What one joining segment needs.

    Attributes:
        sums: by node of its graph that holds a joined value: the reduction of the main graph.
        members: blocks that leave partials of the same elements.
        tickets, groups: the first word of its tickets, and how many there are.
        partials: by reduction: the first word of its partials.
    """

    segment: Segment
    sums: dict[int, int]
    members: int
    tickets: int
    groups: int
    partials: dict[int, int]


class GatheringKernel(TileKernel):
    """A tile kernel that also does what `joins`, the segments behind it, do.

    Tensors of the main segment are named as ever, others of the joining ones by their buffers.
    """

    def __init__(self, tiles: Tiles, main: Segment, joins: list[Segment]):
        super().__init__(tiles)
        self.main, self.joins = main, joins
        self.ends_at = {main.writes[k]: i for i, k in self.ends.items()}
        """By buffer of partials: the reduction."""
        self.counters = 0
        self.found = [self.group(segment) for segment in joins]

    def group(self, segment: Segment) -> Group:
        sums: dict[int, int] = {}
        for n, node in enumerate(segment.graph.nodes):
            if node.op == "load" and segment.reads[node.attr] in self.ends_at:
                users = segment.graph.users(n)
                joined = [u for u in users if segment.graph.nodes[u].op in REDUCTIONS]
                sums[joined[0] if joined else n] = self.ends_at[segment.reads[node.attr]]
        one = next(iter(sums.values()))
        members = self.tiles.count_of_partials(one)
        groups = self.tiles.blocks // members
        tickets = self.take(groups)
        words = {i: PARTIAL_WORDS * members * self.elements(i) for i in sums.values()}
        partials = {i: self.take(n) for i, n in words.items()}
        return Group(segment, sums, members, tickets, groups, partials)

    def take(self, words: int) -> int:
        """Room for so many words of four bytes, aligned to a sector."""
        first = self.counters
        self.counters += math.ceil(words / SECTOR_WORDS) * SECTOR_WORDS
        return first

    # ---- parameters ----------------------------------------------------------------------------

    def buffers(self) -> dict[int, tuple[str, str]]:
        """By buffer that the launch is given: its declaration, and its name in this function."""
        declared = super().tensors()
        of_main = [*self.main.reads, *self.main.writes]
        found = {
            b: (d, d.split()[-1].replace("*", ""))
            for b, d in zip(of_main, declared, strict=True)
            if b not in self.ends_at
        }
        for segment in self.joins:
            for i, b in enumerate(segment.reads):
                if b not in self.ends_at and b not in found:
                    declaration = input_parameter(i, segment.graph.inputs[i])
                    found[b] = (declaration.rpartition(" ")[0] + f" b{b}", f"b{b}")
            for b, (_, access) in zip(segment.writes, segment.graph.outputs, strict=True):
                found[b] = (f"{TYPES[access.dtype]}* __restrict__ b{b}", f"b{b}")
        return found

    def tensors(self) -> list[str]:
        return [declaration for declaration, _ in self.buffers().values()]

    def numbers(self) -> list[str]:
        return ["u32* counters", *super().numbers()]

    def first_of(self, what: str, word: int) -> int:
        return self.given(f"first_of_{what}", word)

    # ---- the kernel ----------------------------------------------------------------------------

    def pointers(self) -> None:
        """Partials have no tensors; also take a ticket of every group."""
        super().pointers()
        for g, group in enumerate(self.found):
            (i, *_) = group.sums.values()
            number, step = "0", 1
            for name, count in reversed(self.of_group(i)):
                number = f"{name} * {self.given(f'{name}_step{g}', step)} + {number}"
                step *= count
            tickets = self.first_of(f"tickets{g}", group.tickets)
            self.line(f"u32* const tickets{g} = counters + {tickets} + ({number});")
            for i in group.sums.values():
                at = self.offset(self.access(i), self.area.grid, self.coordinate)
                first = self.first_of(f"partials{i}", group.partials[i])
                self.line(f"u64* const partials{i} = (u64*)(counters + {first}) + {at};")
            self.line(f"u32 ticket{g} = 0;")
            self.open("if (threadIdx.x == 0)")
            self.line(f"ticket{g} = take_ticket<{group.members}>(tickets{g});")
            for i in group.sums.values():
                self.expect_partials(i)
            self.close()

    def pointer_to(self, k: int, offset: str) -> None:
        if k not in self.area.added:
            super().pointer_to(k, offset)

    def of_group(self, i: int) -> list[tuple[str, int]]:
        """What numbers the groups of a reduction: all that does not number its partials."""
        t = self.tiles
        every = [(f"grid{a}", self.area.graph.space[a]) for a in self.area.grid]
        every += [("split", t.splits), ("piece", t.pieces)]
        partials = t.partials_of(i)
        return [each for each in every if each[1] > 1 and each not in partials]

    def access(self, i: int):
        return self.graph.outputs[self.ends[i]][1]

    def own_partial(self, i: int) -> str:
        """Where this block's partial of reduction `i` begins."""
        return f"partials{i} + {self.partial(i)} * {self.elements(i)}"

    def expect_partials(self, i: int) -> None:
        if self.area.along_lane(i):
            self.line(f"expect_partials<1>({self.own_partial(i)}, 1);")
            return
        columns = self.tiles.lanes * self.s.vector
        first = f"piece * {columns}"
        left = f"{self.graph.space[self.area.lane]} - {first}"
        self.line(f"expect_partials<{columns}>({self.own_partial(i)} + {first}, {left});")

    def words_at_once(self, i: int) -> int:
        return math.gcd(2, self.s.vector, self.elements(i))

    def leave_columns(self, i: int) -> None:
        self.join_shares(i)
        left = f"leave_partials<{self.words_at_once(i)}>({self.own_partial(i)} + column, acc{i});"
        self.line(f"if (y == 0 && inside) {left}")

    def leave_number(self, i: int) -> None:
        self.join_numbers(i)
        self.line(f"if (threadIdx.x == 0) leave_partial({self.own_partial(i)}, acc{i});")

    def after_partials(self) -> None:
        """Who was the last of its group to begin joins what the group has left."""
        self.line(f"__shared__ u32 told[{len(self.found)}];")
        for g in range(len(self.found)):
            self.line(f"if (threadIdx.x == 0) told[{g}] = ticket{g};")
        self.line("__syncthreads();")
        for g, group in enumerate(self.found):
            self.open(f"if (told[{g}] == {group.members - 1})")
            if self.area.along_lane(next(iter(group.sums.values()))):
                self.join_group_of_numbers(group)
            else:
                self.join_group_of_columns(group)
            self.close()

    def join_group_of_numbers(self, group: Group) -> None:
        self.open(f"if (threadIdx.x < {WARP})")
        names = {}
        for n, i in group.sums.items():
            how = f"{JOINS[self.graph.nodes[i].op]}, {group.members}"
            value = f"join_partials<{how}>(partials{i}, {self.elements(i)})"
            self.line(f"const float sum{n} = {value};")
            names[n] = f"sum{n}"
        self.open("if (threadIdx.x == 0)")
        (i, *_) = group.sums.values()
        at = self.offset(self.access(i), self.area.grid, self.coordinate)
        self.line(f"const i64 element = {at};")
        self.follow(group.segment, names)
        self.close()
        self.close()

    def join_group_of_columns(self, group: Group) -> None:
        t, vector = self.tiles, self.s.vector
        for i in group.sums.values():
            join = JOINS[self.graph.nodes[i].op]
            self.line(f"acc{i} = splat<{vector}>({join}::start<float>());")
            how = f"{join}, {group.members}, {t.shares}, {vector}, {self.words_at_once(i)}"
            taken = f"take_partials<{how}>(partials{i} + column, {self.elements(i)}, y)"
            self.line(f"if (inside) acc{i} = {taken};")
            self.join_shares(i)
        self.open("if (y == 0 && inside)")
        self.open(f"TW_UNROLL for (int e = 0; e < {vector}; ++e)")
        (i, *_) = group.sums.values()
        at = self.offset(self.access(i), self.area.grid, self.coordinate)
        self.line(f"const i64 element = {at} + column + e;")
        self.follow(group.segment, {n: f"acc{i}[e]" for n, i in group.sums.items()})
        self.close()
        self.close()

    def follow(self, segment: Segment, names: dict[int, str]) -> None:
        """What follows from joined values at one element of theirs, and the stores."""
        graph, steps = segment.graph, Kernel(segment.graph)
        called = {b: name for b, (_, name) in self.buffers().items()}
        at = self.coordinates_of_element(segment, names)
        for i, n in enumerate(graph.nodes):
            buffer = segment.reads[n.attr] if n.op == "load" else None
            if i in names or buffer in self.ends_at:
                continue
            if buffer is not None:
                offset = self.offset_in(segment, called[buffer], graph.inputs[n.attr], at)
                value = f"load_one({called[buffer]} + {offset})"
            else:
                value = steps.expression(n, [names[a] for a in n.args], None)
            self.line(f"const {TYPES[n.dtype]} f{i} = {value};")
            names[i] = f"f{i}"
        for b, (i, access) in zip(segment.writes, graph.outputs, strict=True):
            offset = self.offset_in(segment, called[b], access, at)
            self.line(f"{called[b]}[{offset}] = {names[i]};")

    def coordinates_of_element(self, segment: Segment, names: dict[int, str]) -> dict[int, str]:
        """By axis; along the outermost `element` is within the joined value."""
        found, axes, of = {}, _axes(segment, names), segment.writes[0]
        furthest = max((step for *_, step in axes), default=1)
        for a, n, step in axes:
            place = "element"
            if step > 1:
                place += f" / {self.given(f'join{of}_step{a}', step)}"
            if step < furthest:
                place += f" % {self.given(f'join{of}_size{a}', n)}"
            found[a] = f"({place})"
        return found

    def offset_in(self, segment: Segment, name: str, access: Access, at: dict[int, str]) -> str:
        """Of an element of what `name` points to."""
        of = f"join{segment.writes[0]}_{name}"
        strides = [self.given(f"{of}_stride{a}", s) for a, s in enumerate(access.strides)]
        return self.offset(replace(access, strides=tuple(strides)), list(at), at)


def _axes(segment: Segment, names: dict[int, str]) -> list[tuple[int, int, int]]:
    """The axes of a joined value: which, how long, and their steps in the order of its elements."""
    graph = segment.graph
    (value, *_) = names
    load = value if graph.nodes[value].op == "load" else graph.nodes[value].args[0]
    strides = graph.inputs[graph.nodes[load].attr].strides
    shape = graph.nodes[value].shape
    return [(a, n, strides[a]) for a, n in enumerate(shape) if n != 1]
