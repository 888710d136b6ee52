"""Sums of integers by buckets: exact in every distribution, whoever comes first."""

import pytest
import torch
from cuda_on_cpu import DEVICE, OnCpu, fault_reported

from tilewright.compile import cxx, nvrtc
from tilewright.impl import IMPLS
from tilewright.indexed import DISTRIBUTIONS
from tilewright.op import Workload
from tilewright.tensor_spec import DTYPES

pytestmark = pytest.mark.skipif(
    nvrtc.missing() is not None or cxx.missing() is not None, reason="a compiler is missing"
)
SUMS = IMPLS["bucket_integers"]
PLACES, TERMS = 700, 5000


def sums(dtype, share=4, more="", flags=""):
    """Several chunks, and buckets that several blocks share where indices are skewed."""
    w = Workload.parse(
        f"scatter_reduce(x={dtype}[{PLACES},4], dim=0, index=i64[{TERMS},4], src={dtype}[{TERMS},4]"
        f", reduce=sum{more}){flags}"
    )
    config = SUMS.Config(
        width=4, shift=8, split_threads=256, items=4, settle_threads=512, share=share
    )
    assert SUMS.space(w, DEVICE).why_not(config) is None
    return w, OnCpu(SUMS, config, w)


@pytest.mark.parametrize("spread", DISTRIBUTIONS)
@pytest.mark.parametrize("dtype", ["i32", "i64"])
@pytest.mark.parametrize(("include", "share"), [(True, 4), (True, 16), (False, 4)])
def test_sums_are_pytorchs_and_wrap_as_these_do(dtype, spread, include, share):
    more = f", include_self={include}"
    w, run = sums(dtype, share, more, f"!donate=x!indices={spread}")
    x, index, _ = w.operator.examples(w, "random", 0, "cpu")
    ends = torch.iinfo(DTYPES[dtype])
    for low, high in ((-9, 9), (ends.min, ends.max)):
        src = torch.randint(low, high, index.shape, dtype=x.dtype)
        expected = torch.scatter_reduce(x, 0, index, src, "sum", include_self=include)
        for _ in range(2):  # threads and blocks going backwards
            assert torch.equal(run(x.clone(), index, src), expected)


def test_a_place_whose_terms_come_to_nothing_is_zero_without_its_old_element():
    w, run = sums("i64", more=", include_self=False")
    x, index, src = (torch.ones_like(t) for t in w.operator.examples(w, "random", 0, "cpu"))
    src[::2] = -1
    found = run(x, index, src)
    assert not found[1].any()
    assert (found[2:] == 1).all()


def test_an_index_out_of_range_is_left_out_and_told():
    w, run = sums("i32")
    x, index, src = w.operator.examples(w, "random", 0, "cpu")
    index[5], index[2000] = PLACES, -1
    kept = (index >= 0) & (index < PLACES)
    expected = torch.scatter_add(x, 0, index * kept, src * kept)
    assert torch.equal(run(x, index, src), expected)
    assert fault_reported()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("scatter_reduce(x=i32[9], dim=0, index=i64[9], src=i32[9], reduce=mean)", "is no sum"),
        ("scatter_add(x=f32[9], dim=0, index=i64[9], src=f32[9])", "f32 is no integer"),
    ],
)
def test_what_is_not_added_so_is_refused(text, why):
    assert why in SUMS.unsupported(Workload.parse(text), DEVICE)
