"""How a row kernel walks its rows: the knobs."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.space import param

ROW_THREADS = (
    *(4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 1024),
)
ON_CHIP = ("registers", "shared")
"""Where a persistent kernel keeps parameters."""
UNROLL = 4
"""Turns over a row that is not in registers, unless a schedule says otherwise."""


@dataclass(frozen=True)
class RowSchedule:
    """How a kernel walks rows that it reduces.

    A row is cut into vectors of `vector` elements; `row_threads` threads of each of `cluster`
    blocks take them in turn: neighbouring threads take neighbouring vectors, and the vectors of
    one turn follow those of the turn before, or, if `contiguous`, each warp has one piece of the
    row to itself. `rows_per_thread` rows are walked together, so that a parameter vector loaded
    once serves all of them; `rows_per_block` such groups share a block.

    A persistent kernel, one block for each place on the device, takes row after row. It copies
    `stages` rows ahead into shared memory while it works on one: each thread what it will read, or
    in `bulk` the copy engine. It may keep the `parameters`, vectors that do not vary over rows, on
    chip: as they are, or `widened` to what is used of them. Any other kernel loads them where they
    are used, or `ahead`, beside the row itself, so that a row costs one wait for memory only.

    Where the vectors are no multiple of the threads, the `tail` is peeled, so that only the last
    turn asks whether it is within the row, or every turn is predicated.

    Sums over rows are joined by a second `kernel`, or by the first one itself once all blocks of
    the `grid` have met, which then must all run at once: see columns. The second kernel is let in
    as blocks come to the end of their rows, or `early`, to wait beside them.

    Its groups walk rows with the stride of the grid, or `in_turn`: each takes its next rows from a
    counter.

    With `rematerialize` halves that are kept over sweeps stay packed, and every sweep widens them
    again; otherwise the compiler may keep the fp32 values, in twice the registers.

    What later sweeps need is kept as narrow as it was read, and they `recompute` the rest; or it is
    kept as they use it: softmax's exponentials, in twice the registers.

    Vectors of `shifted` rows lie where memory is aligned, though rows begin anywhere: see shifting.

    Instead of a cluster, `blocks_per_row` blocks anywhere on the device may share a row: see
    sharing.

    Registers are what launch bounds leave to each thread where `min_blocks` blocks share an SM; or
    no more than `max_registers`, if that is not 0. A search tries the caps that it is told to,
    those that make the compiler spill among them. Turns over a row in registers are all unrolled;
    over others it is `unroll` of them, whose values a thread has at hand at once.
    """

    vector: int = param(8, 4, 2, 1)
    row_threads: int = param(*ROW_THREADS, default=256)
    rows_per_block: int = param(1, 2, 4, 8)
    rows_per_thread: int = param(1, 2, 4)
    storage: str = param("registers", "shared", "reread")
    moments: str = param("two_pass", "merge", "lanes", "tensor_cores")
    cluster: int = param(1, 2, 4, 8)
    min_blocks: int = param(1, 2, 3, 4, 6, 8)
    stream_loads: bool = param(True, False)
    stages: int = param(0, 1, 2, 3)
    bulk: bool = param(False, True)
    parameters: str = param("reload", "ahead", "registers", "shared")
    widened: bool = param(False, True)
    rematerialize: bool = param(False, True)
    contiguous: bool = param(False, True)
    shifted: bool = param(False, True)
    in_turn: bool = param(False, True)
    combine: str = param("kernel", "grid")
    tail: str = param("peeled", "predicated")
    recompute: bool = param(True, False)
    blocks_per_row: int = param(1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
    early: bool = param(False, True)
    max_registers: int = param(0, counts=True)
    unroll: int = param(1, 2, 3, 4, default=UNROLL)

    @property
    def block_threads(self) -> int:
        return self.row_threads * self.rows_per_block

    @property
    def row_blocks(self) -> int:
        """Blocks that share a row, as a cluster or without being one."""
        return self.cluster * self.blocks_per_row

    @property
    def persistent(self) -> bool:
        return self.stages > 0 or self.parameters in ON_CHIP
