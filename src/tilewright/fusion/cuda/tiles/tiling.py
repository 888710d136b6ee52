"""An area under a schedule: its tiles, and the schedules that follow from another's."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

from tilewright.compile.counters import COUNTERS
from tilewright.device import REGISTER_STEP, WARP, DeviceSpec
from tilewright.fusion.cuda import registers
from tilewright.fusion.cuda.partials import PARTIAL_WORDS, SECTOR_WORDS
from tilewright.fusion.cuda.tiles.area import Area, varies_everywhere
from tilewright.fusion.cuda.tiles.schedule import TileSchedule
from tilewright.fusion.ir import Graph
from tilewright.fusion.plan import Plan
from tilewright.fusion.remembered import remembered

JOIN_SHARES, FEW_COLUMNS = 8, 1 << 17
"""Shares of a block that puts few partials together, also where there are fewer partials than that,
if the results have so few elements in all: one kernel serves them."""
LEAST_STEPS = 8
"""Of a split, where a walk is fitted to the schedule of a longer one: fewer are not worth joining
their partials."""
JOIN_THREADS = 1024
"""Threads of a block that puts partials together: their loads are all the parallelism there is."""
FEW_PARTIALS = 32
"""Of each result, so few that blocks of a quarter as many threads, which find room beside those
that leave the partials, have all of them under way at once."""
KEPT_KINDS = 8
"""Counts of kept steps that have kernels of their own: each up to 8, every second one to 16, every
fourth to 32."""
MOST_ROUNDS = 4
"""Of a walk, that compilers unroll if they know how many there are: loads of all are then under
way. Of f16[64,512,768] over dim 1 that is four rounds, and 8 loads of 16 bytes instead of 2."""
KEEPING_LEEWAY = 18
"""Registers of a thread that keeps steps, beside the estimate: with bounds by both none of 195
untuned kernels that reduce over channels spills, by the estimate alone 8 do (NVRTC 13.0, sm_90a;
sm_100a 0, sm_80 one, 16 bytes)."""
BLOCK_REGISTERS = 1 << 16
"""Of the threads of one block, on every architecture."""


class Tiles:
    """An area under a schedule.

    Attributes:
        lanes, shares: threads of a block along the lane, and along the walk.
        splits: blocks among which a walk is divided, each with so many `split_steps`.
        meets: those wait for what all of them add up.
        pieces: blocks side by side along the lane.
        kept_steps: steps whose values a thread keeps: all of its walk, or none.
        sure_steps: of those, so many that every thread has.
        at_once: steps that a thread has in flight where it keeps none: a power of two, so that few
            kernels serve walks of all lengths. What is past the end is the last step again.
        rounds: how often a walk takes those, if its kernel is for so many alone; else 0.

    Where sizes are given to the kernel, steps that are kept and rounds are those of the longest
    walk of several, which it serves.
    """

    def __init__(self, area: Area, s: TileSchedule):
        self.area, self.s = area, s
        self.lanes, self.shares = (s.lanes, s.shares) if area.walk else (s.block_threads, 1)
        self.meets = s.combine == "grid"
        self.splits = s.splits if area.divides or self.meets else 1
        self.split_steps = math.ceil(area.steps / self.splits)
        self.pieces = math.ceil(area.width / (self.lanes * s.vector * s.turns))
        self.blocks = area.cells * self.splits * self.pieces
        own = math.ceil(self.split_steps / self.shares)
        self.at_once = min(s.unroll, _power_above(own)) if area.walk else 1
        rounds, apart = math.ceil(own / self.at_once), 1
        last = area.steps - (self.splits - 1) * self.split_steps
        sure = min(self.split_steps, max(last, 0)) // self.shares
        if s.sizes == "given":
            rounds, apart = _power_above(rounds), max(_power_above(own) // KEPT_KINDS, 1)
            own = math.ceil(own / apart) * apart
            sure = min(own - apart, sure // apart * apart)
        self.rounds = rounds if self.splits == 1 and rounds <= MOST_ROUNDS else 0
        keeps = s.storage == "registers"
        self.kept_steps, self.sure_steps = (own, sure) if keeps else (0, 0)

    def partials_of(self, i: int) -> list[tuple[str, int]]:
        """What numbers the partials of reduction `i`, outermost first: a coordinate and its
        size."""
        area = self.area
        axes = area.graph.axes(i)
        found = [(f"grid{a}", area.graph.space[a]) for a in area.grid if a in axes]
        if area.walks_through(i):
            found.append(("split", self.splits))
        if area.along_lane(i):
            found.append(("piece", self.pieces))
            if not area.walks_through(i):
                found.append((f"(x / {WARP})", math.ceil(self.lanes / WARP)))
        return [(name, n) for name, n in found if n > 1]

    @remembered
    def count_of_partials(self, i: int) -> int:
        return math.prod(n for _, n in self.partials_of(i))

    def misfit(self) -> str | None:
        """Why the schedule does not suit, or None."""
        return self.area.refuses(self.s) or self.overload()

    def overload(self) -> str | None:
        """Why the tiles ask too much of a thread or a launch, or None."""
        s = self.s
        if s.ahead and (self.kept_steps or self.shares * s.unroll >= self.split_steps):
            return "all steps of a thread are on their way at once"
        if s.combine == "last" and self.words > COUNTERS:
            return f"{self.words} words of partials exceed {COUNTERS}"
        if self.meets and self.meeting_words > COUNTERS:
            return f"{self.meeting_words} words to meet by exceed {COUNTERS}"
        room = min(255, BLOCK_REGISTERS // s.block_threads)
        left = 4 * (room - registers.ARITHMETIC)
        if self.held_bytes > left:
            return f"{self.held_bytes} bytes per thread exceed {left} bytes of registers"
        return registers.capped_in_vain(s.max_registers, room // REGISTER_STEP * REGISTER_STEP)

    @property
    def stores_steps(self) -> bool:
        """Whether some result has an element of each step."""
        graph, walk = self.area.graph, self.area.walk
        results = (n for k, (n, _) in enumerate(graph.outputs) if k not in self.area.added)
        return any(graph.nodes[i].shape[a] != 1 for i in results for a in walk)

    @property
    def plan(self) -> Plan:
        return self.area.plan_with_stores_last if self.kept_steps else self.area.plan

    @property
    def joined_words(self) -> float:
        """Partials that a thread of the last block of a group joins, at most."""
        ends = self.area.added.values()
        columns = [1 if self.area.along_lane(i) else self.lanes * self.s.vector for i in ends]
        partials = [self.count_of_partials(i) * n for i, n in zip(ends, columns, strict=True)]
        return max(partials, default=0) / self.s.block_threads

    @property
    def words(self) -> int:
        """What partials and tickets take where the last block joins them."""
        results = self.area.result_elements
        partials = sum(self.count_of_partials(i) * n for i, n in results.items())
        tickets = sum(self.blocks // self.count_of_partials(i) for i in results)
        return PARTIAL_WORDS * partials + tickets + 2 * SECTOR_WORDS * len(results)

    @property
    def meeting_words(self) -> int:
        """What blocks that share a walk count one another in, a sector for those of each walk."""
        return SECTOR_WORDS * self.blocks // self.splits

    @functools.cached_property
    def held_bytes(self) -> int:
        """Of one thread: what it adds up, and what it keeps or has in flight, whichever is more."""
        return self._held_bytes(self.s.unroll)

    def _held_bytes(self, in_flight: int) -> int:
        loaded, kept, sums = self.area.step_bytes(self.s.vector)
        flying = (1 + self.s.ahead) * in_flight * loaded
        return max(kept * self.kept_steps, flying) + sums

    @property
    def estimated_registers(self) -> int:
        """What a thread needs, as far as a schedule tells; the compiler's own count decides."""
        return registers.ARITHMETIC + self.held_bytes // 4

    @property
    def bounded_registers(self) -> int:
        """The same where launch bounds are to leave room for it: of steps that are really in
        flight, so that kernels that are alike have the same bounds."""
        in_flight = self.at_once if self.area.walk else self.s.unroll
        leeway = KEEPING_LEEWAY if self.kept_steps else 0
        return registers.ARITHMETIC + self._held_bytes(in_flight) // 4 + leeway


def blocks_in_room(tiles: Tiles, device: DeviceSpec) -> int:
    """Blocks for which an SM has registers, as many as a thread is reckoned to need."""
    threads = min(device.threads_per_sm, device.registers_per_sm // tiles.estimated_registers)
    return max(threads // tiles.s.block_threads, 1)


def blocks_asked_for(tiles: Tiles, device: DeviceSpec) -> int:
    """Of an SM, by launch bounds: compilers take no more registers than leave room for these, half
    of its threads at most. The table in docs/row_kernels.md says what that gives."""
    threads = device.registers_per_sm // tiles.bounded_registers
    threads = min(device.threads_per_sm // 2, threads)
    return max(threads // tiles.s.block_threads, 1)


def blocks_that_meet(tiles: Tiles, device: DeviceSpec) -> int:
    """Of an SM, which launch bounds have to leave room for."""
    return math.ceil(tiles.blocks / device.sms)


def meets_in_vain(tiles: Tiles, device: DeviceSpec, leeway: int = 0) -> str | None:
    """Why blocks that wait for one another would not all run at once, with so many registers more
    than are reckoned to be needed, or None."""
    if not tiles.meets:
        return None
    needed = tiles.s.max_registers or tiles.estimated_registers + leeway
    resident, limiter = device.occupancy(tiles.s.block_threads, needed, 0)
    if blocks_that_meet(tiles, device) > resident:
        most = resident * device.sms
        return f"{tiles.blocks} blocks wait for one another, and {limiter} let {most} run at once"
    return None


def blocks_of_sm(tiles: Tiles, device: DeviceSpec) -> int:
    """So many blocks on an SM that all run at once, or as many as registers allow."""
    return min(blocks_in_room(tiles, device), math.ceil(tiles.blocks / device.sms))


def loads_bytes(graph: Graph, c: TileSchedule) -> int:
    """What one block may have on its way at once, of tensors that vary over all axes."""
    whole = [a.itemsize for a in graph.memory if varies_everywhere(a, graph)]
    steps = c.unroll * (2 if c.ahead else 1)
    return c.block_threads * c.turns * c.vector * steps * sum(whole)


def joining_schedule(area: Area, most: int) -> TileSchedule:
    """For the kernels that put partials together: single columns, many shares of each. Those of one
    launch have as many threads; `most` are the partials of one result of any of them."""
    steps = _power_above(area.steps)
    threads = JOIN_THREADS if most > FEW_PARTIALS else JOIN_THREADS // 4
    if area.cells * area.width <= FEW_COLUMNS:
        steps = max(steps, JOIN_SHARES)
    shares = min(threads // min(_power_above(area.width), WARP), steps)
    sweeps = max(sum(bool(phase.reductions) for phase in area.plan.phases), 1)
    unroll = max(min(4 // sweeps, steps // shares), 1)  # what several have at hand takes registers
    reread = TileSchedule(1, threads // shares, shares, 1, unroll)
    kept = replace(reread, storage="registers")
    return kept if area.carried and Tiles(area, kept).misfit() is None else reread


def fitted(s: TileSchedule, area: Area) -> TileSchedule:
    """The schedule, or for another area the nearest: narrower, with fewer splits. Where there is
    nothing to keep no steps are: their loads would all be under way at once."""
    if not area.carried:
        s = replace(s, storage="reread")
    if s.vector in area.vectors and Tiles(area, s).misfit() is None:
        return s
    vector = next(v for v in area.vectors if v <= s.vector or v == 1)
    turns = s.turns if area.turning else 1
    if not area.walk:
        shares = max(s.block_threads // WARP, 1)
        return TileSchedule(vector, WARP, shares, turns, min(s.unroll, turns), sizes=s.sizes)
    lanes = min(s.lanes, _power_above(area.width / vector))
    steps = _power_above(area.steps)
    shares = max(min(s.shares, steps), WARP // lanes)
    splits = min(s.splits, max(steps // max(shares, LEAST_STEPS), 1)) if area.divides else 1
    unroll = max(min(s.unroll, steps // splits // shares), 1)
    tried = TileSchedule(
        vector, lanes, shares, turns, unroll, splits, s.storage, s.stream_loads, sizes=s.sizes
    )
    keeps = area.carried and Tiles(area, tried).misfit() is None
    return tried if keeps else replace(tried, storage="reread")


def _power_above(n: float) -> int:
    return 1 << max(math.ceil(n) - 1, 0).bit_length()
