"""Which split-K configs of the weight gradient fit, and which should be fast: wave arithmetic."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from tilewright.compile.counters import COUNTERS
from tilewright.device import MAX_GRID_YZ, DeviceSpec
from tilewright.impls.weight_gradient._problem import PANEL, Problem

COMBINES = ("last", "grid", "kernel")
"""Who adds the slices of a tile: its last block; all its blocks, which run at once and wait for
each other; or a second kernel."""
MARKED, SERIAL = "marked", "serial"
"""All its blocks, as with "grid", but each waits for the sums themselves: blocks meet when they
begin, and have marked the places of their sums by then. Or its blocks one after the other, each
adding to what the one before left: a tile's sums take the workspace of one slice."""
WAYS = (*COMBINES, MARKED, SERIAL)
"""As the kernels number them."""
ADD_THREADS = (256, 128, 512)
"""Of a block of the second kernel: the values of its knob."""


class Split(Protocol):
    """A config of any of the kernels."""

    @property
    def tile_m(self) -> int: ...
    @property
    def tile_n(self) -> int: ...
    @property
    def tile_k(self) -> int: ...
    @property
    def stages(self) -> int: ...
    @property
    def split_k(self) -> int: ...
    @property
    def cluster(self) -> int: ...
    @property
    def blocks_together(self) -> int: ...
    @property
    def combine(self) -> str: ...
    @property
    def add_threads(self) -> int:
        """Of a block of the second kernel; the usual ones where there is none."""

    @property
    def blocks(self) -> int:
        """Of stream-K, which walk equal ranges of all tiles' steps; 0 where slices are cut."""

    @property
    def whole(self) -> bool:
        """Those blocks walk whole tiles."""

    @property
    def threads(self) -> int: ...
    @property
    def sums(self) -> int: ...
    @property
    def beside_sums(self) -> int: ...
    @property
    def alone_with_bias(self) -> bool:
        """Whether an SM has one block at most where sums of the bias lie beside a tile."""

    @property
    def sum_bytes(self) -> int: ...
    @property
    def operand_bytes(self) -> int: ...
    @property
    def shared_bytes(self) -> int: ...
    @property
    def static_bytes(self) -> int: ...


C = TypeVar("C", bound=Split)


def blocks_per_sm(problem: Problem, device: DeviceSpec, c: Split) -> int:
    """Blocks that share an SM; the kernels are compiled for as many, and for one if that is 0.

    Adding slices takes sixteen loads of four registers at a time, which sets a floor.
    """
    most = device.registers_left(c.threads, 1)
    registers = min(max(c.sums + c.beside_sums, 120), most)
    shared_bytes = c.shared_bytes + c.static_bytes
    together, _ = device.occupancy(c.threads, registers, shared_bytes)
    return min(together, 1) if problem.bias and c.alone_with_bias else together


def split_choices(problem: Problem, device: DeviceSpec, tiles: set[int], least_k: int) -> list[int]:
    """Slice counts worth trying: powers of two, and what fills whole waves of the device, in
    clusters of any size."""
    most = problem.steps(least_k)
    found = {1 << i for i in range(9)} | {3, 6, 12, 24, 48}
    for n in tiles:
        for waves in (1, 2, 3, 4):
            for cluster in (1, 2, 3, 4, 6, 8):
                at_once = device.cluster_sms.get(cluster, device.sms)
                found.add(waves * at_once // n // cluster * cluster)
    return sorted(s for s in found if 1 <= s <= most)


def why_not(problem: Problem, device: DeviceSpec, c: Split) -> str | None:
    """Why a config does not fit, in words, or None."""
    if c.shared_bytes + c.static_bytes > device.shared_bytes_per_block:
        return f"{c.shared_bytes} bytes of shared memory are more than a block has"
    if c.tile_m >= 2 * max(problem.features, 64) or c.tile_n // PANEL >= 2 * problem.panels:
        return "a tile half as large covers the whole result"
    if c.split_k % c.cluster:
        return f"{c.split_k} slices do not fill clusters of {c.cluster}"
    if c.cluster > 1 and 4 * c.tile_m * (c.tile_n + 2) > c.operand_bytes:
        return f"{c.stages} stages are smaller than a tile's sums, which a cluster keeps there"
    if c.add_threads != ADD_THREADS[0] and c.combine != "kernel":
        return "no second kernel adds slices"
    if problem.column_tiles(c.tile_n) > MAX_GRID_YZ:
        return f"{problem.column_tiles(c.tile_n)} columns of tiles are more than a grid has"
    if c.blocks:
        return _why_not_in_ranges(problem, device, c)
    if c.whole:
        return "without ranges every block has one tile, or a slice of it"
    if c.split_k == 1:
        return None if c.combine == COMBINES[0] else "one slice needs no combining"
    if c.split_k > problem.steps(c.tile_k):
        return f"{problem.pixels} pixels are fewer than {c.split_k} slices of {c.tile_k}"
    if c.split_k > MAX_GRID_YZ:
        return f"{c.split_k} slices are more than a grid has"
    groups, tiles = c.split_k // c.cluster, problem.tiles(c.tile_m, c.tile_n)
    if groups == 1:
        return None if c.combine == COMBINES[0] else "a cluster adds all slices"
    if c.combine == SERIAL and c.cluster > 1:
        return "blocks that add one after the other add no slices in clusters"
    if workspace_bytes(problem, c) > problem.workspace_limit_bytes:
        kept = 1 if c.combine == SERIAL else groups
        return (
            f"partial sums of {kept} groups of slices exceed {problem.workspace_limit_bytes} bytes"
        )
    if c.combine != "kernel" and tiles * c.cluster > COUNTERS:
        return f"segments of {tiles} tiles exceed {COUNTERS} counters"
    if c.combine == MARKED and c.blocks_together > 1:
        return "blocks of a cluster mark no places"
    if c.combine == "grid" and c.blocks_together > 2:
        return f"how many clusters of {c.blocks_together} run at once differs from chip to chip"
    at_once = blocks_at_once(device, c) * blocks_per_sm(problem, device, c)
    if c.combine in ("grid", MARKED) and tiles * c.split_k > at_once:
        return f"{tiles * c.split_k} blocks cannot run at once"
    return None


def _why_not_in_ranges(problem: Problem, device: DeviceSpec, c: Split) -> str | None:
    if c.split_k > 1 or c.cluster > 1 or c.combine != COMBINES[0]:
        return "ranges of steps are cut by blocks, not by slices"
    tiles = problem.tiles(c.tile_m, c.tile_n)
    if c.whole and c.blocks >= tiles:
        return f"{tiles} tiles are one or none for each of {c.blocks} blocks"
    steps = tiles * problem.steps(c.tile_k)
    if not c.blocks <= steps < 2**31:
        return f"{steps} steps are no ranges of {c.blocks} blocks"
    if c.blocks > device.sms * blocks_per_sm(problem, device, c):
        return f"{c.blocks} blocks cannot run at once"
    if workspace_bytes(problem, c) > problem.workspace_limit_bytes:
        return f"partial sums of {c.blocks} blocks exceed {problem.workspace_limit_bytes} bytes"
    if cuts_tiles(c) and tiles > COUNTERS:
        return f"{tiles} tiles exceed {COUNTERS} counters"
    return None


def cuts_tiles(c: Split) -> bool:
    """Whether ranges of steps end inside tiles, whose segments are then left to add."""
    return c.blocks > 0 and not c.whole


def in_ranges(problem: Problem, device: DeviceSpec, bases: Iterable[C]) -> list[C]:
    """Each of the configs with as many blocks of stream-K, or persistent ones, as run at once, or
    fewer."""
    found = []
    for base in bases:
        for together in range(blocks_per_sm(problem, device, base), 0, -1):
            for whole in (False, True):
                config = replace(base, blocks=together * device.sms, whole=whole)  # type: ignore[type-var]
                if why_not(problem, device, config) is None:
                    found.append(config)
    return found


def likely(
    problem: Problem, device: DeviceSpec, bases: Iterable[C], splits: Iterable[int]
) -> list[C]:
    """Each of the configs at every slice count and way to combine that fits; one block after the
    other where memory leaves no other way."""
    found = []
    splits = tuple(splits)
    for base in bases:
        for split_k in splits:
            if split_k % base.cluster:
                continue
            ways = COMBINES[: 1 if split_k == base.cluster else None]
            configs = [replace(base, split_k=split_k, combine=way) for way in ways]  # type: ignore[type-var]
            fits = [c for c in configs if why_not(problem, device, c) is None]
            in_turn = replace(base, split_k=split_k, combine=SERIAL)  # type: ignore[type-var]
            if not fits and why_not(problem, device, in_turn) is None:
                fits = [in_turn]
            found += fits
    return found


def ranked(configs: Iterable[C], us: Callable[[C], float], most: int) -> list[C]:
    """The configs that should be fastest, at most two alike but for slices and who adds them."""
    found: list[C] = []
    alike: Counter[C] = Counter()
    for config in sorted(configs, key=us):
        kind = replace(config, split_k=config.cluster, combine=COMBINES[0])  # type: ignore[type-var]
        alike[kind] += 1
        if alike[kind] <= 2:
            found.append(config)
        if len(found) == most:
            break
    return found


SUMS_PER_SM = 64 * 64
"""Where fp32 sums of halves are kept, what is taken untuned has as many slices as give each SM a
tile of so many sums. Tensor cores cut off an ulp for each 16 pixels of a chain, and a result whose
error is over twice PyTorch's is refused: cuDNN's chains are as short as if tiles of twice as many
sums filled the SMs. Of 66 layers of ResNet-50 v1.5 at batch 8, 32 and 256 (H200, 2026-11-22) the
model's first choice was refused on 17, and on 15 of them had fewer slices than these."""
MOST_ASKED, SHORT_CHAIN = 48, 600
"""Slices that are asked for at most, and pixels of a chain that is short enough anyway."""
LEAST_OF_TAPS, SHORT_OF_TAPS = 4, 2112
"""Of filters of several taps: slices, and pixels of a chain that is short enough anyway. The other
two of those 17 layers had chains of 6848 of 12544 pixels, and four slices were right."""


def longest_chain(problem: Problem, device: DeviceSpec) -> float:
    """Pixels that a thread may sum one behind the other, in a config that is taken unverified."""
    if not problem.keeps_sums:
        return math.inf
    if problem.taps > 1:
        return max(SHORT_OF_TAPS, problem.pixels / LEAST_OF_TAPS)
    elements = problem.features * problem.row_length
    slices = min(math.ceil(device.sms * SUMS_PER_SM / elements), MOST_ASKED)
    return max(SHORT_CHAIN, problem.pixels / slices)


def chain(problem: Problem, c: Split) -> float:
    """Pixels that a thread of a config sums one behind the other."""
    if not cuts_tiles(c):
        return problem.pixels / c.split_k
    return min(problem.pixels, problem.pixels * problem.tiles(c.tile_m, c.tile_n) / c.blocks)


def exact(problem: Problem, device: DeviceSpec, configs: Iterable[C]) -> list[C]:
    """Those of short chains; all where none is."""
    configs, longest = list(configs), longest_chain(problem, device)
    return [c for c in configs if chain(problem, c) <= longest] or configs


CHALLENGERS = 2


def challengers(
    problem: Problem,
    device: DeviceSpec,
    first: Split,
    configs: Iterable[C],
    us: Callable[[C], float],
) -> list[C]:
    """The best configs with a block for each SM where the one to take untuned leaves SMs without:
    a search measures them, whatever the model says of its choice."""
    if _blocks(problem, first) >= device.sms:
        return []
    filling = (c for c in configs if _blocks(problem, c) >= device.sms)
    return heapq.nsmallest(CHALLENGERS, filling, key=us)


def _blocks(problem: Problem, c: Split) -> int:
    return c.blocks or problem.tiles(c.tile_m, c.tile_n) * c.split_k


# Fitted to tests/unit/weight_gradient/weight_grad_h200.csv (docs/weight_gradient.md).
LAUNCH_US, FILL_US, STEP_US, STORE_US = 1.61, 1.37, 0.075, 0.17
"""An empty kernel; until the first products; between two steps of a block; writing 128 x 128."""
TURN_US, HELD = 1.18, 1.53
"""From asking for a step's pixels until they are there, under load; stages that products hold."""
LAST_US, GRID_US, CLUSTER_US, SECOND_KERNEL_US, SLICE_US = 2.28, 1.44, 1.38, 5.25, 0.085
"""Until it is known who was last; until all blocks of a tile have met, of a cluster; launching
another kernel; following one more group."""
SEEN_US = 0.5
"""Until a sum that was stored is seen where it was waited for: a guess."""
ONE_BYTES_PER_US, PEER_BYTES_PER_US = 61.7e3, 40.1e3
"""That one SM reads of partial sums in L2, and of its neighbours' in their shared memory."""
WRITTEN, READ = 0.7, 3.46
"""Rate of all partial sums to and from L2, in units of the memory's."""
SCATTERED, READ_FREELY = 45, 0.0113
"""Of stream-K, whose blocks share no pixels with their neighbours: what small tiles, which read
more for each product, add to the time. Timings of nine layers, H200, 2026-11-21, commit 77fc060:
512 channels 3x3 of 7 x 7 pixels, batch 256, take 91 to 98 us by tiles of 256 x 128 to 128 x 192,
111 us by 128 x 128 and 135 to 141 us by 64 x 384 and 64 x 256."""
MEMORY, AGAIN, AGAIN_IN_CLUSTERS = 0.92, 0.1, 0.3
"""Of the memory's datasheet rate that operands are read at; and of what further tiles read, how
much comes from memory again: blocks of one slice drift apart, those in clusters further."""


WGMMA_SHARE = 0.82
"""Of the datasheet's tensor rate that wgmma reaches."""


def forecast(
    problem: Problem, device: DeviceSpec, c: Split, share: float = WGMMA_SHARE
) -> dict[str, Any]:
    """What a config amounts to on a device: how its blocks fill the SMs, and its time.

    `waves` is how often the blocks that run at once fit into all blocks; `tail` the part of the
    last wave that stays empty.
    """
    tiles, _, _ = _amounts(problem, c)
    at_once = blocks_at_once(device, c) * blocks_per_sm(problem, device, c)
    waves = (c.blocks or tiles * c.split_k) / at_once
    return {
        "tile": f"{c.tile_m}x{c.tile_n}x{c.tile_k}",
        "tiles": tiles,
        "slices": round(c.blocks / tiles, 2) if cuts_tiles(c) else c.split_k,
        "waves": round(waves, 2),
        "tail": round(1 - waves / math.ceil(waves), 2),
        "workspace_bytes": workspace_bytes(problem, c),
        "predicted_us": round(predicted_us(problem, device, c, share), 2),
    }


def blocks_at_once(device: DeviceSpec, c: Split) -> int:
    """Where each SM holds one block."""
    size = c.blocks_together
    return device.cluster_sms.get(size, device.sms // size * size)


def predicted_us(
    problem: Problem, device: DeviceSpec, c: Split, share: float = WGMMA_SHARE
) -> float:
    """Wave arithmetic: steps of a block, times waves, plus combining the slices.

    A step takes as long as its products, or as its stage's turn: the bytes that fit into shared
    memory, over the time until they come, are what an SM gets. Blocks that share an SM share its
    tensor cores, and hide each other's waiting. The constants were fitted to 1432 timings of the 66
    layers of ResNet-50 v1.5 at batch 8, 32 and 256 on an H200, 2026-11-21: the config they rank
    first takes 1.014 times as long as the fastest of about 22 measured, in geometric mean.

    Args:
        share: of the datasheet's tensor rate that the kernel's instruction reaches.
    """
    tiles, tile, groups = _amounts(problem, c)
    waves = math.ceil((c.blocks or tiles * c.split_k) / blocks_at_once(device, c))
    together = max(1, min(blocks_per_sm(problem, device, c), waves))
    rate = share * device.flops["f16_tensor"] * 1e-6
    multiply_us = 2 * tile * c.tile_k / rate * device.sms
    step_us = max(multiply_us, (multiply_us + STEP_US) / together)
    turn_us = TURN_US / max(c.stages - HELD, 0.5) / together
    stores = math.ceil(tiles / c.blocks) if c.blocks else 1
    steps = math.ceil(problem.steps(c.tile_k) * tiles / (c.blocks or tiles * c.split_k))
    if c.whole:
        steps = stores * problem.steps(c.tile_k)
    memory_us = _traffic(problem, device, c) / (MEMORY * device.dram_bytes_per_s) * 1e6
    total_us = LAUNCH_US + FILL_US * math.ceil(waves / together)
    total_us += max(waves * steps * max(step_us, turn_us), memory_us)
    total_us += STORE_US * waves * stores * tile / 128**2 / c.cluster
    if cuts_tiles(c):
        read = 1.1 / c.tile_m + 0.9 / c.tile_n  # boxes of x take longer than those of grad_output
        total_us *= 1 + SCATTERED * max(0.0, read - READ_FREELY)
        return total_us + _joining_us(problem, c, steps)
    if c.cluster > 1:
        total_us += waves * (CLUSTER_US + 4 * tile / PEER_BYTES_PER_US)
    if groups == 1:
        return total_us
    one_us = 4 * tile / c.cluster / ONE_BYTES_PER_US
    if c.combine == SERIAL:  # those of an earlier wave have had their turn
        return total_us + math.ceil(groups / waves) * (GRID_US + 2 * one_us)
    partial_us = 4 * tile * tiles * groups / (device.dram_bytes_per_s * 1e-6)
    total_us += max(partial_us / WRITTEN, one_us)
    if c.combine == "last":
        return total_us + LAST_US + groups * one_us
    start_us = {"grid": GRID_US, MARKED: SEEN_US, "kernel": SECOND_KERNEL_US}[c.combine]
    if c.combine == MARKED:  # as many marks are written, while the first pixels come
        total_us += max(partial_us / WRITTEN - FILL_US, 0.0)
    return total_us + start_us + partial_us / READ + SLICE_US * groups


def _joining_us(problem: Problem, c: Split, steps: int) -> float:
    """Of stream-K: a block stores the segment that it begins with, and adds those of the tile that
    it ends with, with half as many loads under way as where nothing else is in registers."""
    of_tile = problem.steps(c.tile_k)
    if steps % of_tile == 0:
        return 0.0
    one_us = 4 * c.tile_m * c.tile_n / ONE_BYTES_PER_US
    later = math.ceil((of_tile - 1) / steps)
    return one_us + GRID_US + 2 * later * one_us


def _traffic(problem: Problem, device: DeviceSpec, c: Split) -> float:
    """Bytes from memory: each operand once, and a part of what further tiles read of it; where
    blocks walk ranges, which begin anywhere, what half of L2 does not hold of the operands."""
    again = AGAIN if c.cluster == 1 else AGAIN_IN_CLUSTERS
    if cuts_tiles(c):
        again = max(AGAIN, 1 - device.l2_bytes / (2 * problem.read_bytes))
    x_bytes = problem.read_bytes - problem.grad_bytes
    further = (problem.column_tiles(c.tile_n) - 1) * problem.grad_bytes
    further += 0 if problem.group else (problem.row_tiles(c.tile_m) - 1) * x_bytes
    return problem.read_bytes + again * further


def partial_sums(problem: Problem, c: Split) -> int:
    """How many the workspace holds: whole tiles, and a row of the bias's beside each."""
    tiles, tile, groups = _amounts(problem, c)
    slots = c.blocks if cuts_tiles(c) else 0
    if groups > 1:
        slots = tiles * (1 if c.combine == SERIAL else groups)
    return slots * (tile + c.tile_m * problem.bias)


def workspace_bytes(problem: Problem, c: Split) -> int:
    return c.sum_bytes * partial_sums(problem, c)


def _amounts(problem: Problem, c: Split) -> tuple[int, int, int]:
    """Tiles, elements of a tile, groups of slices."""
    return problem.tiles(c.tile_m, c.tile_n), c.tile_m * c.tile_n, c.split_k // c.cluster
