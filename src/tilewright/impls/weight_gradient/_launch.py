"""Launching a weight-gradient kernel: workspace for partial sums, counters, one launch or two."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.compile.cache import Compiled
from tilewright.compile.counters import counters
from tilewright.compile.launch import CudaKernel
from tilewright.impl import Executable, allocator
from tilewright.impls.weight_gradient._model import (
    MARKED,
    Split,
    cuts_tiles,
    partial_sums,
    workspace_bytes,
)
from tilewright.impls.weight_gradient._problem import Problem, Results, addresses, returned
from tilewright.op import Workload

ENTRY, ADD_ENTRY = "weight_grad", "add_all_slices"
ADD_QUADS = 4
"""Of a tile, that a thread of the second kernel adds at once."""


class WeightGradKernel(Executable):
    """One launch, or two where a second kernel adds the slices.

    `overlapping` says that the second may start while the first ends.

    Args:
        built: of a source that ends kernels/weight_gradient/common.cuh.
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
        self.kernel = CudaKernel(built, ENTRY, f"{signature}PPPP{'i' * len(constants)}T")
        self.add = CudaKernel(built, ADD_ENTRY, "PPPT")
        rows, columns = problem.row_tiles(config.tile_m), problem.column_tiles(config.tile_n)
        groups, tiles = config.split_k // config.cluster, rows * columns
        self.results, self.combine = Results(w), config.combine
        self.split = groups > 1 or cuts_tiles(config)
        self.grid, self.cluster = (rows * config.cluster, columns, groups), config.blocks_together
        self.counters, ranges = tiles * config.cluster, (config.split_k, 1, False)
        if config.blocks:
            self.grid, ranges = (config.blocks, 1, 1), (config.blocks, tiles, config.whole)
        self.waits = self.split and (config.blocks > 0 or self.combine in ("grid", MARKED))
        self.last = (*constants, problem.packed(config.tile_m, config.tile_k, *ranges))
        tile = config.tile_m * config.tile_n
        self.add_threads = config.add_threads
        self.add_grid = (rows, columns, max(1, tile // (4 * self.add_threads * ADD_QUADS)))
        self.partial_sums = partial_sums(problem, config)
        self.sum_dtype = torch.float64 if config.sum_bytes == 8 else torch.float32
        self.workspace_bytes = workspace_bytes(problem, config)

    def operands(self, x: torch.Tensor, grad_output: torch.Tensor) -> tuple[Any, ...]:
        """The kernel's first arguments."""
        return x.data_ptr(), grad_output.data_ptr()

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        device = tensors[0].device
        index = device.index
        stream = torch._C._cuda_getCurrentRawStream(index)
        found = self.results.begun(tensors, device)
        out, bias = addresses(found)
        partial = counter = 0
        if self.split:
            shape = (self.partial_sums,)
            workspace = allocator.empty_strided(shape, (1,), dtype=self.sum_dtype, device=device)
            partial = workspace.data_ptr()
            if self.combine != "kernel":
                counter = counters.address(device.index, stream, self.counters)
        self.kernel.launch(
            self.grid, (self.block_threads, 1, 1), self.shared_bytes, stream, index,
            *self.operands(*tensors[:2]), out, bias, partial, counter,
            *self.last,
            cluster=self.cluster, cooperative=self.waits,
        )  # fmt: skip
        if self.split and self.combine == "kernel":
            self.add.launch(
                self.add_grid, (self.add_threads, 1, 1), 0, stream, index,
                out, bias, partial, self.last[-1], overlapping=self.overlapping,
            )  # fmt: skip
        return returned(found)
