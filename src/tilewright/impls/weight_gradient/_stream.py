"""Pixels of a convolution of stride 1 as one stream, of which taps read the same copy of x.

Rows of x are padded by what one side's padding is, so that a row's last zeros are the next one's
first; rows between images likewise. `grad_output` is padded to the same pitch. A tap then is a
number of pixels by which x is ahead, and x is copied once for all taps of a block.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

from tilewright.impls.weight_gradient._problem import PANEL, Problem

ROW_TAPS = 3
"""Taps of a filter row, which one warpgroup multiplies in one instruction."""


@functools.lru_cache(maxsize=1024)
def stream_of(problem: Problem) -> Problem:
    """The problem whose output's pixels are those of the stream."""
    p, q, s, height, width, *rest = problem.geometry
    pad_h, pad_w = rest[2:4]
    rows, pitch = max(height + pad_h, p), max(width + pad_w, q)
    images = problem.pixels // (p * q)
    return replace(
        problem, pixels=images * rows * pitch, geometry=(rows, pitch, s, height, width, *rest)
    )


def halo_of(problem: Problem, tile_n: int, tile_k: int) -> int:
    """Chunks of `tile_k` pixels by which a tile's last tap is ahead of its first one; 0 where taps
    have no stream in common, or a tile no whole filter rows."""
    _, pitch, filter_width, *_, stride_h, stride_w, _, _, dilation_h, dilation_w = stream_of(
        problem
    ).geometry
    rows, rest = divmod(tile_n // PANEL, ROW_TAPS)
    if filter_width != ROW_TAPS or rest or problem.taps // ROW_TAPS % rows:
        return 0
    reach = (ROW_TAPS - 1) * dilation_w
    if (stride_h, stride_w) != (1, 1) or reach + 16 > tile_k:
        return 0
    if stream_of(problem).pixels >= 2**31 - 2**20:
        return 0
    return math.ceil(((rows - 1) * dilation_h * pitch + reach) / tile_k)
