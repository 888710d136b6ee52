"""What tile kernels do, which decides where a graph is cut into kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tilewright.device import DeviceSpec
from tilewright.fusion.cuda.rows.row_sets import MOST_ROWS
from tilewright.fusion.cuda.tiles.area import Area, best_walk
from tilewright.fusion.cuda.tiles.schedule import TileSchedule
from tilewright.fusion.cuda.tiles.tiling import Tiles, fitted
from tilewright.fusion.cuda.vectors import MOST_COLUMNS
from tilewright.fusion.ir import Graph
from tilewright.fusion.program import Kernels, Segment

PARTIALS_SHARE = 4
"""Partials of results may be this fraction of the elements that are read."""
LONG_LANE = 64
"""Elements along the lane of which a block leaves one partial of each sum."""
LONG_ROWS = 1 << 20
"""Elements from which more passes are cheaper than a device that is mostly idle."""
MORE_PASSES = 8
"""Over large tensors, that such rows may take."""
MOST_JOINED = 1 << 16
"""Partials of one number that a block joins: by 1024 threads, four loads of each under way at
once."""
MANY_LANES = 16
"""Elements along the lane that a block takes at least."""


def few_rows(space: tuple[int, ...], row: tuple[int, ...], lane: int, device: DeviceSpec) -> bool:
    """Whether rows are so few and long that they leave most of a device idle: clusters, where rows
    run along the lane, else blocks side by side on it. Or too long for one of these."""
    elements, columns = math.prod(space), math.prod(space[a] for a in row)
    blocks = elements // columns
    if lane in row and columns > MOST_COLUMNS:
        return True
    if lane in row:
        blocks *= device.max_cluster
    else:
        blocks = blocks // space[lane] * math.ceil(space[lane] / MANY_LANES)
    return 2 * blocks <= device.sms and elements >= LONG_ROWS


def _over_rows(graph: Graph, i: int, row: tuple[int, ...]) -> bool:
    """Whether reduction `i` runs over all rows of what it reduces, and each of these is whole."""
    shape = graph.nodes[graph.nodes[i].args[0]].shape
    over = [a for a, n in enumerate(shape) if a not in row and n > 1]
    return list(graph.axes(i)) == over and all(shape[a] == graph.space[a] for a in row)


class TileKernels(Kernels):
    """What kernels of this target do, under one schedule: see Kernels.

    Args:
        device: split rows that are too few for it, though each of their reductions is a pass.
        mixes: add up over different dims in one walk.
        rows: row kernels leave a partial for each row of what is reduced over rows and more.
        columns: they also add up over all rows.
        sets: row kernels complete what is reduced over sets of rows, too.
        adds_across: kernels of rows across the order of memory also add up along it.
        parts: rows are parts of longer ones, whose results are put together at once for all.
    """

    across = True
    corrects_halves = False  # of which sums are exact enough
    most_joined = MOST_JOINED

    def __init__(
        self,
        schedule: TileSchedule,
        device: DeviceSpec | None = None,
        mixes: bool = True,
        rows: bool = False,
        columns: bool = False,
        adds_across: bool = False,
        sets: bool = False,
        parts: bool = False,
    ):
        super().__init__()
        self.schedule, self.device, self.mixes = schedule, device, mixes
        self.row_partials, self.columns, self.joins_apart = rows, columns, parts
        self.adds_across = adds_across
        self.set_rows = MOST_ROWS if sets else 0
        self.extra = MORE_PASSES if device else 0
        self.stores_sums = schedule.combine != "last"  # else what joins partials stores all sums
        self.rounds_sums = not (rows or sets)

    def kind(self) -> tuple[Any, ...]:
        ways = self.mixes, self.row_partials, self.columns, self.adds_across, self.stores_sums
        return (*super().kind(), self.device, *ways, self.set_rows, self.joins_apart)

    def suits(self, space: tuple[int, ...], row: tuple[int, ...], lane: int) -> int:
        if not row:
            return 1
        if self.device and few_rows(space, row, lane, self.device):
            return -1
        return 2 if lane in row else 0

    def adds(self, graph: Graph, row: tuple[int, ...], lane: int, sums: Sequence[int]) -> bool:
        if row and lane not in row:
            leaves = len(sums) * PARTIALS_SHARE <= min(graph.space[lane], LONG_LANE)
            return self.adds_across and row in graph.reduction_sets and leaves
        if row:
            return self.row_partials and all(
                set(row) < set(graph.axes(i)) or (self.columns and _over_rows(graph, i, row))
                for i in sums
            )
        sets = list(dict.fromkeys(graph.axes(i) for i in sums))
        if len(sets) > 1 and not self.mixes:
            return False
        partial, _ = best_walk(graph, lane, sets)
        return len(sets) == 1 or partial * PARTIALS_SHARE <= math.prod(graph.space)

    def divided(self, segment: Segment) -> dict[int, int]:
        area = Area(segment)
        tiles = Tiles(area, fitted(self.schedule, area))
        return {k: tiles.count_of_partials(i) for k, i in area.added.items()}
