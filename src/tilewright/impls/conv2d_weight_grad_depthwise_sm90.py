"""The weight gradient of a depthwise convolution on Hopper: tensor cores sum over images."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.build import CompileTask
from tilewright.compile import tensor_map
from tilewright.compile.cache import Compiled, compiled
from tilewright.device import DeviceSpec
from tilewright.impl import Executable, Implementation
from tilewright.impls import _weight_grad_rows as rows
from tilewright.impls._weight_grad import as_read
from tilewright.impls._weight_grad_layout import in_any_layout
from tilewright.impls._weight_grad_rows import Layout, RowsKernel, rows_task
from tilewright.op import Workload
from tilewright.space import ConfigSpace, param
from tilewright.tensor_spec import TensorSpec

IMAGES = 16
"""That a product sums over."""
MOST_LAGS = 9
"""Diagonals of eight sums among 16 x 8."""
MOST_STRIDE = 4
MOST_PIXELS = 256
"""Of a box of the copy engine, those that a stride leaves out among them."""
FEW_WARPS = 12
"""On an SM, beyond which its shared memory is read as fast as it can be."""
FEED_BYTES = 40
"""That an SM is fed in a clock cycle."""
FEED_STATE = 128
"""Bytes of shared memory in which a lane keeps what it has asked for."""


@dataclass(frozen=True)
class Config(rows.Config):
    """
    Attributes:
        features: channels of a block.
        own: units of a warp: rows of the filter, or their every stride-th tap.
        blocks: of eight pixels of a line, that a warp takes.
        along: warps that share a line's pixels.
        together: blocks that share an SM; rows of x fill their shared memory.
    """

    stages: int = param(3, 2, 4)
    shares: int = param(1)
    waves: float = param(1.0, 0.5)
    features: int = param(16, 32)
    own: int = param(3, 2, 1)
    blocks: int = param(2, 1)
    along: int = param(1, 2, 4)
    together: int = param(2, 1, 3, 4)


SMALLEST = Config(stages=2, blocks=1, together=1)
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


class Conv2dWeightGradDepthwiseSm90(Implementation):
    """Of one channel, pixels of x and of grad_output are the rows and columns of a product that
    sums over images, so that each of its diagonals is a tap: nothing is shifted or transposed."""

    name, backend = "conv2d_weight_grad_depthwise_sm90", "cuda"
    op = ("conv2d_weight_grad", "conv2d_weight_bias_grad")

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        if device.arch != "sm_90a":
            return (
                f"its copies need the copy engine, and its sums the registers that compilers leave "
                f"them for sm_90a; {device.name} is {device.arch}"
            )
        if reason := rows.rows_refusal(w, device):
            return reason
        channels, features = w["x"].shape[1], w["grad_output"].shape[1]
        if not channels == features == w["groups"]:
            return (
                f"groups={w['groups']} of {channels} to {features} channels: not one filter for "
                "each channel"
            )
        filter_width, stride = w["kernel_size"][1], w["stride"][1]
        if stride > min(MOST_STRIDE, filter_width):
            return f"stride={list(w['stride'])}: beyond {MOST_STRIDE}, or the filter's width"
        if (lags := math.ceil(filter_width / stride)) > MOST_LAGS:
            return f"{lags} taps of a row, one stride apart, exceed {MOST_LAGS}"
        if as_read(w["x"]).align < 16:
            return f"x={w['x']}: channels are copied in eights, aligned to 16 bytes"
        return _room_refusal(w, SMALLEST, device)

    def space(self, w: Workload, device: DeviceSpec) -> ConfigSpace[Config]:
        width = w["grad_output"].shape[3]

        def refusal(c: Config) -> str | None:
            if c.own > 1 and _teams(w, c.own) == _teams(w, c.own - 1):
                return f"warps with {c.own} units are as many as with {c.own - 1}"
            if c.along > 1 and _chunk(c) - 8 * c.blocks >= width:
                return f"{c.along} warps have {_chunk(c)} pixels, a line {width}"
            return _room_refusal(w, c, device)

        return ConfigSpace(Config, None, refusal)

    def heuristic(self, w: Workload, device: DeviceSpec) -> Config:
        """The least time by bytes that reach an SM and bytes that its warps read there."""
        return min(self.space(w, device), key=lambda c: _cycles(w, c, device))

    def compile_key(self, config: Config, w: Workload) -> str:
        """Sizes of images are arguments; the filter and what a block has are baked in."""
        baked = (w["x"].dtype, w.outputs[0].dtype, w["kernel_size"], w["stride"], len(w.outputs))
        knobs = (config.stages, config.features, config.own, config.blocks, config.along)
        return f"{knobs} {config.together} {baked}"

    def task(self, config: Config, w: Workload, device: DeviceSpec) -> CompileTask:
        layout = _layout(w, config, device)
        more = {"WITH_BIAS": len(w.outputs) - 1, "OWN": config.own, "ALONG": config.along}
        more |= {"ROWS": layout.ring}
        return rows_task(("depthwise_sm90",), w, device, layout, config, more)

    def build(self, config: Config, w: Workload, device: DeviceSpec) -> Executable:
        built = compiled(self.task(config, w, device))
        kernel = ImagesKernel(built, w, device, _layout(w, config, device), config)
        return in_any_layout(kernel, w, device)


class ImagesKernel(RowsKernel):
    """Tensor maps hold addresses: they are made once for each pair of tensors that comes."""

    signature = "TTPP"

    def __init__(
        self, built: Compiled, w: Workload, device: DeviceSpec, layout: Layout, config: Config
    ):
        super().__init__(built, w, device, layout, config)
        self.maps = functools.lru_cache(maxsize=256)(functools.partial(_maps, w, layout))

    def operands(self, x: torch.Tensor, grad_output: torch.Tensor) -> tuple[Any, ...]:
        addresses = x.data_ptr(), grad_output.data_ptr()
        return (*self.maps(*addresses), *addresses)


def _maps(w: Workload, layout: Layout, x: int, grad_output: int) -> tuple[bytes, bytes]:
    """Tensor maps of both: channels, images and pixels of a row; of x, of every stride-th pixel."""
    stride = w["stride"][1]
    pixels = (layout.chunk + 8) * stride
    return (
        _rows_of(w["x"], x, (layout.features, IMAGES, pixels, 1), stride),
        _rows_of(w["grad_output"], grad_output, (layout.features, IMAGES, layout.chunk, 1)),
    )


def _rows_of(spec: TensorSpec, address: int, box: Iterable[int], stride: int = 1) -> bytes:
    n, channels, height, width = spec.shape
    pixel = channels * spec.itemsize
    strides = height * width * pixel, pixel, width * pixel
    sizes = channels, n, width, height
    return tensor_map.tiled(spec.dtype, address, sizes, strides, tuple(box), (1, 1, stride, 1))


def _room_refusal(w: Workload, config: Config, device: DeviceSpec) -> str | None:
    """Why memory, registers or a box of the copy engine do not hold what a block has, or None."""
    layout, least = _layout(w, config, device), w["kernel_size"][0] + w["stride"][0]
    if layout.ring < least:
        return f"{config.together} blocks on an SM have no room for {least} rows of x each"
    if (pixels := (layout.chunk + 8) * w["stride"][1]) > MOST_PIXELS:
        return f"a part of {pixels} pixels of a row is wider than {MOST_PIXELS}"
    warps = math.ceil(layout.warps * config.together / device.schedulers_per_sm)
    registers = device.registers_per_sm // device.schedulers_per_sm // device.warp // warps
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
    """Of a thread: sums of eight channels, operands, and what is beside them."""
    return 32 * config.own + 56 * config.blocks + 16


def _layout(w: Workload, config: Config, device: DeviceSpec) -> ImagesLayout:
    """As kernels/weight_grad_depthwise_sm90.cuh computes it."""
    filter_height, (stride_h, stride_w) = w["kernel_size"][0], w["stride"]
    chunk = _chunk(config)
    warps = config.features // 8 * config.along * _teams(w, config.own)
    sums = config.features * (math.prod(w["kernel_size"]) + len(w.outputs) - 1)
    pixel_bytes = IMAGES * config.features * 2
    line_bytes, row_bytes = chunk * pixel_bytes, stride_w * (chunk + 8) * pixel_bytes
    block_bytes = min(device.shared_bytes_per_sm // config.together, device.shared_bytes_per_block)
    beside = config.stages * (line_bytes + 16) + FEED_STATE
    most = (
        2 * filter_height + stride_h * config.stages
    )  # a column's last rows, and the next one's first
    held = min(most, (block_bytes - 1024 - beside) // row_bytes)
    loop_bytes = beside + held * row_bytes
    fragments = math.ceil(sums / (128 * warps))
    return ImagesLayout(
        config.features, chunk, warps, fragments, loop_bytes, 0, IMAGES, held, config.together
    )


def _cycles(w: Workload, config: Config, device: DeviceSpec) -> float:
    """Of an SM, for a line of one channel."""
    stride_h, stride_w = w["stride"]
    layout = _layout(w, config, device)
    chunks = math.ceil(w["grad_output"].shape[3] / layout.chunk)
    pixels = layout.chunk + stride_h * stride_w * (layout.chunk + 8)
    fed = chunks * pixels * IMAGES * 2 / FEED_BYTES
    operands = _teams(w, config.own) * config.blocks + _units(w) * (config.blocks + 1)
    read = chunks * config.along * operands * 16 / 8  # 16 cycles an operand of eight channels
    warps = layout.warps * config.together
    return max(fed, read * max(1.0, FEW_WARPS / warps)) + 0.1 * (fed + read)
