"""The weight gradient of a depthwise convolution on Hopper: plain multiply-adds."""

from __future__ import annotations

import functools
import math
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
from tilewright.settings import workspace_limit_bytes
from tilewright.space import ConfigSpace, param
from tilewright.tensor_spec import TensorSpec

MOST_STRIDE = 4
MOST_OF_BOX = 256
"""Elements of a box of the copy engine in each dim."""
PLACE = 128
"""Bytes; boxes begin at multiples of it in shared memory."""
STAGES = (2, 3, 4, 6)
FEATURES = (16, 24, 32, 40, 48, 64, 72, 80, 96, 120, 128, 144, 200, 240)
PRODUCERS = 32
"""Threads of the warp that has the copy engine work."""
WASTE = 1.2
"""Channels of all blocks, in units of those there are, that a config may have."""
PIECE, PIECE_CYCLES = 64, 3.85
"""Bytes that the copy engine brings at once, aligned, and clock cycles of an SM that it takes."""
CYCLES, BUBBLES = 0.84, 1.4
"""Of a scheduler for an instruction that is counted here, and how many warps' turns it loses in one
of all warps. Like the other cycles fitted to tests/unit/weight_gradient/depthwise_h200.csv."""
STEP_INSTRUCTIONS, ROW_INSTRUCTIONS = 76, 6
"""Of a thread, beside those for columns."""
LINE, APART = 256, 0.25
"""Bytes that memory is read by, and how much longer slices of less take beside one another."""
ADD_CYCLES, SUM_CYCLES = 26, 0.7
"""For each slice that is added at the end, and of an SM for a byte of its blocks' sums."""
LAUNCHES_US = 2.5
"""What the shortest of 32 layers took on an H200 beyond their cycles (depthwise_wgrad.json)."""
LATENCY = 2270
"""Clock cycles from asking for a step's pixels until they are there: see
docs/weight_gradient_kernels.md."""


@dataclass(frozen=True)
class Config(rows.Config):
    """
    Attributes:
        shares: of a line's columns, a thread each.
        features: channels of a block.
        channels: of a thread.
        lines: of the output in a step.
        row_groups: of the filter's rows, a thread each.
        together: blocks that share an SM.
        whole: rows are copied in one piece, by blocks that have all channels.
    """

    stages: int = param(*STAGES)
    shares: int = param(2, 1, 4, 7, 8, 14)
    waves: float = param(1.0)
    features: int = param(*FEATURES)
    channels: int = param(4, 2)
    lines: int = param(2, 1, 4, 7)
    row_groups: int = param(1, 2, 3)
    together: int = param(2, 1, 3)
    whole: bool = param(False, True)


@dataclass(frozen=True)
class FmaLayout(Layout):
    """
    Attributes:
        workers: threads of a block that multiply.
        chunks: of a row of x.
        handed_over: bytes of the sums that threads hand over at once.
        together: blocks that share an SM.
    """

    workers: int = 0
    chunks: int = 1
    handed_over: int = 0
    together: int = 1

    def threads(self, config: rows.Config) -> int:
        return math.ceil(self.workers / 32) * 32 + self.producers

    def shared_bytes(self, config: rows.Config) -> int:
        return max(self.loop_bytes, self.handed_over)

    def blocks_per_sm(self, config: rows.Config, device: DeviceSpec) -> int:
        return self.together

    def chunks_of(self, w: Workload) -> int:
        return self.chunks


class Conv2dWeightGradDepthwiseFmaSm90(WeightGradByRows):
    """The copy engine brings each pixel once; threads have channels, and multiply a pixel of x with
    all pixels of grad_output that meet it in a line."""

    name = "conv2d_weight_grad_depthwise_fma_sm90"

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        if device.arch != "sm_90a":
            return f"its copies need the copy engine of sm_90a; {device.name} is {device.arch}"
        if reason := rows.rows_refusal(w, device) or depthwise_refusal(w):
            return reason
        if w["stride"][1] > min(MOST_STRIDE, w["kernel_size"][1]):
            return f"stride={list(w['stride'])}: beyond {MOST_STRIDE}, or the filter's width"
        if reason := rows.channels_refusal(w):
            return reason
        if not _has_room(w, device):
            height, width = w["kernel_size"]
            return f"a filter of {height} x {width} leaves no room for the sums of two channels"
        return rows.sums_refusal(self, w, device)

    def space(self, w: Workload, device: DeviceSpec) -> ConfigSpace[Config]:
        return ConfigSpace(Config, None, lambda c: _refusal(w, c, device))

    def heuristic(self, w: Workload, device: DeviceSpec) -> Config:
        """The least time by what an SM is fed, reads, multiplies and waits for."""
        return _ranked(w, device, workspace_limit_bytes())[0]

    def promising(self, w: Workload, device: DeviceSpec) -> list[Config]:
        """By the same measure, the best of each piece of an image that a block may have."""
        found: dict[tuple[int, ...], Config] = {}
        for c in _ranked(w, device, workspace_limit_bytes()):
            found.setdefault((c.channels, c.lines, c.features, c.whole), c)
        return list(found.values())

    def layout(self, w: Workload, config: Config) -> FmaLayout:
        return _layout(w, config)

    def forecast(self, config: Config, w: Workload, device: DeviceSpec) -> dict[str, Any]:
        us = LAUNCHES_US + _cycles(w, config, device) / device.clock_hz * 1e6
        return rows.forecast(w, device, _layout(w, config), config, predicted_us=round(us, 2))

    def compile_key(self, config: Config, w: Workload) -> str:
        """Sizes of images are arguments; the filter and what a block has are baked in."""
        baked = (w["x"].dtype, w.outputs[0].dtype, w["kernel_size"], w["stride"], len(w.outputs))
        return f"{replace(config, waves=1.0)} {_layout(w, config)} {baked}"

    def task(self, config: Config, w: Workload, device: DeviceSpec) -> CompileTask:
        layout = _layout(w, config)
        more = {"CHUNKS_OF_X": 1, "CHANNELS": config.channels, "ROW_GROUPS": config.row_groups}
        more |= {"WHOLE_ROWS": int(config.whole)}
        more |= {"EXPECTED_THREADS": layout.threads(config)}
        files = ("depthwise_fma_sm90", "depthwise_sums")
        return rows_task(files, w, device, layout, config, more)

    def kernel(
        self, built: Compiled, w: Workload, device: DeviceSpec, layout: Layout, config: Any
    ) -> RowsKernel:
        maps = functools.partial(_maps, w, layout)
        return MappedKernel(built, w, device, layout, config, maps)


def _maps(w: Workload, layout: Layout, x: int, grad_output: int) -> tuple[bytes, bytes]:
    """Tensor maps: channels, pixels and rows of a step's piece of an image."""
    stride_h, stride_w = w["stride"]
    line = layout.chunk + _kept(w) - 1
    return (
        _rows_of(w["x"], x, (layout.features, layout.chunk * stride_w, layout.lines * stride_h, 1)),
        _rows_of(w["grad_output"], grad_output, (layout.features, line, layout.lines, 1)),
    )


def _rows_of(spec: TensorSpec, address: int, box: tuple[int, ...]) -> bytes:
    n, channels, height, width = spec.shape
    pixel = channels * spec.itemsize
    strides = pixel, width * pixel, height * width * pixel
    return tensor_map.tiled(
        spec.dtype, address, (channels, width, height, n), strides, box, swizzled=False
    )


def _kept(w: Workload) -> int:
    """Pixels of a line that meet one of x."""
    return math.ceil(w["kernel_size"][1] / w["stride"][1])


def _columns(w: Workload) -> int:
    """Of a line, each with a stride's pixels of x; from the first one that any output meets."""
    stride, padding = w["stride"][1], w["padding"][1]
    first = min(padding // stride, _kept(w) - 1)
    last = max((w["x"].shape[3] - 1 + padding) // stride, w["grad_output"].shape[3] - 1)
    return last - first + 1


@functools.lru_cache(maxsize=4096)
def _layout(w: Workload, config: Config) -> FmaLayout:
    """As kernels/weight_gradient/depthwise_fma_sm90.cuh computes it."""
    (filter_height, filter_width), (stride_h, stride_w) = w["kernel_size"], w["stride"]
    columns, kept = _columns(w), _kept(w)
    widest = min(MOST_OF_BOX // stride_w, MOST_OF_BOX - kept + 1)
    chunks = math.ceil(columns / widest)
    chunk = math.ceil(columns / chunks)
    pixel_bytes, down = config.features * 2, config.lines * stride_h
    line_bytes = (chunk + kept - 1) * pixel_bytes
    row_bytes = chunk * stride_w * pixel_bytes
    slots = _prime(w, config) + config.stages
    loop_bytes = config.stages * (_place(config.lines * line_bytes) + 16)
    loop_bytes += slots * _place(down * row_bytes) + config.whole * row_bytes
    sums = config.features * (filter_height * filter_width + len(w.outputs) - 1)
    workers = config.features // config.channels * config.shares * config.lines * config.row_groups
    handed_over = 4 * filter_width * config.channels * (math.ceil(workers / 32) * 32 + PRODUCERS)
    return FmaLayout(
        config.features, chunk, 1, math.ceil(sums / 128), loop_bytes, PRODUCERS,
        lines=config.lines, workers=workers, chunks=chunks, handed_over=handed_over,
        together=config.together,
    )  # fmt: skip


def _place(size: int) -> int:
    return math.ceil(size / PLACE) * PLACE


def _prime(w: Workload, config: Config) -> int:
    """Steps before all rows are there that a line of the output needs."""
    filter_height, stride = w["kernel_size"][0], w["stride"][0]
    return math.ceil((filter_height - stride) / (config.lines * stride))


def _own_rows(w: Workload, config: Config) -> int:
    return math.ceil(w["kernel_size"][0] / config.row_groups)


def _registers(w: Workload, c: Config) -> int:
    """Of a thread: sums, what it keeps of grad_output, and what NVRTC 13.0 needs beside them."""
    own_rows = _own_rows(w, c)
    of_values = (own_rows * w["kernel_size"][1] + _kept(w)) * c.channels
    return of_values + 5 * own_rows + 24 + (20 if c.lines & (c.lines - 1) else 0)


def _waste_refusal(w: Workload, features: int) -> str | None:
    channels = w["x"].shape[1]
    if math.ceil(channels / features) * features <= max(WASTE * channels, min(FEATURES)):
        return None
    return f"blocks of {features} channels have more than {WASTE} times {channels}"


def _refusal(w: Workload, c: Config, device: DeviceSpec) -> str | None:
    """Why a config does not fit, in words, or None."""
    channels, filter_height = w["x"].shape[1], w["kernel_size"][0]
    if reason := _waste_refusal(w, c.features):
        return reason
    if math.ceil(filter_height / _own_rows(w, c)) != c.row_groups:
        return f"{filter_height} rows of the filter are not cut into {c.row_groups} equal groups"
    out_height = w["grad_output"].shape[2]
    if c.lines >= 2 * out_height:
        return f"{c.lines} lines of {out_height}"
    if c.lines * w["stride"][0] > MOST_OF_BOX:
        return f"rows of {c.lines} lines are more than {MOST_OF_BOX}"
    registers = _registers(w, c)
    layout = _layout(w, c)
    if c.whole and (layout.chunks > 1 or c.features != channels):
        return (
            f"blocks of {c.features} channels, rows in {layout.chunks} chunks, have no whole rows"
        )
    if c.shares > 1 and layout.chunk < 2 * c.shares:
        return f"{layout.chunk} columns are few for {c.shares} threads"
    threads = layout.threads(c)
    if not 96 <= threads <= 1024:
        return f"{threads} threads of a block"
    block_bytes = min(device.shared_bytes_per_sm // c.together, device.shared_bytes_per_block)
    if layout.shared_bytes(c) + 1024 > block_bytes:
        return f"{layout.shared_bytes(c)} bytes of shared memory do not fit {c.together} times"
    warps = math.ceil(threads // 32 * c.together / device.schedulers_per_sm)
    room = device.registers_per_sm // device.schedulers_per_sm // device.warp // warps // 8 * 8
    if min(room, device.registers_per_thread) < registers:
        return f"{c.together} blocks of {threads} threads leave {room} of {registers} registers"
    return None


def _with_fewest_stages(w: Workload, device: DeviceSpec) -> ConfigSpace[Config]:
    """What fits if anything does, without the products that the channels rule out."""
    features = [f for f in FEATURES if not _waste_refusal(w, f)]
    whole = [False, True] if w["x"].shape[1] in features else [False]
    return ConfigSpace(Config, None, lambda c: _refusal(w, c, device)).restricted(
        {"stages": [STAGES[0]], "features": features, "whole": whole}
    )


@functools.lru_cache(maxsize=1024)
def _has_room(w: Workload, device: DeviceSpec) -> bool:
    return next(iter(_with_fewest_stages(w, device)), None) is not None


@functools.lru_cache(maxsize=256)
def _ranked(w: Workload, device: DeviceSpec, limit_bytes: int) -> tuple[Config, ...]:
    """By the model's time, for so much workspace; each with as many stages as fit."""
    more = STAGES[:0:-1]

    def with_most_stages(c: Config) -> Config:
        larger = (replace(c, stages=stages) for stages in more)
        return next((d for d in larger if _refusal(w, d, device) is None), c)

    found = [with_most_stages(c) for c in _with_fewest_stages(w, device)]
    return tuple(sorted(found, key=lambda c: _cycles(w, c, device)))


def _feeding(w: Workload, c: Config) -> float:
    """Cycles for a pixel of a block's channels."""
    channels, size = w["x"].shape[1], w["x"].itemsize
    pixel_bytes = c.features * size
    if c.whole:
        return pixel_bytes / PIECE * PIECE_CYCLES
    if channels * size % PIECE or pixel_bytes % PIECE:
        brought = pixel_bytes + PIECE - 16  # from some multiple of 16 bytes on
    else:
        brought = pixel_bytes
    apart = 1 - min(pixel_bytes, LINE) / LINE if c.features < channels else 0.0
    return brought / PIECE * PIECE_CYCLES * (1 + APART * apart)


@functools.lru_cache(maxsize=4096)
def _ways(across: int, channels: int, shares: int, stride_bytes: int, chunk: int) -> float:
    """How often as long threads take that read at once, because they read the same banks."""

    def address(lane: int) -> int:
        column = chunk * (lane // across % shares) // shares
        return column * stride_bytes + lane % across * channels * 2

    starts = [address(lane) for lane in range(64 // channels)]
    words = {(start + i) // 4 for start in starts for i in range(0, channels * 2, 4)}
    banks = [word % 32 for word in words]
    return max(map(banks.count, set(banks)))


def _cycles(w: Workload, c: Config, device: DeviceSpec) -> float:
    """Of an SM, for the whole gradient."""
    layout, own_rows, prime = _layout(w, c), _own_rows(w, c), _prime(w, c)
    filter_width, (stride_h, stride_w), kept = w["kernel_size"][1], w["stride"], _kept(w)
    of_column = 3 + c.channels + own_rows * stride_w * (1 + c.channels)
    of_column += own_rows * filter_width * c.channels
    instructions = layout.chunk / c.shares * of_column + (kept - 1) * (1 + c.channels)
    instructions += ROW_INSTRUCTIONS * own_rows + STEP_INSTRUCTIONS
    warps = layout.threads(c) // 32 - 1
    busy = warps * c.together / device.schedulers_per_sm
    issued = CYCLES * instructions * (busy + BUBBLES)
    ways = [
        _ways(c.features // c.channels, c.channels, c.shares, pixels * c.features * 2, layout.chunk)
        for pixels in (1, stride_w)
    ]
    read = ways[0] + ways[1] * own_rows * stride_w
    read *= warps * layout.chunk / c.shares * c.channels / 2
    line = c.lines * (layout.chunk + kept - 1) * _feeding(w, c)
    of_x = c.lines * layout.chunk * stride_h * stride_w * _feeding(w, c)
    waited = LATENCY / (c.stages - 1)
    step = max(issued, c.together * read, c.together * (line + of_x), waited)
    primed = max(c.together * of_x, waited)
    column = math.ceil(w["grad_output"].shape[2] / c.lines)
    split = rows.split_of(w, device, layout, c)
    own = math.ceil(split.lines / split.slices)
    sums = split.workspace_bytes
    ended = own_rows * (200 + warps * filter_width * c.channels * 2) * c.together
    return (
        own * step
        + (own / column + 1) * prime * primed
        + sums / device.sms * SUM_CYCLES
        + split.slices * ADD_CYCLES
        + ended
    )
