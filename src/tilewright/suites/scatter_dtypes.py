"""Sums and updates of fp16, fp64 and int64, by rows and by elements; a budget of a minute will do.

The rows are what index_put comes down to: an index_add where it accumulates, else a scatter whose
index is expanded over the rows. The sizes are those of rows_embedding and scatter_large.
"""

from tilewright.suite import suite

scatter_dtypes = suite(
    "scatter_dtypes",
    [
        *(
            f"index_add(x={dtype}[50000,256], dim=0, index=i64[200000], "
            f"source={dtype}[200000,256])!donate=x"
            for dtype in ("f16", "f64", "i64")
        ),
        *(
            f"scatter(x={dtype}[50000,256], dim=0, index=i64[200000,256]@strides(1,0), "
            f"src={dtype}[200000,256])!donate=x"
            for dtype in ("f16", "i64")
        ),
        *(
            f"{op}(x={dtype}[1000000], dim=0, index=i64[1000000], src={dtype}[1000000])"
            for op, dtype in (
                ("scatter_add", "f16"),
                ("scatter_add", "f64"),
                ("scatter_add", "i64"),
                ("scatter", "f64"),
            )
        ),
    ],
)
