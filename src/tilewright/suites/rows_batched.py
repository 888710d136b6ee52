"""Rows moved or reduced within each batch, by an index that differs from batch to batch.

Points pooled into voxels or nodes, batch by batch, as scatter libraries do it by an index of
(batch, points) that they expand over the features; and one new position of each sequence in a cache
of keys.
"""

from tilewright.suite import suite

ROWS = "x=f32[8,20000,64], dim=1, index=i64[8,50000,64]@strides(50000,1,0), src=f32[8,50000,64]"

rows_batched = suite(
    "rows_batched",
    [
        f"scatter({ROWS})",
        f"scatter_add({ROWS})",
        f"scatter_reduce({ROWS}, reduce=amax)",
        "scatter(x=bf16[64,8192,8,128], dim=1, index=i64[64,1,8,128]@strides(1,1,0,0), "
        "src=bf16[64,1,8,128])!donate=x",
    ],
)
