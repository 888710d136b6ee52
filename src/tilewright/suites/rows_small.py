"""Sums of few rows, where launches and the host take longer than the memory does.

A graph's readout, the gradient of one sentence's embeddings, updates of a thousand rows, routed
tokens, messages of a small graph, and a histogram.
"""

from tilewright.suite import suite

rows_small = suite(
    "rows_small",
    [
        "index_add(x=f32[20,64], dim=0, index=i64[50], source=f32[50,64])",
        "embedding_backward(grad=f32[512,768], index=i64[512], num_weights=30522)",
        "index_add(x=f32[1000,128], dim=0, index=i64[1000], source=f32[1000,128])!donate=x",
        "index_add(x=bf16[2000,1024], dim=0, index=i64[4096], source=bf16[4096,1024])!donate=x",
        "index_add(x=f32[5000,64], dim=0, index=i64[16384], source=f32[16384,64])!donate=x",
        "scatter_add(x=f32[1000], dim=0, index=i64[5000], src=f32[5000])",
    ],
)
