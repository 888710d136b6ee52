"""The convolution weight gradient as a matrix product, as its CUDA kernels see it."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

import torch
from torch import Tensor

from tilewright.impl import allocate
from tilewright.impls._in_place import Written
from tilewright.op import Workload
from tilewright.settings import workspace_limit_bytes
from tilewright.tensor_spec import HALVES, TensorSpec, channels_last_strides, same_layout

PANEL = 64
"""Columns of the product come in panels of so many channels of one filter tap."""


@dataclass(frozen=True)
class Problem:
    """The weight gradient as a matrix product: K rows, taps times channels columns, pixels summed.

    Attributes:
        channels: of x; columns of one tap, or of all taps together in a problem without gaps
            between them.
        row_length: columns of all taps.
        panels_per_tap: of 64 columns each: ceil(channels / PANEL), or one with groups.
        pixels: of the output, over the batch.
    """

    features: int
    channels: int
    taps: int
    row_length: int
    panels_per_tap: int
    pixels: int
    flops: int
    read_bytes: int
    grad_bytes: int
    """Of those, what is read of grad_output."""
    geometry: tuple[int, ...]
    """P, Q, S, H, W, then stride, padding and dilation by height and width."""
    bias: int
    """Numbers that a feature's sum of grad_output is kept in: none where it is not asked for, two
    where it stays fp32."""
    workspace_limit_bytes: int
    """Of partial sums; a config that needs more does not fit."""
    keeps_sums: bool = False
    """Whether the result is fp32 sums of halves, in which shows what tensor cores cut off."""
    group: int = 0
    """0, or channels, and features, of a group: a tile has 64 features and their own channels."""

    @property
    def pointwise(self) -> bool:
        """Whether the pixels of x are the output's: one tap, stride 1, no padding."""
        out_height, out_width, _, height, width, *rest = self.geometry
        return (out_height, out_width) == (height, width) and rest[:4] == [1, 1, 0, 0]

    @property
    def panels(self) -> int:
        return self.taps * self.panels_per_tap

    def steps(self, tile_k: int) -> int:
        return math.ceil(self.pixels / tile_k)

    def row_tiles(self, tile_m: int) -> int:
        return math.ceil(self.features / tile_m)

    def column_tiles(self, tile_n: int) -> int:
        return math.ceil(self.panels / (tile_n // PANEL))

    def tiles(self, tile_m: int, tile_n: int) -> int:
        return self.row_tiles(tile_m) * self.column_tiles(tile_n)

    def packed(
        self, tile_m: int, tile_k: int, split_k: int, tiles: int = 1, whole: bool = False
    ) -> bytes:
        """`struct Problem` of kernels/weight_gradient/common.cuh; ranges are of the steps of so
        many tiles, or `whole` tiles."""
        out_height, out_width, filter_width, *rest = self.geometry
        steps, longer = divmod(tiles * (1 if whole else self.steps(tile_k)), split_k)
        rows, walk_q = divmod(tile_k, out_width)
        walk_n, walk_p = divmod(rows, out_height)
        fields = (
            self.features, self.channels, self.panels, self.panels_per_tap,
            self.row_length, filter_width,
            self.row_tiles(tile_m), split_k, steps, longer,
            self.pixels, out_height, out_width, walk_n, walk_p, walk_q, *rest,
        )  # fmt: skip
        divisors = (
            out_width, out_height, self.panels_per_tap, self.taps, filter_width, split_k,
        )  # fmt: skip
        # n / d is n times the multiplier, shifted right by 31 bits and those of d - 1
        bits = [(d - 1).bit_length() for d in divisors]
        multipliers = [-(-(1 << 31 + b) // d) for b, d in zip(bits, divisors, strict=True)]
        shifts = sum(b << 5 * i for i, b in enumerate(bits))
        packed = struct.pack(f"{len(fields)}i7I", *fields, *multipliers, shifts)
        return packed.ljust(128, b"\0")


def problem_of(w: Workload, dense: bool = False) -> Problem:
    """`dense`: taps follow one another without gaps, instead of each filling panels of its own."""
    return _problem_of(w, dense, workspace_limit_bytes())


@functools.lru_cache(maxsize=1024)
def _problem_of(w: Workload, dense: bool, limit_bytes: int) -> Problem:
    x, grad = w["x"], w["grad_output"]
    n, k, p, q = grad.shape
    _, c, height, width = x.shape
    r, s = w["kernel_size"]
    taps, channels = (1, r * s * c) if dense else (r * s, c)
    group = 0 if w["groups"] == 1 else c // w["groups"]
    return Problem(
        features=k,
        channels=channels,
        taps=taps,
        row_length=r * s * (group or c),
        panels_per_tap=1 if group else math.ceil(channels / PANEL),
        pixels=n * p * q,
        flops=w.flops,
        read_bytes=w.bytes[0],
        grad_bytes=grad.distinct_bytes,
        geometry=(p, q, s, height, width, *w["stride"], *w["padding"], *w["dilation"]),
        bias=sum(2 if o.dtype == "f32" else 1 for o in w.outputs[1:]),
        workspace_limit_bytes=limit_bytes,
        keeps_sums=x.dtype in HALVES and w.outputs[0].dtype == "f32",
        group=group,
    )


def is_channels_last(spec: TensorSpec) -> bool:
    """Dense NHWC memory; a tensor may be that and contiguous at once."""
    return same_layout(spec.shape, spec.real_strides, channels_last_strides(spec.shape))


def as_read(spec: TensorSpec) -> TensorSpec:
    """The tensor as kernels see it: dense channels_last memory, or the bias's gradient.

    Of another layout it is a converted copy; see _layout.
    """
    if spec.rank < 4 or is_channels_last(spec):
        return spec
    return TensorSpec(spec.dtype, spec.shape, channels_last_strides(spec.shape))


class Results:
    """Memory of the weight's gradient and, if asked for, the bias's, as kernels write them.

    Attributes:
        in_place: for each, whether the kernel may overwrite what it adds to: it was donated, or is
            a copy.
    """

    def __init__(self, w: Workload):
        self.specs = [as_read(spec) for spec in w.outputs]
        donated = bool(w.operator.destinations(w))
        self._written = Written(w, map(as_read, w.tensors.values()))
        converted = "into" in w.tensors and not is_channels_last(w["into"])
        self.in_place = (donated or converted, donated)

    def memory(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """New, or the memory of what is added to.

        Args:
            tensors: x and grad_output, and what is added to, if anything is.

        Raises:
            InvalidArgument: what is written in place shares memory with another tensor.
        """
        if self._written:
            self._written.begin(tensors, [t.data_ptr() for t in tensors])
        into = tensors[2:]
        if not into:
            return [allocate(spec, device) for spec in self.specs]
        return [
            t if here else allocate(spec, device)
            for t, spec, here in zip(into, self.specs, self.in_place, strict=False)
        ]

    def begun(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """As `memory`, with what is added to in it."""
        found = self.memory(tensors, device)
        if len(tensors) > 2:
            for t, before in zip(found, tensors[2:], strict=True):
                if t is not before:
                    t.copy_(before)
        return found


def addresses(tensors: Sequence[Tensor]) -> tuple[int, int]:
    """Of the weight's gradient and the bias's; 0 for what is not there."""
    if not tensors:
        return 0, 0
    return tensors[0].data_ptr(), tensors[1].data_ptr() if len(tensors) > 1 else 0


def returned(found: Sequence[Tensor]) -> Tensor | tuple[Tensor, ...]:
    """As the operator returns them."""
    return found[0] if len(found) == 1 else tuple(found)


def operand_refusal(
    w: Workload,
    dtypes: Sequence[str] = HALVES,
    wide_result: bool = False,
    adds: bool = False,
) -> str | None:
    """Why tensors of these dtypes, of at most 2^31 pixels, are not what is given, in words.

    Args:
        wide_result: the kernel can write fp32.
        adds: it can add its results to `into`, and to `into_bias`.
    """
    for name in ("x", "grad_output"):
        spec = w[name]
        if spec.numel == 0:
            return f"{name} is empty: there is nothing to compute"
        if spec.dtype not in dtypes:
            return f"{name} is {spec.dtype}; the kernel multiplies {' and '.join(dtypes)}"
    if "into" in w.tensors and not adds:
        return "the kernel writes its result, it does not add it to another"
    if "into" in w.tensors and as_read(w["into"]).align < 16:
        return f"into={w['into']} is not aligned to 16 bytes"
    if "into_bias" in w.tensors and w["into_bias"].strides is not None:
        return f"into_bias={w['into_bias']} is not contiguous"
    if w.outputs[0].dtype != w["x"].dtype and not wide_result:
        return f"the result is to be {w.outputs[0].dtype}; the kernel writes the dtype of x"
    pixels = max(s.numel // s.shape[1] for s in (w["x"], w["grad_output"]))
    if pixels >= 2**31 - 1024:
        return f"{pixels} pixels exceed 2^31"
    if (largest := max(*w["stride"], *w["padding"], *w["dilation"])) >= 2**30:
        return f"a stride, padding or dilation of {largest} exceeds 2^30"
    return None


def depthwise_refusal(w: Workload) -> str | None:
    """Why it is not one filter for each channel, in words, or None."""
    channels, features = w["x"].shape[1], w["grad_output"].shape[1]
    if channels == features == w["groups"]:
        return None
    return (
        f"groups={w['groups']} of {channels} to {features} channels: not one filter for each "
        "channel"
    )


def copy_engine_refusal(w: Workload, furthest: int = 255) -> str | None:
    """Why the copy engine of sm_90 cannot walk the pixels under each tap, in words.

    Args:
        furthest: pixels from a filter's first tap to its last.
    """
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
        if reach > furthest or padding > 128 or not -128 <= padding - reach <= 127:
            return f"a filter that reaches {reach} pixels with padding {padding} is too wide"
    return None


def result_defined(w: Workload) -> dict[str, object]:
    """What the kernels of common.cuh need to know of the result."""
    return {
        "RESULT": w.outputs[0].dtype,
        "ADDS": int("into" in w.tensors),
        "BIAS": len(w.outputs) - 1,
    }


def source(name: str) -> str:
    folder = resources.files("tilewright").joinpath("kernels", "weight_gradient")
    return folder.joinpath(name).read_text()
