"""Rows added where no index repeats.

Gradients that were already summed by row, added to a table (200k of 400k rows of 256, in place and
as a new tensor; 65536 of two million rows of 128), and the rows of a permutation brought back in
order (16384 tokens of a model of width 7168, bf16, each from the one expert it went to).
"""

from tilewright.suite import suite

rows_unique = suite(
    "rows_unique",
    [
        "index_add(x=f32[400000,256], dim=0, index=i64[200000], source=f32[200000,256])"
        "!donate=x!indices=unique",
        "index_add(x=f32[400000,256], dim=0, index=i64[200000], source=f32[200000,256])"
        "!indices=unique",
        "index_add(x=f32[2000000,128], dim=0, index=i64[65536], source=f32[65536,128])"
        "!donate=x!indices=unique",
        "index_add(x=bf16[16384,7168], dim=0, index=i64[16384], source=bf16[16384,7168])"
        "!donate=x!indices=unique",
    ],
)
