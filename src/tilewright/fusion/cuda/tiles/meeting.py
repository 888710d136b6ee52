"""Tile kernels whose blocks share walks, so that a large tensor stays on chip between its sweeps.

Few columns and many rows, as of the batch norm of channels-last images, leave most of a device idle
where one block walks all rows of its columns. Here many do, each a part, which stays in registers
or in the SM's cache. After a sweep that adds up, each leaves what it found in memory, waits until
all that share its walk have, and joins everything in a fixed order: all of them end with the same
bits. They wait for one another, and so must all run at once.
"""

from __future__ import annotations

from tilewright.fusion.cuda.kernel import JOINS, TYPES
from tilewright.fusion.cuda.partials import SECTOR_WORDS
from tilewright.fusion.cuda.tiles.kernel import TileKernel
from tilewright.fusion.cuda.tiles.tiling import Tiles
from tilewright.tensor_spec import TensorSpec

READS_AT_ONCE = 4
"""Of other blocks' results, that a thread has under way."""


class SharedWalkKernel(TileKernel):
    """A tile kernel with `splits` blocks to a walk, which is given room for `partials`, and
    counters."""

    def __init__(self, tiles: Tiles):
        super().__init__(tiles)
        self.times = 0
        nodes = self.graph.nodes
        self.sums = [i for phase in self.plan.phases for i in phase.reductions]
        self.dtype = "f64" if any(nodes[i].dtype == "f64" for i in self.sums) else "f32"
        self.columns = tiles.lanes * self.s.vector

    @property
    def partials(self) -> TensorSpec:
        """What blocks leave: for each sum a vector of every lane of every block."""
        return TensorSpec(self.dtype, (len(self.sums) * self.tiles.blocks * self.columns,))

    def tensors(self) -> list[str]:
        # Read again after it was written, by others: not restricted.
        return [*super().tensors(), f"{TYPES[self.dtype]}* partials"]

    def numbers(self) -> list[str]:
        return ["u32* counters", *super().numbers()]

    def place(self) -> None:
        """Also where the block's walk is counted, and which block is the first of it."""
        super().place()
        before = f"split * {self.pieces}"
        self.line(f"const u32 first_block = block - {before};")
        of_walk = self.given("of_walk", self.tiles.splits * self.tiles.pieces)
        walk = f"block / {of_walk} * {self.pieces} + piece"
        self.line(f"u32* const counter = counters + ({walk}) * {SECTOR_WORDS};")

    @property
    def first_share(self) -> str:
        return "split == 0 && y == 0"

    def join_walk(self, sums: tuple[int, ...]) -> None:
        if not sums:
            return
        t, blocks = self.tiles, self.given("blocks", self.tiles.blocks)
        for i in sums:
            self.join_shares(i)
            section = f"partials + (i64){self.sums.index(i)} * {blocks} * {self.columns}"
            self.line(f"auto* const left{i} = ({self.kind(i)}*)({section}) + x;")
            self.line(f"if (y == 0) left{i}[(i64)block * {t.lanes}] = acc{i};")
        self.times += 1
        self.line(f"meet(counter, {self.splits}, {self.times});")
        if self.times == self.area.meetings:
            self.line("const u32 leaving = start_leaving(counter);")
        for i in sums:
            self.line(f"acc{i} = {self.start(i)};")
        unroll = f'_Pragma("unroll {READS_AT_ONCE}")'
        self.open(f"{unroll} for (int p = y; p < {self.splits}; p += {t.shares})")
        for i in sums:
            other = f"left{i}[(i64)(first_block + p * {self.pieces}) * {t.lanes}]"
            self.line(f"acc{i} = join_each<{JOINS[self.graph.nodes[i].op]}>(acc{i}, {other});")
        self.close()
        super().join_walk(sums)

    def complete(self) -> None:
        super().complete()
        self.line(f"leave(counter, leaving, {self.splits}, {self.times});")
