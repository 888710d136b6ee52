"""Sums of many rows in very few places, where every index repeats.

The gradient of BERT's token types (2 rows of 768), features of a point cloud by class (ScanNet's
20, a million points of 64), centroids of k-means (16 and 64 clusters of a million points of 32),
and one row for each graph of a batch (32 graphs of a thousand nodes of 256, in order).
"""

from tilewright.suite import suite

rows_few = suite(
    "rows_few",
    [
        "embedding_backward(grad=f32[65536,768], index=i64[65536], num_weights=2)",
        "embedding_backward(grad=bf16[65536,768], index=i64[65536], num_weights=2)",
        *(
            f"index_add(x=f32[{places},{width}], dim=0, index=i64[1000000], "
            f"source=f32[1000000,{width}])!donate=x!indices={spread}"
            for places, width in ((20, 64), (16, 32), (64, 32))
            for spread in ("uniform", "zipf")
        ),
        "index_add(x=f32[32,256], dim=0, index=i64[32000], source=f32[32000,256])"
        "!donate=x!indices=sorted",
    ],
)
