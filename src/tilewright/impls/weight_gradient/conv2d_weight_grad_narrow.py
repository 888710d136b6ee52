"""The weight gradient of a convolution of few channels: a network's first layer."""

from __future__ import annotations

import math

from tilewright.build import CompileTask
from tilewright.device import DeviceSpec
from tilewright.impls.weight_gradient._narrow import (
    copy_bytes,
    narrow_refusal,
    octets_of,
    raw_bytes,
    unfolded_bytes,
)
from tilewright.impls.weight_gradient._rows import (
    SUMS_BESIDE,
    Config,
    Layout,
    WeightGradByRows,
    chunk_of,
    prime,
    room_refusal,
    rows_task,
    sums_refusal,
)
from tilewright.op import Workload

WIDE_BIAS = 16
"""Registers that fp32 sums of the bias take besides."""


class Conv2dWeightGradNarrow(WeightGradByRows):
    """Rows of x are unfolded once in shared memory and meet every row of grad_output that needs
    them: taps and channels of a filter row together fill the columns that channels alone do not.

    The bias's gradient is one column more.
    """

    name = "conv2d_weight_grad_narrow"

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        return (
            narrow_refusal(w, device)
            or room_refusal(w, self.space(w, device))
            or sums_refusal(self, w, device)
        )

    def layout(self, w: Workload, config: Config) -> Layout:
        return _layout(w, config)

    def heuristic(self, w: Workload, device: DeviceSpec) -> Config:
        """Two blocks for each SM and most loads under way; few lines leave more sums than work."""
        fits = list(self.space(w, device))
        n, _, height, _ = w["grad_output"].shape
        busy = n * height >= 8 * device.sms  # a guess

        def rank(c: Config) -> tuple[float, ...]:
            together = min(2, _layout(w, c).blocks_per_sm(c, device))
            waves = abs(c.waves - (1.0 if busy else 0.5))
            return -together, waves, abs(c.shares - 2), c.stages

        return min(fits, key=rank)

    def compile_key(self, config: Config, w: Workload) -> str:
        """Sizes of images are arguments; the filter and the chunk of a row are baked in."""
        layout = _layout(w, config)
        dtypes = (w["x"].dtype, *(o.dtype for o in w.outputs))
        baked = (dtypes, w["kernel_size"], w["stride"], w["x"].shape[1])
        return f"{config.stages} {config.shares} {layout} {baked} {copy_bytes(w)}"

    def task(self, config: Config, w: Workload, device: DeviceSpec) -> CompileTask:
        more = {"C": w["x"].shape[1], "COPY_BYTES": copy_bytes(w)}
        return rows_task(("unfold", "narrow"), w, device, _layout(w, config), config, more)


def _layout(w: Workload, config: Config) -> Layout:
    """As kernels/weight_gradient/narrow.cuh computes it."""
    filter_height, chunk = w["kernel_size"][0], chunk_of(w["grad_output"].shape[3])
    features = min(64, math.ceil(w["grad_output"].shape[1] / 16) * 16)
    stage_bytes = chunk * (features * 2 + 16) + raw_bytes(w, chunk)
    ring = prime(filter_height, w["stride"][0]) + 2
    loop_bytes = config.stages * stage_bytes + ring * unfolded_bytes(w, chunk)
    fragments, wide = filter_height * features // 16, [o.dtype for o in w.outputs[1:]] == ["f32"]
    beside = SUMS_BESIDE + WIDE_BIAS * wide
    return Layout(features, chunk, octets_of(w), fragments, loop_bytes, beside_sums=beside)
