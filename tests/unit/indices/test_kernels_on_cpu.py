"""The CUDA kernels for indices are right, run on a CPU: guards, poison and the exact result."""

import dataclasses
import itertools
import math
import random
import re

import pytest
import torch
from cuda_on_cpu import DEVICE, OnCpu, fault_reported
from hypothesis import given, settings

from indexing import cuda_kernels, gathers
from tilewright.compile import cxx, nvrtc
from tilewright.compile.cache import compiled
from tilewright.impl import IMPLS
from tilewright.impls.indices.rows import _sorted_rows
from tilewright.indexed import DISTRIBUTIONS
from tilewright.measure.verify import Verifier
from tilewright.op import Workload
from tilewright.ops._indexing import last_written
from tilewright.suite import SUITES

pytestmark = pytest.mark.skipif(
    nvrtc.missing() is not None or cxx.missing() is not None, reason="a compiler is missing"
)
CPU = torch.device("cpu")
SKEWED = "index_add(x=f32[50,36], dim=0, index=i64[900], source=f32[900,36])!donate=x!indices=zipf"
CASES = [
    "scatter(x=f32[9000], dim=0, index=i64[5000], src=f32[5000])!indices=zipf",
    "scatter(x=f32[300], dim=0, index=i64[7000], src=f32[7000])!indices=constant",
    "scatter(x=f64[2,90,5], dim=1, index=i32[2,300,5], src=f64[2,300,5])!donate=x",
    "scatter(x=f32[120,20], dim=0, index=i64[90,20], src=2.5)!indices=few_bins",
    "scatter(x=f32[90,24], dim=0, index=i64[120,24]@strides(1,0), src=f32[120,24])",
    "scatter(x=f64[90,24], dim=0, index=i64[120,24]@strides(1,0), src=2.5)!donate=x",
    "scatter(x=i64[3,50,5], dim=1, index=i32[3,40,5]@strides(0,1,0), src=-7)!indices=zipf",
    "scatter(x=f32[3,50,24], dim=1, index=i64[3,120,24]@strides(120,1,0), src=f32[3,120,24])",
    "scatter(x=f64[2,2,9,6], dim=2, index=i32[2,2,70,6]@strides(150,75,1,0), src=2.5)!donate=x"
    "!indices=zipf",
    "scatter(x=i32[7,20,4], dim=1, index=i64[7,1,4]@strides(1,1,0), src=i32[7,1,4])!donate=x",
    "scatter_add(x=f32[3,50,12], dim=1, index=i64[3,400,12]@strides(400,1,0), src=f32[3,400,12])"
    "!indices=zipf",
    "scatter_reduce(x=f64[2,3,20,5], dim=-2, index=i32[2,3,90,5]@strides(300,100,1,0), "
    "src=f64[2,3,90,5], reduce=mean, include_self=False)!donate=x!indices=few_bins",
    "scatter_reduce(x=f32[40,9,8], dim=1, index=i64[40,1,8]@strides(1,1,0), src=f32[40,1,8], "
    "reduce=amax)!indices=constant",
    "scatter(x=f32[100,64], dim=0, index=i64[50,1], src=f32[50,1])!donate=x",
    "scatter(x=f32[40,17], dim=0, index=i64[90,16], src=f32[91,17])!indices=zipf",
    "scatter(x=f32[40,300], dim=1, index=i64[40,1], src=1.0)!donate=x!indices=constant",
    "scatter(x=f64[40,30,3], dim=1, index=i64[39,1,3], src=f64[40,2,3])",
    "scatter(x=f64[3,70,9], dim=1, index=i32[2,30,9]@strides(1,2,60), src=f64[3,30,10])",
    "scatter(x=f16[9,40], dim=1, index=i64[7,200]@strides(0,1), src=-0.0)!donate=x",
    "scatter(x=i64[2,3,50,4], dim=-2, index=i64[1,2,90,3], src=i64[2,2,90,3]@strides(0,0,1,90))"
    "!indices=constant",
    "scatter(x=bf16[900]@align2, dim=0, index=i64[100], src=bf16[150])!indices=few_bins",
    "scatter_reduce(x=f32[50,31], dim=1, index=i64[50,80], src=f32[50,80], reduce=mean)",
    SKEWED,
    "index_reduce(x=f32[50,36], dim=0, index=i64[900], source=f32[900,36], reduce=prod)",
    "index_reduce(x=f64[50,6], dim=0, index=i64[900], source=f64[900,6], reduce=prod, "
    "include_self=False)!donate=x!indices=few_bins",
    "index_add(x=f32[50], dim=0, index=i64[900], source=f32[900]@strides(3), alpha=-2.0)",
    "scatter_add(x=f32[9,5000], dim=1, index=i64[9,1], src=f32[9,1])!donate=x",
    "scatter_reduce(x=f64[7,3,9], dim=1, index=i32[6,100,8], src=f64[7,101,9], reduce=mean)"
    "!indices=zipf",
    "scatter_reduce(x=i32[41,7]@align4, dim=0, index=i64[100,7], src=i32[100,7], reduce=prod, "
    "include_self=False)",
    "scatter_add(x=f32[2,50,7], dim=1, index=i32[2,900,6], src=f32[3,901,7])!indices=zipf",
    "scatter_reduce(x=f64[50,31], dim=0, index=i64[80,31]@strides(1,80), src=f64[80,31], "
    "reduce=prod)!donate=x!indices=constant",
    "scatter_add(x=f32[900,20], dim=0, index=i64[2100,20], src=f32[2100,20])!indices=zipf",
    "scatter_reduce(x=f32[2,700], dim=1, index=i32[2,5000], src=f32[2,5000], reduce=sum)"
    "!donate=x!indices=constant",
    "scatter_reduce(x=f32[900,20], dim=0, index=i64[2100,20], src=f32[2100,20], reduce=prod)"
    "!indices=zipf",
    "scatter_add(x=i64[900,20], dim=0, index=i64[2100,20], src=i64[2100,20])!donate=x!indices=zipf",
    "scatter_reduce(x=f16[2,700], dim=1, index=i32[2,5000], src=f16[2,5000], reduce=prod, "
    "include_self=False)!donate=x!indices=few_bins",
    "index_reduce(x=i64[40,6], dim=0, index=i32[700], source=i64[700,6], reduce=amax)",
    "index_reduce(x=f32[40,6], dim=0, index=i64[700], source=f32[700,6], reduce=amin)",
    "embedding_backward(grad=f32[9,50,20], index=i64[9,50], num_weights=70, padding_idx=3)",
    "index_add(x=f32[50,36], dim=0, index=i64[900], source=f32[900,36], alpha=-2.0)"
    "!indices=few_bins!nondeterministic",
    "index_add(x=f32[2,50,3], dim=1, index=i64[900], source=f32[2,900,3])"
    "!donate=x!indices=sorted!nondeterministic",
    "embedding_backward(grad=f64[9,50,20], index=i64[9,50], num_weights=70, padding_idx=3)"
    "!indices=constant!nondeterministic",
    "gather(x=f16[70,48], dim=0, index=i64[300,48]@strides(1,0))!indices=zipf",
    "gather(x=f64[3,90,5], dim=1, index=i32[3,200,5])",
    "gather(x=i32[40,30]@strides(1,40), dim=0, index=i64[50,24])",
]
SEARCHED = CASES[0], SKEWED


def cases():
    for text in CASES:
        w = Workload.parse(text)
        for impl in cuda_kernels(w, DEVICE):
            configs = [impl.heuristic(w, DEVICE)]
            if text in SEARCHED:
                configs += impl.space(w, DEVICE).sample(random.Random(1), 1)
            for config in dict.fromkeys(configs):
                yield pytest.param(impl, config, w, id=f"{impl.name} {config} {w}")


@pytest.mark.parametrize(("impl", "config", "w"), list(cases()))
def test_kernels_are_right_and_deterministic_and_stay_in_their_memory(impl, config, w):
    verdict = Verifier(w, CPU).check(OnCpu(impl, config, w))
    assert verdict.ok, verdict.message
    assert verdict.deterministic or impl.races
    assert not fault_reported()


SMALL = {
    "300000": "700", "30000": "50", "3000": "90", "100000000": "5000",
    "34725600": "5400", "551200": "90", "12000000": "1400", "6000000": "700", "2449029": "900",
    "2000000": "1100", "1000000": "1300", "500000": "900", "400000": "900", "200000": "700",
    "128256": "400", "100000": "260", "65536": "500", "50257": "130", "50000": "190",
    "32768": "300", "16384": "200", "32000": "600", "30522": "210", "25000": "500",
    "10000": "400", "8192": "48", "7168": "40", "5000": "200", "4096": "24", "1024": "30",
    "1000": "40", "900": "30", "768": "24", "256": "12", "250": "11", "100": "20",
}  # fmt: skip
"""Of each size in the suites: what a CPU can go through."""


def small(suite, name):
    """The suite's workloads with each size made small; in fp32, as halves need a GPU."""
    for text in SUITES[suite].texts:
        shorter = re.sub(r"(?<=[\[,=])\d+(?=[],)])", lambda n: SMALL.get(n[0], n[0]), text)
        w = Workload.parse(shorter.replace("bf16", "f32"))
        spreads = [w.distribution] if "!indices" in text else DISTRIBUTIONS
        served = IMPLS[name].serves(w.op) and IMPLS[name].unsupported(w, DEVICE) is None
        for spread in spreads if served else ():
            flags = [f for f in w.flags if not f.startswith("indices")]
            yield w.operator.workload(flags=[*flags, f"indices={spread}"], **dict(w.args))


@pytest.mark.parametrize(
    ("suite", "name"),
    [
        ("rows_embedding", "rows_sorted"),
        ("rows_embedding", "rows_sorted_torch"),
        ("rows_few", "rows_bins"),
        ("rows_gnn", "rows_sorted"),
        ("rows_unique", "rows_unique"),
        ("scatter_moe", "rows_sorted"),
        ("scatter_large", "scatter_buckets"),
        ("scatter_sums", "scatter_sorted"),
        ("scatter_sums", "bucket_sums"),
        ("scatter_sums", "bucket_products"),
        ("scatter_sums", "bucket_extremes"),
        ("scatter_dtypes", "bucket_sums"),
        ("scatter_dtypes", "bucket_integers"),
        ("scatter_sums", "integer_sums"),
        ("rows_small", "integer_sums"),
        ("rows_small", "rows_balanced"),
        ("scatter_sums", "scatter_serial"),
        ("scatter_partial", "scatter_strided"),
        ("scatter_partial", "scatter_sorted"),
        ("scatter_partial", "scatter_buckets"),
        ("scatter_partial", "scatter_tiled"),
        ("scatter_partial", "bucket_sums"),
        ("scatter_maskrcnn", "scatter_exchange"),
        ("scatter_maskrcnn", "scatter_winner"),
        ("scatter_maskrcnn", "scatter_tiled"),
        ("gather", "gather_cuda"),
    ],
)
def test_every_suite_is_right_on_its_distributions_made_small(suite, name):
    impl, seen = IMPLS[name], set()
    for w in small(suite, name):
        run = OnCpu(impl, impl.heuristic(w, DEVICE), w)
        tensors = w.operator.examples(w, "integer", 0, "cpu")
        expected = w.operator.indexed.terms(w, tensors).value
        assert torch.equal(run(*tensors).double(), expected.double()), w
        seen.add(w.op)
    assert seen


def test_places_out_of_range_are_read_as_zeros_and_reported():
    for text in CASES[-3:-1]:
        w = Workload.parse(text)
        for name in ("gather_cuda", "gather_tiled"):
            impl = IMPLS[name]
            if impl.unsupported(w, DEVICE) is None:
                x, index = w.operator.examples(w, "random", 0, "cpu")
                expected = torch.gather(x, w["dim"], index.long())
                index[..., 0][..., 3:5] = torch.tensor([-1, 2**31 - 1])
                run = OnCpu(impl, impl.heuristic(w, DEVICE), w)
                expected.masked_fill_((index < 0) | (index >= w["x"].shape[w["dim"]]), 0)
                assert torch.equal(run(x, index), expected)
                assert fault_reported()


@pytest.mark.parametrize("slab", [16, 32])
def test_a_gather_may_go_by_slabs_of_the_last_axis(slab):
    w, impl = (
        Workload.parse("gather(x=f32[3,20,64], dim=1, index=i64[3,50,64])"),
        IMPLS["gather_cuda"],
    )
    x, index = w.operator.examples(w, "random", 0, "cpu")
    for config in impl.space(w, DEVICE).sample(random.Random(3), 60):
        if config.slab == slab and config.block_threads == 128:
            assert torch.equal(OnCpu(impl, config, w)(x, index), torch.gather(x, 1, index)), config


@settings(max_examples=8)
@given(gathers())
def test_a_gather_of_any_shape_and_strides_is_pytorchs(w):
    x, index = w.operator.examples(w, "random", 0, "cpu")
    expected = torch.gather(x, w["dim"], index.long())
    for name in ("gather_cuda", "gather_tiled"):
        impl = IMPLS[name]
        if impl.unsupported(w, DEVICE) is None:
            configs = [
                impl.heuristic(w, DEVICE),
                *impl.space(w, DEVICE).sample(random.Random(2), 1),
            ]
            for config in configs:
                assert torch.equal(OnCpu(impl, config, w)(x, index), expected), config


@pytest.mark.parametrize(
    "text",
    [
        "index_add(x=f32[90,16], dim=0, index=i64[5000], source=f32[5000,16])",
        "scatter_add(x=f32[3000], dim=0, index=i64[20000], src=f32[20000])",
    ],
)
def test_atomic_sums_of_hot_rows_are_closer_to_the_truth_than_one_addition_a_position(text):
    w, impl = Workload.parse(text + "!indices=zipf!nondeterministic"), IMPLS["rows_atomic"]
    run = OnCpu(impl, dataclasses.replace(impl.heuristic(w, DEVICE), items=4), w)
    own, one_by_one = [], []
    for seed in range(6):
        x, index, source = w.operator.examples(w, "random", seed, "cpu")
        truth = x.double().index_add(0, index, source.double())
        own.append((run(x, index, source) - truth).abs().max())
        one_by_one.append((x.index_add(0, index, source) - truth).abs().max())
    assert sum(own) < 0.5 * sum(one_by_one)


@pytest.mark.parametrize(
    "text",
    [
        "index_add(x=f32[50,200], dim=0, index=i64[900], source=f32[900,200], alpha=-2.0)"
        "!indices=zipf!nondeterministic",
        "index_add(x=i64[2,50,260], dim=1, index=i32[700], source=i64[2,700,260])!donate=x",
        "embedding_backward(grad=f64[9,50,68], index=i64[9,50], num_weights=70, padding_idx=3)"
        "!indices=sorted!nondeterministic",
    ],
)
def test_pieces_of_rows_may_be_added_in_bulk(text):
    w, impl = Workload.parse(text), IMPLS["rows_atomic"]
    found = [c for c in impl.space(w, DEVICE) if c.bulk]
    assert {c.items for c in found} == {1, 4, 16}
    for config in found[::4]:
        verdict = Verifier(w, CPU).check(OnCpu(impl, config, w))
        assert verdict.ok, f"{config}: {verdict.message}"
        log = compiled(impl.task(config, w, DEVICE)).log
        assert not any(map(int, re.findall(r"(\d+) bytes spill stores", log)))


@pytest.mark.parametrize(
    "name", ["rows_balanced", "rows_bins", "rows_dealt", "rows_serial", "rows_sorted"]
)
@pytest.mark.parametrize("alpha", [1.0, -2.0])
def test_zeros_have_the_signs_of_pytorchs(name, alpha):
    text = f"index_add(x=f32[9,8], dim=0, index=i64[90], source=f32[90,8], alpha={alpha})"
    w, impl = Workload.parse(text), IMPLS[name]
    x, index, source = w.operator.examples(w, "random", 0, "cpu")
    index.clamp_(max=5)
    for old, new in itertools.product((0.0, -0.0), repeat=2):
        x.fill_(old)
        source.fill_(new)
        found = OnCpu(impl, impl.heuristic(w, DEVICE), w)(x, index, source)
        expected = torch.index_add(x, 0, index, source, alpha=alpha)
        assert torch.equal(found.signbit(), expected.signbit()), (old, new)


@pytest.mark.parametrize(
    "name",
    ["scatter_buckets", "scatter_exchange", "scatter_strided", "scatter_tiled", "scatter_winner"],
)
def test_a_negative_zero_is_written_as_it_is(name):
    w = Workload.parse("scatter(x=f32[300], dim=0, index=i64[500], src=-0.0)")
    tensors = w.operator.examples(w, "random", 0, "cpu")
    out = OnCpu(IMPLS[name], IMPLS[name].heuristic(w, DEVICE), w)(*tensors)
    expected = torch.scatter(tensors[0], 0, tensors[1], -0.0)
    assert torch.equal(out.signbit(), expected.signbit())


def test_a_gradient_of_minus_zeros_is_zero_as_pytorchs():
    w = Workload.parse("embedding_backward(grad=f32[90,8], index=i64[90], num_weights=9)")
    index = torch.arange(90) % 5
    for name in ("rows_balanced", "rows_bins", "rows_dealt", "rows_serial", "rows_sorted"):
        run = OnCpu(IMPLS[name], IMPLS[name].heuristic(w, DEVICE), w)
        assert not run(torch.full((90, 8), -0.0), index).signbit().any()


@pytest.mark.parametrize("rows", [96, 192])
def test_units_need_be_no_power_of_two(rows):
    w, impl = Workload.parse(SKEWED), IMPLS["rows_sorted"]
    config = dataclasses.replace(impl.heuristic(w, DEVICE), rows=rows)
    verdict = Verifier(w, CPU).check(OnCpu(impl, config, w))
    assert verdict.ok, verdict.message


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("spread", DISTRIBUTIONS)
@pytest.mark.parametrize(("lanes", "threads"), [(4, 256), (32, 512), (16, 256)])
def test_runs_over_units_and_spans_are_joined(waits, spread, lanes, threads, monkeypatch):
    monkeypatch.setattr(
        _sorted_rows, "first_in_out", lambda p: waits
    )  # where stored as wide as sums
    w = Workload.parse(
        f"index_add(x=f32[50,68], dim=0, index=i64[3000], source=f32[3000,68])!indices={spread}"
    )
    impl = IMPLS["rows_sorted"]
    sums = {"rows": 8, "lanes": lanes, "vec": 4, "unrolled": 4, "block_threads": threads}
    config = impl.Config(**sums, blocks=2, passes=1, items=4)
    assert impl.space(w, DEVICE).why_not(config) is None
    tensors = w.operator.examples(w, "integer", 0, "cpu")
    assert torch.equal(
        OnCpu(impl, config, w)(*tensors), torch.index_add(*tensors[:1], 0, *tensors[1:])
    )


@pytest.mark.parametrize("flag", ["", "!donate=x"])
@pytest.mark.parametrize("own", ["True", "False"])
def test_where_most_places_are_not_named_all_are_filled_before(own, flag):
    text = "x=f32[900,12], dim=0, index=i64[100], source=f32[100,12], reduce=mean"
    w = Workload.parse(f"index_reduce({text}, include_self={own}){flag}!indices=zipf")
    impl = IMPLS["rows_sorted"]
    run = OnCpu(impl, impl.heuristic(w, DEVICE), w)
    entries = [launch.entry for launch in run.executable.launches]
    assert entries.index("fill") == 0 if not flag else "fill" not in entries
    verdict = Verifier(w, CPU).check(run)
    assert verdict.ok, verdict.message


@pytest.mark.parametrize("own", ["True", "False"])
@pytest.mark.parametrize("flag", ["", "!donate=x"])
def test_a_mean_of_runs_over_many_units_is_divided_once(own, flag):
    text = "x=f32[23,12], dim=0, index=i64[700], source=f32[700,12], reduce=mean"
    w = Workload.parse(f"index_reduce({text}, include_self={own}){flag}!indices=zipf")
    config = dataclasses.replace(IMPLS["rows_sorted"].heuristic(w, DEVICE), rows=8)
    verdict = Verifier(w, CPU).check(OnCpu(IMPLS["rows_sorted"], config, w))
    assert verdict.ok, verdict.message


@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
def test_old_rows_may_be_read_ahead_of_their_runs_end(ahead):
    w, impl = Workload.parse(SKEWED.replace("zipf", "uniform")), IMPLS["rows_sorted"]
    config = dataclasses.replace(impl.heuristic(w, DEVICE), rows=16, ahead=ahead, unrolled=4)
    assert impl.space(w, DEVICE).why_not(config) is None
    verdict = Verifier(w, CPU).check(OnCpu(impl, config, w))
    assert verdict.ok, verdict.message


@pytest.mark.parametrize("text", [CASES[0], SKEWED])
def test_an_index_out_of_range_is_skipped_and_reported(text):
    w = Workload.parse(text.replace("!donate=x", ""))
    for impl in cuda_kernels(w, DEVICE):
        run = OnCpu(impl, impl.heuristic(w, DEVICE), w)
        x, index, src = w.operator.examples(w, "random", 0, "cpu")
        index[:2] = torch.tensor([-1, 2**40])
        kept = torch.cat([index[2:], index[-2:]]), torch.cat([src[2:], torch.zeros_like(src[:2])])
        found = run(x, index, src)
        assert fault_reported()
        if w.op == "index_add":
            torch.testing.assert_close(found, torch.index_add(x, 0, *kept), rtol=1e-4, atol=1e-4)
        else:
            assert torch.equal(found, last_written(x, 0, index[2:], src[2:]))


@pytest.mark.parametrize("places", [255, 256, 65535, 65536])
def test_pytorch_sorts_the_last_place_and_what_is_left_out_behind_it(places):
    w = Workload.parse(f"embedding_backward(grad=f32[90,4], index=i64[90], num_weights={places})")
    run = OnCpu(IMPLS["rows_sorted_torch"], IMPLS["rows_sorted_torch"].heuristic(w, DEVICE), w)
    index = torch.tensor([places - 1, 0, places, places // 2, -1] * 18)
    grad = torch.randint(-9, 9, (90, 4)).float()
    expected = torch.zeros(places, 4)
    for i in (0, 1, 3):
        expected[index[i]] = grad[i::5].sum(0)
    assert torch.equal(run(grad, index), expected)
    assert fault_reported()


@pytest.mark.parametrize(
    ("name", "dtype", "large"),
    [
        *((name, "f32", 2.0**100) for name in ("rows_sorted", "scatter_sorted", "bucket_products")),
        *((name, "f64", 2.0**1000) for name in ("rows_sorted", "scatter_sorted")),
    ],
)
@pytest.mark.parametrize("last", [1.0, -0.0, math.inf, math.nan])
def test_a_product_leaves_the_range_of_its_dtype_only_where_the_whole_does(
    name, dtype, large, last
):
    shape = [2000] if name == "rows_sorted" else [2000, 2]
    x = f"{dtype}{[3, *shape[1:]]}"
    w = Workload.parse(
        f"scatter_reduce(x={x}, dim=0, index=i64{shape}, src={dtype}{shape}, reduce=prod)"
    )
    x, index, src = w.operator.examples(w, "random", 0, "cpu")
    x.fill_(3)
    index.fill_(1)
    src[:900], src[900:1800], src[1800:], src[-1] = large, 1 / large, -1, last
    impl = IMPLS[name]
    for config in (impl.heuristic(w, DEVICE), *impl.space(w, DEVICE).sample(random.Random(0), 3)):
        found = OnCpu(impl, config, w)(x, index, src)
        expected = torch.full_like(x[1], -3.0 * last)
        assert found[1].equal(expected) or (math.isnan(last) and found[1].isnan().all()), config
        assert torch.equal(found[0], x[0])


def test_a_product_of_few_positions_begins_with_the_old_element():
    w = Workload.parse("scatter_reduce(x=f32[500], dim=0, index=i64[2], src=f32[2], reduce=prod)")
    impl = IMPLS["scatter_serial"]
    x, index, src = torch.zeros(500), torch.zeros(2, dtype=torch.int64), torch.full((2,), 1e30)
    x[0] = 1e-30
    run = OnCpu(impl, impl.heuristic(w, DEVICE), w)
    torch.testing.assert_close(run(x, index, src)[0], torch.tensor(1e30))
    assert run(torch.zeros(500), index, src)[0] == 0


def test_strides_that_lead_nowhere_may_be_of_any_size():
    w = Workload.parse(
        "scatter_add(x=f32[4,7,2], dim=0, index=i64[1,7,2]@strides(3000000000,1,7), src=f32[1,7,2])"
    )
    impl = IMPLS["scatter_serial"]
    assert impl.unsupported(w, DEVICE) is None
    verdict = Verifier(w, CPU).check(OnCpu(impl, impl.heuristic(w, DEVICE), w))
    assert verdict.ok, verdict.message
