"""Rows reduced by blocks of equal work: right however often places are named, the same bits."""

import dataclasses
import itertools
import math
import random
import re

import cuda_on_cpu
import pytest
import torch
from cuda_on_cpu import DEVICE, OnCpu, fault_reported
from hypothesis import given, settings
from hypothesis import strategies as st

from axes_of_cases import pairs
from indexing import DTYPES
from tilewright.compile import cxx, nvrtc
from tilewright.compile.cache import compiled
from tilewright.device import DEVICES
from tilewright.impl import IMPLS
from tilewright.impls.indices._indexed import most_bytes
from tilewright.impls.indices.rows import rows_balanced
from tilewright.impls.indices.rows._rows import served_rows
from tilewright.indexed import DISTRIBUTIONS
from tilewright.measure.verify import Verifier
from tilewright.op import Workload
from tilewright.suite import SUITES

IMPL = IMPLS["rows_balanced"]
CPU = torch.device("cpu")
needs_compilers = pytest.mark.skipif(
    nvrtc.missing() is not None or cxx.missing() is not None, reason="a compiler is missing"
)


def with_sms(monkeypatch, sms):
    device = dataclasses.replace(DEVICE, sms=sms)
    monkeypatch.setattr(cuda_on_cpu, "DEVICE", device)
    return device


def assert_right(w, config, device=DEVICE):
    assert IMPL.space(w, device).why_not(config) is None
    verdict = Verifier(w, CPU).check(OnCpu(IMPL, config, w))
    assert verdict.ok, f"{config}: {verdict.message}"
    assert verdict.deterministic  # though blocks come in another order, and so who is last
    assert not fault_reported()


@needs_compilers
@pytest.mark.parametrize("reduce", ["sum", "prod", "mean", "amax", "amin"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_reduction_is_right(dtype, reduce):
    own = (DTYPES.index(dtype) + len(reduce)) % 2 == 0
    w = Workload.parse(
        f"scatter_reduce(x={dtype}[40,20], dim=0, index=i64[1500,20]@strides(1,0), "
        f"src={dtype}[1500,20], reduce={reduce}, include_self={own})"
        f"{'!donate=x' if own else ''}!indices=zipf"
    )
    if reduce == "prod" and not dtype.startswith("i"):
        assert "in one chain" in IMPL.unsupported(w, DEVICE)
    else:
        assert_right(w, IMPL.heuristic(w, DEVICE))


LAYOUTS = [
    "index_add(x=f16[3,40,5], dim=1, index=i64[400], source=f16[3,400,5], alpha=-2.0)!donate=x",
    "index_add(x=bf16[300,40], dim=0, index=i32[70], source=bf16[70,40])",
    "index_add(x=f32[40,37]@strides(44,1), dim=0, index=i64[3000], source=f32[3000,37])!donate=x",
    "index_add(x=f32[40,36]@align4, dim=0, index=i64[300], source=f32[300,36])",
    "index_add(x=f64[2000], dim=0, index=i64[1100], source=f64[1100])",
    "index_add(x=f32[5,1], dim=0, index=i64[1], source=f32[1,1])",
    "index_reduce(x=i64[90,6]@strides(7,1), dim=0, index=i64[800], source=i64[800,6], reduce=mean, "
    "include_self=False)!donate=x",
    "scatter_add(x=bf16[2,90,40], dim=1, index=i64[2,800,40]@strides(0,1,0), src=bf16[2,800,40])",
    "embedding_backward(grad=f32[7,100,24], index=i64[7,100], num_weights=90, padding_idx=3, "
    "scale_grad_by_freq=True)",
    "embedding_backward(grad=f16[300,300], index=i32[300], num_weights=7)",
    "index_add(x=f32[3,9,70], dim=1, index=i64[2000], source=f32[3,2000,70])",
]


@needs_compilers
@pytest.mark.parametrize("text", LAYOUTS)
def test_every_layout_is_right_by_any_config(text):
    w = Workload.parse(f"{text}!indices=zipf")
    others = IMPL.space(w, DEVICE).sample(random.Random(len(text)), 2)
    for config in dict.fromkeys([IMPL.heuristic(w, DEVICE), *others]):
        assert_right(w, config)


@needs_compilers
@pytest.mark.parametrize("flag", ["", "!donate=x"])
@pytest.mark.parametrize("spread", DISTRIBUTIONS)
@pytest.mark.parametrize(("threads", "lanes", "sms"), [(256, 4, 132), (1024, 32, 9)])
def test_every_distribution_is_right_by_many_blocks_or_few(
    threads, lanes, sms, spread, flag, monkeypatch
):
    device = with_sms(monkeypatch, sms)
    w = Workload.parse(
        f"index_add(x=f32[1700,68], dim=0, index=i64[3000], source=f32[3000,68]){flag}"
        f"!indices={spread}"
    )
    config = IMPL.Config(block_threads=threads, blocks=1, lanes=lanes, vec=4, unrolled=2)
    assert IMPL.space(w, device).why_not(config) is None
    x, index, source = w.operator.examples(w, "integer", 0, "cpu")
    expected = torch.index_add(x, 0, index, source)
    run = OnCpu(IMPL, config, w)
    for _ in range(2):
        assert torch.equal(run(x.clone(), index, source), expected)


def runs_of(draw):
    """How often each place is named: never, or about as often as a run may be without a cut."""
    lengths = st.one_of(st.just(0), st.integers(1, 3), st.integers(14, 18), st.integers(19, 700))
    return draw(st.lists(lengths, min_size=1, max_size=40))


@needs_compilers
@settings(max_examples=30)
@given(st.data())
def test_runs_of_any_lengths_are_cut_and_joined(data):
    lengths = runs_of(data.draw)
    index = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    index = index[torch.randperm(len(index))]
    left_out = data.draw(st.integers(1, 40))
    index = torch.cat([index, torch.full((left_out,), len(lengths))])[:8000]
    w = Workload.parse(
        f"embedding_backward(grad=f32[{len(index)},8], index=i64[{len(index)}], "
        f"num_weights={len(lengths) + 1}, padding_idx={len(lengths)}, scale_grad_by_freq=True)"
    )
    grad = torch.randint(-9, 9, (len(index), 8)).float()
    sums = torch.zeros(len(lengths) + 1, 8).index_add(0, index, grad)
    sums[-1] = 0
    counts = index.bincount(minlength=len(sums)).clamp(min=1)[:, None]
    with pytest.MonkeyPatch.context() as patch:
        with_sms(patch, data.draw(st.sampled_from([1, 2, 7, 40])))
        config = IMPL.Config(block_threads=256, blocks=1, lanes=4, vec=2, unrolled=4)
        run = OnCpu(IMPL, config, w)
        assert torch.equal(run(grad, index), sums / counts)
        assert torch.equal(run(grad, index), sums / counts)


@needs_compilers
@pytest.mark.parametrize("spread", ["zipf", "constant"])
def test_sums_have_the_same_bits_whoever_comes_last(spread, monkeypatch):
    with_sms(monkeypatch, 30)
    w = Workload.parse(
        "index_add(x=f32[70,40], dim=0, index=i64[4000], source=f32[4000,40], alpha=0.3)"
        f"!indices={spread}"
    )
    tensors = w.operator.examples(w, "random", 0, "cpu")
    run = OnCpu(IMPL, IMPL.heuristic(w, DEVICE), w)
    x, index, source = tensors
    first, backwards = run(*tensors), run(*tensors)
    assert torch.equal(first, backwards)
    exact = torch.index_add(x.double(), 0, index, source.double(), alpha=0.3)
    torch.testing.assert_close(first.double(), exact, rtol=1e-5, atol=1e-5)


@needs_compilers
@pytest.mark.parametrize("count", [1, 31, 256, 257, 2048, 2049, 16384, 32768])
def test_any_number_of_indices_is_right(count):
    w = Workload.parse(f"index_add(x=i32[99,3], dim=0, index=i64[{count}], source=i32[{count},3])")
    assert_right(w, IMPL.heuristic(w, DEVICE))


@needs_compilers
def test_as_many_places_as_there_are_counters_for():
    w = Workload.parse("index_add(x=i32[50001,2], dim=0, index=i64[3000], source=i32[3000,2])")
    x, index, source = w.operator.examples(w, "integer", 0, "cpu")
    index[::3], index[1::7] = 50000, 0
    run = OnCpu(IMPL, IMPL.heuristic(w, DEVICE), w)
    assert torch.equal(run(x, index, source), torch.index_add(x, 0, index, source))


@needs_compilers
def test_an_index_out_of_range_is_skipped_and_reported_where_the_rest_is_filled():
    w = Workload.parse(
        "embedding_backward(grad=f32[70,8], index=i64[70], num_weights=9, padding_idx=4)"
    )
    grad, index = w.operator.examples(w, "integer", 0, "cpu")
    run = OnCpu(IMPL, IMPL.heuristic(w, DEVICE), w)
    index[:4] = torch.tensor([-1, 9, 2**40, 65535])
    kept = index[4:] != 4
    expected = torch.zeros(9, 8).index_add(0, index[4:][kept], grad[4:][kept])
    assert torch.equal(run(grad, index), expected)
    assert fault_reported()
    assert not run(grad, torch.full_like(index, 4)).any()  # none is left
    assert not fault_reported()


@needs_compilers
def test_zeros_have_the_signs_of_pytorchs_where_a_run_is_cut(monkeypatch):
    with_sms(monkeypatch, 9)
    w = Workload.parse("index_add(x=f32[9,8], dim=0, index=i64[900], source=f32[900,8])")
    run = OnCpu(IMPL, IMPL.heuristic(w, DEVICE), w)
    x, index, source = w.operator.examples(w, "random", 0, "cpu")
    index.clamp_(max=5)
    for old, new in itertools.product((0.0, -0.0), repeat=2):
        expected = torch.index_add(x.fill_(old), 0, index, source.fill_(new))
        assert torch.equal(run(x, index, source).signbit(), expected.signbit()), (old, new)


@needs_compilers
@pytest.mark.parametrize("reduce", ["amax", "amin"])
def test_a_nan_in_any_part_of_a_run_is_the_result(reduce, monkeypatch):
    with_sms(monkeypatch, 9)
    text = f"x=f32[3,8], dim=0, index=i64[900], source=f32[900,8], reduce={reduce}"
    w = Workload.parse(f"index_reduce({text})!indices=constant")
    run = OnCpu(IMPL, IMPL.heuristic(w, DEVICE), w)
    x, index, source = w.operator.examples(w, "random", 0, "cpu")
    for row in (0, 450, 899):
        spoilt = source.clone()
        spoilt[row, 3] = math.nan
        expected = torch.index_reduce(x, 0, index, spoilt, reduce)
        assert torch.equal(run(x, index, spoilt).nan_to_num(7e7), expected.nan_to_num(7e7))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("index_add(x=f32[9,4], dim=0, index=i64[32769], source=f32[32769,4])", "than 32768"),
        ("index_add(x=f32[65536,4], dim=0, index=i64[30], source=f32[30,4])", "than 65535"),
        (
            "index_add(x=f32[60000,4], dim=0, index=i64[30], source=f32[30,4])!donate=x",
            "or a block's memory",
        ),
        ("index_reduce(x=f32[9,4], dim=0, index=i64[3], source=f32[3,4], reduce=prod)", "chain"),
        ("index_add(x=f32[4], dim=0, index=i64[3]@strides(2), source=f32[3])", "not contiguous"),
        ("scatter_add(x=f32[9,4], dim=0, index=i64[3,4], src=f32[3,4])", "go separate ways"),
    ],
)
def test_what_it_does_not_take_is_said_in_words(text, words):
    assert words in IMPL.unsupported(Workload.parse(text), DEVICE)


@pytest.mark.parametrize("suite", ["rows_small", "rows_embedding", "rows_few", "rows_gnn"])
def test_one_launch_of_ranges_that_are_alike_in_little_memory(suite):
    for w in SUITES[suite].workloads():
        if not IMPL.serves(w.op) or IMPL.unsupported(w, DEVICE) is not None:
            continue
        p, device = served_rows(w), DEVICE
        for c in IMPL.space(w, device):
            (launch,), workspace = IMPL.launches(w, p, c, device)
            assert workspace.bytes <= most_bytes(48, p.count) + 256
            assert launch.shared_bytes <= device.shared_bytes_per_block
            assert launch.counters == math.prod(launch.grid)
            rows = rows_balanced.most_of_range(p, c, device)
            assert rows <= max(2 * math.ceil(p.count / launch.grid[0]), 40)


@pytest.mark.skipif(nvrtc.missing() is not None, reason="NVRTC is not installed")
@pytest.mark.parametrize(
    ("dtype", "reduce", "device"),
    pairs(["bf16", "f32", "f64", "i64"], ["sum", "prod", "mean", "amax"], ["a100", "h200", "b200"]),
)
def test_as_many_rows_in_flight_as_are_allowed_do_not_spill(dtype, reduce, device):
    text = f"x={dtype}[400,256], dim=0, index=i64[30000], source={dtype}[30000,256]"
    more = f"index_reduce({text}, reduce={reduce})"
    w = Workload.parse(f"index_add({text}, alpha=2.0)" if reduce == "sum" else more)
    spec = DEVICES[device]
    if IMPL.unsupported(w, spec) is not None:
        assert reduce == "prod"
        return
    for threads in (512, 1024):
        found = [c for c in IMPL.space(w, spec) if c.blocks * c.block_threads == threads]
        config = max(found, key=lambda c: (c.unrolled * c.vec, str(c)))
        log = compiled(IMPL.task(config, w, spec)).log
        spills = [int(n) for n in re.findall(r"(\d+) bytes spill stores", log)]
        assert spills
        assert not any(spills)
