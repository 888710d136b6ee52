"""Sums of many numbers in fused kernels round as those of a few do, on both targets."""

import pytest
from fused_on_cpu import assert_verified

import tilewright as tw
from tilewright.compile import cxx
from tilewright.op import OPS
from tilewright.tensor_spec import TensorSpec

pytestmark = pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing()))

ACROSS = {
    "sum": lambda x: x / x.exp().sum(0),
    "squares": lambda x: x / (x * x).sum(0),
    "variance": lambda x: (x - x.mean(0)) * x.var(0).rsqrt(),
    "softmax": lambda x: x.softmax(0),
    "batches": lambda x: x.view(4, -1, 40).exp().sum((0, 1)) + x,
}


@pytest.mark.parametrize("case", ACROSS)
def test_a_sum_down_a_long_column_is_verified(case):
    name = f"long_{case}"
    tw.fuse(ACROSS[case], name=name)
    try:
        assert_verified(OPS[name].workload(x=TensorSpec("f32", (3000, 40))))
    finally:
        OPS.remove(name)
