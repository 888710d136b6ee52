"""The bias + layer norm block at the hidden sizes of GPT-2 and GPT-3, and two wider ones.

Source: NVIDIA/Fuser issue 383 (twelve sizes, 8192 rows, fp16); 32768 and 65536 are ours.
"""

from tilewright.suite import suite
from tilewright.suites._widths import WIDTHS

bias_layer_norm_gpt = suite(
    "bias_layer_norm_gpt",
    [
        f"bias_layer_norm(x=f16[8192,{h}], bias0=f16[{h}], bias1=f16[{h}],"
        f" weight=f16[{h}], bias=f16[{h}])"
        for h in WIDTHS
    ],
)
