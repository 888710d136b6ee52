"""Products of floats as sums of logarithms: every kind of value, and the same bits in any order."""

import math

import pytest
import torch
from cuda_on_cpu import DEVICE, OnCpu, fault_reported
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.compile import cxx, nvrtc
from tilewright.impl import IMPLS
from tilewright.impls.indices.elements.bucket_products import MOST_FACTORS, unit_bits
from tilewright.indexed import DISTRIBUTIONS
from tilewright.op import Workload

pytestmark = pytest.mark.skipif(
    nvrtc.missing() is not None or cxx.missing() is not None, reason="a compiler is missing"
)
PRODUCTS = IMPLS["bucket_products"]
PLACES, FACTORS = 700, 5000
NAN, INF = math.nan, math.inf


def product(dtype="f32", width=4, share=4, more="", flags="", places=PLACES):
    """Several chunks, and buckets that several blocks share where indices are skewed."""
    w = Workload.parse(
        f"scatter_reduce(x={dtype}[{places},{width}], dim=0, index=i64[{FACTORS},{width}], "
        f"src={dtype}[{FACTORS},{width}], reduce=prod{more}){flags}"
    )
    config = PRODUCTS.Config(
        width=width, shift=8, split_threads=256, items=4, settle_threads=512, share=share
    )
    assert PRODUCTS.space(w, DEVICE).why_not(config) is None
    return w, OnCpu(PRODUCTS, config, w)


def exact(x, index, src, include=True):
    """In fp64, which holds products of so many factors near one nearly exactly."""
    return torch.scatter_reduce(x.double(), 0, index, src.double(), "prod", include_self=include)


@pytest.mark.parametrize("spread", DISTRIBUTIONS)
@pytest.mark.parametrize("share", [4, 16])
@pytest.mark.parametrize("include", [True, False])
def test_products_are_nearly_exact_in_any_distribution_and_order(spread, share, include):
    w, run = product(share=share, more=f", include_self={include}", flags=f"!indices={spread}")
    x, index, _ = w.operator.examples(w, "random", 0, "cpu")
    src = torch.exp(torch.randn(index.shape, dtype=torch.float64) / 30).float()
    src *= torch.randint(2, src.shape) * 2 - 1
    found, expected = run(x, index, src), exact(x, index, src, include)
    tiny = torch.finfo(torch.float32).smallest_normal
    assert ((found - expected).abs() <= expected.abs() * 2.0**-23.9 + tiny).all()
    order = torch.randperm(FACTORS)
    assert torch.equal(
        found, run(x, index[order], src[order])
    )  # threads and blocks going backwards


@settings(max_examples=15)
@given(st.integers(-149, 127), st.integers(0, 60), st.integers(0, 2**32))
def test_factors_of_any_exponents_have_products_that_are_rounded_once(least, spread, seed):
    random = torch.Generator().manual_seed(seed)
    _, run = product(width=1)
    index = torch.randint(PLACES, (FACTORS, 1), generator=random)
    exponent = torch.randint(least, min(least + spread, 127) + 1, index.shape, generator=random)
    src = torch.ldexp(1 - torch.rand(index.shape, generator=random) / 2, exponent)
    src[::2] = (1 / src[::2].double()).float().clamp(2.0**-149, 2.0**127)
    x = torch.randn(PLACES, 1, generator=random)
    found, logarithm = run(x, index, src).double(), torch.zeros(PLACES, 1, dtype=torch.float64)
    logarithm.scatter_add_(0, index, src.double().log2()).add_(x.double().abs().log2())
    size = torch.exp2(logarithm)
    size = torch.where(size >= 2.0**128 * (1 - 2.0**-25), INF, size)
    close = (found.abs() - size).abs() <= size * 2.0**-23.9 + 2.0**-149
    assert (close | (found.abs() == size)).all()
    assert torch.equal(found.signbit(), x.signbit())


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("flags", ["", "!donate=x"])
def test_products_of_integers_are_exact(dtype, flags):
    w, run = product(dtype, flags=flags, places=3000)
    for seed in range(2):
        x, index, _ = w.operator.examples(w, "random", seed, "cpu")
        x, src = torch.ones_like(x), torch.randint(-4, 5, index.shape).to(x.dtype)
        src[src == 4] = 1
        expected = exact(x, index, src)
        held = expected.abs() <= 2.0 ** {"f16": 11, "bf16": 8, "f32": 24}[dtype]
        assert held.sum() > 0.9 * held.numel()
        found = run(x.clone(), index, src)
        assert torch.equal(found[held].double(), expected[held])
        assert torch.equal(found[held].signbit(), expected[held].signbit())


ODD = [
    (2.0, [INF, 1.0]), (2.0, [-INF, 0.5, -1.0]), (2.0, [INF, -INF]), (2.0, [0.0, -1.0]),
    (2.0, [0.0, INF]), (2.0, [NAN, 0.0]), (NAN, [2.0]), (0.0, [-2.0]), (0.0, [INF]), (-INF, [0.0]),
    (INF, [-1e-45]), (0.0, [1e38, 1e38]), (1e-30, [1e30, 1e30, 1e-30]), (1e30, [1e30, 1e-30]),
    (1e-45, [0.5]), (3e38, [2.0]), (-1e-45, [2.0**100, 2.0**49]), (-0.0, [1.0]), (-0.0, [-1.0]),
    (2.0, [-0.0]),
]  # fmt: skip
"""Old elements and their factors."""


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("everywhere", [True, False])
def test_what_is_no_number_or_barely_one(include, everywhere):
    """In a place among others, or as all that a block has of a place."""
    _, run = product(width=1, more=f", include_self={include}")
    for old, factors in ODD:
        x, src = torch.full((PLACES, 1), old), torch.ones(FACTORS, 1)
        index = torch.full((FACTORS, 1), 3 if everywhere else 7)
        index[: len(factors)], src[: len(factors), 0] = 3, torch.tensor(factors)
        held = torch.tensor([old, *factors]).tolist()  # as fp32 holds them
        expected = math.prod(held if include else held[1:])
        expected = torch.tensor(expected, dtype=torch.float64).float()
        found = run(x, index, src)
        torch.testing.assert_close(found[3, 0], expected, rtol=2.0**-22, atol=0, equal_nan=True)
        assert found[3, 0].isnan() or found[3, 0].signbit() == expected.signbit(), (old, factors)
        torch.testing.assert_close(found[4], x[4], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("spread", ["uniform", "constant"])
def test_an_index_out_of_range_is_left_out_and_told(spread):
    w, run = product(flags=f"!indices={spread}")
    x, index, _ = w.operator.examples(w, "random", 0, "cpu")
    x, src = torch.ones_like(x), torch.ones(index.shape)
    index[5], index[2000] = PLACES, -1
    src[5] = src[2000] = NAN
    assert torch.equal(run(x, index, src), x)
    assert fault_reported()


@pytest.mark.parametrize("factors", [1, 2, 3, 2**10, MOST_FACTORS - 1, MOST_FACTORS])
def test_no_sum_of_logarithms_exceeds_62_bits(factors):
    assert factors * 149.5 * 2 ** unit_bits(factors) < 2**62
    assert (
        24 * 2.0 ** -(unit_bits(factors) + 1) < 2.0**-26
    )  # of integers below 2^24, other than one


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("scatter_reduce(x=f32[9], dim=0, index=i64[9], src=f32[9], reduce=mean)", "is no product"),
        ("scatter_reduce(x=f64[9], dim=0, index=i64[9], src=f64[9], reduce=prod)", "f64 is no"),
        ("scatter_reduce(x=i32[9], dim=0, index=i64[9], src=i32[9], reduce=prod)", "i32 is no"),
        ("scatter_reduce(x=f32[9], dim=0, index=i64[5000000], src=f32[5000000], reduce=prod)",
         "more than 4194304"),
        ("scatter_reduce(x=f32[9,9]@strides(1,9), dim=0, index=i64[9,9], src=f32[9,9], "
         "reduce=prod)", "not contiguous"),
    ],
)  # fmt: skip
def test_what_is_not_multiplied_so_is_refused(text, why):
    assert why in PRODUCTS.unsupported(Workload.parse(text), DEVICE)
