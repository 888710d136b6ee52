"""One-dimensional scatter by buckets of neighbouring places."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.build import CompileTask
from tilewright.compile.cache import compiled
from tilewright.device import DeviceSpec
from tilewright.impl import Executable, Implementation
from tilewright.impls import _sort
from tilewright.impls._indexed import IndexedExecutable, Launch, Workspace, cuda_task, no_cuda
from tilewright.impls._scatter import ScatterProblem, scatter_problem
from tilewright.impls._sort import Sort, place_bytes
from tilewright.op import Workload
from tilewright.space import ConfigSpace, param

SETTLE_THREADS = 1024


class ScatterBuckets(Implementation):
    """Each access to memory is near its neighbours', however random the indices are.

    Workspace: 8 bytes per index and the counters of the sort. A bucket is one block's: skewed
    indices leave most of the device idle.
    """

    name, backend, op = "scatter_buckets", "cuda", "scatter"

    @dataclass(frozen=True)
    class Config:
        digit_bits: int = param(6, 7, 8, 9, 10, 11, 12)  # buckets: 2^digit_bits at most
        items: int = param(4, 8, 16)  # indices of a thread

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        if reason := no_cuda(w, device):
            return reason
        p = scatter_problem(w)
        if isinstance(p, str):
            return p
        if p.outer != 1 or p.inner != 1:
            return "it is for one dim"
        if next(iter(self.space(w, device)), None) is None:
            return f"{p.places} places make no buckets that fit"
        return None

    def space(self, w: Workload, device: DeviceSpec) -> ConfigSpace[Any]:
        p = scatter_problem(w)
        assert isinstance(p, ScatterProblem), p

        def fits(c: ScatterBuckets.Config) -> str | None:
            if shift(p, c) < 1:
                return f"{p.places} places need fewer than {c.digit_bits} bits"
            limit = device.shared_bytes_per_block
            if (size := settle_bytes(p, c)) > limit:
                return f"a bucket takes {size} bytes, a block has {limit}"
            if (size := place_bytes(c.digit_bits, c.items)) > limit:
                return f"placing takes {size} bytes, a block has {limit}"
            return None

        return ConfigSpace(self.Config, constraint=fits)

    def heuristic(self, w: Workload, device: DeviceSpec) -> Any:
        p = scatter_problem(w)
        assert isinstance(p, ScatterProblem), p

        def merit(c: ScatterBuckets.Config) -> tuple[float, ...]:
            # Two buckets for each SM at least; then few, so that placing writes longer runs.
            buckets = -(-p.places >> shift(p, c))
            return min(buckets, 2 * device.sms), -c.digit_bits, c.items

        return max(self.space(w, device), key=merit)

    def compile_key(self, config: Any, w: Workload) -> str:
        return f"{config} {scatter_problem(w)}"

    def task(self, config: Any, w: Workload, device: DeviceSpec) -> CompileTask:
        p = scatter_problem(w)
        assert isinstance(p, ScatterProblem), p
        macros = {
            "REDUCE": 0,
            "DIGIT_BITS": config.digit_bits,
            "ITEMS": config.items,
            "SHIFT": shift(p, config),
            "CARRIED": carried(w),
            "NUMBER": p.number is not None,
            "IN_PLACE": p.in_place,
        }
        files = ["sort.cuh", "buckets.cu"]
        return cuda_task(files, "settle", p.dtype, p.index, macros, device)

    def build(self, config: Any, w: Workload, device: DeviceSpec) -> Executable:
        p = scatter_problem(w)
        assert isinstance(p, ScatterProblem), p
        return BucketsExecutable(w, p, config, compiled(self.task(config, w, device)))


def shift(p: ScatterProblem, c: ScatterBuckets.Config) -> int:
    """Bits of a place within its bucket; the place past the last one has a bucket too."""
    return p.places.bit_length() - c.digit_bits


def settle_bytes(p: ScatterProblem, c: ScatterBuckets.Config) -> int:
    return (4 << shift(p, c)) + 4 * SETTLE_THREADS // 32


def carried(w: Workload) -> bool:
    """Whether entries hold the values themselves."""
    return len(w.tensors) == 3 and w.main.itemsize <= 4


class BucketsExecutable(IndexedExecutable):
    def __init__(self, w: Workload, p: ScatterProblem, c: ScatterBuckets.Config, built: Any):
        super().__init__(w, built, {**_sort.SIGNATURES, "settle": "PPPPPid"})
        self.block_threads, self.shared_bytes = SETTLE_THREADS, settle_bytes(p, c)
        self._sort = Sort(p.length, p.places, c.digit_bits, c.items, shift=shift(p, c))
        self._workspace = Workspace(**self._sort.workspace)
        self.workspace_bytes = self._workspace.bytes
        self._places, self._number = p.places, p.number or 0.0
        self._buckets = -(-p.places >> shift(p, c))
        self._carried = carried(w)

    def launches(
        self, tensors: Sequence[torch.Tensor], out: torch.Tensor, fault: int
    ) -> Iterator[Launch]:
        memory, at = self._workspace.allocate(out.device)
        x, index, *rest = (t.data_ptr() for t in tensors)
        source = rest[0] if rest else 0
        yield from self._sort.launches(index, at, fault, source if self._carried else 0)
        args = (at["sorted"], at["totals"], x, source, out.data_ptr(), self._places, self._number)
        yield Launch("settle", (self._buckets, 1, 1), self.block_threads, self.shared_bytes, args)
        del memory
