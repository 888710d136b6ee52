"""Gradients of adaptive layer norms, whose shift, scale and gate each sample has of its own.

    tilewright bench --import benchmarks/adaptive_norms.py --suite adaptive_norms

Shapes are those of diffusion transformers: Peebles & Xie, arXiv 2212.09748 (1152 wide); Esser et
al., arXiv 2403.03206 (1536); those of 3072 as larger models of the latter kind have them.
"""

from torch import Tensor
from torch.nn import functional as F

import tilewright as tw
from tilewright.suite import suite


@tw.fuse
def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1.0 + scale) + shift


@tw.fuse
def gated_modulated(
    x: Tensor, branch: Tensor, gate: Tensor, shift: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """A block's residual, and the norm of the next."""
    total = x + gate * branch
    return total, F.layer_norm(total, total.shape[-1:], eps=1e-6) * (1.0 + scale) + shift


def rows() -> list[str]:
    found = []
    for dtype, samples, tokens, width in (
        ("f16", 32, 256, 1152),
        ("bf16", 256, 256, 1152),
        ("bf16", 4, 4096, 1536),
        ("bf16", 2, 4608, 3072),
    ):
        full, vector = f"{dtype}[{samples},{tokens},{width}]", f"{dtype}[{samples},1,{width}]"
        found += [
            f"modulated_backward(grad_output={full}, x={full}, shift={vector}, scale={vector})",
            f"gated_modulated_backward(grad_output0={full}, grad_output1={full}, x={full}, "
            f"branch={full}, gate={vector}, shift={vector}, scale={vector})",
        ]
    return found


adaptive_norms = suite("adaptive_norms", rows())
