"""Mixture of experts: what eight experts made of each token, added up per token.

Source: DeepSeek-V3's hidden size (7168) and eight routed experts a token; nvFuser's scatter
benchmark takes the same. Rows come in the order of experts, so each token has eight of them at
random places: a balanced index.
"""

from tilewright.suite import suite

scatter_moe = suite(
    "scatter_moe",
    [
        f"index_add(x=bf16[{tokens},7168], dim=0, index=i64[{8 * tokens}], "
        f"source=bf16[{8 * tokens},7168])!donate=x!indices=balanced"
        for tokens in (1024, 4096, 8192)
    ],
)
