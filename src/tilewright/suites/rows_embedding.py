"""Gradients of embedding tables: many rows added to few, under every skew.

A click model's small table (1M lookups of 1000 rows of 64), a catalogue (200k of 50k rows of 256),
BERT's vocabulary (65536 tokens of 30522 rows of 768), and a large language model's (32768 tokens of
128256 rows of 4096, bf16). In place on the table, as an optimiser accumulates, and as the dense
gradient that autograd makes.
"""

from tilewright.suite import suite

TABLES = ((1_000_000, 1000, 64), (200_000, 50_000, 256), (65_536, 30_522, 768))
SPREADS = ("uniform", "zipf", "sorted", "constant")

rows_embedding = suite(
    "rows_embedding",
    [
        *(
            f"index_add(x=f32[{rows},{width}], dim=0, index=i64[{count}], "
            f"source=f32[{count},{width}])!donate=x!indices={spread}"
            for count, rows, width in TABLES
            for spread in SPREADS
        ),
        *(
            f"embedding_backward(grad=f32[{count},{width}], index=i64[{count}], "
            f"num_weights={rows})!indices={spread}"
            for count, rows, width in TABLES
            for spread in SPREADS
        ),
        "embedding_backward(grad=bf16[32768,4096], index=i64[32768], num_weights=128256)"
        "!indices=zipf",
    ],
)
