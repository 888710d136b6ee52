"""The gradients of an RMS norm with a gate before it, as Mamba 2 has it. arXiv 2405.21060.

    tilewright tune --import benchmarks/gated_norms.py --suite gated_norms --impl fused

The name is that of the results which are kept.
"""

from torch import Tensor
from torch.nn import functional as F

import tilewright as tw
from tilewright.suite import suite


@tw.fuse
def gated2(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    """Of a state-space model's output x by its gate g."""
    return F.rms_norm(x * F.silu(g), x.shape[-1:], w)


def backward(width: int) -> str:
    row = f"bf16[8192,{width}]"
    return f"gated2_backward(grad_output={row}, x={row}, g={row}, w=bf16[{width}])"


gated_norms = suite("gated_norms", [backward(width) for width in (1024, 4096, 5120, 16384)])
