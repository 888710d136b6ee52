"""What the weight-gradient kernels that walk rows share: sizes, slices, both launches."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.build import CompileTask
from tilewright.compile import nvrtc
from tilewright.compile.cache import Compiled, compiled
from tilewright.compile.launch import CudaKernel
from tilewright.device import DeviceSpec
from tilewright.impl import Executable, Implementation, allocator
from tilewright.impls.weight_gradient._layout import in_any_layout
from tilewright.impls.weight_gradient._problem import (
    Results,
    addresses,
    as_read,
    operand_refusal,
    returned,
    source,
)
from tilewright.op import Workload
from tilewright.settings import workspace_limit_bytes
from tilewright.space import ConfigSpace, param

ENTRY, ADD_ENTRY, ADD_THREADS = "weight_grad", "add_all_slices", 256
MOST_FRAGMENTS = 40
"""16 x 8 sums of a warp, four registers each."""
LARGEST_CHUNK = 112
"""Pixels of a row of the output that a step multiplies at once."""
MOST_TILE_WASTE = 64
"""Times that a slice's sums, of whole tiles, are more than the result, at most: a guess."""
SUMS_BESIDE = 56
"""Registers of a thread besides its sums: operands, addresses, the way through the rows."""


@dataclass(frozen=True)
class Config:
    """
    Attributes:
        stages: steps of a block on their way at once.
        shares: of a line's pixels, each multiplied by warps of its own.
        waves: blocks, in units of what runs at once; fewer blocks leave fewer sums to add.
    """

    stages: int = param(3, 4, 5)
    shares: int = param(2, 1, 4)
    waves: float = param(1.0, 0.5, 0.25, 2.0)


@dataclass(frozen=True)
class Layout:
    """How a block of one of the kernels is made; all of it is baked into its binary.

    Attributes:
        features: of a block, a multiple of 16.
        chunk: pixels of a line, a multiple of 16.
        warps: of a share.
        fragments: 16 x 8 sums of a warp.
        loop_bytes: shared memory of the loop.
        producers: threads that do not multiply.
        images: that a line is of.
        lines: of an image that a step takes.
        beside_sums: registers of a thread.
    """

    features: int
    chunk: int
    warps: int
    fragments: int
    loop_bytes: int
    producers: int = 0
    images: int = 1
    lines: int = 1
    beside_sums: int = SUMS_BESIDE

    def threads(self, config: Config) -> int:
        return 32 * self.warps * config.shares + self.producers

    def shared_bytes(self, config: Config) -> int:
        """Of the loop, and afterwards of the sums that shares hand over."""
        handed_over = 512 * self.warps * self.fragments if config.shares > 1 else 0
        return max(self.loop_bytes, handed_over)

    def chunks_of(self, w: Workload) -> int:
        """Of a row."""
        return math.ceil(w["grad_output"].shape[3] / self.chunk)

    def blocks_per_sm(self, config: Config, device: DeviceSpec) -> int:
        """At most so many that registers hold sums and what is beside them."""
        threads, registers = self.threads(config), 4 * self.fragments + self.beside_sums
        registers = min(registers, device.registers_per_thread)
        return device.occupancy(threads, registers, self.shared_bytes(config))[0]


@dataclass(frozen=True)
class Split:
    """How the lines of a workload are shared among blocks.

    Attributes:
        tiles: ranges of the features, each summed by blocks of its own.
        slices: of the lines, each with sums of its own, which the second kernel adds.
        lines: steps of all slices together.
        floats: of the sums of one slice.
        at_once: blocks that run at once.
    """

    tiles: int
    slices: int
    lines: int
    floats: int
    at_once: int

    @property
    def workspace_bytes(self) -> int:
        return 4 * self.slices * self.floats

    def forecast(self, tile: str, **more: Any) -> dict[str, Any]:
        """As a person reads it; `waves` and `tail` are those of split-K kernels."""
        waves = self.tiles * self.slices / self.at_once
        return {
            "tile": tile,
            "tiles": self.tiles,
            "slices": self.slices,
            "waves": round(waves, 2),
            "tail": round(1 - waves / math.ceil(waves), 2),
            "workspace_bytes": self.workspace_bytes,
            **more,
        }


def split_of(w: Workload, device: DeviceSpec, layout: Layout, config: Config) -> Split:
    (n, _, _, _), (_, features, out_height, _) = w["x"].shape, w["grad_output"].shape
    tiles = math.ceil(features / layout.features)
    columns = math.ceil(n / layout.images) * layout.chunks_of(w)
    lines = columns * math.ceil(out_height / layout.lines)
    at_once = device.sms * layout.blocks_per_sm(config, device)
    floats = tiles * layout.warps * layout.fragments * 128
    allowed = workspace_limit_bytes() // (4 * floats)
    slices = max(1, min(lines, round(at_once * config.waves) // tiles, allowed))
    return Split(tiles, slices, lines, floats, at_once)


def forecast(
    w: Workload, device: DeviceSpec, layout: Layout, config: Config, **more: Any
) -> dict[str, Any]:
    """How the blocks of a config fill the SMs; a tile is features x pixels of a step."""
    pixels = layout.images * layout.lines * layout.chunk
    tile = f"{layout.features}x{pixels}"
    return split_of(w, device, layout, config).forecast(tile, **more)


def chunk_of(width: int) -> int:
    """Rows of the output in equal chunks of at most LARGEST_CHUNK pixels, rounded up to 16."""
    chunks = math.ceil(width / LARGEST_CHUNK)
    return math.ceil(width / chunks / 16) * 16


def prime(filter_height: int, stride: int) -> int:
    """Steps before all rows are there that a line of the output needs."""
    return (filter_height - 1) // stride


def rows_refusal(w: Workload, device: DeviceSpec) -> str | None:
    """Why rows cannot be walked, in words, or None."""
    if device.kind != "cuda":
        return f"it runs on an NVIDIA GPU, not on {device.name}"
    if reason := operand_refusal(w, wide_result=True, adds=True):
        return reason
    if w["dilation"] != (1, 1):
        return f"dilation={list(w['dilation'])}: the kernel walks without gaps"
    if w["stride"][0] > w["kernel_size"][0] or w["stride"][1] > 4:
        return (
            f"stride={list(w['stride'])}: a step brings the rows of one stride, up to the filter's"
        )
    grad = as_read(w["grad_output"])
    if grad.shape[1] % 8 or grad.align < 16:
        return f"grad_output={grad}: features are copied in eights, aligned to 16 bytes"
    return None


def channels_refusal(w: Workload) -> str | None:
    """Why x cannot be copied as it lies, in words, or None."""
    if as_read(w["x"]).align < 16:
        return f"x={w['x']}: channels are copied in eights, aligned to 16 bytes"
    return None


def sums_refusal(impl: Implementation, w: Workload, device: DeviceSpec) -> str | None:
    """Why not even one slice's sums may be kept, in words, or None."""
    limit = workspace_limit_bytes()
    if 4 * MOST_TILE_WASTE * math.prod(w.outputs[0].shape) <= limit:
        return None
    needed = impl.forecast(impl.heuristic(w, device), w, device)["workspace_bytes"]
    if needed <= limit:
        return None
    return f"sums of {needed} bytes exceed the {limit} of TILEWRIGHT_WORKSPACE_BYTES"


def room_refusal(w: Workload, space: ConfigSpace[Any]) -> str | None:
    """Why no config of the space fits, in words, or None."""
    if next(iter(space), None) is not None:
        return None
    height, width = w["kernel_size"]
    return (
        f"lines of {w['grad_output'].shape[3]} pixels, and the rows of x that a filter of {height} "
        f"x {width} meets with stride={list(w['stride'])}, are more than a block has room for"
    )


def shape_refusal(layout: Layout, config: Config, device: DeviceSpec) -> str | None:
    """Why a config does not fit, in words, or None."""
    if layout.shared_bytes(config) + 1024 > device.shared_bytes_per_block:
        return f"{layout.shared_bytes(config)} bytes of shared memory are more than a block has"
    multiplying = layout.threads(config) - layout.producers
    if multiplying > 512:
        return f"{multiplying} threads are more than registers hold the sums of"
    if config.shares * 16 > layout.chunk:
        return (
            f"{layout.chunk} pixels of a line are fewer than 16 for each of {config.shares} shares"
        )
    return None


def rows_task(
    files: tuple[str, ...],
    w: Workload,
    device: DeviceSpec,
    layout: Layout,
    config: Config,
    more: dict[str, int],
    text: str = "",
) -> CompileTask:
    """The task of kernels/weight_gradient/<file>.cuh, one after the other.

    Args:
        more: what they need defined besides.
        text: what they need declared.
    """
    filter_height, filter_width = w["kernel_size"]
    stride_h, stride_w = w["stride"]
    dtype = w["x"].dtype
    defined = {
        "DTYPE": dtype, "RESULT": w.outputs[0].dtype, "OPERAND": f'"{dtype}"',
        "R": filter_height, "S": filter_width, "STRIDE_H": stride_h, "STRIDE_W": stride_w,
        "FEATURES": layout.features, "CHUNK": layout.chunk, "CHUNKS_OF_X": 0,
        "IMAGES": layout.images, "LINES_TOGETHER": layout.lines, "WITH_BIAS": len(w.outputs) - 1,
        "STAGES": config.stages, "PRODUCERS": layout.producers,
        "SHARES": config.shares, "MIN_BLOCKS": max(1, layout.blocks_per_sm(config, device)),
        "EXPECTED_WARPS": layout.warps, "EXPECTED_FRAGMENTS": layout.fragments,
        "LOOP_BYTES": layout.loop_bytes, **more,
    }  # fmt: skip
    macros = "".join(f"#define {key} {value}\n" for key, value in defined.items())
    own = "".join(source(f"{name}.cuh") for name in files)
    common = "".join(source(f"{name}.cuh") for name in ("hopper", "long_sum", "rows"))
    flags = nvrtc.flags_for(device.arch)
    return CompileTask("nvrtc", macros + common + text + own, flags, ENTRY)


class RowsKernel(Executable):
    """Sums of every slice of the lines, then their sum, which may be added to another gradient."""

    signature = "PP"
    """Struct codes of the kernel's operands."""

    def __init__(
        self, built: Compiled, w: Workload, device: DeviceSpec, layout: Layout, config: Config
    ):
        n, channels, height, width = w["x"].shape
        _, features, out_height, out_width = w["grad_output"].shape
        self.resources, self.results = built.resources, Results(w)
        self.block_threads, self.shared_bytes = layout.threads(config), layout.shared_bytes(config)
        self.kernel = CudaKernel(built, ENTRY, f"{self.signature}PT")
        self.add = CudaKernel(built, ADD_ENTRY, "PPPPPT")
        self.overlapping = device.capability >= 90
        split = split_of(w, device, layout, config)
        self.grid = (split.slices, split.tiles, 1)
        self.add_grid = (layout.warps * layout.fragments, split.tiles, 1)
        self.partial_floats = split.slices * split.floats
        self.workspace_bytes = split.workspace_bytes
        row_length = math.prod(w.outputs[0].shape[1:])
        sizes = (channels, features, height, width, out_height, out_width)
        fields = (
            split.lines,
            layout.chunks_of(w),
            *sizes,
            *w["padding"],
            split.slices,
            row_length,
            n,
        )
        self.problem = struct.pack(f"{len(fields)}i", *fields).ljust(128, b"\0")

    def operands(self, x: torch.Tensor, grad_output: torch.Tensor) -> tuple[Any, ...]:
        """The kernel's first arguments."""
        return x.data_ptr(), grad_output.data_ptr()

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        x, grad_output, *into = tensors
        device, index = x.device, x.device.index
        stream = torch._C._cuda_getCurrentRawStream(index)
        found = self.results.memory(tensors, device)
        shape = (self.partial_floats,)
        partial = allocator.empty_strided(shape, (1,), dtype=torch.float32, device=device)
        self.kernel.launch(
            self.grid, (self.block_threads, 1, 1), self.shared_bytes, stream, index,
            *self.operands(x, grad_output), partial.data_ptr(), self.problem,
        )  # fmt: skip
        self.add.launch(
            self.add_grid, (ADD_THREADS, 1, 1), 0, stream, index,
            partial.data_ptr(), *addresses(into), *addresses(found), self.problem,
            overlapping=self.overlapping,
        )  # fmt: skip
        return returned(found)


class MappedKernel(RowsKernel):
    """Its operands are tensor maps, and addresses: maps are made once for each pair of tensors.

    Args:
        maps: of the addresses of x and grad_output, both tensor maps.
    """

    signature = "TTPP"

    def __init__(
        self,
        built: Compiled,
        w: Workload,
        device: DeviceSpec,
        layout: Layout,
        config: Config,
        maps: Callable[[int, int], tuple[bytes, bytes]],
    ):
        super().__init__(built, w, device, layout, config)
        self.maps = functools.lru_cache(maxsize=256)(maps)

    def operands(self, x: torch.Tensor, grad_output: torch.Tensor) -> tuple[Any, ...]:
        pointers = x.data_ptr(), grad_output.data_ptr()
        return (*self.maps(*pointers), *pointers)


class WeightGradByRows(Implementation):
    """A kernel that walks rows: what follows from the layout of its blocks."""

    backend = "cuda"
    op = ("conv2d_weight_grad", "conv2d_weight_bias_grad")

    def layout(self, w: Workload, config: Any) -> Layout:
        """How a block is made, as the kernel's own source computes it."""
        raise NotImplementedError

    def kernel(
        self, built: Compiled, w: Workload, device: DeviceSpec, layout: Layout, config: Any
    ) -> RowsKernel:
        return RowsKernel(built, w, device, layout, config)

    def space(self, w: Workload, device: DeviceSpec) -> ConfigSpace[Any]:
        return ConfigSpace(Config, constraint=lambda c: shape_refusal(self.layout(w, c), c, device))

    def forecast(self, config: Any, w: Workload, device: DeviceSpec) -> dict[str, Any]:
        """Without a time, where it has no model of that."""
        return forecast(w, device, self.layout(w, config), config)

    def task(self, config: Any, w: Workload, device: DeviceSpec) -> CompileTask:
        raise NotImplementedError

    def build(self, config: Any, w: Workload, device: DeviceSpec) -> Executable:
        built = compiled(self.task(config, w, device))
        kernel = self.kernel(built, w, device, self.layout(w, config), config)
        return in_any_layout(kernel, w, device)
