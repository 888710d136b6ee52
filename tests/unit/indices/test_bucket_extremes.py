"""amax and amin by buckets: PyTorch's in every distribution and dtype, whoever comes first."""

import math

import pytest
import torch
from cuda_on_cpu import DEVICE, OnCpu, fault_reported

from tilewright.compile import cxx, nvrtc
from tilewright.impl import IMPLS
from tilewright.indexed import DISTRIBUTIONS
from tilewright.op import Workload

pytestmark = pytest.mark.skipif(
    nvrtc.missing() is not None or cxx.missing() is not None, reason="a compiler is missing"
)
EXTREMES = IMPLS["bucket_extremes"]
PLACES, TERMS = 700, 5000
DTYPES = ("f16", "bf16", "f32", "f64", "i32", "i64")


def extremes(dtype, reduce, include=True, flags=""):
    """Several chunks, and buckets that several blocks share where indices are skewed."""
    w = Workload.parse(
        f"scatter_reduce(x={dtype}[{PLACES},4], dim=0, index=i64[{TERMS},4], src={dtype}[{TERMS},4]"
        f", reduce={reduce}, include_self={include}){flags}"
    )
    config = EXTREMES.Config(
        width=4, shift=8, split_threads=256, items=4, settle_threads=512, share=4
    )
    assert EXTREMES.space(w, DEVICE).why_not(config) is None
    return w, OnCpu(EXTREMES, config, w)


def least(t):
    return -math.inf if t.is_floating_point() else torch.iinfo(t.dtype).min


@pytest.mark.parametrize("spread", DISTRIBUTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("reduce", "include"), [("amax", True), ("amin", False)])
def test_every_place_has_what_pytorch_has_there(dtype, spread, reduce, include):
    w, run = extremes(dtype, reduce, include, f"!donate=x!indices={spread}")
    x, index, src = w.operator.examples(w, "random", 0, "cpu")
    if x.is_floating_point():
        x[::7], src[::19], src[::23], src[::29] = math.nan, math.nan, math.inf, -math.inf
    expected = torch.scatter_reduce(x, 0, index, src, reduce, include_self=include)
    for _ in range(2):  # threads and blocks going backwards
        found = run(x.clone(), index, src)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduce", ["amax", "amin"])
@pytest.mark.parametrize("include", [True, False])
def test_the_ends_of_a_dtype_are_values_like_others(dtype, reduce, include):
    w, run = extremes(dtype, reduce, include)
    x, index, src = w.operator.examples(w, "random", 0, "cpu")
    end = least(x) if reduce == "amax" else -least(x) if x.is_floating_point() else ~least(x)
    src.fill_(end)
    index.clamp_(max=PLACES - 2)
    expected = torch.scatter_reduce(x, 0, index, src, reduce, include_self=include)
    assert torch.equal(run(x, index, src), expected)


def test_an_index_out_of_range_is_left_out_and_told():
    w, run = extremes("f32", "amax")
    x, index, src = w.operator.examples(w, "random", 0, "cpu")
    index[5], index[2000] = PLACES, -1
    src[5] = src[2000] = math.nan
    kept = (index >= 0) & (index < PLACES)
    expected = torch.scatter_reduce(x, 0, index * kept, src.where(kept, -math.inf), "amax")
    assert torch.equal(run(x, index, src), expected)
    assert fault_reported()


def test_other_reductions_are_refused():
    w = Workload.parse("scatter_reduce(x=f32[9], dim=0, index=i64[9], src=f32[9], reduce=sum)")
    assert "sum is neither amax nor amin" in EXTREMES.unsupported(w, DEVICE)
