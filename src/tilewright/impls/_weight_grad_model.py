"""Which split-K configs of the weight gradient fit, and which should be fast: wave arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol, TypeVar

from tilewright.device import DeviceSpec
from tilewright.impls._weight_grad import PANEL, Problem

WORKSPACE_LIMIT_BYTES = 1 << 29
"""Partial sums of a split reduction; a config that needs more does not fit."""
COUNTERS = 1 << 12
"""Tiles that a launch can count."""
COMBINES = ("last", "grid", "kernel")
"""Who adds the slices of a tile: its last block; all its blocks, which run at once and wait for
each other; or a second kernel."""


class Split(Protocol):
    """A config of any of the kernels."""

    @property
    def tile_m(self) -> int: ...
    @property
    def tile_n(self) -> int: ...
    @property
    def tile_k(self) -> int: ...
    @property
    def split_k(self) -> int: ...
    @property
    def combine(self) -> str: ...
    @property
    def threads(self) -> int: ...
    @property
    def sums(self) -> int: ...
    @property
    def stage_bytes(self) -> int: ...
    @property
    def shared_bytes(self) -> int: ...
    @property
    def static_bytes(self) -> int: ...


C = TypeVar("C", bound=Split)


def blocks_per_sm(device: DeviceSpec, c: Split) -> int:
    """Blocks that share an SM; the kernels are compiled for as many.

    Adding slices takes sixteen loads of four registers at a time, which sets a floor.
    """
    most = device.registers_per_sm // c.threads // 8 * 8
    registers = min(max(c.sums + 64, 120), most)
    return device.occupancy(c.threads, registers, c.shared_bytes + c.static_bytes)[0]


def split_choices(problem: Problem, device: DeviceSpec, tiles: set[int], least_k: int) -> list[int]:
    """Slice counts worth trying: powers of two, and what fills whole waves of the device."""
    most = problem.steps(least_k)
    found = {1 << i for i in range(9)} | {3, 6, 12, 24, 48}
    for n in tiles:
        for waves in (1, 2, 3, 4):
            found.add(waves * device.sms // n)
    return sorted(s for s in found if 1 <= s <= most)


def why_not(problem: Problem, device: DeviceSpec, c: Split) -> str | None:
    """Why a config does not fit, in words, or None."""
    if c.shared_bytes + c.static_bytes > device.shared_bytes_per_block:
        return f"{c.shared_bytes} bytes of shared memory are more than a block has"
    if c.tile_m >= 2 * max(problem.features, 64) or c.tile_n // PANEL >= 2 * problem.panels:
        return "a tile half as large covers the whole result"
    if c.split_k == 1:
        return None if c.combine == COMBINES[0] else "one slice needs no combining"
    if c.split_k > problem.steps(c.tile_k):
        return f"{problem.pixels} pixels are fewer than {c.split_k} slices of {c.tile_k}"
    tiles = problem.tiles(c.tile_m, c.tile_n)
    if 4 * tiles * c.split_k * c.tile_m * c.tile_n > WORKSPACE_LIMIT_BYTES:
        return f"partial sums of {c.split_k} slices exceed {WORKSPACE_LIMIT_BYTES} bytes"
    if c.combine != "kernel" and tiles > COUNTERS:
        return f"{tiles} tiles exceed {COUNTERS} counters"
    if c.combine == "grid" and tiles * c.split_k > device.sms * blocks_per_sm(device, c):
        return f"{tiles * c.split_k} blocks cannot run at once"
    return None


def likely(
    problem: Problem, device: DeviceSpec, bases: Iterable[C], splits: Iterable[int]
) -> list[C]:
    """Each of the configs at every slice count and way to combine that fits."""
    found = []
    splits = tuple(splits)
    for base in bases:
        for split_k in splits:
            for combine in COMBINES:
                config = replace(base, split_k=split_k, combine=combine)  # type: ignore[type-var]
                if why_not(problem, device, config) is None:
                    found.append(config)
    return found


LAUNCH_US, FILL_US, STEP_US, STORE_US = 2.2, 1.2, 0.11, 0.5
"""An empty kernel; until the first products; between two steps of a block; writing 128 x 128."""
MEET_US, SECOND_KERNEL_US, SLICE_US = 1.0, 5.0, 0.03
"""Until all blocks of a tile have met; launching another kernel; following one more slice."""
L2_BYTES_PER_CLOCK = 40.0
"""That an SM draws from L2."""
WRITTEN, READ = 0.7, 1.5
"""Rate of partial sums to and from L2, in units of the memory's."""


def predicted_us(problem: Problem, device: DeviceSpec, c: Split, share: float = 0.88) -> float:
    """Wave arithmetic: steps of a block, times waves, plus combining the slices.

    Blocks that share an SM share its tensor cores and its path to L2, and hide each other's waiting
    between steps. The constants were fitted to 1700 timings of the 66 layers of ResNet-50 v1.5 at
    batch 8, 32 and 256 on an H200, 2026-11-21: the config they rank first takes 1.03 times as long
    as the fastest of those measured, in geometric mean.

    Args:
        share: of the datasheet's tensor rate that the kernel's instruction reaches.
    """
    tiles, tile = problem.tiles(c.tile_m, c.tile_n), c.tile_m * c.tile_n
    blocks = tiles * c.split_k
    waves = math.ceil(blocks / device.sms)  # in units of one block per SM
    together = max(1, min(blocks_per_sm(device, c), waves))
    sm_bytes_per_us = L2_BYTES_PER_CLOCK * device.clock_hz * 1e-6
    multiply_us = 2 * tile * c.tile_k / (share * device.flops["f16_tensor"] / device.sms) * 1e6
    load_us = c.stage_bytes / sm_bytes_per_us
    step_us = max(multiply_us, load_us, (multiply_us + STEP_US) / together)
    steps = math.ceil(problem.steps(c.tile_k) / c.split_k)
    memory_us = problem.read_bytes / device.dram_bytes_per_s * 1e6 * 1.2
    total_us = LAUNCH_US + FILL_US * math.ceil(waves / together)
    total_us += max(waves * steps * step_us, memory_us)
    if c.split_k == 1:
        return total_us + STORE_US * waves * tile / 128**2
    memory_bytes_per_us = device.dram_bytes_per_s * 1e-6
    partial_us = 4 * tile * blocks / memory_bytes_per_us
    one_us = 4 * tile / sm_bytes_per_us
    total_us += max(partial_us / WRITTEN, one_us)
    if c.combine == "last":
        return total_us + MEET_US + c.split_k * one_us
    start_us = MEET_US if c.combine == "grid" else SECOND_KERNEL_US
    return total_us + start_us + partial_us / READ + SLICE_US * c.split_k
