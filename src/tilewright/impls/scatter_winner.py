"""Scatter by a pass that finds each place's last position, then one write of each place."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.build import CompileTask
from tilewright.compile.cache import compiled
from tilewright.device import DeviceSpec
from tilewright.impl import Executable, Implementation
from tilewright.impls._indexed import IndexedExecutable, Launch, Workspace, cuda_task, no_cuda
from tilewright.impls._scatter import ScatterProblem, scatter_problem, served_scatter
from tilewright.op import Workload
from tilewright.space import ConfigSpace, param

MAX_GRID = 2**31 - 1
ALL = 0
"""As a slab: all columns."""


class ScatterWinner(Implementation):
    """For any number of places. Workspace: a key for each element of x, 8 bytes where the winner's
    value is carried in it, else 4."""

    name, backend, op = "scatter_winner", "cuda", "scatter"

    @dataclass(frozen=True)
    class Config:
        slab: int = param(ALL, 16, 32, 64, 128, 256)  # columns at a time, for the L2 cache
        items: int = param(1, 2, 4, 8)  # elements of a thread
        block_threads: int = param(256, 512, 1024)
        carried: bool = param(False, True)  # a value travels with its position, of 4 bytes at most
        sent: int = param(0, 1024, 4096)  # entries of a block's table: of one place it sends one

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        if reason := no_cuda(w, device):
            return reason
        p = scatter_problem(w)
        if isinstance(p, str):
            return p
        if next(iter(self.space(w, device)), None) is None:
            return f"{w.main.numel} elements exceed a grid of {MAX_GRID} blocks"
        return None

    def space(self, w: Workload, device: DeviceSpec) -> ConfigSpace[Any]:
        p = served_scatter(w)

        def fits(c: ScatterWinner.Config) -> str | None:
            if c.slab and p.inner % c.slab:
                return f"slab={c.slab} does not divide {p.inner} columns"
            if c.carried and (w.main.itemsize > 4 or p.number is not None):
                return "only values of up to 4 bytes are carried"
            if c.sent and w.main.numel >= 2**32 - 1:
                return f"{w.main.numel} elements exceed 32 bits"
            if c.block_threads == 1024 and c.items == 8:
                return "1024 threads with 8 accesses in flight spill"
            blocks = max(w.main.numel, w["index"].numel) / (c.items * c.block_threads)
            return f"{blocks:.0f} blocks exceed a grid" if blocks > MAX_GRID else None

        return ConfigSpace(self.Config, constraint=fits)

    def heuristic(self, w: Workload, device: DeviceSpec) -> Any:
        p = served_scatter(w)
        # Keys with values, if all of them take a part of the L2 cache; else the winners of a slab,
        # and its rows of src.
        carries = w.main.itemsize <= 4 and p.number is None
        if carries and 8 * w.main.numel <= device.l2_bytes // 4:
            large = w.main.numel >= 2**18
            return self.Config(ALL, 4 if large else 1, 512 if large else 256, True, 1024)
        slabs = [s for s in (256, 128, 64, 32, 16) if p.inner % s == 0 and s < p.inner]
        near = [s for s in (p.inner, *slabs) if 4 * p.places * s <= device.l2_bytes // 8]
        slab = near[0] if near else slabs[-1] if slabs else p.inner
        items = 4 if w.main.numel >= 2**20 else 1
        return self.Config(ALL if slab == p.inner else slab, items)

    def compile_key(self, config: Any, w: Workload) -> str:
        p = scatter_problem(w)
        return f"{config} {p}"

    def task(self, config: Any, w: Workload, device: DeviceSpec) -> CompileTask:
        p = served_scatter(w)
        macros = {
            **p.macros,
            "REDUCE": 0,
            "SLAB": config.slab or p.inner,
            "ITEMS": config.items,
            "THREADS": config.block_threads,
            "CARRIED": config.carried,
            "SENT": config.sent,
        }
        return cuda_task(["winner.cu"], "elect", p.dtype, p.index, macros, device)

    def build(self, config: Any, w: Workload, device: DeviceSpec) -> Executable:
        p = served_scatter(w)
        return WinnerExecutable(w, p, config, compiled(self.task(config, w, device)), device)


class WinnerExecutable(IndexedExecutable):
    def __init__(
        self,
        w: Workload,
        p: ScatterProblem,
        c: ScatterWinner.Config,
        built: Any,
        device: DeviceSpec,
    ):
        super().__init__(w, built, {"clear": "P", "elect": "PPPP", "write": "PPPPd"})
        self.block_threads, self.shared_bytes = c.block_threads, 8 * c.sent
        per_block = c.items * c.block_threads
        cells = w.main.numel
        keys = (8 if c.carried else 4) * cells
        self._grids = {
            "clear": min(math.ceil(keys / (16 * c.block_threads)), 8 * device.sms),
            "elect": math.ceil(w["index"].numel / per_block),
            "write": math.ceil(cells / per_block),
        }
        self._number = p.number or 0.0
        self._workspace = Workspace(keys=keys)
        self.workspace_bytes = self._workspace.bytes

    def launches(
        self, tensors: Sequence[torch.Tensor], out: torch.Tensor, fault: int
    ) -> Iterator[Launch]:
        memory, at = self._workspace.allocate(out.device)
        x, index, *rest = (t.data_ptr() for t in tensors)
        source, keys = rest[0] if rest else 0, at["keys"]
        args: dict[str, tuple[float, ...]] = {
            "clear": (keys,),
            "elect": (index, source, keys, fault),
            "write": (x, source, out.data_ptr(), keys, self._number),
        }
        for name, given in args.items():
            grid, shared_bytes = (self._grids[name], 1, 1), self.shared_bytes * (name == "elect")
            follows = name != "clear"
            yield Launch(name, grid, self.block_threads, shared_bytes, given, overlapping=follows)
        del memory
