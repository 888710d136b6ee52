"""Layer norm's gradients at the hidden sizes of GPT-2 and GPT-3, and two wider ones.

Source: NVIDIA/Fuser issue 383 (twelve sizes, 8192 rows, fp16); 32768 and 65536 are ours.
"""

from tilewright.suite import suite
from tilewright.suites._widths import WIDTHS

layer_norm_backward_gpt = suite(
    "layer_norm_backward_gpt",
    [
        f"layer_norm_backward(grad_output=f16[8192,{h}], x=f16[8192,{h}], mean=f32[8192,1],"
        f" rstd=f32[8192,1], weight=f16[{h}])"
        for h in WIDTHS
    ],
)
