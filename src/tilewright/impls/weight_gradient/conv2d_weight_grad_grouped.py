"""The weight gradient of a convolution in groups of a few channels each."""

from __future__ import annotations

import itertools
import math

from tilewright.build import CompileTask
from tilewright.device import DeviceSpec
from tilewright.impls.weight_gradient._rows import (
    MOST_FRAGMENTS,
    Config,
    Layout,
    WeightGradByRows,
    channels_refusal,
    chunk_of,
    prime,
    room_refusal,
    rows_refusal,
    rows_task,
    sums_refusal,
)
from tilewright.op import Workload

DEPTHS = (1, 2, 4, 8, 16, 32)
MOST_FEATURES, MOST_WITH_ROW_GROUPS = 64, 32
"""Of a block; and where warps share the filter's rows."""


class Conv2dWeightGradGrouped(WeightGradByRows):
    """16 features at a time meet the channels of their groups, at every tap, in one pass, and a
    column of ones for the bias's gradient."""

    name = "conv2d_weight_grad_grouped"

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        if reason := rows_refusal(w, device):
            return reason
        channels, features, groups = w["x"].shape[1], w["grad_output"].shape[1], w["groups"]
        if channels != features or channels // groups not in DEPTHS or groups == 1:
            return (
                f"groups={groups} of {channels} to {features} channels: not as many features as "
                f"channels in groups of {', '.join(map(str, DEPTHS))}"
            )
        if _fragments(w, w["kernel_size"][0]) > MOST_FRAGMENTS:
            return f"a row of {w['kernel_size'][1]} taps takes more than {MOST_FRAGMENTS} fragments"
        return (
            channels_refusal(w)
            or room_refusal(w, self.space(w, device))
            or sums_refusal(self, w, device)
        )

    def layout(self, w: Workload, config: Config) -> Layout:
        return _layout(w, config)

    def heuristic(self, w: Workload, device: DeviceSpec) -> Config:
        """As many threads for each SM as there can be, then as many loads under way."""

        def rank(c: Config) -> tuple[float, ...]:
            layout = _layout(w, c)
            threads = layout.threads(c) * layout.blocks_per_sm(c, device)
            return (abs(c.waves - 1.0), -min(threads, 512), c.shares, abs(c.stages - 4))

        return min(self.space(w, device), key=rank)

    def compile_key(self, config: Config, w: Workload) -> str:
        """Sizes of images are arguments; the filter, groups and the chunk of a row are baked in."""
        layout = _layout(w, config)
        baked = (w["x"].dtype, w.outputs[0].dtype, w["kernel_size"], w["stride"], _depth(w))
        return f"{config.stages} {config.shares} {layout} {baked}"

    def task(self, config: Config, w: Workload, device: DeviceSpec) -> CompileTask:
        more = {"DEPTH": _depth(w), "ROW_GROUPS": _row_groups(w)}
        return rows_task(("grouped",), w, device, _layout(w, config), config, more)


def _depth(w: Workload) -> int:
    return w["x"].shape[1] // w["groups"]


def _span(w: Workload) -> int:
    return max(16, _depth(w))


def _fragments(w: Workload, row_groups: int) -> int:
    """Of a warp's sums; the bias's are the first column of another one."""
    filter_height, filter_width = w["kernel_size"]
    rows = math.ceil(filter_height / row_groups)
    return rows * filter_width * _span(w) // 8 + len(w.outputs) - 1


def _row_groups(w: Workload) -> int:
    """Of the filter's rows, so that a warp's registers hold the sums of one."""
    return next(n for n in itertools.count(1) if _fragments(w, n) <= MOST_FRAGMENTS)


def _layout(w: Workload, config: Config) -> Layout:
    """As kernels/weight_gradient/grouped.cuh computes it."""
    (filter_height, filter_width), (stride_h, stride_w) = w["kernel_size"], w["stride"]
    chunk, span = chunk_of(w["grad_output"].shape[3]), _span(w)
    row_groups = _row_groups(w)
    most = MOST_FEATURES if row_groups == 1 else MOST_WITH_ROW_GROUPS
    features = min(most, math.ceil(w["x"].shape[1] / span) * span)
    pixel_bytes = features * 2 + 16
    row_bytes = ((chunk - 1) * stride_w + filter_width) * pixel_bytes
    ring_rows = (prime(filter_height, stride_h) + config.stages) * stride_h
    loop_bytes = config.stages * chunk * pixel_bytes + ring_rows * row_bytes + 16
    return Layout(
        features, chunk, features // 16 * row_groups, _fragments(w, row_groups), loop_bytes
    )
