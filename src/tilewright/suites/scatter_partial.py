"""Updates and sums whose index covers a part of x, or names few of many places.

New positions of some sequences in a cache of keys (in place, and few of its places are named), most
columns of a long matrix, most images of Mask R-CNN's features (1000, 256, 7, 7), and the front of a
longer source; sums of the same columns and images. And updates in place of all sequences of that
cache, of one logit of each token (GPT-2's vocabulary), and of one place in 63, which is sums' too.
"""

from tilewright.suite import suite

scatter_partial = suite(
    "scatter_partial",
    [
        "scatter(x=f32[64,8192,256], dim=1, index=i64[48,16,256], src=f32[64,16,256])!donate=x",
        *(
            f"{op}(x=f32[100000,256], dim=0, index=i64[100000,250], src=f32[100000,256])"
            for op in ("scatter", "scatter_add")
        ),
        *(
            f"{op}(x=f32[1000,256,7,7], dim=1, index=i64[900,256,7,7], src=f32[1000,256,7,7])"
            for op in ("scatter", "scatter_add")
        ),
        "scatter(x=f32[1000000], dim=0, index=i64[500000], src=f32[1000000])",
        "scatter(x=f32[64,8192,256], dim=1, index=i64[64,16,256], src=f32[64,16,256])!donate=x",
        "scatter(x=f32[8192,50257], dim=1, index=i64[8192,1], src=1.0)!donate=x",
        *(
            f"{op}(x=f32[34725600], dim=0, index=i64[551200], src=f32[551200])!donate=x"
            for op in ("scatter", "scatter_add")
        ),
    ],
)
