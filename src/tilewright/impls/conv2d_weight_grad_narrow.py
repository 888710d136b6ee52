"""The weight gradient of a convolution of few channels: a network's first layer."""

from __future__ import annotations

import math

from tilewright.build import CompileTask
from tilewright.compile.cache import compiled
from tilewright.device import DeviceSpec
from tilewright.impl import Executable, Implementation
from tilewright.impls._weight_grad import as_read
from tilewright.impls._weight_grad_layout import in_any_layout
from tilewright.impls._weight_grad_rows import (
    Config,
    Layout,
    RowsKernel,
    chunk_of,
    prime,
    rows_refusal,
    rows_task,
    shape_refusal,
)
from tilewright.op import Workload
from tilewright.space import ConfigSpace

MOST_COLUMNS = 32
"""Taps times channels of one row of the filter: eight for each warp."""


class Conv2dWeightGradNarrow(Implementation):
    """Rows of x are unfolded once in shared memory and meet every row of grad_output that needs
    them: taps and channels of a filter row together fill the columns that channels alone do not.

    The bias's gradient is one column more.
    """

    name, backend = "conv2d_weight_grad_narrow", "cuda"
    op = ("conv2d_weight_grad", "conv2d_weight_bias_grad")

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        if reason := rows_refusal(w, device):
            return reason
        x, (filter_height, filter_width) = w["x"], w["kernel_size"]
        columns = filter_width * x.shape[1]
        if w["groups"] != 1:
            return f"groups={w['groups']}: the kernel multiplies all channels with all features"
        if columns > MOST_COLUMNS or filter_height > 7:
            return (
                f"{filter_height} rows of {filter_width} taps of {x.shape[1]} channels are more "
                f"than 7 rows of {MOST_COLUMNS} columns"
            )
        if len(w.outputs) > 1 and columns % 8 == 0:
            return f"{columns} columns leave none for the bias beside them"
        if _copy_bytes(w) < 4:
            return f"x={x}: its rows are copied in pieces of 4 aligned bytes or more"
        return None

    def space(self, w: Workload, device: DeviceSpec) -> ConfigSpace[Config]:
        return ConfigSpace(Config, None, lambda c: shape_refusal(_layout(w, c), c, device))

    def heuristic(self, w: Workload, device: DeviceSpec) -> Config:
        """Two blocks for each SM and most loads under way; few lines leave more sums than work."""
        fits = list(self.space(w, device))
        n, _, height, _ = w["grad_output"].shape
        busy = n * height >= 8 * device.sms

        def rank(c: Config) -> tuple[float, ...]:
            together = min(2, _layout(w, c).blocks_per_sm(c, device))
            waves = abs(c.waves - (1.0 if busy else 0.5))
            return -together, waves, abs(c.shares - 2), c.stages

        return min(fits, key=rank)

    def compile_key(self, config: Config, w: Workload) -> str:
        """Sizes of images are arguments; the filter and the chunk of a row are baked in."""
        layout = _layout(w, config)
        baked = (w["x"].dtype, w.outputs[0].dtype, w["kernel_size"], w["stride"], w["x"].shape[1])
        return f"{config.stages} {config.shares} {layout} {baked} {_copy_bytes(w)}"

    def task(self, config: Config, w: Workload, device: DeviceSpec) -> CompileTask:
        more = {"C": w["x"].shape[1], "COPY_BYTES": _copy_bytes(w)}
        return rows_task("narrow", w, device, _layout(w, config), config, **more)

    def build(self, config: Config, w: Workload, device: DeviceSpec) -> Executable:
        built = compiled(self.task(config, w, device))
        return in_any_layout(RowsKernel(built, w, device, _layout(w, config), config), w, device)


def _copy_bytes(w: Workload) -> int:
    """What rows of x, and its address, are multiples of: at most 16 bytes."""
    x = as_read(w["x"])
    return math.gcd(x.shape[3] * x.shape[1] * x.itemsize, x.align, 16)


def _layout(w: Workload, config: Config) -> Layout:
    """As kernels/weight_grad_narrow.cuh computes it."""
    (filter_height, filter_width), (stride_h, stride_w) = w["kernel_size"], w["stride"]
    channels, chunk = w["x"].shape[1], chunk_of(w["grad_output"].shape[3])
    features = min(64, math.ceil(w["grad_output"].shape[1] / 16) * 16)
    warps = math.ceil(filter_width * channels / 8)
    raw = (chunk - 1) * stride_w * channels + warps * 8 + 2 + _copy_bytes(w) // 2
    raw = (raw + 7) // 8 * 8
    stage_bytes = chunk * (features * 2 + 16) + stride_h * raw * 2
    ring_rows = (prime(filter_height, stride_h) + 2) * stride_h
    loop_bytes = config.stages * stage_bytes + ring_rows * chunk * (warps | 1) * 16
    return Layout(features, chunk, warps, filter_height * features // 16, loop_bytes)
