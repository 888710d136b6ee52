"""Tensor maps: what the copy engine of sm_90 and later is told of a tensor in global memory.

A kernel takes one by value (code T of its signature) and asks for boxes of it. Elements outside
the tensor read as 0.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from tilewright.compile.cuda import check, driver

# cuda.h
_TYPES = {"f16": (6, 2), "f32": (7, 4), "f64": (8, 8), "bf16": (9, 2)}
"""CUtensorMapDataType, and bytes."""
_NO_INTERLEAVE, _NO_SWIZZLE, _L2_256B, _FILL_ZEROS = 0, 0, 3, 0
_SWIZZLES = {32: 1, 64: 2, 128: 3}

BYTES = 128
SWIZZLE_BYTES = 128
"""Usual innermost extent of a box: in each 1024 bytes, 16-byte chunk i of row r lies at i xor r. Of
narrower rows two or four lie side by side as one, whose chunks are exchanged within each."""


def tiled(
    dtype: str,
    address: int,
    sizes: Sequence[int],
    strides_bytes: Sequence[int],
    box: Sequence[int],
    stride: Sequence[int] | None = None,
    swizzled: bool = True,
) -> bytes:
    """The map of a tensor from which boxes are copied.

    Args:
        address: of the first element, a multiple of 16.
        sizes: innermost first; the innermost dim is contiguous.
        strides_bytes: of all dims but the innermost, multiples of 16.
        box: elements of a box in each dim, at most 256, those left out by `stride` among them; in
            the innermost 32, 64 or 128 bytes if `swizzled`, else a multiple of 16.
        stride: in each dim, of how many elements one is copied; 1 in the innermost.

    Raises:
        LaunchError: the driver refused.
    """
    return _encoded(
        "cuTensorMapEncodeTiled",
        dtype,
        address,
        sizes,
        strides_bytes,
        (_array(ctypes.c_uint32, box),),
        stride or [1] * len(sizes),
        _SWIZZLES[box[0] * _TYPES[dtype][1]] if swizzled else _NO_SWIZZLE,
    )


def im2col(
    dtype: str,
    address: int,
    sizes: Sequence[int],
    strides_bytes: Sequence[int],
    lower: Sequence[int],
    upper: Sequence[int],
    channels: int,
    pixels: int,
    stride: Sequence[int],
) -> bytes:
    """The map of an NHWC tensor from which columns of pixels are copied, as a convolution walks.

    Args:
        address: of the first element, a multiple of 16.
        sizes: (C, W, H, N).
        strides_bytes: of W, H and N, multiples of 16.
        lower: (W, H): where a filter's first tap begins to walk, minus the padding.
        upper: (W, H): where it ends, relative to the last pixel.
        channels: of a box, SWIZZLE_BYTES in all.
        pixels: of a box, in the order of width, height, batch.
        stride: (W, H) of the walk, at most 8.

    Raises:
        LaunchError: the driver refused.
    """
    return _encoded(
        "cuTensorMapEncodeIm2col",
        dtype,
        address,
        sizes,
        strides_bytes,
        (
            _array(ctypes.c_int, lower),
            _array(ctypes.c_int, upper),
            ctypes.c_uint32(channels),
            ctypes.c_uint32(pixels),
        ),
        [1, *stride, 1],
        _SWIZZLES[SWIZZLE_BYTES],
    )


def _encoded(
    function: str,
    dtype: str,
    address: int,
    sizes: Sequence[int],
    strides_bytes: Sequence[int],
    box: tuple[Any, ...],
    element_strides: Sequence[int],
    swizzle: int,
) -> bytes:
    room = ctypes.create_string_buffer(BYTES + 64)
    start = -ctypes.addressof(room) % 64  # the driver wants it aligned
    status = getattr(driver(), function)(
        ctypes.c_void_p(ctypes.addressof(room) + start),
        ctypes.c_int(_TYPES[dtype][0]),
        ctypes.c_uint32(len(sizes)),
        ctypes.c_void_p(address),
        _array(ctypes.c_uint64, sizes),
        _array(ctypes.c_uint64, strides_bytes),
        *box,
        _array(ctypes.c_uint32, element_strides),
        *map(ctypes.c_int, (_NO_INTERLEAVE, swizzle, _L2_256B, _FILL_ZEROS)),
    )
    check(status, f"{function} of {dtype}{list(sizes)} with strides {list(strides_bytes)} bytes")
    return room.raw[start : start + BYTES]


def _array(kind: Any, values: Sequence[int]) -> Any:
    return (kind * len(values))(*values)
