"""The convolution weight gradient for Hopper: TMA im2col, wgmma, and a split reduction."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch

from tilewright.build import CompileTask
from tilewright.compile import tensor_map
from tilewright.compile.cache import Compiled, compiled
from tilewright.device import DeviceSpec
from tilewright.impl import Executable, Implementation
from tilewright.impls._weight_grad import (
    PANEL,
    Problem,
    as_read,
    operand_refusal,
    problem_of,
    result_defined,
    source,
)
from tilewright.impls._weight_grad_launch import ENTRY, WeightGradKernel
from tilewright.impls._weight_grad_layout import in_any_layout
from tilewright.impls._weight_grad_model import (
    COMBINES,
    blocks_per_sm,
    forecast,
    likely,
    ranked,
    split_choices,
    why_not,
)
from tilewright.op import Workload
from tilewright.space import ConfigSpace, param

WARPGROUPS = {
    (64, 64): (1, 1), (64, 128): (1, 1), (64, 192): (1, 1), (64, 256): (1, 2),
    (64, 384): (1, 2), (64, 576): (1, 3),
    (128, 64): (2, 1), (128, 128): (2, 1), (128, 192): (2, 1), (128, 256): (2, 1),
    (256, 64): (2, 1), (256, 128): (2, 1),
}  # fmt: skip
"""(tile_m, tile_n) -> warpgroups along each; at most 128 sums a thread."""
FETCHES = ("walk", "matrix", "shared")
"""The copy engine walks the pixels of x under each tap; or, for one tap with stride 1 and no
padding, copies them as a matrix; or each box of that to two neighbouring blocks at once."""
FETCHED = 4
"""So many promising configs are tried with other ways to copy x, whose speed no model tells yet."""
CLUSTERS, STAGES = (1, 2, 3, 4, 6, 8), (2, 3, 4, 5, 6, 7, 8, 9, 11, 14)


@dataclass(frozen=True)
class Config:
    """
    Attributes:
        tile_m, tile_n: output channels, and taps times input channels, of one block.
        tile_k: output pixels of one step.
        stages: steps in shared memory.
        split_k: slices of the pixels, each summed by blocks of its own.
        cluster: so many consecutive slices are added through the shared memory of their blocks.
        combine: who adds what is left, one sum for each cluster; see COMBINES.
        fetch: how x is copied; see FETCHES.
    """

    tile_m: int = param(64, 128, 256)
    tile_n: int = param(64, 128, 192, 256, 384, 576)
    tile_k: int = param(64, 32, 128)
    stages: int = param(4, 2, 3, 5, 6, 7, 8, 9, 11, 14)
    split_k: int = param(1)
    cluster: int = param(*CLUSTERS)
    combine: str = param(*COMBINES)
    fetch: str = param(*FETCHES)

    @property
    def blocks_together(self) -> int:
        """Blocks of one thread block cluster, for either reason."""
        return self.cluster * self.share

    @property
    def share(self) -> int:
        """Neighbouring row tiles that have each box of x copied to all of them at once."""
        return 2 if self.fetch == "shared" else 1

    @property
    def warpgroups(self) -> tuple[int, int]:
        return WARPGROUPS[self.tile_m, self.tile_n]

    @property
    def threads(self) -> int:
        along_m, along_n = self.warpgroups
        return along_m * along_n * 128 + 32

    @property
    def sums(self) -> int:
        """fp32 sums of one thread."""
        return self.tile_m * self.tile_n // (self.threads - 32)

    @property
    def beside_sums(self) -> int:
        """Registers of a thread besides those."""
        return 64

    @property
    def sum_bytes(self) -> int:
        return 4

    @property
    def stage_bytes(self) -> int:
        return (self.tile_m + self.tile_n) * self.tile_k * 2

    @property
    def shared_bytes(self) -> int:
        return self.stages * self.stage_bytes + 1024  # boxes begin at multiples of 1024

    @property
    def static_bytes(self) -> int:
        """Barriers and panels."""
        return 1024


class Conv2dWeightGradSm90(Implementation):
    """An implicit matrix product with split-K: no layout change, no memset, no second launch.

    One warp has the copy engine walk the output pixels (im2col mode for x, so that stride, padding
    and dilation cost nothing), and warpgroups multiply both operands transposed from swizzled
    shared memory. Slices of the pixels are added in fp32 in a fixed order.
    """

    name, backend = "conv2d_weight_grad_sm90", "cuda"
    op = ("conv2d_weight_grad", "conv2d_weight_bias_grad")

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        if device.arch != "sm_90a":
            return f"wgmma is an instruction of sm_90a, and {device.name} is {device.arch}"
        if reason := operand_refusal(w, wide_result=True, adds=True):
            return reason
        if w["groups"] != 1:
            return f"groups={w['groups']}: the kernel multiplies all channels with all features"
        for name in ("x", "grad_output"):
            spec = as_read(w[name])
            if spec.align < 16 or spec.shape[1] % 8:
                return f"{name}={w[name]}: the copy engine needs rows and base aligned to 16 bytes"
        if max(w["stride"]) > 8:
            return f"stride={w['stride']}: the copy engine takes strides up to 8"
        for kernel, dilation, padding in zip(
            w["kernel_size"], w["dilation"], w["padding"], strict=True
        ):
            reach = (kernel - 1) * dilation
            if reach > 255 or padding > 128 or not -128 <= padding - reach <= 127:
                return f"a filter that reaches {reach} pixels with padding {padding} is too wide"
        return None

    def space(self, w: Workload, device: DeviceSpec) -> ConfigSpace[Config]:
        problem = problem_of(w)
        tiles = {problem.tiles(*shape) for shape in WARPGROUPS}
        splits = split_choices(problem, device, tiles, 32)

        return ConfigSpace(Config, {"split_k": splits}, lambda c: _refusal(problem, device, c))

    def heuristic(self, w: Workload, device: DeviceSpec) -> Config:
        return self.promising(w, device, 1)[0]

    def promising(self, w: Workload, device: DeviceSpec, most: int = 32) -> list[Config]:
        problem, space = problem_of(w), self.space(w, device)
        configs = likely(problem, device, _deepest(problem, device), space.values["split_k"])
        found = ranked(problem, device, configs, most)
        others = [replace(c, fetch=fetch) for c in found[:FETCHED] for fetch in FETCHES[1:]]
        others = [c for c in others if most > 1 and _refusal(problem, device, c) is None]
        return [*found[:FETCHED], *others, *found[FETCHED:]]

    def forecast(self, config: Config, w: Workload, device: DeviceSpec) -> dict[str, Any]:
        return forecast(problem_of(w), device, config)

    def compile_key(self, config: Config, w: Workload) -> str:
        """Shape and slice count are arguments: one binary serves every layer."""
        dtypes = (w.main.dtype, *result_defined(w).values())
        return f"{replace(config, split_k=min(config.split_k, 2))} {dtypes}"

    def task(self, config: Config, w: Workload, device: DeviceSpec) -> CompileTask:
        along_m, along_n = config.warpgroups
        dtype, columns = w.main.dtype, config.tile_n // along_n
        defined = {
            "DTYPE": dtype,
            **result_defined(w),
            "TILE_M": config.tile_m,
            "TILE_N": config.tile_n,
            "TILE_K": config.tile_k,
            "STAGES": config.stages,
            "WARPGROUPS_M": along_m,
            "WARPGROUPS_N": along_n,
            "COLUMNS": columns,
            "BLOCKS": config.tile_m // 64 // along_m,
            "STRIDE": 64,
            "WARP_ROW(warp)": "((warp) / 4 % WARPGROUPS_M * BLOCKS * 64 + (warp) % 4 * 16)",
            "WARP_COLUMN(warp)": "((warp) / 4 / WARPGROUPS_M * COLUMNS)",
            "THREADS": config.threads,
            "COMBINE": COMBINES.index(config.combine),
            "CLUSTER": config.cluster,
            "MATRIX": int(config.fetch != "walk"),
            "SHARE": config.share,
            "MIN_BLOCKS": max(1, blocks_per_sm(device, config)),
        }
        text = "".join(f"#define {name} {value}\n" for name, value in defined.items())
        common, own = source("weight_grad.cuh"), source("weight_grad_sm90.cuh")
        flags = (f"--gpu-architecture={device.arch}", "--std=c++17")
        return CompileTask(
            "nvrtc", text + common + wgmma(columns, dtype) + wgmma(8, dtype) + own, flags, ENTRY
        )

    def build(self, config: Config, w: Workload, device: DeviceSpec) -> Executable:
        kernel = HopperKernel(compiled(self.task(config, w, device)), config, w)
        return in_any_layout(kernel, w, device)


class HopperKernel(WeightGradKernel):
    """Tensor maps hold addresses: they are made once for each pair of tensors that comes."""

    overlapping = True

    def __init__(self, built: Compiled, config: Config, w: Workload):
        super().__init__(built, "TT", config, w, problem_of(w))
        self.maps = functools.lru_cache(maxsize=256)(
            functools.partial(encode_maps, w, config.tile_k, config.fetch != "walk")
        )

    def operands(self, x: torch.Tensor, grad_output: torch.Tensor) -> tuple[Any, ...]:
        return self.maps(x.data_ptr(), grad_output.data_ptr())


def encode_maps(
    w: Workload, tile_k: int, matrix: bool, x: int, grad_output: int
) -> tuple[bytes, bytes]:
    """Tensor maps of x, walked as the filter's first tap does or a matrix, and of grad_output."""
    n, c, height, width = w["x"].shape
    _, k, p, q = w["grad_output"].shape
    dtype, itemsize = w.main.dtype, w.main.itemsize
    (r, s), dilation = w["kernel_size"], w["dilation"]
    padding, stride = w["padding"], w["stride"]
    map_grad = tensor_map.tiled(
        dtype, grad_output, (k, n * p * q), (k * itemsize,), (PANEL, tile_k)
    )
    if matrix:
        box = (PANEL, tile_k)
        return tensor_map.tiled(dtype, x, (c, n * p * q), (c * itemsize,), box), map_grad
    row = width * c * itemsize
    map_x = tensor_map.im2col(
        dtype,
        x,
        (c, width, height, n),
        (c * itemsize, row, row * height),
        (-padding[1], -padding[0]),
        (padding[1] - (s - 1) * dilation[1], padding[0] - (r - 1) * dilation[0]),
        PANEL,
        tile_k,
        (stride[1], stride[0]),
    )
    return map_x, map_grad


def wgmma(columns: int, dtype: str) -> str:
    """`multiply(sums, a, b)`: 64 x columns x 16, both operands transposed in shared memory."""
    count = columns // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return (
        f"TW_DEVICE void multiply(float (&d)[{count}], u64 a, u64 b) {{\n"
        '  asm volatile("{\\n.reg .pred p;\\nsetp.ne.b32 p, 1, 0;\\n"\n'
        f'    "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{dtype}.{dtype} '
        f'{{{registers}}}, %{count}, %{count + 1}, p, 1, 1, 1, 1;\\n}}"\n'
        f'    : {outputs} : "l"(a), "l"(b) : "memory");\n}}\n'
    )


def _refusal(problem: Problem, device: DeviceSpec, c: Config) -> str | None:
    if (c.tile_m, c.tile_n) not in WARPGROUPS:
        return f"a tile of {c.tile_m} x {c.tile_n} has no arrangement of warpgroups"
    if c.fetch != "walk" and not problem.pointwise:
        return "x is no matrix under a filter of several taps, or with stride or padding"
    if c.share > 1:
        if c.cluster > 1:
            return "blocks that share boxes of x do not add slices together"
        if c.tile_n // PANEL % c.share or problem.row_tiles(c.tile_m) % c.share:
            return f"{c.share} blocks cannot share tiles of {c.tile_m} x {c.tile_n} evenly"
    return why_not(problem, device, c)


def _deepest(problem: Problem, device: DeviceSpec) -> list[Config]:
    """Each tile, step and cluster with as many stages as fit: how fast an SM is fed depends on the
    bytes under way."""
    found = []
    for tile in WARPGROUPS:
        for tile_k in (64, 128):
            depths = [Config(*tile, tile_k, stages) for stages in STAGES[::-1]]
            fits = [c for c in depths if _refusal(problem, device, c) is None]
            for c in fits[:1]:
                found += [replace(c, cluster=n) for n in CLUSTERS if n <= device.max_cluster]
    return found
