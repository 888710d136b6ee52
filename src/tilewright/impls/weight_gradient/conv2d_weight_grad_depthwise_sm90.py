"""The weight gradient of a depthwise convolution on Hopper: tensor cores sum over images."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from tilewright.build import CompileTask
from tilewright.compile import tensor_map
from tilewright.compile.cache import Compiled
from tilewright.device import DeviceSpec
from tilewright.impls.weight_gradient import _rows as rows
from tilewright.impls.weight_gradient._problem import depthwise_refusal
from tilewright.impls.weight_gradient._rows import (
    Layout,
    MappedKernel,
    RowsKernel,
    WeightGradByRows,
    rows_task,
)
from tilewright.op import Workload
from tilewright.space import ConfigSpace, param
from tilewright.tensor_spec import TensorSpec

IMAGES, LINES = 8, 2
"""That a product sums over."""
MOST_LAGS = 9
"""Diagonals of eight sums among 16 x 8."""
MOST_STRIDE = 4
MOST_PIXELS = 256
"""Of a box of the copy engine, those that a stride leaves out among them."""
FEW_WARPS = 12
"""On an SM, beyond which its shared memory is read as fast as it can be: a guess."""
FEED_BYTES = 40
"""That an SM is fed in a clock cycle: a guess. Boxes of 64 bytes later gave 16.6
(docs/measured_facts.md)."""
LATENCY = 2100
"""Clock cycles from asking for a step's pixels until they are there: see
docs/weight_gradient_kernels.md."""


@dataclass(frozen=True)
class Config(rows.Config):
    """
    Attributes:
        features: channels of a block.
        own: units of a warp: rows of the filter, or their every stride-th tap.
        keeps: a row of x stays in registers for the next filter row, which needs it, too.
        blocks: of eight pixels of a line, that a warp takes.
        along: warps that share a line's pixels.
        together: blocks that share an SM.
    """

    stages: int = param(4, 3, 5, 6, 8)
    shares: int = param(1)
    waves: float = param(1.0, 0.5)
    features: int = param(16, 32, 64)
    own: int = param(3, 4, 2, 1)
    keeps: bool = param(False, True)
    blocks: int = param(2, 1)
    along: int = param(1, 2, 4)
    together: int = param(2, 1, 3, 4)


SMALLEST = Config(stages=3, blocks=1, together=1)
"""What fits if any config does."""


@dataclass(frozen=True)
class ImagesLayout(Layout):
    """
    Attributes:
        ring: rows of x in shared memory.
        together: blocks that share an SM.
    """

    ring: int = 0
    together: int = 1

    def blocks_per_sm(self, config: rows.Config, device: DeviceSpec) -> int:
        return self.together


class Conv2dWeightGradDepthwiseSm90(WeightGradByRows):
    """Of one channel, pixels of x and of grad_output are the rows and columns of a product that
    sums over images, so that each of its diagonals is a tap: nothing is shifted or transposed."""

    name = "conv2d_weight_grad_depthwise_sm90"

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        if device.arch != "sm_90a":
            return (
                f"its copies need the copy engine, and its sums the registers that compilers leave "
                f"them for sm_90a; {device.name} is {device.arch}"
            )
        if reason := rows.rows_refusal(w, device) or depthwise_refusal(w):
            return reason
        filter_width, stride = w["kernel_size"][1], w["stride"][1]
        if stride > min(MOST_STRIDE, filter_width):
            return f"stride={list(w['stride'])}: beyond {MOST_STRIDE}, or the filter's width"
        if (lags := math.ceil(filter_width / stride)) > MOST_LAGS:
            return f"{lags} taps of a row, one stride apart, exceed {MOST_LAGS}"
        return (
            rows.channels_refusal(w)
            or _room_refusal(w, SMALLEST, device)
            or rows.sums_refusal(self, w, device)
        )

    def space(self, w: Workload, device: DeviceSpec) -> ConfigSpace[Config]:
        width = w["grad_output"].shape[3]

        def refusal(c: Config) -> str | None:
            if c.keeps and (w["stride"] != (1, 1) or c.own == 1):
                return "the next unit of a warp needs other rows"
            if c.own > 1 and _teams(w, c.own) == _teams(w, c.own - 1):
                return f"warps with {c.own} units are as many as with {c.own - 1}"
            if c.along > 1 and _chunk(c) - 8 * c.blocks >= width:
                return f"{c.along} warps have {_chunk(c)} pixels, a line {width}"
            return _room_refusal(w, c, device)

        return ConfigSpace(Config, None, refusal)

    def heuristic(self, w: Workload, device: DeviceSpec) -> Config:
        """The least time by bytes that reach an SM and bytes that its warps read there."""
        return min(self.space(w, device), key=lambda c: _cycles(w, c))

    def promising(self, w: Workload, device: DeviceSpec) -> list[Config]:
        """By the same measure, the best of each way to share the work among warps."""
        found: dict[tuple[int, int, bool, int], Config] = {}
        for c in sorted(self.space(w, device), key=lambda c: _cycles(w, c)):
            found.setdefault((c.own, c.blocks, c.keeps, c.features), c)
        return list(found.values())

    def layout(self, w: Workload, config: Config) -> ImagesLayout:
        return _layout(w, config)

    def compile_key(self, config: Config, w: Workload) -> str:
        """Sizes of images are arguments; the filter and what a block has are baked in."""
        baked = (w["x"].dtype, w.outputs[0].dtype, w["kernel_size"], w["stride"], len(w.outputs))
        ring = _layout(w, config).ring
        return f"{replace(config, waves=1.0)} {ring} {baked}"

    def task(self, config: Config, w: Workload, device: DeviceSpec) -> CompileTask:
        layout = _layout(w, config)
        more = {"OWN": config.own, "ALONG": config.along}
        more |= {"ROWS": layout.ring, "KEEPS": int(config.keeps)}
        return rows_task(("depthwise_sm90", "depthwise_sums"), w, device, layout, config, more)

    def kernel(
        self, built: Compiled, w: Workload, device: DeviceSpec, layout: Layout, config: Any
    ) -> RowsKernel:
        maps = functools.partial(_maps, w, layout)
        return MappedKernel(built, w, device, layout, config, maps)


def _maps(w: Workload, layout: Layout, x: int, grad_output: int) -> tuple[bytes, bytes]:
    """Tensor maps: channels, images and pixels of a row of x, or of the other's two lines."""
    stride = w["stride"][1]
    pixels = (layout.chunk + 8) * stride
    return (
        _rows_of(w["x"], x, (layout.features, IMAGES, pixels, 1), stride),
        _rows_of(w["grad_output"], grad_output, (layout.features, IMAGES, layout.chunk, LINES)),
    )


def _rows_of(spec: TensorSpec, address: int, box: Iterable[int], stride: int = 1) -> bytes:
    n, channels, height, width = spec.shape
    pixel = channels * spec.itemsize
    strides = height * width * pixel, pixel, width * pixel
    sizes = channels, n, width, height
    return tensor_map.tiled(spec.dtype, address, sizes, strides, tuple(box), (1, 1, stride, 1))


def _room_refusal(w: Workload, config: Config, device: DeviceSpec) -> str | None:
    """Why memory, registers or a box of the copy engine do not hold what a block has, or None."""
    layout = _layout(w, config)
    block_bytes = min(device.shared_bytes_per_sm // config.together, device.shared_bytes_per_block)
    if layout.loop_bytes + 1024 > block_bytes:
        return f"{config.together} blocks on an SM have no room for {layout.ring} rows of x each"
    if (pixels := (layout.chunk + 8) * w["stride"][1]) > MOST_PIXELS:
        return f"a chunk of {pixels} pixels of a row is wider than {MOST_PIXELS}"
    warps = math.ceil(layout.warps * config.together / device.schedulers_per_sm)
    registers = device.registers_per_sm // device.schedulers_per_sm // device.warp // warps
    registers = min(registers, device.registers_per_thread)
    if registers < _registers(config):
        return f"{config.together} blocks of {layout.warps} warps leave {registers} registers"
    return None


def _units(w: Workload) -> int:
    return w["kernel_size"][0] * w["stride"][1] + len(w.outputs) - 1


def _teams(w: Workload, own: int) -> int:
    """Of warps that share the units."""
    return math.ceil(_units(w) / own)


def _chunk(config: Config) -> int:
    return 8 * config.blocks * config.along


def _registers(config: Config) -> int:
    """Of a thread: fitted to what NVRTC 13.0 takes where it may take any number."""
    if config.keeps:
        return 45 * config.own + 84 * config.blocks - 6
    return 35 * config.own + 45 * config.blocks + 37


def _layout(w: Workload, config: Config) -> ImagesLayout:
    """As kernels/weight_gradient/depthwise_sm90.cuh computes it."""
    filter_height, (stride_h, stride_w) = w["kernel_size"][0], w["stride"]
    chunk = _chunk(config)
    warps = config.features // 8 * config.along * _teams(w, config.own)
    sums = config.features * (math.prod(w["kernel_size"]) + len(w.outputs) - 1)
    pixel_bytes = IMAGES * config.features * 2
    stage_bytes, row_bytes = LINES * chunk * pixel_bytes + 16, stride_w * (chunk + 8) * pixel_bytes
    heights = w["x"].shape[2], w["grad_output"].shape[2]
    ring = _ring(*heights, filter_height, stride_h, w["padding"][0], config.stages)
    loop_bytes = config.stages * stage_bytes + ring * row_bytes + pixel_bytes
    fragments = math.ceil(sums / (128 * warps))
    return ImagesLayout(
        config.features, chunk, warps, fragments, loop_bytes,
        images=IMAGES, lines=LINES, ring=ring, together=config.together,
    )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _ring(
    height: int, out_height: int, filter_height: int, stride: int, padding: int, stages: int
) -> int:
    """Rows of x that so many steps in a row need, wherever in a column the first one is."""

    def inside(h: int) -> int:
        return min(max(h, 0), height)

    tops = [p * stride - padding for p in range(0, out_height, LINES)]
    reach, first = (LINES - 1) * stride + filter_height, inside(tops[0])
    # Of each step of a column its first row, and the one behind its last; then columns in a row.
    column = [(inside(top) - first, inside(top + reach) - first) for top in tops]
    rows_of_column = column[-1][1]
    spans = [
        (begin + i * rows_of_column, end + i * rows_of_column)
        for i in range(2 + stages // len(tops))
        for begin, end in column
    ]
    needed = (spans[i + stages - 1][1] - spans[i][0] for i in range(len(spans) - stages + 1))
    return max(*needed, filter_height + stride)


def _cycles(w: Workload, config: Config) -> float:
    """Of an SM, for two lines of one channel; what it is fed, reads, and waits for."""
    stride_h, stride_w = w["stride"]
    layout = _layout(w, config)
    chunks = math.ceil(w["grad_output"].shape[3] / layout.chunk)
    pixels = layout.chunk + stride_h * stride_w * (layout.chunk + 8)
    fed = LINES * pixels * IMAGES * config.features * 2 / FEED_BYTES
    rows_read = config.own + 1 if config.keeps else 2 * config.own
    halves = LINES * config.blocks + rows_read * (config.blocks + 1)
    read = layout.warps * halves * 8  # cycles, for a half of an operand
    waited = LATENCY / (config.stages - 2) / config.together
    warps = layout.warps * config.together
    step = max(fed, read * max(1.0, FEW_WARPS / warps), waited) + 0.1 * (fed + read)
    return chunks * step / config.features
