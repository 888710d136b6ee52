"""Schedules of tile kernels: how a space is cut into the tiles that blocks walk.

A tile kernel takes what a row kernel cannot: reductions across the order of memory (a softmax over
channels, a sum over dim 0), several reductions over different dims in one pass (the gradients of a
broadcast), and rows so long and few that blocks must share them. Vectors run along one axis, the
lane; a block walks a piece of other axes, and what is left numbers the blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.space import param


@dataclass(frozen=True)
class TileSchedule:
    """How a kernel walks tiles.

    A block has `lanes` threads along the lane axis, each with `turns` vectors of `vector` elements,
    times `shares` that divide the steps of the walk; each has `unroll` steps in flight, and the
    next ones, too, while it computes, if they are loaded `ahead`. The walk is divided into
    `splits`.
    `storage` says whether values that a second sweep needs stay in registers or are read again;
    what blocks gather has a second sweep, of its stores, only if they stay there.
    What blocks leave of a result is put together by a `kernel` of its own, or, of all blocks that
    have a share in it, by the `last` one to begin: see gathering. Or all blocks of the `grid` run
    at once, wait for one another, and go on with what all have found: see meeting.
    `sizes` are given when the kernel is launched, so that it serves others, too, or compiled in.
    Registers are what launch bounds leave to each thread, or no more than `max_registers`, if that
    is not 0: a search tries the caps that it is told to.
    """

    vector: int = param(8, 4, 2, 1)
    lanes: int = param(1, 2, 4, 8, 16, 32, 64, 128, 256, default=32)
    shares: int = param(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, default=8)
    turns: int = param(1, 2, 4, 8, 16)
    unroll: int = param(1, 2, 4, 8)
    splits: int = param(*(2**k for k in range(11)))
    storage: str = param("reread", "registers")
    stream_loads: bool = param(True, False)
    combine: str = param("kernel", "last", "grid")
    ahead: bool = param(False, True)
    sizes: str = param("given", "compiled", own=True)
    max_registers: int = param(0, counts=True)

    @property
    def block_threads(self) -> int:
        return self.lanes * self.shares
