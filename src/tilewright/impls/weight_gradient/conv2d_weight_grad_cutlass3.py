"""CUTLASS 3.x's weight gradient for Hopper, an implicit matrix product by TMA and wgmma: a
yardstick, and where nothing is padded a choice like any other."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from tilewright.build import CompileTask, Resources
from tilewright.compile import nvcc
from tilewright.compile.cache import Compiled, compiled
from tilewright.compile.launch import CppFunction
from tilewright.compile.resources import parse_ptxas
from tilewright.device import DeviceSpec
from tilewright.impl import Executable, Implementation, allocate
from tilewright.impls.weight_gradient._cutlass import ELEMENTS, only_compared, packed
from tilewright.impls.weight_gradient._layout import in_any_layout
from tilewright.impls.weight_gradient._model import ADD_THREADS, COMBINES, forecast, predicted_us
from tilewright.impls.weight_gradient._problem import (
    PANEL,
    Problem,
    as_read,
    copy_engine_refusal,
    operand_refusal,
    problem_of,
    source,
)
from tilewright.op import Workload
from tilewright.space import ConfigSpace, param

THREADS = 256
"""A warpgroup that multiplies, and one of which a warp copies."""
MOST_SUMS = 128 * 128
"""Of a tile: 128 sums of a thread."""
CLUSTERS = ((1, 1), (2, 1), (1, 2))
"""Their kernels are compiled together: the first takes ten times as long as each further one."""
BESIDE_STAGES = 1024
"""Bytes of shared memory for barriers and alignment."""
MAX_REACH = 254


@dataclass(frozen=True)
class Config:
    """
    Attributes:
        tile_m, tile_n: output channels, and channels of one filter tap, of one block.
        tile_k: output pixels of a step.
        stages: steps in shared memory: all that one block on an SM has room for, as CUTLASS's own
            instances have them, or each of two or three.
        cluster_m, cluster_n: blocks that copy their common boxes to each other.
    """

    tile_m: int = param(128, 64, 256)
    tile_n: int = param(128, 64, 256)
    tile_k: int = param(64)
    stages: int = param(7, 4, 5, 9, 14)
    cluster_m: int = param(1, 2)
    cluster_n: int = param(1, 2)

    # what the model of our own kernels asks for besides
    split_k = cluster = 1
    blocks, whole = 0, False
    combine, add_threads = COMBINES[0], ADD_THREADS[0]
    threads = THREADS
    sum_bytes, beside_sums, static_bytes, alone_with_bias = 4, 41, 0, False

    @property
    def cluster_text(self) -> str:
        return f"{self.cluster_m}x{self.cluster_n}"

    @property
    def kernel(self) -> str:
        """Its name in the library."""
        return f"weight_grad_kernel_{self.cluster_text}"

    @property
    def blocks_together(self) -> int:
        return self.cluster_m * self.cluster_n

    @property
    def sums(self) -> int:
        return self.tile_m * self.tile_n // 128

    @property
    def stage_bytes(self) -> int:
        return 2 * (self.tile_m + self.tile_n) * self.tile_k

    @property
    def operand_bytes(self) -> int:
        return self.stages * self.stage_bytes

    @property
    def shared_bytes(self) -> int:
        return self.operand_bytes + BESIDE_STAGES


class Conv2dWeightGradCutlass3(Implementation):
    """Kernels instantiated from CUTLASS's headers by nvcc, all clusters of a tile and number of
    stages in one library.

    CUTLASS has no split-K, stream-K or persistent schedule for convolutions on sm_90: tiles that
    are fewer than SMs leave SMs idle.
    """

    name, backend, op = "conv2d_weight_grad_cutlass3", "cutlass", "conv2d_weight_grad"

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        if device.arch != "sm_90a":
            return f"CUTLASS 3.x's kernel is for sm_90a, and {device.name} is {device.arch}"
        if reason := operand_refusal(w, wide_result=True):
            return reason
        if w["groups"] != 1:
            return f"groups={w['groups']}: CUTLASS has no grouped weight gradient"
        if reason := copy_engine_refusal(w, MAX_REACH):
            return reason
        return nvcc.missing() or nvcc.cutlass_missing(utilities=True)

    def only_compared(self, w: Workload) -> str | None:
        return only_compared(w)

    def space(self, w: Workload, device: DeviceSpec) -> ConfigSpace[Config]:
        return ConfigSpace(Config, {}, lambda c: _refusal(w, device, c))

    def heuristic(self, w: Workload, device: DeviceSpec) -> Config:
        return self.promising(w, device)[0]

    def promising(self, w: Workload, device: DeviceSpec) -> list[Config]:
        """The whole space, which is small, by the wave arithmetic of our own kernels."""
        configs = self.space(w, device)
        return sorted(configs, key=lambda c: predicted_us(_problem(w, c), device, c))

    def forecast(self, config: Config, w: Workload, device: DeviceSpec) -> dict[str, Any]:
        return forecast(_problem(w, config), device, config)

    def compile_key(self, config: Config, w: Workload) -> str:
        """Sizes are arguments: one library serves every layer."""
        return f"{_defined(config, w)} {config.cluster_text}"

    def task(self, config: Config, w: Workload, device: DeviceSpec) -> CompileTask:
        defined = _defined(config, w).items()
        text = "".join(f"#define {name} {value}\n" for name, value in defined)
        text += source("cutlass_common.cuh") + source("cutlass3.cu")
        text += "".join(f"WEIGHT_GRAD({m}, {n})\n" for m, n in CLUSTERS)
        folders = nvcc.cutlass_flags(utilities=True)
        flags = (*nvcc.DEFAULT_FLAGS, nvcc.architecture(device.arch), *folders)
        return CompileTask("nvcc", text, flags, "weight_grad")

    def resources(self, config: Config, log: str) -> Resources:
        return parse_ptxas(log, config.kernel)

    def build(self, config: Config, w: Workload, device: DeviceSpec) -> Executable:
        kernel = Cutlass3Kernel(compiled(self.task(config, w, device)), config, w)
        return in_any_layout(kernel, w, device)


class Cutlass3Kernel(Executable):
    """One launch."""

    def __init__(self, built: Compiled, config: Config, w: Workload):
        self.resources = parse_ptxas(built.log, config.kernel)
        self.block_threads, self.shared_bytes = THREADS, config.shared_bytes
        self.function = CppFunction(
            built, f"weight_grad_{config.cluster_text}", "PPPPiP", checked=True
        )
        self.output = as_read(w.outputs[0])
        problem = packed(w)
        self._problem = ctypes.create_string_buffer(problem, len(problem))
        self._problem_address = ctypes.addressof(self._problem)

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        x, grad = tensors
        device, index = x.device, x.device.index
        stream = torch._C._cuda_getCurrentRawStream(index)
        out = allocate(self.output, device)
        self.function(
            self._problem_address, x.data_ptr(), grad.data_ptr(), out.data_ptr(), index, stream
        )
        return out


def _refusal(w: Workload, device: DeviceSpec, c: Config) -> str | None:
    """Why a config does not fit, in words, or None."""
    if c.tile_m * c.tile_n > MOST_SUMS:
        return f"a tile of {c.tile_m} x {c.tile_n} is too large for one warpgroup"
    if c.shared_bytes > device.shared_bytes_per_block:
        return f"{c.shared_bytes} bytes of shared memory are more than a block has"
    together = _blocks_per_sm(device, c)
    if together == _blocks_per_sm(device, replace(c, stages=c.stages + 1)):
        return f"{c.stages + 1} stages let as many blocks share an SM, {together}"
    if (c.cluster_m, c.cluster_n) not in CLUSTERS:
        return f"clusters of {c.cluster_text} are not among {CLUSTERS}"
    features, channels = w["grad_output"].shape[1], w["x"].shape[1]
    if c.tile_m >= 2 * max(features, 64) or c.tile_n >= 2 * max(channels, 64):
        return "a tile half as large has room for all features and channels"
    rows = math.ceil(features / c.tile_m)
    columns = math.ceil(channels / c.tile_n) * math.prod(w["kernel_size"])
    if rows % c.cluster_m or columns % c.cluster_n:
        return f"{rows} x {columns} tiles do not fill clusters of {c.cluster_text}"
    return None


def _blocks_per_sm(device: DeviceSpec, c: Config) -> int:
    if c.shared_bytes > device.shared_bytes_per_block:
        return 0
    return device.occupancy(c.threads, c.sums + c.beside_sums, c.shared_bytes)[0]


def _problem(w: Workload, c: Config) -> Problem:
    """A tile's columns are channels of one tap, of which the last tile may be partly empty."""
    per_tap = math.ceil(w["x"].shape[1] / c.tile_n) * (c.tile_n // PANEL)
    return replace(problem_of(w), panels_per_tap=per_tap)


def _defined(c: Config, w: Workload) -> dict[str, object]:
    """What is baked into a library."""
    return {
        "ELEMENT": ELEMENTS[w.main.dtype], "RESULT": ELEMENTS[w.outputs[0].dtype],
        "TILE_M": c.tile_m, "TILE_N": c.tile_n, "TILE_K": c.tile_k,
        "STAGES": c.stages, "SHARED_BYTES": c.shared_bytes,
    }  # fmt: skip
