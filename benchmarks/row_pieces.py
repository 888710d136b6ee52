"""Rows that are normalised whole and then used in pieces.

    tilewright bench --import benchmarks/row_pieces.py --suite row_pieces

The names are those of the results which are kept.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

import tilewright as tw
from tilewright.suite import suite


@tw.fuse
def rotated_norm(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries and keys of Qwen3: RMS norm of each head, then rotary positions of its halves."""
    y = F.rms_norm(x, x.shape[-1:], weight, 1e-6)
    first, second = y.chunk(2, -1)
    return y * cos + torch.cat([-second, first], -1) * sin


@tw.fuse
def half_of_norm(x: Tensor, weight: Tensor) -> Tensor:
    """What a projection of the first half takes of normalised rows."""
    return F.rms_norm(x, x.shape[-1:], weight)[..., : x.shape[-1] // 2]


def rotated(heads: int, dtype: str = "bf16") -> str:
    angles = f"{dtype}[2048,1,128]"
    return f"x={dtype}[4,2048,{heads},128], weight={dtype}[128], cos={angles}, sin={angles}"


row_pieces = suite(
    "row_pieces",
    [
        *(f"rotated_norm({rotated(heads)})" for heads in (8, 32)),
        f"rotated_norm({rotated(32, 'f32')})",
        f"rotated_norm_backward(grad_output=bf16[4,2048,32,128], {rotated(32)}, grads=[x,weight])",
        "half_of_norm(x=f16[8192,4096], weight=f16[4096])",
    ],
)
