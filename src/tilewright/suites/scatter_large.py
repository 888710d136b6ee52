"""Scatters whose places fit no cache of an SM: one-dimensional ones, and a long matrix.

Source: sizes of tensors that graphs and recommendation models update, beyond TVM's sweep (pull
request 7056 ends at a million).
"""

from tilewright.suite import suite

scatter_large = suite(
    "scatter_large",
    [
        "scatter(x=f32[1000000], dim=0, index=i64[1000000], src=f32[1000000])",
        "scatter(x=f32[100000,256], dim=0, index=i64[100000,256], src=f32[100000,256])",
        "scatter(x=f32[100000000], dim=0, index=i64[100000000], src=f32[100000000])",
    ],
)
