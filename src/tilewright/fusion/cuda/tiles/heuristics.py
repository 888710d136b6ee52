"""Which schedules of tile kernels fit an area, and which a simple model expects most of."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tilewright.device import SECTOR_BYTES, WARP, DeviceSpec
from tilewright.fusion.cuda.tiles.area import Area
from tilewright.fusion.cuda.tiles.schedule import TileSchedule
from tilewright.fusion.cuda.tiles.tiling import (
    Tiles,
    blocks_asked_for,
    blocks_in_room,
    fitted,
    meets_in_vain,
)
from tilewright.fusion.cuda.vectors import WIDEST_ACCESS
from tilewright.space import ConfigSpace

IN_FLIGHT_BYTES, MOST_IN_FLIGHT_BYTES = 32, 128
"""Of every thread that a device can hold: what hides the latency of its memory; of one thread."""
MOST_ELEMENTS = 16
"""Of one tensor that a thread has in flight: more take registers from other blocks."""
SECOND_LAUNCH_S, LAST_BLOCK_S = 1.5e-6, 2e-6
"""What a kernel that puts partials together takes on a GPU, however little it does, and what the
last block does in its place: 14.59 and 16.0 us, 14.86 and 15.36 us for the same tiles of
lerp_backward (16, 3, 244, 244) with all gradients, H200, 2026-11-21, commit 77fc060."""
MEETING_S = 2.2e-6
"""What it takes all blocks to wait for one another, and to join what each has added up: batch norm
of channels-last images, H100, see meeting_heuristic."""
MANY_LEFT = 100
"""Numbers that a thread joins at a meeting in as long as all else takes, by the same timings."""
MOST_CACHED = 1.7
"""Of what the caches of all SMs hold, that blocks which meet may read again, the rest from L2: see
meeting_heuristic."""
MEETING_LEEWAY = 24
"""Registers of a thread whose blocks meet, beside the estimate, so that it spills 108 bytes at most
(NVRTC 13.0, sm_90a)."""
SUMS_OF_A_THREAD = 6.4
"""With so many columns a thread, joining them within a block takes as long as all else: of the same
timings, vectors of 1 and 2 elements take 14.6 to 16.0 us, those of 4 take 17.2 to 23.9 us."""
REREAD = 0.97, 0.7
"""Of storage "registers", what reading twice reaches where everything stays in the L2 cache, by the
same timings, and where it does not."""
MANY_WORDS = 50
"""Partials that a thread joins in as long as all else takes, for about 10 us of it."""
SQUEEZE = 1.25
"""What a thread is reckoned to need, beside a cap that compilers may yet keep without spilling. A
block that would have an SM to itself finds company so: see the table in docs/row_kernels.md."""
MOST_CAPPED = 240
"""Registers of a thread that a cap may name: the next step is all that launch bounds can leave."""
BUSY_POWER, ACCESS_POWER, USED_POWER = 0.3, 0.1, 0.5
ALONE, FIRST_STEPS, AGAIN = 0.8, 0.5, 8
"""How much the merits below count: bytes in flight, width of an access, elements that are used; a
block that has an SM to itself; what a walk waits for at first, in steps; what is left to be joined,
beside what is read. Chosen by hand: untuned tiles reach 0.983 of the searched speed (H200,
lerp_paddle, 1462c2b)."""
LEEWAY = 0.87
"""Of what the model expects of the best schedule: one that reaches as much is taken in its place if
more sizes share it. The gradients of gates of 100 sizes have 14 kernels so, without it 33."""
USUAL_BYTES, USUAL_PIECE_BYTES = 8, 128
"""Of a thread's vector, and of a block's piece of a row: a line of a cache."""
LANES, THREADS, SPLITS = (4, 8, 16, 32, 64), (256, 512, 1024), tuple(2**k for k in range(1, 11))
"""That are tried: those of a block, and blocks that share a walk."""
FEWER_THREADS, ALONE_ACROSS = 128, 0.7
"""Of a block that adds up across its walk: while it waits at its barriers others load. Gradients of
a layer norm over the channels of bf16[32,384,28,28] took 39.8 us on an H200, and 54.0 by a block of
256 threads that has an SM to itself (b39f707, no file kept)."""
SWEPT_AGAIN = 0.3
"""What every further sweep takes beside the first, of a walk that is added up across and keeps
nothing: by the same timings, of channels in numbers of 21 to 768."""
STEP_LOADS = 2
"""Numbers of a step, for each element of a vector, that take as long as all else: gradients of
global response normalization, which loads seven, took 184.8 us on an H200 by eight elements
(bdb7142), and 241.4 by four (fadb93b, no file kept)."""
PROMISING = 10
"""So many of the model's choices a search begins with, for each of the widest vectors, half of them
for either storage: how narrow ones fare beside them it does not tell."""


def tile_space(area: Area, device: DeviceSpec) -> ConfigSpace[TileSchedule]:
    """The schedules that fit."""
    divides = area.divides or area.meets

    def why_not(c: TileSchedule) -> str | None:
        tiles = Tiles(area, c)
        return tiles.misfit() or meets_in_vain(tiles, device)

    return ConfigSpace(
        TileSchedule,
        {
            "vector": area.vectors,
            "turns": (1, 2, 4, 8, 16) if area.turning else (1,),
            "splits": tuple(2**k for k in range(11)) if divides else (1,),
            "storage": ("reread", "registers") if area.carried else ("reread",),
            "combine": ("kernel", *["last"] * area.gathers, *["grid"] * area.meets),
        },
        why_not,
    )


def tile_heuristic(area: Area, device: DeviceSpec) -> TileSchedule:
    """The schedule of which a simple model expects most, see `merit`, or an undivided walk."""
    return tile_promising(area, device)[0]


def _undivided(area: Area, device: DeviceSpec) -> list[TileSchedule]:
    """For sums over different dims: warps within a row, walks that leave the fewest partials, and
    the widest vectors of which there are yet two blocks for each SM; without those, nothing.

    For lerp's gradients of all operands (`lerp_paddle`, config C) the best of 15 schedules on an
    H200: 14.6 us by vectors of one; by wider ones 14.9 us and more, by warps over several rows 15.7
    to 23.9 us (77fc060, 2026-11-21, by events).
    """
    if len({area.along_lane(i) for i in area.added.values()}) < 2 or not area.walk:
        return []
    found = []
    for vector, ahead, shares in itertools.product(area.vectors, (False, True), (8, 16)):
        unroll = 2 if ahead else min(MOST_ELEMENTS // vector, 8)
        s = TileSchedule(vector, WARP, shares, 1, unroll, ahead=ahead)
        tiles = Tiles(area, s)
        if tiles.misfit() is None and tiles.blocks >= device.sms:
            found.append((tiles.blocks < 2 * device.sms, s))
    found.sort(key=lambda f: f[0])
    if not found or found[0][0]:
        return []
    ways = ("kernel", "last") if area.gathers else ("kernel",)
    every = [replace(s, combine=way) for _, s in found for way in ways]
    return [s for s in every if Tiles(area, s).misfit() is None]


def tile_promising(area: Area, device: DeviceSpec) -> list[TileSchedule]:
    """Those of which the model expects most, the best first."""
    space, found = tile_space(area, device), []
    of_blocks = (FEWER_THREADS, *THREADS) if area.adds_across else THREADS
    shapes = itertools.product(area.vectors[:3], LANES, of_blocks, space.values["turns"])
    ways = list(itertools.product((8, 4, 2, 1), space.values["splits"]))
    joining = [way for way in space.values["combine"] if way != "grid"]
    kinds = list(itertools.product(space.values["storage"], joining))
    for vector, lanes, threads, turns in shapes:
        shape = vector, lanes, threads // lanes, turns
        if area.refuses(TileSchedule(*shape)):  # nor is it cut so with more in flight, or divided
            continue
        for unroll, splits in ways:
            cut = *shape, unroll, splits
            if vector * unroll > MOST_ELEMENTS or area.refuses(TileSchedule(*cut)):
                continue
            for storage, combine in kinds:
                # What is read again is sought in the cache, which streams pass by.
                streams = storage == "registers" or area.only_adds or not area.carried
                schedule = TileSchedule(*cut, storage, streams, combine)
                if area.refuses(schedule):
                    continue
                tiles = Tiles(area, schedule)
                if tiles.overload() is None:
                    found.append((merit(tiles, device), -threads, vector, schedule))
    if not found:
        return [fitted(TileSchedule(), area)]
    found.sort(key=lambda f: f[:3], reverse=True)
    sorts = list(itertools.product(area.vectors[:3], reversed(space.values["storage"])))
    most = PROMISING * 3 // max(len(sorts), 3)
    of_sort = [[c for *_, c in found if (c.vector, c.storage) == sort][:most] for sort in sorts]
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*of_sort))
    near = [c for reached, *_, c in found if reached >= LEEWAY * found[0][0]]
    usual = min(near, key=lambda c: _unusual(c, area.itemsize))
    best = [usual, found[0][-1], *(c for c in in_turn if c is not None)]
    first = _undivided(area, device)
    others = [replace(c, combine="kernel") for c in best if c.storage == "reread"][:4]
    others += [replace(c, ahead=True) for c in best]
    foremost, squeezed = [], []
    for c in [*first[:1], *best[:1]]:
        closer = _squeezed(Tiles(area, c), device)
        alone = blocks_in_room(Tiles(area, c), device) == 1
        foremost.append(closer if closer and alone else c)
        squeezed += [closer] if closer else []
    compiled = [replace(c, sizes="compiled") for c in foremost]
    found_first = [*foremost, *compiled, *squeezed, *first[1:], *best]
    return list(dict.fromkeys([*found_first, *(c for c in others if c in space)]))


def meeting_promising(area: Area, device: DeviceSpec) -> list[TileSchedule]:
    """Of schedules whose blocks meet those of which the model expects most, the best first: those
    that keep steps in registers, of which some are to spare, and then those that leave them to the
    cache of their SM, which streams would pass by."""
    keeping = TileSchedule(unroll=1, storage="registers", combine="grid")
    cached = TileSchedule(unroll=4, stream_loads=False, ahead=True, combine="grid")
    best = []
    for way in (keeping, cached):
        found = []
        cuts = itertools.product(area.vectors[:3], LANES, THREADS, SPLITS)
        for width, lanes, threads, splits in cuts:
            s = replace(way, vector=width, lanes=lanes, shares=threads // lanes, splits=splits)
            tiles = Tiles(area, s)
            if tiles.misfit() is None and meets_in_vain(tiles, device, MEETING_LEEWAY) is None:
                found.append((merit(tiles, device), -threads, width, s))
        found.sort(key=lambda f: f[:3], reverse=True)
        best += [s for *_, s in found[:PROMISING]]
    return best


def meeting_heuristic(area: Area, device: DeviceSpec) -> TileSchedule | None:
    """For a walk that several kernels would divide: blocks that share it, if there is room for all
    steps in their registers, or in the caches of all SMs.

    Of batch norm of channels-last images, up to 1.7 times as large as all caches, those take 0.69
    to 0.84 of the time of several kernels, all searched, and those of 7 x 7, which one block keeps,
    1.2 to 1.6 times as long as that block (H100, docs/row_kernels.md).
    """
    for s in meeting_promising(area, device):
        room = device.sms * device.shared_bytes_per_sm
        if s.storage == "registers" or area.loaded_bytes <= MOST_CACHED * room:
            return s
    return None


def wastes_sectors(s: TileSchedule, area: Area, device: DeviceSpec) -> bool:
    """Whether blocks side by side each read a part of the same sectors, and again what they do not
    keep, for longer than they would wait for one another."""
    piece_bytes = min(s.lanes * s.vector, area.width) * area.itemsize
    if not area.carried or s.storage == "registers" or piece_bytes >= SECTOR_BYTES:
        return False
    return area.loaded_bytes >= area.meetings * MEETING_S * device.dram_bytes_per_s


def _squeezed(tiles: Tiles, device: DeviceSpec) -> TileSchedule | None:
    """The schedule with registers for one block of an SM more than are reckoned to fit, if a thread
    may yet do with those."""
    s, blocks = tiles.s, blocks_in_room(tiles, device) + 1
    cap = device.registers_left(s.block_threads, blocks)
    found = replace(s, max_registers=cap)
    near = tiles.estimated_registers <= SQUEEZE * cap
    fits = blocks * s.block_threads <= device.threads_per_sm and near
    return found if fits and Tiles(tiles.area, found).misfit() is None else None


def roomier_tiles(
    c: TileSchedule, tiles: Sequence[Tiles], device: DeviceSpec
) -> Iterator[TileSchedule]:
    """The schedule of kernels that walk, with room for fewer blocks on an SM, for one of them that
    the compiler made to spill. Narrower ones, for which it is fitted, have no such cap."""
    own = (t for t in tiles if t.s.block_threads == c.block_threads)
    most = max((blocks_asked_for(each, device) for each in own), default=1)
    left = (device.registers_left(c.block_threads, blocks) for blocks in reversed(range(1, most)))
    for cap in dict.fromkeys(min(registers, MOST_CAPPED) for registers in left):
        yield replace(c, max_registers=cap)


def _unusual(c: TileSchedule, itemsize: int) -> tuple[float, ...]:
    """How far a schedule is from the one that comes near the best for most sizes. Sizes that differ
    a little share a schedule then, and with it a kernel."""
    return (
        c.combine != "kernel",
        c.block_threads,
        abs(math.log2(c.vector * itemsize / USUAL_BYTES)),
        abs(math.log2(c.lanes * c.vector * itemsize / USUAL_PIECE_BYTES)),
        c.splits > 1,
        -c.unroll * c.vector,
        c.storage != "reread",
    )


def merit(tiles: Tiles, device: DeviceSpec) -> float:
    """The fraction of a device's bandwidth that a schedule may hope for: its threads must be
    enough, with enough bytes in flight each, spread evenly over the SMs, in pieces of many
    sectors, few of them idle, on walks that are long beside their joining, and must leave few
    partials to be read again. Of two blocks on an SM one loads while the other computes.
    """
    area, s = tiles.area, tiles.s
    itemsize, whole_bytes = area.itemsize, area.element_bytes
    shares = min(tiles.shares, tiles.split_steps)
    steps = math.ceil(tiles.split_steps / tiles.shares) * s.turns
    ahead = min(s.unroll if area.only_adds else max(s.unroll, tiles.kept_steps), steps)
    flying = min(s.vector * whole_bytes * ahead, MOST_IN_FLIGHT_BYTES)
    wanted = device.sms * device.threads_per_sm * IN_FLIGHT_BYTES
    busy = min(1.0, tiles.blocks * tiles.lanes * shares * flying / wanted) ** BUSY_POWER
    even = tiles.blocks / (math.ceil(tiles.blocks / device.sms) * device.sms)
    used = area.width / (tiles.pieces * tiles.lanes * s.vector * s.turns)
    used *= area.steps / (tiles.splits * tiles.shares * math.ceil(tiles.split_steps / tiles.shares))
    piece_bytes = min(tiles.lanes * s.vector, area.width) * itemsize
    wide = piece_bytes / (piece_bytes + SECTOR_BYTES / 2)
    wide *= min(1.0, s.vector * itemsize / WIDEST_ACCESS) ** ACCESS_POWER
    elements = math.prod(area.graph.space)
    results = area.result_elements
    partials = sum(tiles.count_of_partials(i) * results[i] for i in area.added.values())
    again = AGAIN * partials / elements
    joining = steps / (steps + FIRST_STEPS)
    moved_bytes = whole_bytes * elements
    kept = REREAD[moved_bytes > device.l2_bytes] if area.carried else 1.0
    if area.adds_across:
        kept = 1 / (1 + SWEPT_AGAIN * (area.swept_bytes / whole_bytes - 1))
    kept = 1.0 if s.storage == "registers" else kept
    alone = blocks_in_room(tiles, device) == 1
    alone |= area.adds_across and tiles.blocks <= device.sms
    overlaps = (ALONE_ACROSS if area.adds_across else ALONE) if alone else 1.0
    if tiles.meets:
        overlaps /= 1 + tiles.splits / tiles.shares * s.vector / MANY_LEFT
        if device.dram_bytes_per_s:
            moving_s = moved_bytes / device.dram_bytes_per_s
            overlaps *= moving_s / (moving_s + MEETING_S * area.meetings)
    if area.adds_across:
        overlaps /= 1 + area.step_loads / (STEP_LOADS * s.vector)
    if area.only_adds:
        overlaps /= 1 + (s.vector / SUMS_OF_A_THREAD) ** 2
    if area.added:
        last = s.combine == "last"
        if last:
            overlaps /= 1 + tiles.joined_words / MANY_WORDS
        if device.dram_bytes_per_s:
            moving_s = moved_bytes / device.dram_bytes_per_s
            overlaps *= moving_s / (moving_s + (LAST_BLOCK_S if last else SECOND_LAUNCH_S))
    return busy * even * wide * used**USED_POWER * joining * kept * overlaps / (1 + again)


def beyond_cache(tiles: Tiles, device: DeviceSpec) -> float:
    """What is left of the merit of an undivided walk where blocks that run at once have more to
    read again than the cache holds: all of its sweeps come from memory then.

    Gradients of standardized columns, f32[32768,1024], took 380 us on an H200 so (208af20), and 203
    in parts (fadb93b).
    """
    area = tiles.area
    if tiles.s.storage == "registers" or not area.carried or tiles.meets or area.adds_across:
        return 1.0
    moved_bytes = area.element_bytes * math.prod(area.graph.space)
    at_once = device.sms * blocks_in_room(tiles, device)
    if moved_bytes * min(at_once / tiles.blocks, 1.0) <= device.l2_bytes:
        return 1.0
    return min(area.element_bytes / max(area.swept_bytes, 1) / REREAD[1], 1.0)
