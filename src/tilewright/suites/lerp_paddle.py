"""Linear interpolation and its gradients, as Paddle's operator benchmark has them.

Sources: PaddlePaddle/Paddle pull request 45946 and PaddlePaddle/benchmark pull request 1530 (A, the
two B and C of its table; B's weight is not given there); the others, with and without a broadcast
dim, are ours.
"""

from tilewright.suite import suite
from tilewright.suites._lerp import OPERANDS


def forward(dtype: str, shape: str, x: str, end: str, weight: str) -> str:
    return f"lerp(x={dtype}[{x}], end={dtype}[{end}], weight={weight})"


def backward(dtype: str, shape: str, x: str, end: str, weight: str, every: bool = False) -> str:
    """Gradients of x and end, as Paddle's operator computes them, or of every tensor."""
    operands = f"x={dtype}[{x}], end={dtype}[{end}], weight={weight}"
    grads = ", grads=[x,end]" if "[" in weight and not every else ""
    return f"lerp_backward(grad_output={dtype}[{shape}], {operands}{grads})"


lerp_paddle = suite(
    "lerp_paddle",
    [
        *(forward(*operands) for operands in OPERANDS),
        *(backward(*operands) for operands in OPERANDS),
        # and of the weight, which PyTorch's autograd gives too
        *(backward(*operands, every=True) for operands in OPERANDS if "[" in operands[-1]),
    ],
)
