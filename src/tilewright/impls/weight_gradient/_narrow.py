"""What the weight-gradient kernels that unfold rows of x share: which they take, and sizes."""

from __future__ import annotations

import math

from tilewright.device import DeviceSpec
from tilewright.impls.weight_gradient._problem import as_read
from tilewright.impls.weight_gradient._rows import rows_refusal
from tilewright.op import Workload

MOST_COLUMNS = 32
"""Taps times channels of one row of the filter: four octets."""


def narrow_refusal(w: Workload, device: DeviceSpec) -> str | None:
    """Why rows cannot be unfolded, in words, or None."""
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
    if copy_bytes(w) < 4:
        return f"x={x}: its rows are copied in pieces of 4 aligned bytes or more"
    return None


def copy_bytes(w: Workload) -> int:
    """What rows of x, and its address, are multiples of: at most 16 bytes."""
    x = as_read(w["x"])
    return math.gcd(x.shape[3] * x.shape[1] * x.itemsize, x.align, 16)


def octets_of(w: Workload) -> int:
    """Eight columns each: of the taps and channels of one filter row."""
    return math.ceil(w["kernel_size"][1] * w["x"].shape[1] / 8)


def raw_bytes(w: Workload, chunk: int) -> int:
    """A step's rows of x, of a chunk of pixels, as they are copied."""
    stride_h, stride_w = w["stride"]
    halves = (chunk - 1) * stride_w * w["x"].shape[1] + octets_of(w) * 8 + 2 + copy_bytes(w) // 2
    return stride_h * ((halves + 7) // 8 * 8) * 2


def unfolded_bytes(w: Workload, chunk: int) -> int:
    """A step's rows of x, unfolded."""
    return w["stride"][0] * chunk * (octets_of(w) | 1) * 16
