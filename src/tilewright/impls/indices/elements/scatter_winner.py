"""Scatter by a pass that finds each place's last position, then one write of each place."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tilewright.build import CompileTask
from tilewright.compile.cache import compiled
from tilewright.device import MAX_GRID, DeviceSpec
from tilewright.impl import Executable, Implementation
from tilewright.impls.indices._indexed import (
    AT_ONCE,
    IndexedExecutable,
    Launch,
    Workspace,
    fit_at_once,
)
from tilewright.impls.indices.elements._scatter import (
    ScatterProblem,
    moved,
    scatter_problem,
    scatter_refusal,
    served_scatter,
)
from tilewright.op import Workload
from tilewright.space import ConfigSpace, param

ALL = 0
"""As a slab: all columns."""


class ScatterWinner(Implementation):
    """For any number of places. Workspace: a key for each element of x, 8 bytes where the winner's
    value is carried in it, else 4."""

    name, backend, op = "scatter_winner", "cuda", "scatter"
    yields_to = ("scatter_tiled", "scatter_buckets", "scatter_strided")

    @dataclass(frozen=True)
    class Config:
        slab: int = param(ALL, 16, 32, 64, 128, 256)  # columns at a time, for the L2 cache
        items: int = param(1, 2, 4, 8)  # elements of a thread
        block_threads: int = param(256, 512, 1024)
        carried: bool = param(False, True)  # a value travels with its position, of 4 bytes at most
        sent: int = param(0, 1024, 4096)  # entries of a block's table, used where places repeat
        launches: int = param(3, 1)  # one: blocks that all run at once wait for one another

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        if reason := scatter_refusal(w, device):
            return reason
        if next(iter(self.space(w, device)), None) is None:
            return f"{served_scatter(w).cells} elements exceed a grid of {MAX_GRID} blocks"
        return None

    def space(self, w: Workload, device: DeviceSpec) -> ConfigSpace[Any]:
        p = served_scatter(w)

        def fits(c: ScatterWinner.Config) -> str | None:
            if c.slab and p.inner % c.slab:
                return f"slab={c.slab} does not divide {p.inner} columns"
            if c.carried and (w.main.itemsize > 4 or p.number is not None):
                return "only values of up to 4 bytes are carried"
            if c.sent and p.cells >= 2**32 - 1:
                return f"{p.cells} elements exceed 32 bits"
            if c.block_threads == 1024 and c.items == 8:
                return "1024 threads with 8 accesses in flight spill"
            if c.launches == 1 and c.items == 8:
                return f"{AT_ONCE} threads of an SM with 8 accesses in flight spill"
            blocks = max(p.cells, p.positions) / (c.items * c.block_threads)
            return f"{blocks:.0f} blocks exceed a grid" if blocks > MAX_GRID else None

        return ConfigSpace(self.Config, constraint=fits)

    def heuristic(self, w: Workload, device: DeviceSpec) -> Any:
        p = served_scatter(w)
        # Keys with values, if all of them take a part of the L2 cache; else the winners of a slab,
        # and its rows of src.
        carries = w.main.itemsize <= 4 and p.number is None
        if carries and 8 * p.cells <= device.l2_bytes // 4:
            # H200: 100000 elements take one a thread in blocks of 256, 262144 four in blocks of 512
            # (scatter_maskrcnn, scatter_crossover).
            items, threads = (1, 256) if fit_at_once(p.cells, device) else (4, 512)
            launches = 1 if fit_at_once(max(p.cells, p.positions), device) else 3
            return self.Config(ALL, items, threads, True, 1024, launches)
        slabs = [s for s in (256, 128, 64, 32, 16) if p.inner % s == 0 and s < p.inner]
        near = [s for s in (p.inner, *slabs) if 4 * p.places * s <= device.l2_bytes // 8]
        slab = near[0] if near else slabs[-1] if slabs else p.inner
        # Of f64 a million take 30.0 us one a thread and 31.5 by fours, two million 57.9 either way
        # (H100, scatter_thresholds, 1d8565a).
        items = 4 if p.cells >= 2**21 else 1
        return self.Config(ALL if slab == p.inner else slab, items)

    def compile_key(self, config: Any, w: Workload) -> str:
        p = scatter_problem(w)
        return f"{config} {p}"

    def task(self, config: Any, w: Workload, device: DeviceSpec) -> CompileTask:
        p = served_scatter(w)
        macros = {
            "REDUCE": 0,
            "SLAB": config.slab or p.inner,
            "ITEMS": config.items,
            "THREADS": config.block_threads,
            "CARRIED": config.carried,
            "SENT": config.sent,
        }
        files = ["elements/winner.cuh", "elements/winner.cu"]
        if config.launches == 1:
            macros["AT_ONCE"], files = (
                AT_ONCE,
                ["elements/winner.cuh", "elements/meet.cuh", "elements/winner_at_once.cu"],
            )
        return p.task(files, "elect", macros, device)

    def build(self, config: Any, w: Workload, device: DeviceSpec) -> Executable:
        p = served_scatter(w)
        built = compiled(self.task(config, w, device))
        launches = p.with_beyond(launches_of(p, config, device), device)
        workspace = Workspace(keys=keys_bytes(p, config))
        return IndexedExecutable(w, built, "elect", launches, workspace)


def keys_bytes(p: ScatterProblem, c: ScatterWinner.Config) -> int:
    return (8 if c.carried else 4) * p.cells


def launches_of(p: ScatterProblem, c: ScatterWinner.Config, device: DeviceSpec) -> list[Launch]:
    threads, per_block = c.block_threads, c.items * c.block_threads
    clears = min(math.ceil(keys_bytes(p, c) / (16 * threads)), 8 * device.sms), 1, 1
    elects = math.ceil(p.positions / per_block), 1, 1
    writes = math.ceil(p.cells / per_block), 1, 1
    source, number = moved(p)
    if c.launches == 1:
        of_sm = min(AT_ONCE // threads, device.blocks_by_shared(8 * c.sent))
        blocks = min(max(elects[0], writes[0]), device.sms * of_sm), 1, 1
        args = ("x", "index", source, "out", "keys", number, "counter", "fault")
        return [Launch("elect", "PPPPPdPP", blocks, threads, 8 * c.sent, args, meets=True)]
    sent, written = ("index", source, "keys", "fault"), ("x", source, "out", "keys", number)
    return [
        Launch("clear", "P", clears, threads, 0, ("keys",)),
        Launch("elect", "PPPP", elects, threads, 8 * c.sent, sent, overlapping=True),
        Launch("write", "PPPPd", writes, threads, 0, written, overlapping=True),
    ]
