"""The tables of rows_embedding at a tenth of their size, for a CPU of a few cores.

As index_add in place, under every skew; index_put and scatter_add stand beside it as baselines. And
as programs write it otherwise: scatter_add with the index expanded over the rows, and the dense
gradient that autograd makes.
"""

from tilewright.suite import suite

TABLES = ((100_000, 1000, 64), (20_000, 5000, 256), (6_554, 3052, 768))

rows_embedding_small = suite(
    "rows_embedding_small",
    [
        *(
            f"index_add(x=f32[{rows},{width}], dim=0, index=i64[{count}], "
            f"source=f32[{count},{width}])!donate=x!indices={spread}"
            for count, rows, width in TABLES
            for spread in ("uniform", "zipf", "sorted", "constant")
        ),
        *(
            f"scatter_add(x=f32[{rows},{width}], dim=0, index=i64[{count},{width}]@strides(1,0), "
            f"src=f32[{count},{width}])!donate=x!indices={spread}"
            for count, rows, width in TABLES
            for spread in ("uniform", "zipf")
        ),
        *(
            f"embedding_backward(grad=f32[{count},{width}], index=i64[{count}], "
            f"num_weights={rows})!indices=zipf"
            for count, rows, width in TABLES
        ),
    ],
)
