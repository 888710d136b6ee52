"""Forwards and gradients whose errors docs/fusion.md lists: `tilewright verify --suite accuracy`.

Source: GPT-2's hidden size, 768, and 512 rows, and rows as long as vocabularies; all gradients are
asked for, those of broadcast operands of lerp too. Near a weight of 1 lerp's other operand counts
little, and how exactly it does depends on the digits of 1 - weight.
"""

from tilewright.suite import suite


def texts(dtype: str, rows: int = 512, h: int = 768) -> tuple[str, ...]:
    t, row, column = (f"{dtype}[{shape}]" for shape in (f"{rows},{h}", f"{h}", f"{rows},1"))
    mean, rstd = f"mean=f32[{rows},1]", f"rstd=f32[{rows},1]"
    total = f"grad_output_total={t}, total={t}"
    lerp = f"x={row}, end={t}, weight={column}"
    return (
        f"layer_norm(x={t}, weight={row}, bias={row})",
        f"layer_norm_backward(grad_output={t}, x={t}, {mean}, {rstd}, weight={row})",
        f"rms_norm(x={t}, weight={row})",
        f"rms_norm_backward(grad_output={t}, x={t}, {rstd}, weight={row})",
        f"softmax(x={t})",
        f"softmax_backward(grad_output={t}, output={t})",
        f"bias_layer_norm(x={t}, bias0={row}, bias1={row}, weight={row}, bias={row})",
        f"bias_layer_norm_backward(grad_output={t}, x={t}, bias0={row}, bias1={row}, {mean},"
        f" {rstd}, weight={row})",
        f"add_layer_norm(x={t}, residual={t}, weight={row}, bias={row})",
        f"add_layer_norm_backward(grad_output={t}, {total}, {mean}, {rstd}, weight={row})",
        f"add_rms_norm(x={t}, residual={t}, weight={row})",
        f"add_rms_norm_backward(grad_output={t}, {total}, {rstd}, weight={row})",
        f"lerp({lerp})",
        f"lerp_backward(grad_output={t}, {lerp})",
        f"lerp(x={t}, end={t}, weight=0.9999)",
        f"lerp_backward(grad_output={t}, x={t}, end={t}, weight=0.9999)",
    )


DTYPES = ("f32", "f16", "bf16")
WIDE = [text for d in DTYPES for text in texts(d, 16, 32768)[:6]]
"""Of norms and softmax."""

accuracy = suite("accuracy", [text for d in DTYPES for text in texts(d)] + WIDE)
