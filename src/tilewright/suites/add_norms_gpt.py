"""Residual addition and normalisation of pre-norm transformers, forward and backward.

Source: four of the hidden sizes of NVIDIA/Fuser issue 383; the blocks are those of GPT and Llama.
"""

from tilewright.suite import suite


def texts(h: int) -> tuple[str, ...]:
    rows, row = f"bf16[8192,{h}]", f"bf16[{h}]"
    given = f"x={rows}, residual={rows}, weight={row}"
    gradients = f"grad_output={rows}, grad_output_total={rows}, total={rows}"
    return (
        f"add_layer_norm({given}, bias={row})",
        f"add_rms_norm({given})",
        f"add_layer_norm_backward({gradients}, mean=f32[8192,1], rstd=f32[8192,1], weight={row})",
        f"add_rms_norm_backward({gradients}, rstd=f32[8192,1], weight={row})",
    )


add_norms_gpt = suite(
    "add_norms_gpt", [text for h in (768, 4096, 5140, 16384) for text in texts(h)], by=("op",)
)
