"""Updates and sums that are too large for one run of kernels run in slices."""

import pytest
import torch

import tilewright as tw
from tilewright.dispatch import prepared, selection
from tilewright.dispatch.slices import of_slices, slices_of
from tilewright.errors import IndexOutOfRange
from tilewright.op import Workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]
CUDA = torch.device("cuda:0")


@pytest.mark.parametrize(
    "text",
    [
        "scatter_add(x=f32[50], dim=0, index=i64[30000], src=f32[30000])",
        "scatter_add(x=f16[30,90], dim=1, index=i64[30,110], src=f16[30,110])!donate=x",
        "scatter_reduce(x=bf16[9,30], dim=0, index=i64[110,30], src=bf16[110,30], reduce=amax)",
        "scatter(x=f32[5000], dim=0, index=i64[30000], src=f32[30000])!donate=x",
        "scatter(x=f32[9,30], dim=0, index=i64[90,30], src=f32[90,30])",
        "index_add(x=f64[9,64], dim=0, index=i64[3333], source=f64[3333,64])!donate=x",
    ],
)
def test_slices_give_the_same_bits_in_every_run_and_skip_what_is_out_of_range(text):
    w = Workload.parse(text)
    spec = selection.device_spec_of(CUDA)
    slices = slices_of(w, 1000)
    runs = [
        prepared._build(s.workload, CUDA, selection._ordered(s.workload, CUDA, spec))
        for s in slices
    ]
    run = of_slices(w, slices, runs)
    for kind in ("integer", "random"):
        given = w.operator.examples(w, kind, 0, CUDA)
        found = [run(*(t.clone() for t in given)) for _ in range(2)]
        assert torch.equal(*found)
    x, index, src = w.operator.examples(w, "integer", 0, CUDA)
    expected = w.operator.reference(**w.call([x.cpu(), index.cpu(), src.cpu()]))
    assert torch.equal(run(x.clone(), index, src).cpu(), expected)
    bad = index.clone()
    bad.view(-1)[-1] = 10**6
    run(x.clone(), bad, src)
    with pytest.raises(IndexOutOfRange):
        tw.check()


@pytest.mark.alone
def test_a_sum_of_more_than_two_to_the_31_elements(needs_memory):
    needs_memory(30e9)
    tw.reload_records("sqlite://")
    count = 2**31 + 2**20
    index = torch.arange(count, dtype=torch.int32, device=CUDA).remainder_(50)
    src = torch.ones((), dtype=torch.int32, device=CUDA).repeat(count)
    found = tw.scatter_add(torch.zeros(50, dtype=torch.int32, device=CUDA), 0, index, src)
    assert found.tolist() == torch.bincount(index, minlength=50).tolist()
    tw.reload_records()
