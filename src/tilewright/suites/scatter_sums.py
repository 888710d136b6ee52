"""Sums, products and extremes of separate elements, each with an index of its own.

Histograms by column (100000 x 256), gradients of a gather along axes of Mask R-CNN's features
(1000, 256, 7, 7) and of one logit of each token (GPT-2's vocabulary), few long columns, one of a
million and one of a hundred million, a product, a maximum, and a mean of rows.
"""

from tilewright.suite import suite

scatter_sums = suite(
    "scatter_sums",
    [
        "scatter_add(x=f32[100000,256], dim=0, index=i64[100000,256], src=f32[100000,256])",
        *(
            f"scatter_add(x=f32[1000,256,7,7], dim={dim}, index=i64[1000,256,7,7], "
            "src=f32[1000,256,7,7])!donate=x"
            for dim in (0, 1, 3)
        ),
        "scatter_add(x=f32[8192,50257], dim=1, index=i64[8192,1], src=f32[8192,1])!donate=x",
        "scatter_add(x=f32[4,2000], dim=1, index=i64[4,300000], src=f32[4,300000])",
        "scatter_add(x=f32[4,2000], dim=1, index=i64[4,3000], src=f32[4,3000])",
        *(
            f"scatter_add(x=f32[{n}], dim=0, index=i64[{n}], src=f32[{n}])"
            for n in (1000000, 100000000)
        ),
        *(
            "scatter_reduce(x=f32[30000,64], dim=0, index=i64[100000,64], src=f32[100000,64], "
            f"reduce={reduce})"
            for reduce in ("prod", "amax")
        ),
        "index_reduce(x=f32[30000,64], dim=0, index=i64[100000], source=f32[100000,64], "
        "reduce=mean)",
    ],
)
