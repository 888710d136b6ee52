"""Linear interpolation and its gradients, as Paddle's operator benchmark has them.

Sources: PaddlePaddle/Paddle pull request 45946 and PaddlePaddle/benchmark pull request 1530 (A, the
two B and C of its table; B's weight is not given there); the others, with and without a broadcast
dim, are ours.
"""

from tilewright.suite import suite

OPERANDS = (
    # dtype, shape of the result, x, end, weight
    ("f32", "16,102400", "16,102400", "16,102400", "0.2"),  # A
    ("f64", "16,204800", "16,204800", "16,204800", "0.5"),  # B until 2022
    ("f32", "16,3,224,224", "16,1,1,1", "16,3,224,224", "0.5"),  # B since
    ("f32", "16,3,244,244", "16,1,1,1", "16,3,244,244", "f32[3,1,244]"),  # C
    ("f32", "16,3,244,244", "16,3,244,244", "16,3,244,244", "0.3"),
    ("f32", "8192,4096", "8192,4096", "4096", "0.3"),
    ("f32", "8192,4096", "8192,4096", "8192,1", "f32[8192,4096]"),
)


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
