"""Reads by index: rows of tables as embeddings look them up, elements one by one, one of each row.

The rows are those of rows_embedding; the four-dimensional ones and the long matrix those of
scatter_maskrcnn and scatter_large, whose backward they are; one of each row is what a cross entropy
takes of its logits (GPT-2's vocabulary).
"""

from tilewright.suite import suite

gather = suite(
    "gather",
    [
        *(
            f"gather(x={dtype}[{places},{width}], dim=0, "
            f"index=i64[{count},{width}]@strides(1,0))!indices=zipf"
            for dtype, count, places, width in (
                ("f32", 1_000_000, 1000, 64),
                ("f32", 200_000, 50_000, 256),
                ("f32", 65_536, 30_522, 768),
                ("bf16", 32_768, 128_256, 4096),
            )
        ),
        *(f"gather(x=f32[1000,256,7,7], dim={dim}, index=i64[1000,256,7,7])" for dim in (0, 1)),
        "gather(x=f32[100000,256], dim=0, index=i64[100000,256])",
        *(f"gather(x=f32[{n}], dim=0, index=i64[{n}])" for n in (1_000_000, 100_000_000)),
        "gather(x=f32[8192,50257], dim=1, index=i64[8192,1])",
    ],
)
