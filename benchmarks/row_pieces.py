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


@tw.fuse
def rotated_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries and keys of GPT-J: rotary positions of neighbours."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


@tw.fuse
def rotated_pairs_of_norm(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same of normalised heads."""
    y = F.rms_norm(x, x.shape[-1:], weight, 1e-6)
    even, odd = y[..., 0::2], y[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


X = "bf16[4,2048,32,128]"
PAIRS = f"x={X}, {{weight}}cos=bf16[2048,1,64], sin=bf16[2048,1,64]"


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
        f"rotated_pairs({PAIRS.format(weight='')})",
        f"rotated_pairs_backward(grad_output={X}, {PAIRS.format(weight='')}, grads=[x])",
        f"rotated_pairs_of_norm({PAIRS.format(weight='weight=bf16[128], ')})",
        f"rotated_pairs_of_norm_backward(grad_output={X}, "
        f"{PAIRS.format(weight='weight=bf16[128], ')}, grads=[x,weight])",
    ],
)
