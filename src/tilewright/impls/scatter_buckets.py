"""Scatter by buckets of neighbouring places, for more places than fit in shared memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tilewright.build import CompileTask
from tilewright.compile.cache import compiled
from tilewright.device import DeviceSpec
from tilewright.impl import Executable, Implementation
from tilewright.impls._indexed import IndexedExecutable, Launch, Workspace, cuda_task
from tilewright.impls._scatter import (
    ScatterProblem,
    moved,
    scatter_problem,
    scatter_refusal,
    served_scatter,
)
from tilewright.op import Workload
from tilewright.space import ConfigSpace, param

MAX_GRID = 2**31 - 1
RUNS_OF_THREAD = 8
MIN_TILE = 8192
MIN_ASCENDING = 2048
LONG = 2**24
"""Indices beside which the two launches that find out whether they rise take no time."""
WORKSPACE_PER_INDEX, WORKSPACE_BESIDE = 24, 2**16
"""Bytes: tiles that are much smaller than a chunk, or chunks than the buckets, would take more."""
DIRECT_THREADS, DIRECT_ITEMS = 256, 4
SAMPLED = 1024
"""Positions, a thread each, that a guess is made from."""
MAX_POSITION = 2**16
"""A position in a chunk, and a slot of a bucket, are 16 bits of an entry."""


class ScatterBuckets(Implementation):
    """Each access to memory is near its neighbours', however random the indices are.

    Workspace: 8 bytes per index (4 where values are not carried), 4 for each pair of a chunk and a
    bucket, and the slots of as many buckets as may be too large for one block; 24 an index at most.
    """

    name, backend, op = "scatter_buckets", "cuda", "scatter"

    @dataclass(frozen=True)
    class Config:
        width: int = param(1, 4, 8, 16, 32)  # columns of a tile; 8 of 4 bytes are a sector
        shift: int = param(8, 9, 10, 11, 12, 13, 14)  # rows of a bucket, as a power of two
        split_threads: int = param(256, 512, 1024)
        items: int = param(2, 4, 8, 16, 24)  # indices of a thread, which make a chunk
        settle_threads: int = param(512, 1024)
        share: int = param(4, 16)  # a block settles so many entries for each slot at most
        ascending: bool = param(False, True)  # try first whether indices rise

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        if reason := scatter_refusal(w, device):
            return reason
        if next(iter(self.space(w, device)), None) is None:
            p = served_scatter(w)
            return (
                f"{p.length} x {p.inner} elements to {p.places} places make no chunks and buckets "
                "that fit"
            )
        return None

    def suits(self, w: Workload, device: DeviceSpec) -> bool:
        """Tiles of less are scatter_tiled's: H200, 1-D, 7.9 us of 5000 elements; from 10000 on
        scatter_tiled has one block and these have many (2026-11-21)."""
        p = scatter_problem(w)
        return isinstance(p, ScatterProblem) and p.length * min(p.inner, 16) >= MIN_TILE

    def space(self, w: Workload, device: DeviceSpec) -> ConfigSpace[Any]:
        p = served_scatter(w)
        limit = device.shared_bytes_per_block

        def fits(c: ScatterBuckets.Config) -> str | None:
            s = sizes(w, p, c)
            if c.width > 1 and c.width >= 2 * p.inner:
                return f"width={c.width} is twice the {p.inner} columns"
            if c.ascending and (p.outer > 1 or p.inner > 1 or p.length < MIN_ASCENDING):
                return f"rising indices are looked for in one dim of {MIN_ASCENDING} or more"
            if s.elements >= 2**32 - 1 or s.heavy >= 2**16:
                return f"a tile of {s.elements} elements exceeds 32 bits"
            if max(s.chunk, s.slots) >= MAX_POSITION:
                return f"a chunk or a bucket exceeds {MAX_POSITION}"
            if s.split_bytes > limit or s.settle_bytes > limit:
                return f"{max(s.split_bytes, s.settle_bytes)} bytes, a block has {limit}"
            if s.chunk < 1024:
                return f"a chunk of {s.chunk} elements is too small"
            taken = sum(s.workspace.values())
            if taken > WORKSPACE_PER_INDEX * w["index"].numel + WORKSPACE_BESIDE:
                return f"{taken} bytes exceed {WORKSPACE_PER_INDEX} for each index"
            if s.runs > RUNS_OF_THREAD:
                return f"a thread has {s.runs} of {s.chunks} runs, more than {RUNS_OF_THREAD}"
            if max(s.split_blocks, s.settle_blocks) > MAX_GRID:
                return f"{max(s.split_blocks, s.settle_blocks)} blocks exceed a grid"
            return None

        return ConfigSpace(self.Config, constraint=fits)

    def heuristic(self, w: Workload, device: DeviceSpec) -> Any:
        p = served_scatter(w)

        def merit(c: ScatterBuckets.Config) -> tuple[float, ...]:
            # Every SM busy in both kernels; rows of two sectors; runs of a bucket in a chunk that
            # are near a sector; then buckets of 8192 slots and chunks of 4096 elements: H200, 1e6
            # places 21.6 us, 100000 x 256 368 us, 1e8 2145 us (torch 25.9, 1468, 6345; 2026-11-21).
            s = sizes(w, p, c)
            alone = s.tiles * s.buckets <= 2 * device.sms or resident(s, c, device) == 1
            threads = 1024 if alone and s.slots >= 8192 else 512
            return (
                c.ascending == (p.outer == p.inner == 1 and p.length >= LONG),
                min(s.split_blocks, s.settle_blocks, 0.7 * device.sms),
                min(c.width * w.main.itemsize, 64),
                min(s.chunk * s.slots / s.elements, 2.5),
                -abs(math.log2(s.slots / 8192)),
                -abs(math.log2(s.chunk / 4096)),
                -c.width,
                c.settle_threads == threads,
                -abs(c.split_threads - 512),
                -c.share,
            )

        return max(self.space(w, device), key=merit)

    def compile_key(self, config: Any, w: Workload) -> str:
        return f"{config} {scatter_problem(w)}"

    def task(self, config: Any, w: Workload, device: DeviceSpec) -> CompileTask:
        p = served_scatter(w)
        s = sizes(w, p, config)
        macros = {
            **p.macros,
            "REDUCE": 0,
            "WIDTH": config.width,
            "SHIFT": config.shift,
            "SPLIT_THREADS": config.split_threads,
            "ITEMS": config.items,
            "SETTLE_THREADS": config.settle_threads,
            "SETTLE_BLOCKS": resident(s, config, device),
            "SHARE": s.share,
            "CARRIED": s.carried,
            "ASCENDING": config.ascending,
            "DIRECT_THREADS": DIRECT_THREADS,
            "DIRECT_ITEMS": DIRECT_ITEMS,
            "SAMPLED_POSITIONS": SAMPLED,
        }
        files = ["ascending.cuh"] * config.ascending + ["buckets.cu"]
        return cuda_task(files, "settle", p.dtype, p.index, macros, device)

    def build(self, config: Any, w: Workload, device: DeviceSpec) -> Executable:
        p = served_scatter(w)
        built, s = compiled(self.task(config, w, device)), sizes(w, p, config)
        workspace = Workspace(**s.workspace, state=4)
        return IndexedExecutable(w, built, "settle", launches_of(p, config, s), workspace)


@dataclass(frozen=True)
class Sizes:
    """What kernels/scatter/buckets.cu derives from its macros, by the same names."""

    tiles: int
    elements: int
    chunk: int
    buckets: int
    slots: int
    share: int
    carried: bool
    runs: int
    split_bytes: int
    settle_bytes: int

    @property
    def chunks(self) -> int:
        return math.ceil(self.elements / self.chunk)

    @property
    def heavy(self) -> int:
        return self.chunks * self.chunk // self.share

    @property
    def split_blocks(self) -> int:
        return self.tiles * self.chunks

    @property
    def settle_blocks(self) -> int:
        return self.tiles * (self.buckets + self.heavy)

    @property
    def entry_bytes(self) -> int:
        return 8 if self.carried else 4

    @property
    def workspace(self) -> dict[str, int]:
        """Bytes of each part."""
        heavy = self.tiles * self.heavy
        return {
            "entries": self.entry_bytes * self.split_blocks * self.chunk,
            "runs": 4 * self.split_blocks * self.buckets,
            "common": self.entry_bytes * heavy * self.slots,
            "done": 4 * heavy,
        }


def sizes(w: Workload, p: ScatterProblem, c: ScatterBuckets.Config) -> Sizes:
    carried = p.number is None and w.main.itemsize <= 4
    entry_bytes = 8 if carried else 4
    chunk, slots = c.split_threads * c.items, c.width << c.shift
    buckets = -(-p.places >> c.shift)
    runs = math.ceil(math.ceil(p.length * c.width / chunk) / c.settle_threads)
    return Sizes(
        tiles=p.outer * math.ceil(p.inner / c.width),
        elements=p.length * c.width,
        chunk=chunk,
        buckets=buckets,
        slots=slots,
        share=c.share * slots,
        carried=carried,
        runs=runs,
        split_bytes=4 * (32 + (buckets + 2) // 2 * 2) + entry_bytes * chunk,
        settle_bytes=entry_bytes * slots + 4 * (64 + 2 * (runs + 1) * c.settle_threads),
    )


def resident(s: Sizes, c: ScatterBuckets.Config, device: DeviceSpec) -> int:
    """Blocks of `settle` on an SM, with 48 registers for each thread."""
    fit = device.shared_bytes_per_sm // (s.settle_bytes + 1024)
    return max(1, min(fit, device.registers_per_sm // 48 // c.settle_threads))


def launches_of(p: ScatterProblem, c: ScatterBuckets.Config, s: Sizes) -> list[Launch]:
    source, number = moved(p)
    launches = []
    if c.ascending:
        blocks = math.ceil(p.length / (DIRECT_THREADS * DIRECT_ITEMS))
        args = ("x", "index", source, "out", "state", number)
        launches = [
            Launch("guess", "PP", (1, 1, 1), SAMPLED, 0, ("index", "state")),
            Launch("direct", "PPPPPd", (blocks, 1, 1), DIRECT_THREADS, 0, args),
        ]
    ours = ("entries", "runs", "common", "done")
    splits, settles = (s.split_blocks, 1, 1), (s.settle_blocks, 1, 1)
    read = ("index", source, *ours, "fault", "state")
    written = ("x", source, "out", *ours, number, "state")
    return [
        *launches,
        Launch("split", "PPPPPPPP", splits, c.split_threads, s.split_bytes, read),
        Launch("settle", "PPPPPPPdP", settles, c.settle_threads, s.settle_bytes, written, True),
    ]
