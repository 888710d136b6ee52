"""Norms of two tensors of different rows at once, as of queries and keys, and their gradients.

tilewright bench --import benchmarks/two_norms.py --suite two_norms
"""

from torch import Tensor
from torch.nn import functional as F

import tilewright as tw
from tilewright.suite import suite


@tw.fuse
def query_and_key_norms(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor
) -> tuple[Tensor, Tensor]:
    """RMS norm of each head, of more queries than keys."""
    size = q.shape[-1:]
    return F.rms_norm(q, size, q_weight, 1e-6), F.rms_norm(k, size, k_weight, 1e-6)


Q, K = "bf16[4,2048,32,128]", "bf16[4,2048,8,128]"
GIVEN = f"q={Q}, k={K}, q_weight=bf16[128], k_weight=bf16[128]"
ROWS = "q={d}[8192,4096], k={d}[2048,4096], q_weight={d}[4096], k_weight={d}[4096]"
WIDE = [ROWS.format(d=d) for d in ("bf16", "f32")]

two_norms = suite(
    "two_norms",
    [
        f"query_and_key_norms({GIVEN})",
        f"query_and_key_norms_backward(grad_output0={Q}, grad_output1={K}, {GIVEN})",
        *(
            f"query_and_key_norms_backward(grad_output0={d}[8192,4096], "
            f"grad_output1={d}[2048,4096], {given})"
            for d, given in zip(("bf16", "f32"), WIDE, strict=True)
        ),
    ],
)
