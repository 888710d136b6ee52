"""The weight gradient of a depthwise convolution by tensor cores."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tilewright.build import CompileTask
from tilewright.device import DeviceSpec
from tilewright.impls.weight_gradient import _rows as rows
from tilewright.impls.weight_gradient._problem import depthwise_refusal
from tilewright.impls.weight_gradient._rows import (
    MOST_FRAGMENTS,
    Layout,
    WeightGradByRows,
    chunk_of,
    prime,
    rows_task,
)
from tilewright.op import Workload
from tilewright.space import ConfigSpace, param

WARPS, FEW_FRAGMENTS, WARPS_OF_MANY = 16, 12, 8
"""Of a block; and where a warp has more fragments than that."""


@dataclass(frozen=True)
class Config(rows.Config):
    """
    Attributes:
        shares: sixteens of a line's pixels, each with warps of its own: all there are.
    """

    stages: int = param(3, 2, 4)
    shares: int = param(1, 2, 3, 4, 5, 6, 7)
    waves: float = param(1.0, 0.5, 2.0)


class Conv2dWeightGradDepthwiseMma(WeightGradByRows):
    """Eight channels of two lines of grad_output meet the same channels of a row of x: of a product
    of 16 x 8 sums sixteen are wanted, and x is read once for all lines that meet it."""

    name = "conv2d_weight_grad_depthwise_mma"

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        if reason := rows.rows_refusal(w, device) or depthwise_refusal(w):
            return reason
        if _fragments(w) > MOST_FRAGMENTS:
            return f"{_fragments(w)} fragments of sums in each warp exceed {MOST_FRAGMENTS}"
        return (
            rows.channels_refusal(w)
            or rows.room_refusal(w, self.space(w, device))
            or rows.sums_refusal(self, w, device)
        )

    def space(self, w: Workload, device: DeviceSpec) -> ConfigSpace[Config]:
        sixteens = chunk_of(w["grad_output"].shape[3]) // 16

        def refusal(c: Config) -> str | None:
            if c.shares != sixteens:
                return f"a line has {sixteens} times sixteen pixels"
            return rows.shape_refusal(_layout(w, c), c, device)

        return ConfigSpace(Config, None, refusal)

    def heuristic(self, w: Workload, device: DeviceSpec) -> Config:
        """As many blocks as run at once, and most loads under way."""
        fits = list(self.space(w, device))
        return min(fits, key=lambda c: (abs(c.waves - 1.0), abs(c.stages - 3)))

    def layout(self, w: Workload, config: Config) -> Layout:
        return _layout(w, config)

    def compile_key(self, config: Config, w: Workload) -> str:
        """Sizes of images are arguments; the filter and the chunk of a row are baked in."""
        baked = (w["x"].dtype, w.outputs[0].dtype, w["kernel_size"], w["stride"])
        return f"{config.stages} {config.shares} {_layout(w, config)} {baked}"

    def task(self, config: Config, w: Workload, device: DeviceSpec) -> CompileTask:
        return rows_task(("depthwise_mma",), w, device, _layout(w, config), config, {})


def _fragments(w: Workload) -> int:
    """Of a warp's sums; the bias's are the first column of another one."""
    (filter_height, filter_width), stride_h = w["kernel_size"], w["stride"][0]
    pairs = (prime(filter_height, stride_h) + 2) // 2
    return stride_h * pairs * filter_width + len(w.outputs) - 1


def _layout(w: Workload, config: Config) -> Layout:
    """As kernels/weight_gradient/depthwise_mma.cuh computes it."""
    filter_width, (stride_h, stride_w) = w["kernel_size"][1], w["stride"]
    chunk, fragments = chunk_of(w["grad_output"].shape[3]), _fragments(w)
    most = (WARPS if fragments <= FEW_FRAGMENTS else WARPS_OF_MANY) // (chunk // 16) * 8
    features = min(64, max(16, most // 16 * 16), math.ceil(w["x"].shape[1] / 16) * 16)
    pixel_bytes = features * 2 + 16
    row_bytes = ((chunk - 1) * stride_w + filter_width) * pixel_bytes
    loop_bytes = config.stages * (chunk * pixel_bytes + stride_h * row_bytes) + 16
    return Layout(features, chunk, features // 8, fragments, loop_bytes)
