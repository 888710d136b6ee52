"""Layer norm, RMS norm and softmax over the hidden sizes of GPT-2 and GPT-3: many rows, a few
hundred, and the few of a decoding step.

Source: the widths of NVIDIA/Fuser issue 383 and two wider ones; the row counts are ours.
"""

from tilewright.suite import suite
from tilewright.suites._widths import WIDTHS


def texts(dtype: str, rows: int, h: int) -> tuple[str, ...]:
    x, vector = f"x={dtype}[{rows},{h}]", f"{dtype}[{h}]"
    return (
        f"layer_norm({x}, weight={vector}, bias={vector})",
        f"rms_norm({x}, weight={vector})",
        f"softmax({x})",
    )


norms_sweep = suite(
    "norms_sweep",
    [
        text
        for dtype in ("f16", "bf16", "f32")
        for rows in (8192, 512, 16)
        for h in WIDTHS
        for text in texts(dtype, rows, h)
    ],
    method="graph",
    by=("x[0]", "op,x[-1]"),
)
