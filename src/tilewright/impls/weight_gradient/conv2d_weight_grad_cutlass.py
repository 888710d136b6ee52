"""CUTLASS 2.x's weight gradient, an implicit matrix product with split-K: a yardstick, and where
nothing is padded a choice like any other."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.build import CompileTask, Resources
from tilewright.compile import nvcc
from tilewright.compile.cache import Compiled, compiled
from tilewright.compile.counters import COUNTERS, counters
from tilewright.compile.launch import CppFunction
from tilewright.compile.resources import parse_ptxas
from tilewright.device import DeviceSpec
from tilewright.impl import Executable, Implementation, allocate, allocator
from tilewright.impls.weight_gradient._cutlass import ELEMENTS, only_compared, packed
from tilewright.impls.weight_gradient._layout import in_any_layout
from tilewright.impls.weight_gradient._model import ADD_THREADS, SERIAL, forecast, predicted_us
from tilewright.impls.weight_gradient._problem import as_read, operand_refusal, problem_of, source
from tilewright.op import Workload
from tilewright.settings import workspace_limit_bytes
from tilewright.space import ConfigSpace, param
from tilewright.tensor_spec import TensorSpec

STAGES = (3, 2, 4, 5, 6, 10, 1)
WARPS = {
    (256, 128, 32): (4, 2, 1), (128, 256, 32): (2, 4, 1), (256, 64, 32): (4, 1, 1),
    (64, 256, 32): (1, 4, 1), (128, 128, 32): (2, 2, 1), (128, 64, 32): (2, 2, 1),
    (64, 128, 32): (2, 2, 1), (64, 64, 32): (2, 2, 1), (256, 128, 64): (4, 2, 1),
    (128, 256, 64): (2, 4, 1), (256, 64, 64): (4, 1, 1), (64, 256, 64): (1, 4, 1),
    (128, 128, 64): (2, 2, 1), (128, 64, 64): (2, 2, 1), (64, 128, 64): (2, 2, 1),
    (64, 64, 64): (2, 2, 1),
}  # fmt: skip
"""(tile_m, tile_n, tile_k) -> warps along each, as CUTLASS's own instance library has them."""
SLICED_K = {(64, 128, 64): (1, 2, 2)}
"""The same for m16n8k8, where it differs: warps share the summed dim."""
PROMISING = 24
"""Configs that a search measures first."""
OLDER = 4
"""One in so many of those is of m16n8k8."""
MMA_SHARE = 0.5
"""Of the datasheet's tensor rate, that of wgmma, which mma.sync reaches on sm_90: a guess."""
MAX_BYTES = 2**31
"""CUTLASS indexes tensors in 32 bits."""


@dataclass(frozen=True)
class Config:
    """
    Attributes:
        tile_m, tile_n, tile_k: output channels, taps times channels, and output pixels of a step.
        stages: steps in shared memory.
        split_k: slices of the pixels.
        mode: "parallel": slices go to a workspace and a second kernel adds them. "serial": blocks
            of a tile add theirs one after the other.
        instruction_k: pixels that one tensor-core instruction multiplies: 16, or the 8 of sm_75.
    """

    tile_m: int = param(128, 64, 256)
    tile_n: int = param(128, 64, 256)
    tile_k: int = param(32, 64)
    stages: int = param(*STAGES)
    split_k: int = param(1, counts=True)
    mode: str = param("parallel", "serial")
    instruction_k: int = param(16, 8)

    @property
    def tile(self) -> tuple[int, int, int]:
        return self.tile_m, self.tile_n, self.tile_k

    @property
    def warps(self) -> tuple[int, int, int]:
        sliced = SLICED_K.get(self.tile) if self.instruction_k == 8 else None
        return sliced or WARPS[self.tile]

    @property
    def kernel(self) -> str:
        """Its name in the library."""
        return f"weight_grad_kernel_{self.stages}"

    cluster = blocks_together = 1
    blocks, whole = 0, False  # slices are cut, ranges are not
    add_threads = ADD_THREADS[0]
    sum_bytes, beside_sums, static_bytes, alone_with_bias = 4, 48, 0, False

    @property
    def combine(self) -> str:
        """What the model of our own kernels calls it."""
        return SERIAL if self.mode == "serial" else "kernel"

    @property
    def threads(self) -> int:
        return 32 * math.prod(self.warps)

    @property
    def sums(self) -> int:
        return self.tile_m * self.tile_n // self.threads

    @property
    def shared_bytes(self) -> int:
        return 2 * self.stages * (self.tile_m + self.tile_n) * self.tile_k

    operand_bytes = shared_bytes


class Conv2dWeightGradCutlass(Implementation):
    """Kernels instantiated from CUTLASS's headers by nvcc, all numbers of stages of a tile in one
    library; the widest accesses that channels and addresses allow.

    They multiply the padding, so that infinities of grad_output spread: see `only_compared`.
    """

    name, backend, op = "conv2d_weight_grad_cutlass", "cutlass", "conv2d_weight_grad"

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        if device.kind != "cuda":
            return f"it runs on an NVIDIA GPU, not on {device.name}"
        if reason := operand_refusal(w, wide_result=True):
            return reason
        if w["groups"] != 1:
            return f"groups={w['groups']}: CUTLASS has no grouped weight gradient"
        largest = max(s.numel * s.itemsize for s in (*w.tensors.values(), *w.outputs))
        if largest >= MAX_BYTES:
            return f"a tensor of {largest} bytes: CUTLASS takes less than {MAX_BYTES}"
        return nvcc.missing() or nvcc.cutlass_missing()

    def only_compared(self, w: Workload) -> str | None:
        return only_compared(w)

    def space(self, w: Workload, device: DeviceSpec) -> ConfigSpace[Config]:
        return ConfigSpace(
            Config, {"split_k": _splits(w, device)}, lambda c: _refusal(w, device, c)
        )

    def heuristic(self, w: Workload, device: DeviceSpec) -> Config:
        """The largest tile that is mostly full, and at least a wave of blocks."""
        features, columns, _ = _extents(w)
        tile_m = 128 if features > 64 else 64
        tile_n = 128 if columns > 64 else 64
        stages = 3 if _can_copy_asynchronously(w) else 2
        tiles = math.ceil(features / tile_m) * math.ceil(columns / tile_n)
        wanted = max(1, 2 * device.sms // tiles)
        fits = [
            config
            for split_k in _splits(w, device)
            if _refusal(w, device, config := Config(tile_m, tile_n, 32, stages, split_k)) is None
        ]
        return min(fits, key=lambda c: abs(math.log(c.split_k / wanted)))

    def promising(self, w: Workload, device: DeviceSpec) -> list[Config]:
        """By the wave arithmetic of our own kernels: tiles and slices, two to four stages. It tells
        nothing of instructions, so every fourth config has the shorter one where that is served."""
        problem, space = problem_of(w), self.space(w, device)
        configs = [c for c in space if c.stages in (2, 3, 4)]
        configs.sort(key=lambda c: predicted_us(problem, device, c, MMA_SHARE))
        older = [c for c in configs if c.instruction_k == 8][: PROMISING // OLDER]
        found = [c for c in configs if c.instruction_k == 16][: PROMISING - len(older)]
        for i, config in enumerate(older, 1):
            found.insert(i * OLDER - 1, config)
        return found

    def forecast(self, config: Config, w: Workload, device: DeviceSpec) -> dict[str, Any]:
        found = forecast(problem_of(w), device, config, MMA_SHARE)
        return {**found, "workspace_bytes": 4 * _partial_sums(w, config)}

    def compile_key(self, config: Config, w: Workload) -> str:
        """Sizes are arguments: one library serves every layer whose channels divide alike."""
        return f"{_defined(config, w)} {config.stages} {config.split_k > 1}"

    def task(self, config: Config, w: Workload, device: DeviceSpec) -> CompileTask:
        defined = "".join(
            f"#define {name} {value}\n" for name, value in _defined(config, w).items()
        )
        ahead = _can_copy_asynchronously(w) and config.instruction_k == 16
        stages = [
            s for s in sorted(STAGES) if s == 2 or (ahead and _why_not_stages(s, config) is None)
        ]
        kernels = "".join(f"WEIGHT_GRAD({s})\n" for s in stages if _fits(config, s, device))
        flags = (*nvcc.DEFAULT_FLAGS, nvcc.architecture(device.arch), *nvcc.cutlass_flags())
        common = source("cutlass_common.cuh")
        text = defined + common + source("cutlass.cu") + kernels
        return CompileTask("nvcc", text, flags, "weight_grad")

    def resources(self, config: Config, log: str) -> Resources:
        return parse_ptxas(log, config.kernel)

    def build(self, config: Config, w: Workload, device: DeviceSpec) -> Executable:
        kernel = CutlassKernel(compiled(self.task(config, w, device)), config, w)
        return in_any_layout(kernel, w, device)


class CutlassKernel(Executable):
    """One launch, or two where slices are added, or sums of one are rounded, by another kernel."""

    def __init__(self, built: Compiled, config: Config, w: Workload):
        self.resources = parse_ptxas(built.log, config.kernel)
        self.block_threads, self.shared_bytes = config.threads, config.shared_bytes
        self.function = CppFunction(built, f"weight_grad_{config.stages}", "PPPPPPiP", checked=True)
        self.output = as_read(w.outputs[0])
        serial = config.split_k > 1 and config.mode == "serial"
        self.partial_floats = _partial_sums(w, config)
        self.workspace_bytes = 4 * self.partial_floats
        self.semaphores = _tiles(w, config) if serial else 0
        problem = packed(w, config.split_k, serial)
        self._problem = ctypes.create_string_buffer(problem, len(problem))
        self._problem_address = ctypes.addressof(self._problem)

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        x, grad = tensors
        device, index = x.device, x.device.index
        stream = torch._C._cuda_getCurrentRawStream(index)
        out = allocate(self.output, device)
        workspace = semaphores = 0
        if self.partial_floats:
            shape = (self.partial_floats,)
            held = allocator.empty_strided(shape, (1,), dtype=torch.float32, device=device)
            workspace = held.data_ptr()
        if self.semaphores:
            semaphores = counters.address(device.index, stream, self.semaphores)
        self.function(
            self._problem_address, x.data_ptr(), grad.data_ptr(), out.data_ptr(),
            workspace, semaphores, index, stream,
        )  # fmt: skip
        return out


def _extents(w: Workload) -> tuple[int, int, int]:
    """Of the matrix product: rows, columns, and pixels summed."""
    n, k, p, q = w["grad_output"].shape
    return k, w["x"].shape[1] * math.prod(w["kernel_size"]), n * p * q


def _partial_sums(w: Workload, c: Config) -> int:
    """fp32 in a workspace; the slices of a tile in turn can be kept in an fp32 result."""
    output, serial = w.outputs[0], c.mode == "serial"
    if c.split_k == 1 or (serial and output.dtype == "f32"):
        return 0
    return output.numel * (1 if serial else c.split_k)


def _tiles(w: Workload, c: Config) -> int:
    features, columns, _ = _extents(w)
    return math.ceil(features / c.tile_m) * math.ceil(columns / c.tile_n)


def _alignment(spec: TensorSpec, most: int = 8) -> int:
    """Elements that one access may span: channels and the address are multiples of them."""
    return math.gcd(spec.shape[1], as_read(spec).align // spec.itemsize, most)


def _can_copy_asynchronously(w: Workload) -> bool:
    """Into shared memory, 4 bytes at least; single halves pass through registers, in two stages."""
    return min(_alignment(w["x"]), _alignment(w["grad_output"])) >= 2


def _splits(w: Workload, device: DeviceSpec) -> list[int]:
    """Powers of two, small counts, and what fills whole waves of blocks."""
    features, columns, pixels = _extents(w)
    found = {1, 3, 6, 12, 24, 48, *(1 << i for i in range(1, 9))}
    for tile_m, tile_n, _ in WARPS:
        tiles = math.ceil(features / tile_m) * math.ceil(columns / tile_n)
        found |= {waves * device.sms // tiles for waves in (1, 2, 3, 4)}
    return sorted(s for s in found if 1 <= s <= max(1, pixels // 32))


def _why_not_stages(stages: int, c: Config) -> str | None:
    if stages == 1:
        return "stages=1 compiles and is wrong: a step is overwritten while it is read"
    if stages == 10 and c.tile != (64, 64, 32):
        return "stages=10 is for tiles of 64 x 64 x 32"
    return None


def _fits(c: Config, stages: int, device: DeviceSpec) -> bool:
    return 2 * stages * (c.tile_m + c.tile_n) * c.tile_k <= device.shared_bytes_per_block


def _refusal(w: Workload, device: DeviceSpec, c: Config) -> str | None:
    """Why a config does not fit, in words, or None."""
    if c.tile not in WARPS:
        return f"a tile of {c.tile_m} x {c.tile_n} x {c.tile_k} has no arrangement of warps"
    if reason := _why_not_stages(c.stages, c):
        return reason
    if not _fits(c, c.stages, device):
        return f"{c.shared_bytes} bytes of shared memory are more than a block has"
    if c.instruction_k == 8 and (w.main.dtype != "f16" or c.stages != 2):
        return "m16n8k8 is for f16 and two stages: sm_75 has no asynchronous copies"
    if c.stages > 2 and not _can_copy_asynchronously(w):
        return "channels that are no multiple of 2, or such addresses, allow two stages"
    if c.split_k == 1:
        return None if c.mode == "parallel" else "one slice needs no order"
    if 4 * _partial_sums(w, c) > workspace_limit_bytes():
        return f"partial sums of {c.split_k} slices exceed {workspace_limit_bytes()} bytes"
    if c.mode == "serial" and (tiles := _tiles(w, c)) > COUNTERS:
        return f"{tiles} tiles exceed {COUNTERS} semaphores"
    return None


def _defined(c: Config, w: Workload) -> dict[str, object]:
    """What is baked into a library; halves are written only where nothing is left to add."""
    result = w.outputs[0].dtype
    written = result if c.split_k == 1 else "f32"
    channels = _alignment(w.outputs[0])
    warps_m, warps_n, warps_k = c.warps
    return {
        "ELEMENT": ELEMENTS[w.main.dtype], "WRITTEN": ELEMENTS[written], "RESULT": ELEMENTS[result],
        "TILE_M": c.tile_m, "TILE_N": c.tile_n, "TILE_K": c.tile_k,
        "WARPS_M": warps_m, "WARPS_N": warps_n, "WARPS_K": warps_k,
        "INSTRUCTION_K": c.instruction_k, "ARCH": "Sm75" if c.instruction_k == 8 else "Sm80",
        "ALIGN_X": _alignment(w["x"]), "ALIGN_GRAD": _alignment(w["grad_output"]),
        "WRITTEN_VECTOR": min(channels, 4 if written == "f32" else 8),
        "RESULT_VECTOR": min(channels, 4),
    }  # fmt: skip
