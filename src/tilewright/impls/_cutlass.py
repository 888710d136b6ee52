"""What the two generations of CUTLASS's weight gradients have in common."""

from __future__ import annotations

import struct

from tilewright.op import Workload

ELEMENTS = {"f16": "cutlass::half_t", "bf16": "cutlass::bfloat16_t", "f32": "float"}


def packed(w: Workload, slices: int = 1, serial: bool = False) -> bytes:
    """`struct Problem` of kernels/weight_grad_cutlass_common.cuh."""
    n, c, height, width = w["x"].shape
    _, k, p, q = w["grad_output"].shape
    fields = (n, height, width, c, k, p, q, *w["kernel_size"])
    fields += (*w["padding"], *w["stride"], *w["dilation"], slices, serial)
    return struct.pack(f"{len(fields)}i", *fields)
