"""Scatter in one launch whose blocks send one another what they read, then write their places."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tilewright.build import CompileTask
from tilewright.compile.cache import compiled
from tilewright.device import DeviceSpec
from tilewright.impl import Executable, Implementation
from tilewright.impls.indices._indexed import IndexedExecutable, Launch, Workspace
from tilewright.impls.indices.elements._scatter import (
    moved,
    scatter_problem,
    scatter_refusal,
    served_scatter,
)
from tilewright.op import Workload
from tilewright.space import ConfigSpace, param

SEGMENT = 32
"""Neighbouring places of a block: four sectors of memory of four-byte elements."""
MIN_SHARE = 1024
"""Positions or places of a block, below which fewer blocks do: a guess."""
MAX_ITEMS = 8
MAX_RUNS = 32
"""Of a warp; each lane keeps one."""
MAX_CHUNK = 2**16
"""A position in a chunk, and a slot of a block, are 16 bits of an entry."""


class ScatterExchange(Implementation):
    """For some millions of elements, which the blocks that run at once can keep in shared memory.

    Workspace: 8 bytes per index (4 where values are not carried) and 4 for each pair of blocks.
    """

    name, backend, op = "scatter_exchange", "cuda", "scatter"

    @dataclass(frozen=True)
    class Config:
        block_threads: int = param(256, 512, 1024)
        blocks: int = param(1, 2, 4)  # of an SM
        sent: int = param(0, 1024, 2048, 4096)  # entries of a table, used where places repeat

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        if reason := scatter_refusal(w, device):
            return reason
        if next(iter(self.space(w, device)), None) is None:
            p = served_scatter(w)
            return (
                f"{max(p.cells, p.positions)} elements are more than {device.sms} SMs "
                "keep in shared memory"
            )
        return None

    def suits(self, w: Workload, device: DeviceSpec) -> bool:
        """Its blocks all run at once and wait for one another: only where that was measured."""
        return False

    def space(self, w: Workload, device: DeviceSpec) -> ConfigSpace[Any]:
        p = served_scatter(w)

        def fits(c: ScatterExchange.Config) -> str | None:
            if c.block_threads * c.blocks > 1024:
                return "more than 1024 threads of an SM spill"
            s = sizes(w, c, device)
            if max(p.cells, p.positions) >= 2**31:
                return "elements exceed 31 bits"
            if s.grid > c.block_threads:
                return f"{s.grid} blocks, and {c.block_threads} threads to tell them of runs"
            if math.ceil(s.chunks / (c.block_threads // 32)) > MAX_RUNS:
                return f"{s.chunks} chunks are more than {MAX_RUNS} for each warp"
            if s.slots > MAX_CHUNK:
                return f"{s.slots} places of a block exceed {MAX_CHUNK}"
            if s.shared_bytes > (limit := device.shared_bytes_with(c.blocks)):
                return f"{c.blocks} blocks of {s.shared_bytes} bytes, a block has {limit}"
            return None

        return ConfigSpace(self.Config, constraint=fits)

    def heuristic(self, w: Workload, device: DeviceSpec) -> Any:
        # One block with all threads has the longest runs, so the fewest pieces of a sector.
        return max(
            self.space(w, device), key=lambda c: (c.block_threads, -c.blocks, -abs(c.sent - 2048))
        )

    def compile_key(self, config: Any, w: Workload) -> str:
        return f"{config} {scatter_problem(w)}"

    def task(self, config: Any, w: Workload, device: DeviceSpec) -> CompileTask:
        p, s = served_scatter(w), sizes(w, config, device)
        macros = {
            "REDUCE": 0,
            "SEGMENT": SEGMENT,
            "GRID": s.grid,
            "CHUNKS": s.chunks,
            "THREADS": config.block_threads,
            "BLOCKS": config.blocks,
            "SENT": config.sent,
            "CARRIED": s.carried,
        }
        return p.task(["elements/meet.cuh", "elements/exchange.cu"], "exchange", macros, device)

    def build(self, config: Any, w: Workload, device: DeviceSpec) -> Executable:
        p, s = served_scatter(w), sizes(w, config, device)
        source, number = moved(p)
        args = ("x", "index", source, "out", "entries", "runs", "counter", number, "fault")
        launch = Launch(
            "exchange", "PPPPPPPdP", (s.grid, 1, 1), config.block_threads, s.shared_bytes, args,
            meets=True,
        )  # fmt: skip
        built, workspace = compiled(self.task(config, w, device)), Workspace(**s.workspace)
        return IndexedExecutable(w, built, "exchange", p.with_beyond([launch], device), workspace)


@dataclass(frozen=True)
class Sizes:
    """What kernels/indices/elements/exchange.cu derives from its macros, by the same names.

    Attributes:
        grid: blocks, all of which run at once.
        chunks: of the positions, a multiple of the blocks.
        chunk: positions of a chunk.
    """

    grid: int
    chunks: int
    chunk: int
    slots: int
    sent: int
    carried: bool

    @property
    def entry_bytes(self) -> int:
        return 8 if self.carried else 4

    @property
    def shared_bytes(self) -> int:
        of_slots = self.slots * (2 if self.carried else 1)
        return self.entry_bytes * self.chunk + 4 * (of_slots + self.grid + 1 + 2 * self.sent + 32)

    @property
    def workspace(self) -> dict[str, int]:
        """Bytes of each buffer."""
        return {
            "entries": self.entry_bytes * self.chunks * self.chunk,
            "runs": 4 * self.grid * self.chunks,
        }


def sizes(w: Workload, c: ScatterExchange.Config, device: DeviceSpec) -> Sizes:
    p = served_scatter(w)
    cells, positions = p.cells, p.positions
    grid = min(device.sms * c.blocks, math.ceil(max(cells, positions) / MIN_SHARE))
    chunks = grid * math.ceil(positions / (grid * (MAX_ITEMS * c.block_threads - 32)))
    return Sizes(
        grid=grid,
        chunks=chunks,
        chunk=math.ceil(positions / (32 * chunks)) * 32,
        slots=math.ceil(cells / (SEGMENT * grid)) * SEGMENT,
        sent=c.sent,
        carried=p.number is None and w.main.itemsize <= 4,
    )
