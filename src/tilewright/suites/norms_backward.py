"""Gradients of RMS norm, softmax and the bias + layer norm block: many rows, and a few hundred.

Source: four of the hidden sizes of NVIDIA/Fuser issue 383, those of add_norms_gpt; the row counts
are those of norms_sweep.
"""

from tilewright.suite import suite


def texts(dtype: str, rows: int, h: int) -> tuple[str, ...]:
    wide, like_x, row = f"f32[{rows},1]", f"{dtype}[{rows},{h}]", f"{dtype}[{h}]"
    return (
        f"rms_norm_backward(grad_output={like_x}, x={like_x}, rstd={wide}, weight={row})",
        f"softmax_backward(grad_output={like_x}, output={like_x})",
        f"bias_layer_norm_backward(grad_output={like_x}, x={like_x}, bias0={row}, bias1={row},"
        f" mean={wide}, rstd={wide}, weight={row})",
    )


norms_backward = suite(
    "norms_backward",
    [
        text
        for dtype in ("f16", "bf16", "f32")
        for rows in (8192, 512)
        for h in (768, 4096, 5140, 16384)
        for text in texts(dtype, rows, h)
    ],
    method="graph",
    by=("op,grad_output[0]", "op,grad_output.dtype"),
)
