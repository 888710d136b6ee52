"""Few rows by one launch: right for every dtype, reduction and skew, and taken for tiny work."""

import dataclasses
import random
import re

import cuda_on_cpu
import pytest
import torch
from cuda_on_cpu import DEVICE, OnCpu, fault_reported

from axes_of_cases import pairs
from indexing import DTYPES
from tilewright.compile import cxx, nvrtc
from tilewright.compile.cache import compiled
from tilewright.device import DEVICES
from tilewright.dispatch import selection
from tilewright.impl import IMPLS
from tilewright.impls.indices.rows import rows_serial
from tilewright.impls.indices.rows._rows import served_rows
from tilewright.indexed import DISTRIBUTIONS
from tilewright.measure.verify import Verifier
from tilewright.op import Workload

IMPL, DEALT = IMPLS["rows_serial"], IMPLS["rows_dealt"]
CPU = torch.device("cpu")
needs_compilers = pytest.mark.skipif(
    nvrtc.missing() is not None or cxx.missing() is not None, reason="a compiler is missing"
)


ONE_LAUNCH = pytest.mark.parametrize("impl", [IMPL, DEALT], ids=lambda impl: impl.name)


def assert_right(impl, w, config):
    assert impl.space(w, DEVICE).why_not(config) is None
    verdict = Verifier(w, CPU).check(OnCpu(impl, config, w))
    assert verdict.ok, f"{config}: {verdict.message}"
    assert verdict.deterministic
    assert not fault_reported()


@needs_compilers
@ONE_LAUNCH
@pytest.mark.parametrize("reduce", ["sum", "prod", "mean", "amax", "amin"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_reduction_is_right(dtype, reduce, impl):
    own = (DTYPES.index(dtype) + len(reduce)) % 2 == 0
    text = (
        f"scatter_reduce(x={dtype}[40,20], dim=0, index=i64[150,20]@strides(1,0), "
        f"src={dtype}[150,20], reduce={reduce}, include_self={own})"
    )
    flags = ("", "!donate=x") if impl is IMPL else ("!donate=x" if own else "",)
    for flag in flags:
        w = Workload.parse(f"{text}{flag}!indices=zipf")
        assert_right(impl, w, impl.heuristic(w, DEVICE))


LAYOUTS = [
    "index_add(x=f16[3,40,5], dim=1, index=i64[400], source=f16[3,400,5], alpha=-2.0)!donate=x",
    "index_add(x=bf16[300,40], dim=0, index=i32[70], source=bf16[70,40])",
    "index_add(x=f32[900,36], dim=0, index=i64[70], source=f32[70,36])",
    "index_add(x=f32[40,37]@strides(44,1), dim=0, index=i64[300], source=f32[300,37])!donate=x",
    "index_add(x=f32[40,36]@align4, dim=0, index=i64[300], source=f32[300,36])",
    "index_add(x=f64[2000], dim=0, index=i64[1100], source=f64[1100])",
    "index_add(x=f32[5,1], dim=0, index=i64[1], source=f32[1,1])",
    "index_reduce(x=f32[40,6], dim=0, index=i64[700], source=f32[700,6], reduce=prod, "
    "include_self=False)!donate=x",
    "index_reduce(x=i64[90,6]@strides(7,1), dim=0, index=i64[80], source=i64[80,6], reduce=mean, "
    "include_self=False)!donate=x",
    "scatter_add(x=bf16[2,90,40], dim=1, index=i64[2,80,40]@strides(0,1,0), src=bf16[2,80,40])",
    "embedding_backward(grad=f32[7,10,24], index=i64[7,10], num_weights=90, padding_idx=3, "
    "scale_grad_by_freq=True)",
    "embedding_backward(grad=f16[300,300], index=i32[300], num_weights=7)",
]


@needs_compilers
@ONE_LAUNCH
@pytest.mark.parametrize("text", LAYOUTS)
def test_every_layout_is_right_by_any_config(text, impl):
    w = Workload.parse(f"{text}!indices=zipf")
    others = impl.space(w, DEVICE).sample(random.Random(len(text)), 2)
    for config in dict.fromkeys([impl.heuristic(w, DEVICE), *others]):
        assert_right(impl, w, config)


CONFIGS = [(4, 8, 16), (4, 2, 128), (8, 4, 64), (32, 8, 32)]


@needs_compilers
@pytest.mark.parametrize("flag", ["", "!donate=x"])
@pytest.mark.parametrize("spread", DISTRIBUTIONS)
@pytest.mark.parametrize(("lanes", "unrolled", "positions"), CONFIGS)
def test_runs_over_the_ranges_of_groups_are_joined(lanes, unrolled, positions, spread, flag):
    w = Workload.parse(
        f"index_add(x=f32[300,68], dim=0, index=i64[900], source=f32[900,68]){flag}"
        f"!indices={spread}"
    )
    config = IMPL.Config(lanes=lanes, vec=4, unrolled=unrolled, positions=positions)
    x, index, source = w.operator.examples(w, "integer", 0, "cpu")
    expected = torch.index_add(x, 0, index, source)
    assert torch.equal(OnCpu(IMPL, config, w)(x, index, source), expected)


@needs_compilers
@pytest.mark.parametrize("flag", ["", "!donate=x"])
@pytest.mark.parametrize("spread", DISTRIBUTIONS)
@pytest.mark.parametrize(("threads", "lanes", "sms"), [(256, 4, 132), (512, 32, 132), (256, 8, 3)])
def test_blocks_may_have_few_or_many_places(threads, lanes, sms, spread, flag, monkeypatch):
    device = dataclasses.replace(DEVICE, sms=sms)
    monkeypatch.setattr(cuda_on_cpu, "DEVICE", device)
    w = Workload.parse(
        f"index_add(x=f32[1700,68], dim=0, index=i64[3000], source=f32[3000,68]){flag}"
        f"!indices={spread}"
    )
    config = DEALT.Config(block_threads=threads, blocks=1, lanes=lanes, vec=4, unrolled=4)
    assert DEALT.space(w, device).why_not(config) is None
    x, index, source = w.operator.examples(w, "integer", 0, "cpu")
    expected = torch.index_add(x, 0, index, source)
    run = OnCpu(DEALT, config, w)
    for _ in range(2):
        assert torch.equal(run(x.clone(), index, source), expected)


@needs_compilers
@ONE_LAUNCH
@pytest.mark.parametrize("count", [1, 31, 256, 257, 2048, 2049, 16384])
def test_any_number_of_indices_is_right(count, impl):
    w = Workload.parse(f"index_add(x=i32[99,3], dim=0, index=i64[{count}], source=i32[{count},3])")
    if why := impl.unsupported(w, DEVICE):
        assert "each block would read" in why
    else:
        assert_right(impl, w, impl.heuristic(w, DEVICE))


@needs_compilers
@ONE_LAUNCH
def test_a_product_goes_over_its_terms_in_order(impl):
    """From the old row on, no part of 2^100 * 2^-180 * 2^180 leaves fp32; 2^-180 is zero there."""
    text = "x=f32[3,4], dim=0, index=i64[120], source=f32[120,4], reduce=prod"
    w = Workload.parse(f"index_reduce({text})")
    source = torch.full((120, 4), 8.0)
    source[:60] = 0.125
    x, index = torch.full((3, 4), 2.0**100), torch.ones(120, dtype=torch.int64)
    assert torch.equal(OnCpu(impl, impl.heuristic(w, DEVICE), w)(x, index, source), x)


@needs_compilers
@ONE_LAUNCH
def test_an_index_out_of_range_is_skipped_and_reported_where_the_rest_is_filled(impl):
    w = Workload.parse(
        "embedding_backward(grad=f32[70,8], index=i64[70], num_weights=9, padding_idx=4)"
    )
    grad, index = w.operator.examples(w, "integer", 0, "cpu")
    index[:3] = torch.tensor([-1, 9, 2**40])
    kept = index[3:] != 4
    expected = torch.zeros(9, 8).index_add(0, index[3:][kept], grad[3:][kept])
    assert torch.equal(OnCpu(impl, impl.heuristic(w, DEVICE), w)(grad, index), expected)
    assert fault_reported()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("index_add(x=f32[9,4], dim=0, index=i64[2049], source=f32[2049,4])", "more than 2048"),
        ("index_add(x=f32[131073,4], dim=0, index=i64[3], source=f32[3,4])", "up to 131072 places"),
        ("index_add(x=f32[4,0], dim=0, index=i64[3], source=f32[3,0])", "nothing to compute"),
        ("index_add(x=f32[4], dim=0, index=i64[3]@strides(2), source=f32[3])", "not contiguous"),
        ("scatter_add(x=f32[9,4], dim=0, index=i64[3,4], src=f32[3,4])", "go separate ways"),
    ],
)
def test_what_it_does_not_take_is_said_in_words(text, words):
    assert words in IMPL.unsupported(Workload.parse(text), DEVICE)


def test_in_place_a_table_may_be_of_any_size():
    text = "index_add(x=f32[5000000,64], dim=0, index=i64[300], source=f32[300,64])!donate=x"
    assert IMPL.unsupported(Workload.parse(text), DEVICE) is None


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("index_add(x=f32[50,8], dim=0, index=i64[400], source=f32[400,8])", "rows_serial"),
        ("index_add(x=f32[50,8], dim=0, index=i64[401], source=f32[401,8])", "integer_sums"),
        ("index_add(x=i32[50,8], dim=0, index=i64[1024], source=i32[1024,8])", "rows_serial"),
        ("embedding_backward(grad=f32[512,8], index=i64[512], num_weights=4000)", "rows_serial"),
        ("index_add(x=f64[50,7], dim=0, index=i64[1025], source=f64[1025,7])", "integer_sums"),
        ("index_add(x=f32[9,64], dim=0, index=i64[1025], source=f32[1025,64])", "rows_bins"),
        ("index_add(x=f32[9,16], dim=0, index=i64[30], source=f32[30,16])", "rows_dealt"),
        ("index_add(x=f64[50,64], dim=0, index=i64[1025], source=f64[1025,64])", "rows_balanced"),
        ("index_add(x=i32[50,64], dim=0, index=i64[16384], source=i32[16384,64])", "rows_balanced"),
        ("index_add(x=f32[50,64], dim=0, index=i64[16385], source=f32[16385,64])", "integer_sums"),
        ("index_add(x=f16[90,4096], dim=0, index=i64[9000], source=f16[9000,4096])", "rows_sorted"),
        ("index_add(x=f32[90000,768], dim=0, index=i64[9], source=f32[9,768])", "rows_dealt"),
        (
            "index_reduce(x=f32[50,64], dim=0, index=i64[90], source=f32[90,64], reduce=prod)",
            "rows_dealt",
        ),
        ("scatter_add(x=f32[50], dim=0, index=i64[90], src=f32[90])", "rows_serial"),
    ],
)
def test_untuned_it_is_taken_where_work_is_tiny(text, taken):
    for device in ("a100", "h200", "b200"):
        choice = selection._untuned(Workload.parse(text), DEVICES[device], "heuristic", "")
        assert choice.implementation == taken, device


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("index_add(x=f32[9,4], dim=0, index=i64[16385], source=f32[16385,4])", "than 16384"),
        (
            "index_add(x=f32[9000000,64], dim=0, index=i64[300], source=f32[300,64])!donate=x",
            "or a block's memory",
        ),
    ],
)
def test_what_places_dealt_out_do_not_take_is_said_in_words(text, words):
    assert words in DEALT.unsupported(Workload.parse(text), DEVICE)


@pytest.mark.parametrize("columns", [1, 64, 768, 4096])
@pytest.mark.parametrize("count", [1, 50, 1024])
def test_one_launch_of_blocks_that_run_at_once_and_no_workspace(count, columns):
    w = Workload.parse(
        f"index_add(x=f32[50,{columns}], dim=0, index=i64[{count}], "
        f"source=f32[{count},{columns}])!donate=x"
    )
    config = IMPL.heuristic(w, DEVICE)
    launches, workspace = IMPL.launches(w, served_rows(w), config, DEVICE)
    (launch,) = launches
    assert workspace.bytes == 0
    assert launch.grid[0] * launch.grid[1] <= rows_serial.BLOCKS_OF_SM * DEVICE.sms
    assert 2 * (launch.shared_bytes + 1024) <= DEVICE.shared_bytes_per_sm


@pytest.mark.skipif(nvrtc.missing() is not None, reason="NVRTC is not installed")
@pytest.mark.parametrize(("impl", "count"), [(IMPL, 2000), (DEALT, 16000)])
@pytest.mark.parametrize(
    ("dtype", "reduce", "device"),
    pairs(["bf16", "f32", "f64", "i64"], ["sum", "prod", "mean", "amax"], ["a100", "h200", "b200"]),
)
def test_as_many_rows_in_flight_as_are_allowed_do_not_spill(dtype, reduce, device, impl, count):
    text = f"x={dtype}[400,256], dim=0, index=i64[{count}], source={dtype}[{count},256]"
    more = f"index_reduce({text}, reduce={reduce})"
    w = Workload.parse(f"index_add({text}, alpha=2.0)" if reduce == "sum" else more)
    spec = DEVICES[device]
    config = max(impl.space(w, spec), key=lambda c: (c.unrolled * c.vec, str(c)))
    log = compiled(impl.task(config, w, spec)).log
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill stores", log)]
    assert spills
    assert not any(spills)
