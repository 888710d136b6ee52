"""Gather with the places of a block of columns in shared memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tilewright.build import CompileTask
from tilewright.compile.cache import compiled
from tilewright.device import SECTOR_BYTES, DeviceSpec
from tilewright.impl import Executable, Implementation
from tilewright.impls.indices._indexed import (
    IndexedExecutable,
    Launch,
    Workspace,
    cuda_task,
    no_cuda,
)
from tilewright.impls.indices._tiles import (
    ALL,
    columns,
    none_fits,
    tiles,
    why_not,
    width,
)
from tilewright.impls.indices.gathers._gather import Slices, gather_problem
from tilewright.op import Workload
from tilewright.space import ConfigSpace, param


class GatherTiled(Implementation):
    """x, index and out are each moved once, in order, however random the indices are: no sector of
    memory is fetched for one element. One launch, no workspace."""

    name, backend, op = "gather_tiled", "cuda", "gather"

    @dataclass(frozen=True)
    class Config:
        width: int = param(ALL, 8, 16, 32, 64, 128)  # columns of a tile; 8 of 4 bytes are a sector
        slabs: int = param(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # outer slices of a tile
        block_threads: int = param(128, 256, 512, 1024)
        batch: int = param(4, 8)  # accesses of a thread in flight

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        if reason := no_cuda(w, device):
            return reason
        p = gather_problem(w)
        if isinstance(p, str):
            return p
        if p.slices is None:
            return "x or index is not contiguous, or index covers only a part of x"
        if max(p.slices.places, p.slices.length, p.slices.inner) >= 2**31 - 1:
            return "a dim exceeds 32 bits"
        if next(iter(self.space(w, device)), None) is None:
            return none_fits(p.places, device)
        return None

    def suits(self, w: Workload, device: DeviceSpec) -> bool:
        """Where as much is read as there is, of more than stays in the L2 cache beside the index
        and out, sector by sector, and of an SM's two blocks one moves data while the other waits.
        H200, commit 1462c2b: (1000, 256, 7, 7) along dim 0 67 us, by gather_cuda 109 us untuned;
        along dim 1 60 us and 88 us."""
        p, c, itemsize = _slices(w), self.heuristic(w, device), w.main.itemsize
        if p.length < p.places or p.inner * itemsize < SECTOR_BYTES:
            return False
        busy = _resident(w, p, c, device) >= 2 and tiles(p, c) >= 2 * device.sms
        large = w.main.numel * itemsize >= device.l2_bytes // 2
        return busy and large and width(p, c) * itemsize >= SECTOR_BYTES

    def space(self, w: Workload, device: DeviceSpec) -> ConfigSpace[Any]:
        p, itemsize = _slices(w), w.main.itemsize

        def fits(c: GatherTiled.Config) -> str | None:
            return why_not(p, c, tile_bytes(p, c, itemsize), device)

        return ConfigSpace(self.Config, constraint=fits)

    def heuristic(self, w: Workload, device: DeviceSpec) -> Any:
        p, itemsize = _slices(w), w.main.itemsize

        def merit(c: GatherTiled.Config) -> tuple[float, ...]:
            # As for scatter_tiled: every SM busy, rows of whole sectors, two blocks on an SM, of
            # which one moves data while the other waits; then few, large tiles.
            size = tile_bytes(p, c, itemsize)
            row_bytes = itemsize * (columns(p, c) if p.inner == 1 else width(p, c))
            wanted = min(512, columns(p, c) * max(p.length, p.places) // 8)
            return (
                min(tiles(p, c), device.sms),
                min(row_bytes, 32),
                min(device.blocks_by_shared(size), 2),
                columns(p, c),
                -abs(c.block_threads - wanted),
                -c.batch,
            )

        return max(self.space(w, device), key=merit)

    def compile_key(self, config: Any, w: Workload) -> str:
        return f"{config} {_slices(w)} {w.main.dtype} {w['index'].dtype}"

    def task(self, config: Any, w: Workload, device: DeviceSpec) -> CompileTask:
        p = _slices(w)
        macros = {
            "REDUCE": 0,
            "OUTER": f"{p.outer}ll",
            "PLACES": p.places,
            "LENGTH": p.length,
            "INNER": p.inner,
            "WIDTH": width(p, config),
            "SLABS": config.slabs,
            "THREADS": config.block_threads,
            "BATCH": config.batch,
            "BLOCKS": _resident(w, p, config, device),
        }
        files = ["tiles.cuh", "gathers/gather_tiled.cu"]
        return cuda_task(files, "collect", w.main.dtype, w["index"].dtype, macros, device)

    def build(self, config: Any, w: Workload, device: DeviceSpec) -> Executable:
        p = _slices(w)
        size = math.ceil(tile_bytes(p, config, w.main.itemsize) / 16) * 16
        args = ("x", "index", "out", "fault")
        grid = tiles(p, config), 1, 1
        launch = Launch("collect", "PPPP", grid, config.block_threads, size, args)
        built = compiled(self.task(config, w, device))
        return IndexedExecutable(w, built, "collect", [launch], Workspace())


def _slices(w: Workload) -> Slices:
    """Of a workload that `unsupported` has let through."""
    p = gather_problem(w)
    assert not isinstance(p, str), p
    assert p.slices is not None, w
    return p.slices


def tile_bytes(p: Slices, c: GatherTiled.Config, itemsize: int) -> int:
    return columns(p, c) * p.places * itemsize


def _resident(w: Workload, p: Slices, c: GatherTiled.Config, device: DeviceSpec) -> int:
    """Blocks of an SM, with 64 registers for each thread."""
    fit = device.blocks_by_shared(tile_bytes(p, c, w.main.itemsize))
    return max(1, min(fit, device.registers_per_sm // 64 // c.block_threads, device.blocks_per_sm))
