"""The weight gradient of a depthwise convolution: plain multiply-adds, one pass over memory."""

from __future__ import annotations

import math
import struct
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
    depthwise_refusal,
    operand_refusal,
    returned,
    source,
)
from tilewright.impls.weight_gradient._rows import Split, sums_refusal
from tilewright.op import Workload
from tilewright.settings import workspace_limit_bytes
from tilewright.space import ConfigSpace, param

ENTRY, ADD_ENTRY, ADD_THREADS = "weight_grad", "add_all_slices", 256
LARGEST_FILTER = 49
"""Taps whose sums, two channels each, stay in registers."""
MOST_ROWS = 32
"""Of a filter: a bit of a word says of each whether it lies inside x."""
MOST_KEPT = 16
"""Values of grad_output that a pixel of x meets along a row, two channels each, stay there, too."""


@dataclass(frozen=True)
class Config:
    """
    Attributes:
        threads: of a block.
        waves: blocks of all slices and channels, in units of what runs at once.
        stretch: outputs of a row that one thread walks: more threads hide more of memory's latency,
            and load more pixels twice.
    """

    threads: int = param(256, 128)
    waves: int = param(1, 2, 4)
    stretch: int = param(14, 7, 28, 56)


class Conv2dWeightGradDepthwise(Implementation):
    """Each thread owns two channels and keeps their whole filter's sums; slices of the output are
    added by a second kernel in a fixed order.

    Tensor cores have nothing to do here: an output is a product of two channels alone.
    """

    name, backend = "conv2d_weight_grad_depthwise", "cuda"
    op = ("conv2d_weight_grad", "conv2d_weight_bias_grad")

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        if device.kind != "cuda":
            return f"it runs on an NVIDIA GPU, not on {device.name}"
        if reason := depthwise_refusal(w) or operand_refusal(w, wide_result=True, adds=True):
            return reason
        if math.prod(w["kernel_size"]) > LARGEST_FILTER or w["stride"][1] > 4:
            return f"more than {LARGEST_FILTER} taps, or a stride above 4, exceed the registers"
        if w["kernel_size"][0] > MOST_ROWS:
            return f"a filter of {w['kernel_size'][0]} rows has more than {MOST_ROWS}"
        if _kept(w) > MOST_KEPT:
            return f"a row of the filter reaches {_kept(w)} outputs, more than {MOST_KEPT}"
        return sums_refusal(self, w, device)

    def space(self, w: Workload, device: DeviceSpec) -> ConfigSpace[Config]:
        return ConfigSpace(Config)

    def heuristic(self, w: Workload, device: DeviceSpec) -> Config:
        # Registers hold few warps with a large filter: smaller blocks fill an SM better.
        return Config(threads=256 if math.prod(w["kernel_size"]) <= 9 else 128)

    def forecast(self, config: Config, w: Workload, device: DeviceSpec) -> dict[str, Any]:
        """Without a time: it has no model of that."""
        tile = f"{2 * _pairs(config, w)}x{config.stretch}"
        return _split(config, w, device).forecast(tile)

    def compile_key(self, config: Config, w: Workload) -> str:
        """Sizes are arguments; the filter and its stride are baked in."""
        dtypes = (w.main.dtype, w.outputs[0].dtype, len(w.outputs))
        geometry = (w["kernel_size"], w["stride"][1], w["dilation"])
        return f"{config.threads} {dtypes} {geometry} {_paired(w)}"

    def task(self, config: Config, w: Workload, device: DeviceSpec) -> CompileTask:
        defined = {
            "DTYPE": w.main.dtype,
            "RESULT": w.outputs[0].dtype,
            "BIAS": len(w.outputs) - 1,
            "R": w["kernel_size"][0],
            "S": w["kernel_size"][1],
            "STRIDE_W": w["stride"][1],
            "DILATION_H": w["dilation"][0],
            "DILATION_W": w["dilation"][1],
            "PAIRED": int(_paired(w)),
            "THREADS": config.threads,
            "MIN_BLOCKS": _blocks_per_sm(config, w, device),
        }
        text = "".join(f"#define {name} {value}\n" for name, value in defined.items())
        flags = nvrtc.flags_for(device.arch)
        text += source("long_sum.cuh") + source("depthwise.cuh")
        return CompileTask("nvrtc", text, flags, ENTRY)

    def build(self, config: Config, w: Workload, device: DeviceSpec) -> Executable:
        built = compiled(self.task(config, w, device))
        return in_any_layout(DepthwiseKernel(built, config, w, device), w, device)


def _sums(w: Workload) -> int:
    """Of a channel: one for each tap, and the bias's."""
    return math.prod(w["kernel_size"]) + len(w.outputs) - 1


def _paired(w: Workload) -> bool:
    """Whether two channels are 4 aligned bytes."""
    aligned = min(as_read(w[name]).align for name in ("x", "grad_output")) >= 4
    return aligned and w["groups"] % 2 == 0


def _kept(w: Workload) -> int:
    """Values of grad_output that meet a pixel of x along a row."""
    return (w["kernel_size"][1] - 1) * w["dilation"][1] // w["stride"][1] + 1


def _blocks_per_sm(config: Config, w: Workload, device: DeviceSpec) -> int:
    """As many as registers hold: two sums a tap, and what addresses and values need."""
    beyond = 2 * max(0, _kept(w) - w["kernel_size"][1])
    registers = min(2 * _sums(w) + beyond + 62, device.registers_per_thread)
    shared_bytes = 64 * config.threads
    return max(1, device.occupancy(config.threads, registers, shared_bytes)[0])


def _pairs(config: Config, w: Workload) -> int:
    """Of channels, a thread of a block each."""
    return min(math.ceil(w["x"].shape[1] / 2), config.threads // 2)


def _split(config: Config, w: Workload, device: DeviceSpec) -> Split:
    (n, channels, _, _), (_, _, out_height, out_width) = w["x"].shape, w["grad_output"].shape
    pairs = _pairs(config, w)
    blocks = math.ceil(channels / (2 * pairs))
    walks = n * out_height * math.ceil(out_width / config.stretch)
    at_once = device.sms * _blocks_per_sm(config, w, device)
    floats = _sums(w) * channels
    allowed = workspace_limit_bytes() // (4 * floats)
    of_block = math.ceil(walks / (config.threads // pairs))
    slices = max(1, min(at_once * config.waves // blocks, of_block, allowed))
    return Split(blocks, slices, walks, floats, at_once)


class DepthwiseKernel(Executable):
    """Sums of every slice of the rows, then their sum, which may be added to another gradient."""

    def __init__(self, built: Compiled, config: Config, w: Workload, device: DeviceSpec):
        _, channels, height, width = w["x"].shape
        _, _, out_height, out_width = w["grad_output"].shape
        self.resources, self.block_threads = built.resources, config.threads
        self.kernel = CudaKernel(built, ENTRY, "PPPT")
        self.add = CudaKernel(built, ADD_ENTRY, "PPPPPT")
        split, pairs = _split(config, w, device), _pairs(config, w)
        self.grid = (split.slices, split.tiles, 1)
        self.add_grid = (math.ceil(channels / 32), _sums(w), 1)
        self.shape = (split.slices * split.floats,)
        self.results = Results(w)
        self.workspace_bytes = split.workspace_bytes
        stretches = math.ceil(out_width / config.stretch)
        sizes = (channels, pairs, split.lines, out_height, out_width, height, width)
        walked = (w["stride"][0], *w["padding"], split.slices, stretches, config.stretch)
        fields = (*sizes, *walked)
        self.problem = struct.pack(f"{len(fields)}i", *fields).ljust(128, b"\0")

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        x, grad_output, *into = tensors
        device, index = x.device, x.device.index
        stream = torch._C._cuda_getCurrentRawStream(index)
        found = self.results.memory(tensors, device)
        partial = allocator.empty_strided(self.shape, (1,), dtype=torch.float32, device=device)
        self.kernel.launch(
            self.grid, (self.block_threads, 1, 1), 0, stream, index,
            x.data_ptr(), grad_output.data_ptr(), partial.data_ptr(), self.problem,
        )  # fmt: skip
        self.add.launch(
            self.add_grid, (ADD_THREADS, 1, 1), 0, stream, index,
            partial.data_ptr(), *addresses(into), *addresses(found), self.problem,
        )  # fmt: skip
        return returned(found)
