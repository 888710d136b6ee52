"""Sums of floats as sums of integers: every kind of value, and the same bits in any order."""

import math
from dataclasses import replace
from fractions import Fraction

import cuda_on_cpu
import pytest
import torch
from cuda_on_cpu import DEVICE, OnCpu
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.compile import cxx, nvrtc
from tilewright.compile.cache import compiled
from tilewright.device import DEVICES
from tilewright.impl import IMPLS
from tilewright.impls.indices._integers import MOST_TERMS, unit_bits
from tilewright.op import Workload
from tilewright.tensor_spec import DTYPES

pytestmark = pytest.mark.skipif(
    nvrtc.missing() is not None or cxx.missing() is not None, reason="a compiler is missing"
)
PLACES, TERMS = 40, 3000


def kernels(dtype="f32"):
    """Every way to sum by integers, as calls on CPU tensors."""
    w = Workload.parse(
        f"scatter_add(x={dtype}[{PLACES}], dim=0, index=i64[{TERMS}], src={dtype}[{TERMS}])"
    )
    sums, buckets = IMPLS["integer_sums"], IMPLS["bucket_sums"]
    for launches in (4, 1):
        yield OnCpu(sums, sums.Config(128, 2, private=False, launches=launches), w)
        yield OnCpu(sums, sums.Config(256, 4, private=True, launches=launches), w)
    shared = dtype == "f32"  # else by one block, for blocks that share a bucket round to fp64
    yield OnCpu(buckets, replace(buckets.heuristic(w, DEVICE), share=4 if shared else 16), w)


def exact(x, index, src):
    """By Python's exact sums."""
    terms = [[float(v)] for v in x]
    for i, v in zip(index.tolist(), src.tolist(), strict=True):
        terms[i].append(v)
    return torch.tensor([math.fsum(t) for t in terms], dtype=torch.float64)


@settings(max_examples=15)
@given(st.integers(-140, 30), st.integers(0, 90), st.integers(0, 2**32))
def test_sums_of_any_range_of_exponents_are_nearly_exact(least, spread, seed):
    random = torch.Generator().manual_seed(seed)
    index = torch.randint(PLACES, (TERMS,), generator=random)
    exponent = torch.randint(least, least + spread + 1, (TERMS,), generator=random)
    src = torch.ldexp(torch.randn(TERMS, generator=random), exponent)
    x = torch.zeros(PLACES)
    largest = torch.zeros(PLACES).scatter_reduce(0, index, src.abs(), "amax").double()
    for run in kernels():
        found, expected = run(x, index, src), exact(x, index, src)
        off = (found.double() - expected).abs()
        rounding = expected.abs() * 2.0**-24 + 2.0**-150
        assert (off <= rounding + largest * 2.0**-30).all()


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.integers(-1070, 960), st.integers(0, 120), st.integers(0, 2**32))
def test_sums_of_doubles_are_nearly_exact_too(least, spread, seed):
    random = torch.Generator().manual_seed(seed)
    index = torch.randint(PLACES, (TERMS,), generator=random)
    exponent = torch.randint(least, min(least + spread, 1000) + 1, (TERMS,), generator=random)
    src = torch.ldexp(torch.randn(TERMS, generator=random, dtype=torch.float64), exponent)
    x = torch.zeros(PLACES, dtype=torch.float64)
    largest = x.scatter_reduce(0, index, src.abs(), "amax")
    for run in kernels("f64"):
        expected = exact(x, index, src)
        off = (run(x, index, src) - expected).abs()
        # A term is off by 2^-101 of the largest; the sum is rounded, and once more if subnormal.
        assert (off <= expected.abs() * 2.0**-52.9 + largest * 2.0**-89 + 2.0**-1074).all()


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_any_order_has_the_same_bits(dtype):
    index, src = torch.randint(PLACES, (TERMS,)), torch.randn(TERMS).to(DTYPES[dtype]) * 1e3
    x, order = torch.randn(PLACES).to(src.dtype), torch.randperm(TERMS)
    for run in kernels(dtype):
        assert torch.equal(run(x, index, src), run(x, index[order], src[order]))


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("sms", [1, 3])
@pytest.mark.parametrize(
    "text",
    [
        "scatter_add(x=f32[40], dim=0, index=i64[9000], src=f32[9000])",
        "index_add(x=f32[50,6], dim=0, index=i64[900], source=f32[900,6], alpha=-2.0)!donate=x",
        "scatter_add(x=f32[700,7], dim=0, index=i64[30,7], src=f32[30,7])!donate=x",
        "embedding_backward(grad=f32[9,50,20], index=i64[9,50], num_weights=70, padding_idx=3)",
        "index_add(x=f64[50,6], dim=0, index=i64[900], source=f64[900,6], alpha=-2.0)!donate=x",
    ],
)
def test_one_launch_has_the_bits_of_four(text, sms, private, monkeypatch):
    device = replace(DEVICE, sms=sms)
    monkeypatch.setattr(cuda_on_cpu, "DEVICE", device)
    w, sums = Workload.parse(f"{text}!indices=zipf"), IMPLS["integer_sums"]
    tensors = w.operator.examples(w, "random", 0, "cpu")
    found = []
    for launches in (4, 1):
        run = OnCpu(sums, sums.Config(128, 1, private, launches), w)
        for _ in range(2):
            found.append(run(*(t.clone() for t in tensors)))
    assert all(torch.equal(found[0], other) for other in found[1:])
    assert not torch.equal(found[0], tensors[0])


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_blocks_of_one_launch_all_run_at_once(dtype):
    sums, w = (
        IMPLS["integer_sums"],
        Workload.parse(
            f"index_add(x={dtype}[9000,64], dim=0, index=i64[90000], source={dtype}[90000,64])"
            "!donate=x"
        ),
    )
    for device in (DEVICES[name] for name in ("a100", "h200", "b200")):
        for config in sums.space(w, device):
            if config.launches == 1:
                (launch,), _ = sums.launches(w, sums.served(w), config, device)
                resources = compiled(sums.task(config, w, device)).resources
                threads = math.ceil(launch.grid[0] / device.sms) * config.block_threads
                assert threads * -(-resources.registers // 8) * 8 <= 65536
                assert not resources.spill_bytes


@pytest.mark.parametrize(("dtype", "small"), [("f32", 2.0**-10), ("f64", 2.0**-80)])
def test_a_large_term_and_its_opposite_leave_small_ones(dtype, small):
    src = torch.full((TERMS,), small, dtype=DTYPES[dtype])
    src[0], src[-1] = 2.0**16, -(2.0**16)
    index = torch.zeros(TERMS, dtype=torch.int64)
    for run in kernels(dtype):
        found = run(torch.zeros(PLACES, dtype=src.dtype), index, src)
        assert found[0] == (TERMS - 2) * small


NAN, INF = math.nan, math.inf


def odd_sums(huge, tiny):
    """Old elements and their terms."""
    return [
        (0.0, [1.0, INF]), (0.0, [-INF, 2.0]), (0.0, [INF, -INF]), (0.0, [NAN, 1.0]),
        (INF, [-INF]), (INF, [1.0]), (NAN, [1.0]), (1.0, [huge, huge]), (1.0, [huge, huge, -huge]),
        (0.0, [tiny, tiny]), (-tiny, [tiny]), (5.0, [tiny, -0.0]),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "old", "terms"),
    [("f32", *odd) for odd in odd_sums(3e38, 1e-45)]
    + [("f64", *odd) for odd in odd_sums(1.7e308, 5e-324)],
)
def test_what_is_not_finite_or_barely_a_number(dtype, old, terms):
    x = torch.full((PLACES,), old, dtype=DTYPES[dtype])
    src, index = torch.zeros(TERMS, dtype=x.dtype), torch.full((TERMS,), 7)
    index[: len(terms)], src[: len(terms)] = 3, torch.tensor(terms, dtype=x.dtype)
    expected = rounded_once([x[3].item(), *src[: len(terms)].tolist()])
    for run in kernels(dtype):
        found = run(x, index, src)
        torch.testing.assert_close(found[3], expected.to(x.dtype), rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(found[4], x[4], rtol=0, atol=0, equal_nan=True)


def rounded_once(terms):
    if not all(map(math.isfinite, terms)):
        return torch.tensor(sum(terms), dtype=torch.float64)
    total = sum(map(Fraction, terms))
    try:
        return torch.tensor(float(total), dtype=torch.float64)
    except OverflowError:
        return torch.tensor(INF if total > 0 else -INF, dtype=torch.float64)


@pytest.mark.parametrize("old", [0.0, -0.0])
@pytest.mark.parametrize("new", [[0.0], [-0.0], [-0.0, 0.0], [1.0, -1.0]])
def test_zeros_have_the_signs_of_pytorchs(old, new):
    x, index = torch.full((PLACES,), old), torch.arange(TERMS) % 5
    src = torch.tensor(new * (TERMS // len(new)))
    src = src.reshape(-1, len(new)).repeat_interleave(5, 0)[:TERMS].flatten()[:TERMS]
    expected = torch.scatter_add(x, 0, index, src)
    for run in kernels():
        found = run(x, index, src)
        assert torch.equal(found, expected)
        assert torch.equal(found.signbit(), expected.signbit())


@pytest.mark.parametrize("terms", [1, 2, 3, 2**10, MOST_TERMS - 1, MOST_TERMS])
def test_no_sum_exceeds_64_bits(terms):
    assert terms * 2 ** unit_bits(terms) < 2**63
    assert terms * 2.0 ** -(unit_bits(terms) + 1) <= 2.0**-22


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("scatter_add(x=i64[40], dim=0, index=i64[900], src=i64[900])", "i64 is none of"),
        ("scatter_add(x=f32[40], dim=0, index=i64[2000000], src=f32[2000000])", "would lose bits"),
        ("scatter_reduce(x=f32[40], dim=0, index=i64[9], src=f32[9], reduce=amax)", "is no sum"),
    ],
)
def test_what_integers_cannot_sum_is_refused(text, why):
    w = Workload.parse(text)
    for name in ("integer_sums", "bucket_sums"):
        if name == "bucket_sums" and "lose bits" in why:
            assert IMPLS[name].unsupported(w, DEVICE) is None  # its blocks have shorter lists
        else:
            assert why in IMPLS[name].unsupported(w, DEVICE)


def test_a_table_far_larger_than_what_is_added_is_refused():
    w = Workload.parse("index_add(x=f32[90000,64], dim=0, index=i64[9], source=f32[9,64])")
    assert "exceed 48 for each of 576 elements" in IMPLS["integer_sums"].unsupported(w, DEVICE)


def test_a_table_of_more_than_a_gibibyte_is_refused_with_its_bytes():
    text = "embedding_backward(grad=bf16[32768,4096], index=i64[32768], num_weights={})"
    large, fits = (Workload.parse(text.format(n)) for n in (128256, 20000))
    assert f"{128256 * 4096 * 12} bytes" in IMPLS["integer_sums"].unsupported(large, DEVICE)
    assert IMPLS["integer_sums"].unsupported(fits, DEVICE) is None


def test_an_index_out_of_range_is_left_out_and_told():
    x, src = torch.zeros(PLACES), torch.ones(TERMS)
    index = torch.zeros(TERMS, dtype=torch.int64)
    index[5], index[6] = PLACES, -1
    for run in kernels():
        assert run(x, index, src)[0] == TERMS - 2
        assert cuda_on_cpu.fault_reported()


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f64"])
@pytest.mark.parametrize("width", [1, 8])
@pytest.mark.parametrize("share", [4, 16])
def test_blocks_that_share_a_bucket_have_the_same_bits_in_any_order(dtype, width, share):
    places, terms = 700, 20000 // width
    w = Workload.parse(
        f"scatter_add(x={dtype}[{places},{width}], dim=0, index=i64[{terms},{width}], "
        f"src={dtype}[{terms},{width}])!indices=zipf"
    )
    impl = IMPLS["bucket_sums"]
    config = impl.Config(
        width=width, shift=8, split_threads=256, items=4, settle_threads=512, share=share
    )
    x, index, src = w.operator.examples(w, "random", 0, "cpu")
    run = OnCpu(impl, config, w)
    found = run(x, index, src)
    truth = torch.scatter_add(x.double(), 0, index, src.double())
    off, near = (found.double() - truth).abs(), 1e-12 if dtype == "f64" else 1e-6
    assert (off <= truth.abs() * torch.finfo(x.dtype).eps + near).all()
    assert torch.equal(found, run(x, index, src))  # threads and blocks going backwards


PLACES_OF_ONE, LEAST, MOST = 9000, 2817, 3072
"""Numbers of positions for which there is one binary."""


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f64"])
@pytest.mark.parametrize("more", ["", "@strides(0), alpha=-2.0", "@strides(3)"])
@pytest.mark.parametrize("flag", ["", "!donate=x"])
def test_a_binary_of_index_add_serves_as_many_positions_as_there_happen_to_be(dtype, more, flag):
    impl, compiled_for = IMPLS["bucket_sums"], set()

    def workload(count, spread):
        text = f"x={dtype}[{PLACES_OF_ONE}], dim=0, index=i64[{count}], source={dtype}[{count}]"
        return Workload.parse(f"index_add({text}{more}){flag}!indices={spread}")

    @settings(max_examples=6, deadline=None)
    @given(
        st.sampled_from([LEAST, MOST]) | st.integers(LEAST, MOST),
        st.sampled_from(["uniform", "zipf", "constant"]),
        st.integers(0, 9),
    )
    def check(count, spread, seed):
        w = workload(count, spread)
        config = impl.heuristic(w, DEVICE)
        compiled_for.add(impl.task(config, w, DEVICE).source)
        x, index, source = w.operator.examples(w, "random", seed, "cpu")
        expected = w.operator.indexed.terms(w, [x, index, source])
        index[7] = PLACES_OF_ONE
        if source.stride(0):  # else it is all
            source[7] = math.nan
        kept = torch.arange(count) != 7
        left = w.operator.reference(
            x=x.double(), dim=0, index=index[kept], source=source[kept].double(),
            alpha=dict(w.args)["alpha"],
        )  # fmt: skip
        run = OnCpu(impl, config, w)
        found = [run(x.clone(), index, source) for _ in range(2)]
        assert cuda_on_cpu.fault_reported()
        assert torch.equal(*found)
        off = (found[0].double() - left).abs()
        allowed = left.abs() * torch.finfo(x.dtype).eps + expected.magnitude * 2.0**-30
        assert (off <= allowed + torch.finfo(x.dtype).tiny).all()

    check()
    assert len(compiled_for) == 1
    other = workload(MOST + 1, "uniform")
    assert impl.task(impl.heuristic(other, DEVICE), other, DEVICE).source not in compiled_for


def test_rows_and_numbers_that_are_no_fp64_are_refused_in_words():
    impl = IMPLS["bucket_sums"]
    for text, words in (
        ("x=f32[9000,1], dim=0, index=i64[9000], source=f32[9000,1]", "rows, not elements"),
        ("x=f32[9000], dim=0, index=i64[9000]@strides(2), source=f32[9000]", "not contiguous"),
        ("x=i64[9000], dim=0, index=i64[9000], source=i64[9000]", "i64 is none of"),
    ):
        assert words in impl.unsupported(Workload.parse(f"index_add({text})"), DEVICE)
