"""Gradients of group norm, with the SiLU behind it as diffusion U-Nets have it.

    tilewright bench --import benchmarks/group_norms.py --suite group_norms

Shapes are those of the U-Net and the autoencoder of Rombach et al., arXiv 2112.10752: 32 groups.
"""

from torch import Tensor
from torch.nn import functional as F

import tilewright as tw
from tilewright.suite import suite


@tw.fuse
def grouped(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.group_norm(x, 32, weight, bias)


@tw.fuse
def grouped_silu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.silu(F.group_norm(x, 32, weight, bias))


def backward(name: str, images: int, channels: int, size: int) -> str:
    image = f"f16[{images},{channels},{size},{size}]"
    return (
        f"{name}_backward(grad_output={image}, x={image}, "
        f"weight=f16[{channels}], bias=f16[{channels}])"
    )


group_norms = suite(
    "group_norms",
    [
        backward("grouped_silu", 2, 320, 64),
        backward("grouped_silu", 2, 640, 32),
        backward("grouped_silu", 2, 1280, 16),
        backward("grouped_silu", 8, 320, 64),
        backward("grouped_silu", 8, 512, 64),
        backward("grouped_silu", 4, 128, 128),
        backward("grouped", 8, 320, 64),
    ],
)
