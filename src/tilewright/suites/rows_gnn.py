"""Message passing on a graph: features of edges added to their nodes.

Node count and feature width of ogbn-products (2.4 million nodes, 100 features), with a tenth and a
fifth of its 62 million edges, so that the messages fit beside their fp64 truth; in-degrees follow a
power law.
"""

from tilewright.suite import suite

rows_gnn = suite(
    "rows_gnn",
    [
        f"index_add(x=f32[2449029,100], dim=0, index=i64[{edges}], source=f32[{edges},100])"
        f"!indices={spread}"
        for edges, spread in ((6_000_000, "uniform"), (6_000_000, "zipf"), (12_000_000, "zipf"))
    ],
)
