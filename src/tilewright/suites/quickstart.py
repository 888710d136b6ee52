"""A few real shapes of each operator, small enough for two CPU cores.

Sources: GPT-2 and GPT-3 hidden sizes (768, 5140, 1024), Llama-2-7B (4096) and DeepSeek-V3 (7168)
hidden sizes, GPT-2's vocabulary (50257), and Paddle's operator benchmark for lerp (PR 45946).
"""

from tilewright.suite import suite

quickstart = suite(
    "quickstart",
    [
        "bias_layer_norm(x=bf16[8192,768], bias0=bf16[768], bias1=bf16[768],"
        " weight=bf16[768], bias=bf16[768])",
        "bias_layer_norm(x=bf16[2048,5140], bias0=bf16[5140], bias1=bf16[5140],"
        " weight=bf16[5140], bias=bf16[5140])",
        "bias_layer_norm(x=f32[2048,5140], bias0=f32[5140], bias1=f32[5140],"
        " weight=f32[5140], bias=f32[5140])",
        "layer_norm(x=f32[4096,1024], weight=f32[1024], bias=f32[1024])",
        "layer_norm(x=bf16[8192,768], weight=bf16[768], bias=bf16[768])",
        "rms_norm(x=bf16[4096,4096], weight=bf16[4096])",
        "rms_norm(x=f32[1,7168], weight=f32[7168])",
        "softmax(x=f32[4096,4096])",
        "softmax(x=bf16[1024,50257])",
        "lerp(x=f32[16,102400], end=f32[16,102400], weight=0.2)",
        "lerp(x=f32[16,1,1,1], end=f32[16,3,244,244], weight=f32[3,1,244])",
        "lerp(x=bf16[4096,4096], end=bf16[4096], weight=0.3)",
    ],
)
