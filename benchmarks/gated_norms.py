"""RMS norms with a gate, as state-space models have them. Dao and Gu, arXiv 2405.21060.

tilewright tune --import benchmarks/gated_norms.py --suite gated_norms --impl fused --baseline inductor
"""  # noqa: E501

from torch import Tensor
from torch.nn import functional as F

import tilewright as tw
from tilewright.suite import suite


@tw.fuse
def gated(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    """The gate behind the norm."""
    return F.rms_norm(x, x.shape[-1:], w) * F.silu(g)


@tw.fuse
def gated2(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    """The gate before the norm, as Mamba 2 has it."""
    return F.rms_norm(x * F.silu(g), x.shape[-1:], w)


def backward(name: str, width: int) -> str:
    row = f"bf16[8192,{width}]"
    return f"{name}_backward(grad_output={row}, x={row}, g={row}, w=bf16[{width}])"


gated_norms = suite(
    "gated_norms",
    [backward("gated2", width) for width in (1024, 4096, 5120, 16384)],
)
