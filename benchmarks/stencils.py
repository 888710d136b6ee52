"""Stencils of stencils, of which values are stored on the way, and their gradients.

    tilewright bench --import benchmarks/stencils.py --suite stencils

The names are those of the results which are kept.
"""

from torch import Tensor
from torch.nn import functional as F

import tilewright as tw
from tilewright.suite import suite


def _blurred(x: Tensor) -> Tensor:
    padded = F.pad(x, (1, 1, 1, 1))
    n, m = x.shape[1:]
    return sum(padded[:, i : i + n, j : j + m] for i in range(3) for j in range(3)) / 9


@tw.fuse
def edges(x: Tensor) -> Tensor:
    """The magnitude of Sobel's filter of images [batch, height, width]."""
    p = F.pad(x, (1, 1, 1, 1))
    above, beside, below = p[:, :-2], p[:, 1:-1], p[:, 2:]
    across = sum(w * (r[..., 2:] - r[..., :-2]) for w, r in ((1, above), (2, beside), (1, below)))
    down = sum(
        w * (below[..., k : k + x.shape[2]] - above[..., k : k + x.shape[2]])
        for k, w in enumerate((1, 2, 1))
    )
    return (across * across + down * down + 1e-6).sqrt()


@tw.fuse
def blurred_thrice(x: Tensor) -> Tensor:
    return _blurred(_blurred(_blurred(x)))


IMAGES = ("f32[16,512,512]", "f32[64,512,512]")

stencils = suite(
    "stencils",
    [
        text
        for name in ("edges", "blurred_thrice")
        for x in IMAGES
        for text in (f"{name}(x={x})", f"{name}_backward(grad_output={x}, x={x})")
    ],
)
