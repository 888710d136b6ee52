"""The bias + layer norm block at the hidden sizes of GPT-2 and GPT-3, and two wider ones.

Source: NVIDIA/Fuser issue 383 (twelve sizes, 8192 rows, fp16); 32768 and 65536 are ours.
"""

from tilewright.suite import suite

WIDTHS = (768, 1024, 1280, 1536, 1600, 2048, 2560, 4096, 5140, 12288, 16384, 20480, 32768, 65536)

bias_layer_norm_gpt = suite(
    "bias_layer_norm_gpt",
    [
        f"bias_layer_norm(x=f16[8192,{h}], bias0=f16[{h}], bias1=f16[{h}],"
        f" weight=f16[{h}], bias=f16[{h}])"
        for h in WIDTHS
    ],
)
