"""Launching a weight-gradient kernel: workspace for partial sums, counters, one launch or two."""

from __future__ import annotations

import threading
from typing import Any

import torch

from tilewright.compile.cache import Compiled
from tilewright.compile.launch import CudaKernel
from tilewright.errors import LaunchError
from tilewright.impl import Executable, allocate, allocator
from tilewright.impls._weight_grad import Problem
from tilewright.impls._weight_grad_model import COUNTERS, Split
from tilewright.op import Workload

ENTRY, ADD_ENTRY = "weight_grad", "add_all_slices"
ADD_THREADS, ADD_QUADS = 256, 4
"""Of the second kernel's blocks; a thread adds so many quads of a tile at once."""


class Counters:
    """Words of zeros by which blocks find out who is last; kernels leave them as they found them.

    Calls on one stream follow one another and share theirs. A captured launch keeps words of its
    own for good, since its graph may run beside anything; these are zeroed ahead, outside of it.
    """

    SLAB = 1 << 16

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_stream: dict[tuple[int, int], torch.Tensor] = {}
        self._slabs: dict[int, torch.Tensor] = {}
        """By device: words that nobody has yet."""

    def address(self, device: torch.device, stream: int, count: int) -> int:
        """Of `count` words, at most COUNTERS, for a launch on the current stream.

        Raises:
            LaunchError: the stream is being captured, and the words zeroed before are used up.
        """
        assert count <= COUNTERS, count
        if torch.cuda.is_current_stream_capturing():
            with self._lock:
                return self._take(device, count).data_ptr()
        found = self._by_stream.get((device.index, stream))
        if found is None or self._slabs[device.index].numel() < self.SLAB // 2:
            with self._lock:
                self._refill(device)
                found = self._by_stream.setdefault(
                    (device.index, stream), self._take(device, COUNTERS)
                )
        return found.data_ptr()

    def _refill(self, device: torch.device) -> None:
        left = self._slabs.get(device.index)
        if left is None or left.numel() < self.SLAB // 2:
            side = torch.cuda.Stream(device)
            with torch.cuda.stream(side):
                words = torch.zeros(self.SLAB, dtype=torch.int32, device=device)
            side.synchronize()  # any stream may use them from now on
            self._slabs[device.index] = words

    def _take(self, device: torch.device, count: int) -> torch.Tensor:
        left = self._slabs.get(device.index)
        if left is None or left.numel() < count:
            raise LaunchError(
                "no zeroed counters are left for a captured launch; call the operator once outside "
                "of capture"
            )
        self._slabs[device.index] = left[count:]
        return left[:count]


counters = Counters()


class WeightGradKernel(Executable):
    """One launch, or two where a second kernel adds the slices.

    `overlapping` says that the second may start while the first ends.

    Args:
        built: of a source that ends kernels/weight_grad.cuh.
        signature: struct codes of the arguments that a subclass's `operands` gives; those of the
            output, the workspace, the counters and `constants` follow.
    """

    overlapping = False

    def __init__(
        self,
        built: Compiled,
        signature: str,
        config: Split,
        w: Workload,
        problem: Problem,
        constants: tuple[Any, ...] = (),
    ):
        self.resources, self.shared_bytes = built.resources, config.shared_bytes
        self.block_threads = config.threads
        self.kernel = CudaKernel(built, ENTRY, f"{signature}PPP{'i' * len(constants)}T")
        self.add = CudaKernel(built, ADD_ENTRY, "PPT")
        rows, columns = problem.row_tiles(config.tile_m), problem.column_tiles(config.tile_n)
        groups = config.split_k // config.cluster
        self.output, self.combine, self.split = w.outputs[0], config.combine, groups > 1
        self.grid, self.cluster = (rows * config.cluster, columns, groups), config.blocks_together
        self.counters = rows * columns * config.cluster
        self.last = (*constants, problem.packed(config.tile_m, config.tile_k, config.split_k))
        tile = config.tile_m * config.tile_n
        self.add_grid = (rows, columns, max(1, tile // (4 * ADD_THREADS * ADD_QUADS)))
        self.partial_floats = self.split * rows * columns * groups * tile
        self.workspace_bytes = 4 * self.partial_floats

    def operands(self, x: torch.Tensor, grad_output: torch.Tensor) -> tuple[Any, ...]:
        """The kernel's first arguments."""
        return x.data_ptr(), grad_output.data_ptr()

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        device = tensors[0].device
        index = device.index
        stream = torch._C._cuda_getCurrentRawStream(index)
        out = allocate(self.output, device)
        partial = counter = 0
        if self.split:
            shape = (self.partial_floats,)
            workspace = allocator.empty_strided(shape, (1,), dtype=torch.float32, device=device)
            partial = workspace.data_ptr()
            if self.combine != "kernel":
                counter = counters.address(device, stream, self.counters)
        self.kernel.launch(
            self.grid, (self.block_threads, 1, 1), self.shared_bytes, stream, index,
            *self.operands(*tensors), out.data_ptr(), partial, counter, *self.last,
            cluster=self.cluster, cooperative=self.split and self.combine == "grid",
        )  # fmt: skip
        if self.split and self.combine == "kernel":
            self.add.launch(
                self.add_grid, (ADD_THREADS, 1, 1), 0, stream, index,
                out.data_ptr(), partial, self.last[-1], overlapping=self.overlapping,
            )  # fmt: skip
        return out
