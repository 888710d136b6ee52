"""The tables of rows_embedding at a tenth of their size, for a CPU of a few cores."""

from tilewright.suite import suite

TABLES = ((100_000, 1000, 64), (20_000, 5000, 256), (6_554, 3052, 768))

rows_embedding_small = suite(
    "rows_embedding_small",
    [
        f"index_add(x=f32[{rows},{width}], dim=0, index=i64[{count}], "
        f"source=f32[{count},{width}])!donate=x!indices={spread}"
        for count, rows, width in TABLES
        for spread in ("uniform", "zipf", "sorted", "constant")
    ],
)
