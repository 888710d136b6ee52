"""Gather of any strides on a GPU: wide accesses where an index names whole runs of elements."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tilewright.build import CompileTask
from tilewright.compile.cache import compiled
from tilewright.device import MAX_GRID, DeviceSpec
from tilewright.impl import Executable, Implementation
from tilewright.impls.indices._indexed import (
    IndexedExecutable,
    Launch,
    Workspace,
    cuda_task,
    no_cuda,
)
from tilewright.impls.indices.gathers._gather import GatherProblem, gather_problem, served_gather
from tilewright.op import Workload
from tilewright.space import ConfigSpace, param

ALL = 0
"""As a slab: the whole last axis."""
HELD_BYTES = 128
"""Of a thread's elements in flight, beside their indices: 32 registers."""


class GatherCuda(Implementation):
    """One launch, no workspace. Expanded indices are read as they lie, once for each access of x.

    Zeros stand where an index is out of range, until the fault is raised.
    """

    name, backend, op = "gather_cuda", "cuda", "gather"
    yields_to = ("gather_tiled",)

    @dataclass(frozen=True)
    class Config:
        vec: int = param(1, 2, 4, 8)  # elements of one access
        items: int = param(1, 2, 4, 8)  # accesses of a thread in flight
        block_threads: int = param(128, 256, 512)
        slab: int = param(ALL, 16, 32, 64, 128)  # of the last axis at a time, for the L2 cache

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        if reason := no_cuda(w, device):
            return reason
        p = gather_problem(w)
        if isinstance(p, str):
            return p
        if next(iter(self.space(w, device)), None) is None:
            return f"{p.numel} elements exceed a grid of {MAX_GRID} blocks"
        return None

    def space(self, w: Workload, device: DeviceSpec) -> ConfigSpace[Any]:
        p, itemsize, index_bytes = served_gather(w), w.main.itemsize, w["index"].itemsize

        def fits(c: GatherCuda.Config) -> str | None:
            given = 1 if p.copies_runs else c.vec
            if (held := c.items * (c.vec * itemsize + given * index_bytes)) > HELD_BYTES:
                return f"a thread holds {held} bytes, at most {HELD_BYTES}"
            if c.slab and (len(p.axes) < 2 or p.axes[-2].x or p.copies_runs):
                return "slabs are for single elements, along the axis inside the gathered one"
            if c.slab and (c.slab >= p.axes[-1].size or p.axes[-1].size % c.slab):
                return f"slab={c.slab} is no part of {p.axes[-1].size}"
            if p.numel / (c.vec * c.items * c.block_threads) > MAX_GRID:
                return "the grid exceeds 31 bits"
            return None

        return ConfigSpace(self.Config, {"vec": p.vectors(itemsize, index_bytes)}, fits)

    def heuristic(self, w: Workload, device: DeviceSpec) -> Any:
        p = served_gather(w)
        row_bytes, space = p.places * w.main.itemsize, self.space(w, device)
        slabs = {c.slab for c in space}
        whole = row_bytes * p.axes[-1].size <= device.l2_bytes // 2
        fit = [s for s in slabs if s and row_bytes * s <= device.l2_bytes // 4]
        slab = ALL if whole or not fit else max(fit)

        def merit(c: GatherCuda.Config) -> tuple[float, ...]:
            # The part of x that is read meanwhile in a quarter of the L2 cache, if it would not be
            # in half of it anyway; every SM busy; then wide copies of runs, or two elements to an
            # access of others, whose reads of x are apart anyway; then 32 bytes of a thread in
            # flight. 0.965 of the searched speed (H200, gather.json, 1462c2b); at worst 109 us for
            # 88, (1000, 256, 7, 7) along dim 0.
            return (
                c.slab == slab,
                min(math.ceil(p.numel / per_block(c)), 2 * device.sms),
                min(c.vec, 8 if p.copies_runs else 2),
                -abs(c.vec * c.items * w.main.itemsize - 32),
                -abs(c.block_threads - 256),
            )

        return max(space, key=merit)

    def compile_key(self, config: Any, w: Workload) -> str:
        p = served_gather(w)
        return f"{_macros(p, config)} {p.dtype} {p.index}"

    def task(self, config: Any, w: Workload, device: DeviceSpec) -> CompileTask:
        p = served_gather(w)
        macros = _macros(p, config)
        return cuda_task(["gathers/gather.cu"], "collect", p.dtype, p.index, macros, device)

    def build(self, config: Any, w: Workload, device: DeviceSpec) -> Executable:
        p = served_gather(w)
        grid = math.ceil(p.numel / per_block(config)), 1, 1
        args = ("x", "index", "out", p.numel // config.vec, "fault")
        launch = Launch("collect", "PPPqP", grid, config.block_threads, 0, args)
        built = compiled(self.task(config, w, device))
        return IndexedExecutable(w, built, "collect", [launch], Workspace())


def per_block(c: GatherCuda.Config) -> int:
    """Elements of out that a block writes."""
    return c.vec * c.items * c.block_threads


def _macros(p: GatherProblem, c: GatherCuda.Config) -> dict[str, int | str]:
    """All that is baked into the binary, but the dtypes: of the outermost axis not the size."""
    vec, slab = c.vec, c.slab
    *outer, last = p.axes
    axes, of_out = [(last.size // vec, last.x * vec, last.index * vec, vec)], last.size
    for a in reversed(outer):
        axes.append((a.size, a.x, a.index, of_out))
        of_out *= a.size
    if slab:
        axes[0] = (slab // vec, *axes[0][1:])
        axes.insert(2, (last.size // slab, last.x * slab, last.index * slab, slab))
    *inner, (_, *outermost) = axes
    listed = [f"AXIS({', '.join(map(str, a))})" for a in inner]
    return {
        "REDUCE": 0,
        "VEC": vec,
        "ITEMS": c.items,
        "THREADS": c.block_threads,
        "AXES": " ".join([*listed, f"OUTERMOST({', '.join(map(str, outermost))})"]),
        "SLABS": slab > 0,
        "POSITION": "u32" if p.numel // vec < 2**32 else "u64",
        "OFFSET": "u32" if p.reach < 2**31 else "u64",
        "PLACES": f"{p.places}ull",
        "STRIDE": p.stride,
        "STEP": last.x,
        "RUNS": p.copies_runs,
    }
