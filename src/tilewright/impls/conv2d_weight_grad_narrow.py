"""The weight gradient of a convolution of few channels: a network's first layer."""

from __future__ import annotations

import math
from typing import Any

from tilewright.build import CompileTask
from tilewright.compile.cache import compiled
from tilewright.device import DeviceSpec
from tilewright.impl import Executable, Implementation
from tilewright.impls._weight_grad_layout import in_any_layout
from tilewright.impls._weight_grad_narrow import (
    copy_bytes,
    narrow_refusal,
    octets_of,
    raw_bytes,
    unfolded_bytes,
)
from tilewright.impls._weight_grad_rows import (
    SUMS_BESIDE,
    Config,
    Layout,
    RowsKernel,
    chunk_of,
    forecast,
    prime,
    room_refusal,
    rows_task,
    shape_refusal,
)
from tilewright.op import Workload
from tilewright.space import ConfigSpace

WIDE_BIAS = 16
"""Registers that fp32 sums of the bias take besides."""


class Conv2dWeightGradNarrow(Implementation):
    """Rows of x are unfolded once in shared memory and meet every row of grad_output that needs
    them: taps and channels of a filter row together fill the columns that channels alone do not.

    The bias's gradient is one column more.
    """

    name, backend = "conv2d_weight_grad_narrow", "cuda"
    op = ("conv2d_weight_grad", "conv2d_weight_bias_grad")

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        return narrow_refusal(w, device) or room_refusal(w, self.space(w, device))

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

    def forecast(self, config: Config, w: Workload, device: DeviceSpec) -> dict[str, Any]:
        """Without a time: it has no model of that."""
        return forecast(w, device, _layout(w, config), config)

    def compile_key(self, config: Config, w: Workload) -> str:
        """Sizes of images are arguments; the filter and the chunk of a row are baked in."""
        layout = _layout(w, config)
        dtypes = (w["x"].dtype, *(o.dtype for o in w.outputs))
        baked = (dtypes, w["kernel_size"], w["stride"], w["x"].shape[1])
        return f"{config.stages} {config.shares} {layout} {baked} {copy_bytes(w)}"

    def task(self, config: Config, w: Workload, device: DeviceSpec) -> CompileTask:
        more = {"C": w["x"].shape[1], "COPY_BYTES": copy_bytes(w)}
        return rows_task(("unfold", "narrow"), w, device, _layout(w, config), config, more)

    def build(self, config: Config, w: Workload, device: DeviceSpec) -> Executable:
        built = compiled(self.task(config, w, device))
        return in_any_layout(RowsKernel(built, w, device, _layout(w, config), config), w, device)


def _layout(w: Workload, config: Config) -> Layout:
    """As kernels/weight_grad_narrow.cuh computes it."""
    filter_height, chunk = w["kernel_size"][0], chunk_of(w["grad_output"].shape[3])
    features = min(64, math.ceil(w["grad_output"].shape[1] / 16) * 16)
    stage_bytes = chunk * (features * 2 + 16) + raw_bytes(w, chunk)
    ring = prime(filter_height, w["stride"][0]) + 2
    loop_bytes = config.stages * stage_bytes + ring * unfolded_bytes(w, chunk)
    fragments, wide = filter_height * features // 16, [o.dtype for o in w.outputs[1:]] == ["f32"]
    beside = SUMS_BESIDE + WIDE_BIAS * wide
    return Layout(features, chunk, octets_of(w), fragments, loop_bytes, beside_sums=beside)
