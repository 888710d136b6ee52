"""The convolution weight gradient for Hopper: TMA im2col, wgmma, and a split reduction."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from tilewright.build import CompileTask
from tilewright.compile import nvrtc, tensor_map
from tilewright.compile.cache import Compiled, compiled
from tilewright.device import DeviceSpec
from tilewright.impl import Executable, Implementation
from tilewright.impls.weight_gradient._launch import ENTRY, WeightGradKernel
from tilewright.impls.weight_gradient._layout import in_any_layout
from tilewright.impls.weight_gradient._model import (
    ADD_THREADS,
    MARKED,
    SERIAL,
    WAYS,
    blocks_per_sm,
    challengers,
    cuts_tiles,
    exact,
    forecast,
    in_ranges,
    likely,
    predicted_us,
    ranked,
    split_choices,
    why_not,
)
from tilewright.impls.weight_gradient._problem import (
    PANEL,
    Problem,
    copy_engine_refusal,
    operand_refusal,
    problem_of,
    result_defined,
    source,
)
from tilewright.impls.weight_gradient._stream import halo_of, stream_of
from tilewright.op import Workload
from tilewright.space import ConfigSpace, param
from tilewright.tensor_spec import TensorSpec

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
EXCHANGES = ("read", "sent")
"""Blocks of a cluster meet and read their segments of each other's sums; or each sends its
neighbours their segments, to shared memory that is kept free for them."""
PROMISING, FETCHED, STREAMED, MARKING, RANGES = 32, 4, 6, 3, 4
"""So many promising configs by the model alone; so many of them with other ways to copy x, whose
speed no model tells yet; so many whose taps share a copy, that mark places of sums, and that walk
ranges of steps. Sums that are sent, pixels asked for ahead, and stages freed early are not among
them: over eight layers the best of each took 1.00 to 1.4 times the best of the others (H200, fp16,
2026-11-21)."""
MOST_STREAM_WASTE = 1.1
"""Of the stream's pixels to the output's, where that is tried: its zeros are multiplied, too."""
GAIN_OF_RANGES = 0.9
"""Of the other configs' time that one of stream-K must promise before it is chosen without
measuring: where it did, it took 0.87 and 0.89 of theirs (the timings of SCATTERED)."""
GROUPS = (8, 16, 32, 64)
"""Channels of a group: a tile of 64 features meets the 64 channels of theirs, and of smaller ones
more than seven eighths of its products would be dropped."""
CLUSTERS, STAGES = (1, 2, 3, 4, 6, 8), (2, 3, 4, 5, 6, 7, 8, 9, 11, 14)
MOST_TOGETHER, MOST_THREADS_IN_RANGES = 4, 288
"""Of stream-K: blocks that share an SM, and their threads."""
MOST_SUMS = 128
"""Of a thread."""
MOST_SUMS_BESIDE_BIAS = 64
"""Of a thread, where fp32 sums of the bias lie beside segments of tiles."""


@dataclass(frozen=True)
class Config:
    """
    Attributes:
        tile_m, tile_n: output channels, and taps times input channels, of one block.
        tile_k: output pixels of one step.
        stages: steps in shared memory.
        split_k: slices of the pixels, each summed by blocks of its own.
        cluster: so many consecutive slices are added through the shared memory of their blocks.
        combine: who adds what is left, one sum for each cluster; see COMBINES, MARKED, SERIAL.
        add_threads: of a block of the second kernel, where that adds.
        fetch: how x is copied; see FETCHES.
        halo: 0, or taps share one copy of x, of which so many chunks of tile_k pixels are kept
            beside those of the steps under way.
        exchange: blocks of a cluster read each other's sums, or are sent them; see EXCHANGES.
        warm: threads ask the L2 cache for the first stages' pixels, before the copy engine does.
        pending: steps whose products a warpgroup leaves under way while it waits for the next one;
            with 0, a stage is free as soon as it can be, and other warpgroups fill the gap.
        blocks: 0, or stream-K: so many blocks have an equal number of steps each, of one tile
            after the other, and a tile is added by the block that has its first step.
        whole: those blocks have whole tiles each, and nothing is left to add: persistent blocks.
    """

    tile_m: int = param(64, 128, 256)
    tile_n: int = param(64, 128, 192, 256, 384, 576)
    tile_k: int = param(64, 32, 128)
    stages: int = param(4, 2, 3, 5, 6, 7, 8, 9, 11, 14)
    split_k: int = param(1, counts=True)
    cluster: int = param(*CLUSTERS)
    combine: str = param(*WAYS)
    add_threads: int = param(*ADD_THREADS)
    fetch: str = param(*FETCHES)
    halo: int = param(0)
    exchange: str = param(*EXCHANGES)
    warm: bool = param(False, True)
    pending: int = param(1, 0)
    blocks: int = param(0)
    whole: bool = param(False, True)

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
    def alone_with_bias(self) -> bool:
        return False

    @property
    def sum_bytes(self) -> int:
        return 4

    @property
    def operand_bytes(self) -> int:
        if self.halo:  # one more chunk of x than there are: the first lies behind the last, too
            chunks = self.stages + self.halo + 1
            return (self.stages * self.tile_m + chunks * PANEL) * self.tile_k * 2
        return self.stages * (self.tile_m + self.tile_n) * self.tile_k * 2

    @property
    def shared_bytes(self) -> int:
        return self.operand_bytes + self.inbox_bytes + 1024  # boxes begin at multiples of 1024

    @property
    def inbox_bytes(self) -> int:
        """Where neighbours send sums, and a barrier."""
        if self.exchange != "sent":
            return 0
        return self.cluster * math.ceil(self.tile_m * self.tile_n // 4 / self.cluster) * 16 + 16

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
        channels, features = (w[name].shape[1] for name in ("x", "grad_output"))
        group = channels // w["groups"]
        if w["groups"] != 1 and (channels != features or group not in GROUPS):
            return (
                f"groups={w['groups']} of {group} channels and {features // w['groups']} features: "
                f"the kernel takes as many of both, {', '.join(map(str, GROUPS))}"
            )
        return copy_engine_refusal(w)

    def space(self, w: Workload, device: DeviceSpec) -> ConfigSpace[Config]:
        problem = problem_of(w)
        halos = {halo_of(problem, n, k) for _, n in WARPGROUPS for k in (32, 64, 128)}
        exchanges = EXCHANGES[: 1 if result_defined(w)["BIAS"] else None]
        values = {
            "split_k": _splits(problem, device),
            "halo": sorted({0, *halos}),
            "exchange": exchanges,
            "blocks": [device.sms * n for n in range(MOST_TOGETHER + 1)],
        }

        return ConfigSpace(Config, values, lambda c: _refusal(problem, device, c))

    def heuristic(self, w: Workload, device: DeviceSpec) -> Config:
        return _ranking(w, problem_of(w), device)[0]

    def promising(self, w: Workload, device: DeviceSpec) -> list[Config]:
        return list(_ranking(w, problem_of(w), device))

    def forecast(self, config: Config, w: Workload, device: DeviceSpec) -> dict[str, Any]:
        return forecast(_walked(w, config), device, config)

    def compile_key(self, config: Config, w: Workload) -> str:
        """Shape and slice count are arguments: one binary serves every layer."""
        dtypes = (w.main.dtype, *result_defined(w).values())
        baked = replace(config, split_k=min(config.split_k, 2), blocks=min(config.blocks, 1))
        return f"{baked} {dtypes} {problem_of(w).group}"

    def task(self, config: Config, w: Workload, device: DeviceSpec) -> CompileTask:
        along_m, along_n = config.warpgroups
        problem, dtype, columns = problem_of(w), w.main.dtype, config.tile_n // along_n
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
            "COMBINE": WAYS.index(config.combine),
            "ADD_THREADS": config.add_threads,
            "CLUSTER": config.cluster,
            "MATRIX": int(config.fetch != "walk"),
            "SHARE": config.share,
            "HALO": config.halo,
            "TAPS_INSIDE": int(config.halo > 0),
            "GROUP": problem.group,
            "SENT": int(config.exchange == "sent"),
            "WARM": int(config.warm),
            "PENDING": config.pending,
            "STREAM_K": int(config.blocks > 0),
            "WHOLE": int(config.whole),
            "MIN_BLOCKS": max(1, blocks_per_sm(problem, device, config)),
        }
        text = "".join(f"#define {name} {value}\n" for name, value in defined.items())
        files = ["hopper", "long_sum", "common", "combine", "padding"]
        files += ["stream_k"] if config.blocks else []
        text += "".join(source(f"{name}.cuh") for name in files)
        text += wgmma(columns, dtype) + wgmma(8, dtype) + wgmma(8, dtype, begins=True)
        text += source("sm90.cuh")
        flags = nvrtc.flags_for(device.arch)
        return CompileTask("nvrtc", text, flags, ENTRY)

    def build(self, config: Config, w: Workload, device: DeviceSpec) -> Executable:
        kernel = HopperKernel(compiled(self.task(config, w, device)), config, w)
        return in_any_layout(kernel, w, device)


class HopperKernel(WeightGradKernel):
    """Tensor maps hold addresses: they are made once for each pair of tensors that comes."""

    overlapping = True

    def __init__(self, built: Compiled, config: Config, w: Workload):
        super().__init__(built, "TTPP", config, w, _walked(w, config))
        self.maps = functools.lru_cache(maxsize=256)(functools.partial(encode_maps, w, config))

    def operands(self, x: torch.Tensor, grad_output: torch.Tensor) -> tuple[Any, ...]:
        addresses = x.data_ptr(), grad_output.data_ptr()
        return (*self.maps(*addresses), *addresses)


def encode_maps(w: Workload, config: Config, x: int, grad_output: int) -> tuple[bytes, bytes]:
    """Tensor maps of x, walked as the filter's first tap does or a matrix, and of grad_output."""
    n, k, p, q = w["grad_output"].shape
    _, c, height, width = w["x"].shape
    dtype, itemsize = w.main.dtype, w.main.itemsize
    (r, s), (dilation_h, dilation_w) = w["kernel_size"], w["dilation"]
    (pad_h, pad_w), (stride_h, stride_w) = w["padding"], w["stride"]
    box = (PANEL, config.tile_k)
    if config.halo:
        rows, pitch = stream_of(problem_of(w)).geometry[:2]
        first, last = (-pad_w, -pad_h), (pitch - width - pad_w, rows - height - pad_h)
        map_x = _walk(w["x"], x, first, last, box)
        return map_x, _walk(w["grad_output"], grad_output, (0, 0), (pitch - q, rows - p), box)
    map_grad = tensor_map.tiled(dtype, grad_output, (k, n * p * q), (k * itemsize,), box)
    if config.fetch != "walk":
        return tensor_map.tiled(dtype, x, (c, n * p * q), (c * itemsize,), box), map_grad
    last = pad_w - (s - 1) * dilation_w, pad_h - (r - 1) * dilation_h
    return _walk(w["x"], x, (-pad_w, -pad_h), last, box, (stride_w, stride_h)), map_grad


def _walk(
    spec: TensorSpec,
    address: int,
    first: tuple[int, int],
    last: tuple[int, int],
    box: tuple[int, int],
    stride: tuple[int, int] = (1, 1),
) -> bytes:
    """The map of a channels_last tensor whose pixels are walked from `first`, (W, H), to `last`,
    which is relative to the image's last one."""
    n, c, height, width = spec.shape
    row = width * c * spec.itemsize
    sizes, strides = (c, width, height, n), (c * spec.itemsize, row, row * height)
    return tensor_map.im2col(spec.dtype, address, sizes, strides, first, last, *box, stride)


def wgmma(columns: int, dtype: str, begins: bool = False) -> str:
    """`multiply(sums, a, b)`: 64 x columns x 16, both operands transposed in shared memory; or
    `begin`, whose products are the sums."""
    name, adds, constraint = ("begin", 0, "=f") if begins else ("multiply", 1, "+f")
    count = columns // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"{constraint}"(d[{i}])' for i in range(count))
    return (
        f"TW_DEVICE void {name}(float (&d)[{count}], u64 a, u64 b) {{\n"
        f'  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, {adds}, 0;\\n"\n'
        f'    "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{dtype}.{dtype} '
        f'{{{registers}}}, %{count}, %{count + 1}, p, 1, 1, 1, 1;\\n}}"\n'
        f'    : {outputs} : "l"(a), "l"(b) : "memory");\n}}\n'
    )


@functools.lru_cache(maxsize=64)
def _ranking(w: Workload, problem: Problem, device: DeviceSpec) -> tuple[Config, ...]:
    """Configs by the model, the one to take untuned first. It weighs some thousand configs, in a
    tenth of a second, and a tuner asks for it half a dozen times for each workload."""
    deepest, splits = _deepest(problem, device), _splits(problem, device)

    def us(config: Config) -> float:
        return predicted_us(_walked(w, config), device, config)

    configs = likely(problem, device, deepest, splits)
    found = ranked(configs, us, PROMISING)
    stream, streamed = stream_of(problem), []
    if stream.pixels < MOST_STREAM_WASTE * problem.pixels:
        deep = likely(stream, device, _deepest(problem, device, streams=True), splits)
        streamed = ranked(deep, us, STREAMED)
    walks = (c for c in in_ranges(problem, device, deepest) if _fits(problem, device, c))
    ranges = ranked(walks, us, RANGES)
    if problem.keeps_sums:
        first = min(exact(problem, device, (*configs, *streamed)), key=us)
    else:
        gains = [c for c in ranges[:1] if us(c) < GAIN_OF_RANGES * us(found[0])]
        first = min((*found[:1], *streamed[:1], *gains), key=us)
    others = list(streamed)
    for way, usual in ((MARKED, "grid"), (SERIAL, "kernel")):
        alike = (replace(c, combine=way) for c in configs if c.combine == usual)
        fits = (c for c in alike if _fits(problem, device, c))
        ranges += ranked(fits, us, MARKING)
    others += [c for c in ranges if us(c) < 1.1 * us(found[0])]
    fetched = [replace(c, fetch=fetch) for c in found[:FETCHED] for fetch in FETCHES[1:]]
    others += [c for c in fetched if _fits(problem, device, c)]
    against = challengers(problem, device, first, configs, us)
    return tuple(dict.fromkeys([first, *against, *found[:FETCHED], *others, *found[FETCHED:]]))


def _splits(problem: Problem, device: DeviceSpec) -> list[int]:
    return split_choices(problem, device, {problem.tiles(*shape) for shape in WARPGROUPS}, 32)


def _refusal(problem: Problem, device: DeviceSpec, c: Config) -> str | None:
    if (c.tile_m, c.tile_n) not in WARPGROUPS:
        return f"a tile of {c.tile_m} x {c.tile_n} has no arrangement of warpgroups"
    if problem.group and (c.tile_m > PANEL or c.share > 1 or c.blocks or c.warm):
        return "with groups a tile has 64 features, whole slices, and channels of its own"
    if c.exchange == "sent" and c.cluster == 1:
        return "a block without neighbours sends nothing"
    if c.blocks and (c.warm or c.split_k > 1 or c.blocks_together > 1):
        return "blocks that take segments of several tiles cut no slices, and stand alone, unwarmed"
    if cuts_tiles(c) and c.threads > MOST_THREADS_IN_RANGES:
        return (
            f"{c.threads} threads have too few registers to add segments of tiles beside their sums"
        )
    if cuts_tiles(c) and problem.bias > 1 and c.sums > MOST_SUMS_BESIDE_BIAS:
        return "a thread has too few registers for fp32 sums of the bias beside segments of tiles"
    if c.whole and problem.bias and c.sums == MOST_SUMS:
        return "a thread has too few registers for tile after tile beside sums of the bias"
    full = c.threads > MOST_THREADS_IN_RANGES or (problem.bias and c.sums == MOST_SUMS)
    if c.combine == SERIAL and full:
        return "a thread has too few registers to add to its sums what other blocks left"
    if c.halo:
        if c.warm:
            return "a stream of padded pixels is not asked for ahead"
        if c.halo != halo_of(problem, c.tile_n, c.tile_k) or c.fetch != "walk":
            return f"taps of tiles of {c.tile_n} share no copy of x {c.halo} chunks longer"
    if c.tile_m * (2 * c.tile_n + 16) > c.operand_bytes:
        return f"{c.stages} stages are smaller than a tile's results, which are gathered there"
    if c.halo:
        return why_not(stream_of(problem), device, c)
    if c.fetch != "walk" and not problem.pointwise:
        return "x is no matrix under a filter of several taps, or with stride or padding"
    if c.share > 1:
        if c.cluster > 1:
            return "blocks that share boxes of x do not add slices together"
        if c.tile_n // PANEL % c.share or problem.row_tiles(c.tile_m) % c.share:
            return f"{c.share} blocks cannot share tiles of {c.tile_m} x {c.tile_n} evenly"
    return why_not(problem, device, c)


def _fits(problem: Problem, device: DeviceSpec, c: Config) -> bool:
    return _refusal(problem, device, c) is None


def _walked(w: Workload, config: Config) -> Problem:
    return stream_of(problem_of(w)) if config.halo else problem_of(w)


def _deepest(problem: Problem, device: DeviceSpec, streams: bool = False) -> list[Config]:
    """Each tile, step and cluster with as many stages as fit: how fast an SM is fed depends on the
    bytes under way. With `streams`, those whose taps share a copy of x."""
    found = []
    for tile in WARPGROUPS:
        for tile_k in (64, 128):
            halo = halo_of(problem, tile[1], tile_k) if streams else 0
            if streams and not halo:
                continue
            depths = [Config(*tile, tile_k, stages, halo=halo) for stages in STAGES[::-1]]
            fits = [c for c in depths if _refusal(problem, device, c) is None]
            for c in fits[:1]:
                found += [replace(c, cluster=n) for n in CLUSTERS if n <= device.max_cluster]
    return found
