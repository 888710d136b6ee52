"""What the two generations of CUTLASS's weight gradients have in common."""

from __future__ import annotations

import struct

from tilewright.op import Workload

ELEMENTS = {"f16": "cutlass::half_t", "bf16": "cutlass::bfloat16_t", "f32": "float"}


def only_compared(w: Workload) -> str | None:
    """CUTLASS multiplies the padding, which our kernels compute around."""
    if not any(w["padding"]):
        return None
    return (
        f"padding={list(w['padding'])} is multiplied: beside an infinity at grad_output's border "
        "that is NaN, in sums that the infinity is no part of"
    )


def packed(w: Workload, slices: int = 1, serial: bool = False) -> bytes:
    """`struct Problem` of kernels/weight_gradient/cutlass_common.cuh."""
    n, c, height, width = w["x"].shape
    _, k, p, q = w["grad_output"].shape
    fields = (n, height, width, c, k, p, q, *w["kernel_size"])
    fields += (*w["padding"], *w["stride"], *w["dilation"], slices, serial)
    return struct.pack(f"{len(fields)}i", *fields)
