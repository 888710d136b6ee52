"""Which kernel of ours takes updates and sums of separate elements where no record speaks: it goes
by how many there are, and in place by how few of all places they can name."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tilewright.device import DEVICES
from tilewright.dispatch import selection
from tilewright.impls.scatter_buckets import PLACES_IN_PLACE
from tilewright.op import Workload

H200, CUDA = DEVICES["h200"], torch.device("cuda:0")
MOST_PLACES_OF_A_TILE = H200.shared_bytes_per_block // 8
"""Of an update of fp32, which scatter_tiled could hold."""


def chosen(text):
    return selection.choose(Workload.parse(text), CUDA).implementation


@pytest.mark.parametrize(
    ("x", "index", "src", "more", "expected"),
    [
        ([34725600], "[551200]", "f32[551200]", "!donate=x", "scatter_strided"),
        ([34725600], "[551200]@strides(2)", "f32[551200]", "!donate=x", "scatter_strided"),
        ([34725600], "[551200]", "f32[551200]@strides(0)", "!donate=x", "scatter_strided"),
        ([34725600], "[551200]", "2.5", "!donate=x", "scatter_strided"),
        ([34725600], "[551200]", "f32[551200]", "", "scatter_buckets"),
        ([25000000], "[551200]", "f32[551200]", "!donate=x", "scatter_buckets"),
        ([40000, 65536], "[512,65536]", "f32[512,65536]", "!donate=x", "scatter_buckets"),
    ],
)
def test_an_update_in_place_of_few_of_many_places_looks_at_those_alone(
    records, x, index, src, more, expected
):
    """But where there are more elements than it numbers."""
    assert chosen(f"scatter(x=f32{x}, dim=0, index=i64{index}, src={src}){more}") == expected


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(2048, 9000), st.sampled_from([16, 64, 100]), st.integers(4, 400))
def test_an_update_of_columns_goes_as_that_of_its_elements_as_one_column_does(
    records, rows, columns, places
):
    """As index_put makes one of them where each dim of x has an index tensor."""
    taken = [
        chosen(f"scatter(x=f32{x}, dim=0, index=i64{index}, src=f32{index})!donate=x")
        for x, index in (
            ([rows * places, columns], [rows, columns]),
            ([rows * places * columns], [rows * columns]),
        )
    ]
    few = "scatter_strided" if places >= PLACES_IN_PLACE else "scatter_buckets"
    assert taken[1] == few
    if rows * places > MOST_PLACES_OF_A_TILE:
        assert taken[0] == few
