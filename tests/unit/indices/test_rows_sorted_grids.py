"""Kernels behind a sort of rows serve more slices, and more pieces of a row, than an axis of a grid
has."""

import pytest
import torch
from cuda_on_cpu import DEVICE, OnCpu

from tilewright.compile import cxx, nvrtc
from tilewright.impl import IMPLS
from tilewright.impls.indices.rows import _sorted_rows
from tilewright.measure.verify import Verifier
from tilewright.op import Workload

pytestmark = pytest.mark.skipif(
    nvrtc.missing() is not None or cxx.missing() is not None, reason="a compiler is missing"
)
CPU = torch.device("cpu")


@pytest.mark.parametrize("outer", [1, 65535, 65536, 100000, 3000001, 2**31 - 1])
def test_a_grid_has_all_slices_and_few_more(outer):
    w = Workload.parse(f"index_add(x=f32[{outer},5], dim=1, index=i64[6], source=f32[{outer},6])")
    size, groups = _sorted_rows.slices(IMPLS["rows_sorted"].served(w))
    assert max(size, groups) <= 65535
    assert 0 <= size * groups - outer < groups


@pytest.mark.parametrize("name", ["rows_sorted", "rows_unique"])
@pytest.mark.parametrize(
    "text",
    [
        "index_add(x={}[7,5], dim=1, index=i64[60], source={}[7,60])",
        "index_add(x={}[7,5], dim=1, index=i64[60], source={}[7,60])!donate=x",
        "index_reduce(x={}[7,50,3], dim=1, index=i64[9], source={}[7,9,3], reduce=prod)",
        "index_reduce(x={}[7,900,3], dim=1, index=i64[600], source={}[7,600,3], "
        "reduce=amax, include_self=False)!indices=unique",
    ],
)
@pytest.mark.parametrize("dtype", ["f16", "f32", "f64", "i64"])
def test_slices_may_be_more_than_one_axis_of_a_grid_has(text, dtype, name, monkeypatch):
    """Seven by three times three blocks, two of which have none."""
    w, impl = Workload.parse(text.format(dtype, dtype)), IMPLS[name]
    if name == "rows_unique" and w["index"].numel > w["x"].shape[1]:
        return  # of which some repeat
    monkeypatch.setattr(_sorted_rows, "MAX_GRID_YZ", 3)
    run = OnCpu(impl, impl.heuristic(w, DEVICE), w)
    assert (3, 3) in {launch.grid[1:] for launch in run.executable.launches}
    verdict = Verifier(w, CPU).check(run)
    assert verdict.ok, verdict.message
    assert verdict.deterministic


def test_pieces_of_a_row_may_be_more_than_an_axis_of_a_grid_has(monkeypatch):
    """Runs over several spans are joined for each piece."""
    monkeypatch.setattr(_sorted_rows, "MAX_GRID_YZ", 3)
    text = "index_add(x=f32[5,333], dim=0, index=i64[3000], source=f32[3000,333])"
    w, impl = Workload.parse(text), IMPLS["rows_sorted"]
    sums = {"rows": 8, "lanes": 4, "vec": 1, "unrolled": 4, "block_threads": 512}
    config = impl.Config(**sums, blocks=2, passes=1, items=4)
    run = OnCpu(impl, config, w)
    assert all(max(launch.grid[1:]) <= 3 for launch in run.executable.launches)
    verdict = Verifier(w, CPU).check(run)
    assert verdict.ok, verdict.message
