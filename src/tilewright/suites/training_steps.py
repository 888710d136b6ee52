"""Forward and backward together: layer norm at the hidden sizes of GPT, other norms and softmax at
three of them, and lerp.

Sources: those of layer_norm_backward_gpt and of lerp_paddle.
"""

from tilewright.suite import suite
from tilewright.suites._lerp import OPERANDS
from tilewright.suites._widths import WIDTHS


def lerp_step(dtype: str, shape: str, x: str, end: str, weight: str) -> str:
    operands = f"x={dtype}[{x}], end={dtype}[{end}], weight={weight}"
    return f"lerp_training({operands}, grad_output={dtype}[{shape}])"


THREE_WIDTHS = (768, 5140, 16384)


def row_steps(h: int) -> tuple[str, ...]:
    block, row = f"f16[8192,{h}]", f"f16[{h}]"
    rows = f"x={block}, grad_output={block}"
    added = f"x={block}, residual={block}, grad_output={block}, grad_output_total={block}"
    return (
        f"rms_norm_training({rows}, weight={row})",
        f"softmax_training({rows})",
        f"bias_layer_norm_training({rows}, bias0={row}, bias1={row}, weight={row}, bias={row})",
        f"add_layer_norm_training({added}, weight={row}, bias={row})",
        f"add_rms_norm_training({added}, weight={row})",
    )


training_steps = suite(
    "training_steps",
    [
        *(
            f"layer_norm_training(x=f16[8192,{h}], grad_output=f16[8192,{h}], weight=f16[{h}],"
            f" bias=f16[{h}])"
            for h in WIDTHS
        ),
        *(text for h in THREE_WIDTHS for text in row_steps(h)),
        *(lerp_step(*operands) for operands in OPERANDS),
    ],
)
