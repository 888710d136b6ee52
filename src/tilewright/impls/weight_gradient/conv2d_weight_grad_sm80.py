"""The convolution weight gradient for sm_80 and later: mma.sync, any number of channels."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

from tilewright.build import CompileTask
from tilewright.compile import nvrtc
from tilewright.compile.cache import compiled
from tilewright.device import DeviceSpec
from tilewright.impl import Executable, Implementation
from tilewright.impls.weight_gradient._launch import ENTRY, WeightGradKernel
from tilewright.impls.weight_gradient._layout import in_any_layout
from tilewright.impls.weight_gradient._model import (
    ADD_THREADS,
    COMBINES,
    SERIAL,
    WAYS,
    blocks_per_sm,
    challengers,
    exact,
    forecast,
    likely,
    predicted_us,
    ranked,
    split_choices,
    why_not,
)
from tilewright.impls.weight_gradient._problem import (
    Problem,
    as_read,
    operand_refusal,
    problem_of,
    result_defined,
    source,
)
from tilewright.op import Workload
from tilewright.space import ConfigSpace, param
from tilewright.tensor_spec import HALVES

THREADS = 256
STEPS = {2: 32, 4: 16, 8: 8}
"""Output pixels of a step, by the size of an element: steps have as many bytes."""
WARPS = {
    (64, 64): (2, 4), (64, 128): (2, 4), (64, 192): (2, 4), (64, 256): (2, 4),
    (128, 64): (4, 2), (128, 128): (2, 4), (128, 256): (2, 4), (256, 64): (4, 2),
    (256, 128): (4, 2),
}  # fmt: skip
"""(tile_m, tile_n) -> warps along each; at most 128 sums a thread."""
LARGEST = {32: 128, 16: 64, 8: 48}
"""Sums of a thread beside its operands, by the pixels of a step."""
PROMISING = 16
SHARE_OF_WGMMA = 0.5
"""Of the tensor rate that mma.sync reaches where there is wgmma, a guess; without, all of it."""
REACHED = 0.8
"""Of either, by kernels whose operands are at hand: a guess."""


@dataclass(frozen=True)
class Config:
    """
    Attributes:
        tile_m, tile_n: output channels, and taps times input channels, of one block.
        tile_k: output pixels of one step; 32 of halves, 16 of fp32, 8 of fp64.
        stages: steps in shared memory.
        split_k: slices of the pixels, each summed by blocks of its own.
        combine: who adds the slices; see COMBINES, SERIAL.
        add_threads: of a block of the second kernel, where that adds.
    """

    tile_m: int = param(64, 128, 256)
    tile_n: int = param(64, 128, 192, 256)
    tile_k: int = param(*STEPS.values())
    stages: int = param(4, 2, 3, 5, 6)
    split_k: int = param(1, counts=True)
    combine: str = param(*COMBINES, SERIAL)
    add_threads: int = param(*ADD_THREADS)

    @property
    def cluster(self) -> int:
        return 1

    @property
    def blocks_together(self) -> int:
        return 1

    @property
    def blocks(self) -> int:
        return 0

    @property
    def whole(self) -> bool:
        return False

    @property
    def threads(self) -> int:
        return THREADS

    @property
    def sums(self) -> int:
        """Of one thread, fp32 or fp64."""
        return self.tile_m * self.tile_n // THREADS

    @property
    def beside_sums(self) -> int:
        """Registers of a thread besides one for each of those: wide operands take more."""
        return {32: 64, 16: 84, 8: 84 + self.sums}[self.tile_k]

    @property
    def alone_with_bias(self) -> bool:
        """Beside tall tiles, and beside 128 x 128, they take more registers than two blocks leave
        each other."""
        return self.tile_m > self.tile_n or self.tile_m == self.tile_n == 128

    @property
    def sum_bytes(self) -> int:
        return 8 if self.tile_k == STEPS[8] else 4

    @property
    def operand_bytes(self) -> int:
        return self.stages * (self.tile_m + self.tile_n) * 64

    @property
    def shared_bytes(self) -> int:
        return max(self.operand_bytes, self.tile_m * (self.tile_n * 2 + 16))

    @property
    def static_bytes(self) -> int:
        """Tables of columns and panels."""
        return 1024 + self.tile_n * 8


class Conv2dWeightGradSm80(Implementation):
    """An implicit matrix product with split-K through registers: asynchronous copies, mma.sync.

    fp32 is rounded to TF32 where that is allowed; else, as fp64, multiplied and added as it is.
    Channels that come in 16 bytes are copied so, each tap by itself. Others are
    gathered one by one, and taps follow one another without gaps, so that three channels of a
    7 x 7 filter fill 147 of 192 columns.
    """

    name, backend = "conv2d_weight_grad_sm80", "cuda"
    op = ("conv2d_weight_grad", "conv2d_weight_bias_grad")

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        if device.kind != "cuda":
            return f"it runs on an NVIDIA GPU, not on {device.name}"
        if reason := operand_refusal(w, (*HALVES, "f32", "f64"), wide_result=True, adds=True):
            return reason
        if w["groups"] != 1:
            return f"groups={w['groups']}: the kernel multiplies all channels with all features"
        reach = max((r - 1) * d for r, d in zip(w["kernel_size"], w["dilation"], strict=True))
        if reach >= 2**15:
            return f"a filter that reaches {reach} pixels is too wide"
        return None

    def space(self, w: Workload, device: DeviceSpec) -> ConfigSpace[Config]:
        problem = _problem(w)
        values = {"split_k": _splits(w, problem, device), "tile_k": [STEPS[w.main.itemsize]]}
        return ConfigSpace(Config, values, lambda c: _refusal(problem, device, c))

    def heuristic(self, w: Workload, device: DeviceSpec) -> Config:
        return _ranking(w, _problem(w), device)[0]

    def promising(self, w: Workload, device: DeviceSpec) -> list[Config]:
        return list(_ranking(w, _problem(w), device))

    def forecast(self, config: Config, w: Workload, device: DeviceSpec) -> dict[str, Any]:
        return forecast(_problem(w), device, config, _share(w, device, config))

    def compile_key(self, config: Config, w: Workload) -> str:
        """Shape and slice count are arguments: one binary serves every layer."""
        dtypes = (w.main.dtype, *result_defined(w).values())
        aligned = tuple(_is_aligned(w, name) for name in ("x", "grad_output"))
        baked = replace(config, split_k=min(config.split_k, 2))
        return f"{baked} {dtypes} {aligned} {w['allow_tf32']}"

    def task(self, config: Config, w: Workload, device: DeviceSpec) -> CompileTask:
        along_m, along_n = WARPS[config.tile_m, config.tile_n]
        dtype = w.main.dtype
        defined = {
            "DTYPE": dtype,
            **result_defined(w),
            "OPERAND": f'"{dtype}"',
            "TF32": int(w["allow_tf32"] is True),
            "TILE_M": config.tile_m,
            "TILE_N": config.tile_n,
            "TILE_K": config.tile_k,
            "STAGES": config.stages,
            "THREADS": THREADS,
            "BLOCKS": config.tile_m // 16 // along_m,
            "COLUMNS": config.tile_n // along_n,
            "STRIDE": 16,
            "WARP_ROW(warp)": f"((warp) % {along_m} * BLOCKS * 16)",
            "WARP_COLUMN(warp)": f"((warp) / {along_m} * COLUMNS)",
            "COMBINE": WAYS.index(config.combine),
            "ADD_THREADS": config.add_threads,
            "CLUSTER": config.cluster,
            "SENT": 0,
            "TAPS_INSIDE": 0,
            "GROUP": 0,
            "MIN_BLOCKS": max(1, blocks_per_sm(_problem(w), device, config)),
            "ALIGNED": int(_is_aligned(w, "x")),
            "ALIGNED_ROWS": int(_is_aligned(w, "grad_output")),
        }
        text = "".join(f"#define {name} {value}\n" for name, value in defined.items())
        flags = nvrtc.flags_for(device.arch)
        products = "halves" if dtype in HALVES else "wide"
        names = ("hopper", "long_sum", "common", "combine", "padding", "sm80", f"sm80_{products}")
        own = "".join(source(f"{name}.cuh") for name in names)
        return CompileTask("nvrtc", text + own, flags, ENTRY)

    def build(self, config: Config, w: Workload, device: DeviceSpec) -> Executable:
        built = compiled(self.task(config, w, device))
        channels = (w["x"].shape[1],)
        kernel = WeightGradKernel(built, "PP", config, w, _problem(w), channels)
        return in_any_layout(kernel, w, device)


@functools.lru_cache(maxsize=64)
def _ranking(w: Workload, problem: Problem, device: DeviceSpec) -> tuple[Config, ...]:
    """Configs by the model, the one to take untuned first."""

    def us(c: Config) -> float:
        return predicted_us(problem, device, c, _share(w, device, c))

    deepest, others, tile_k = [], [], STEPS[w.main.itemsize]
    for tile in WARPS:
        configs = [Config(*tile, tile_k, stages) for stages in (4, 3, 2)]
        fits = [c for c in configs if _refusal(problem, device, c) is None]
        deepest += fits[:1]
        others += fits[1:]
    splits = _splits(w, problem, device)
    configs = likely(problem, device, deepest, splits)
    first = min(exact(problem, device, configs), key=us)
    against = challengers(problem, device, first, configs, us)
    configs += likely(problem, device, others, splits)
    return tuple(dict.fromkeys([first, *against, *ranked(configs, us, PROMISING)]))


def _splits(w: Workload, problem: Problem, device: DeviceSpec) -> list[int]:
    tiles = {problem.tiles(*shape) for shape in WARPS}
    return split_choices(problem, device, tiles, STEPS[w.main.itemsize])


def _is_aligned(w: Workload, name: str) -> bool:
    """Whether channels can be copied 16 bytes at a time."""
    return as_read(w[name]).align == 16 and w[name].shape[1] * w[name].itemsize % 16 == 0


def _share(w: Workload, device: DeviceSpec, c: Config) -> float:
    """Of the datasheet's tensor rate of halves."""
    return REACHED * _rate(w, device) / device.flops["f16_tensor"] * _left_by_reads(w, c)


def _rate(w: Workload, device: DeviceSpec) -> float:
    """Operations per second of the unit that multiplies."""
    if w.main.dtype in ("f32", "f64") and not w["allow_tf32"]:
        return device.flops[w.main.dtype]
    unit = "f16" if w.main.dtype in HALVES else "tf32"
    return device.flops[f"{unit}_tensor"] * (SHARE_OF_WGMMA if device.capability >= 90 else 1.0)


def _left_by_reads(w: Workload, c: Config) -> float:
    """Part of the unit's rate that reading wide operands from shared memory leaves: each lane reads
    one a cycle, and rounding it to TF32 takes one and a half; ldmatrix keeps up for halves."""
    if w.main.dtype in HALVES:
        return 1.0
    along_m, along_n = WARPS[c.tile_m, c.tile_n]
    blocks, columns = c.tile_m // 16 // along_m, c.tile_n // along_n
    plain = 8 if w.main.dtype == "f32" else 4
    products, read = (40, 0.375) if w["allow_tf32"] else (plain, 1.0)
    cycles, reading = blocks * columns / products, (2 * blocks + columns / 8) * read
    return min(1.0, cycles / reading)


def _problem(w: Workload) -> Problem:
    return problem_of(w, dense=not _is_aligned(w, "x"))


def _refusal(problem: Problem, device: DeviceSpec, c: Config) -> str | None:
    if (c.tile_m, c.tile_n) not in WARPS:
        return f"a tile of {c.tile_m} x {c.tile_n} has no arrangement of warps"
    if c.sums > LARGEST[c.tile_k]:
        return f"{c.sums} sums of a thread leave too few registers for wide operands"
    return why_not(problem, device, c)
