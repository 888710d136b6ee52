"""Rows added straight to their places: right for any indices, and by the sort's bits where they
repeat."""

import re

import pytest
import torch
from cuda_on_cpu import DEVICE, OnCpu, fault_reported

from tilewright.compile import cxx, nvrtc
from tilewright.compile.cache import compiled
from tilewright.device import DEVICES
from tilewright.impl import IMPLS
from tilewright.impls.indices.rows._rows import served_rows
from tilewright.measure.verify import Verifier
from tilewright.op import Workload
from tilewright.suite import SUITES

IMPL, SORTED = IMPLS["rows_unique"], IMPLS["rows_sorted"]
needs_compilers = pytest.mark.skipif(
    nvrtc.missing() is not None or cxx.missing() is not None, reason="a compiler is missing"
)
CASES = [
    "index_add(x=f32[90,36], dim=0, index=i64[70], source=f32[70,36])!donate=x",
    "index_add(x=f32[900,36], dim=0, index=i32[70], source=f32[70,36], alpha=-2.0)",
    "index_add(x=f16[3,40,5], dim=1, index=i64[40], source=f16[3,40,5])!donate=x",
    "scatter_add(x=bf16[90,40], dim=0, index=i64[80,40]@strides(1,0), src=bf16[80,40])",
    "index_reduce(x=i64[90,6]@strides(7,1), dim=0, index=i64[80], source=i64[80,6], reduce=mean, "
    "include_self=False)!donate=x",
    "index_reduce(x=f64[90,6], dim=0, index=i64[80], source=f64[80,6], reduce=amin, "
    "include_self=False)",
    "embedding_backward(grad=f32[7,10,24], index=i64[7,10], num_weights=90, padding_idx=3, "
    "scale_grad_by_freq=True)",
]


def spread(text, distribution):
    w = Workload.parse(f"{text}!indices={distribution}")
    return w, OnCpu(IMPL, IMPL.heuristic(w, DEVICE), w)


@pytest.fixture
def straight(monkeypatch):
    """Without the general kernels."""
    every = type(IMPL).launches

    def first(self, *args):
        launches, workspace = every(self, *args)
        assert [launch.entry for launch in launches[:3]] == ["prepare", "look", "add"]
        return launches[:3], workspace

    monkeypatch.setattr(type(IMPL), "launches", first)


@needs_compilers
@pytest.mark.parametrize("distribution", ["unique", "zipf", "constant"])
@pytest.mark.parametrize("text", CASES)
def test_sums_are_right_whether_indices_repeat_or_not(text, distribution):
    w, run = spread(text, distribution)
    verdict = Verifier(w, torch.device("cpu")).check(run)
    assert verdict.ok, verdict.message
    assert verdict.deterministic
    assert not fault_reported()


@needs_compilers
@pytest.mark.parametrize("text", CASES[:2])
def test_they_have_the_bits_of_the_sort(text):
    for distribution in ("unique", "zipf"):
        w, run = spread(text, distribution)
        tensors = w.operator.examples(w, "random", 0, "cpu")
        by_sort = OnCpu(SORTED, SORTED.heuristic(w, DEVICE), w)
        found, expected = (each(tensors[0].clone(), *tensors[1:]) for each in (run, by_sort))
        assert torch.equal(found, expected)


@needs_compilers
@pytest.mark.parametrize("text", CASES)
def test_indices_that_do_not_repeat_leave_nothing_to_the_general_kernels(text, straight):
    w, run = spread(text, "unique")
    verdict = Verifier(w, torch.device("cpu")).check(run)
    assert verdict.ok, verdict.message


@needs_compilers
def test_where_an_index_repeats_nothing_is_added_straight(straight):
    w, run = spread(CASES[0], "zipf")
    x, index, source = w.operator.examples(w, "random", 0, "cpu")
    assert torch.equal(run(x.clone(), index, source), x)


@needs_compilers
@pytest.mark.parametrize("text", CASES[:2])
def test_one_repetition_among_all_is_found(text):
    w, run = spread(text, "unique")
    x, index, source = w.operator.examples(w, "integer", 0, "cpu")
    for first, second in ((0, 1), (0, 69), (31, 32), (5, 37)):
        repeated = index.clone()
        repeated[second] = index[first]
        expected = torch.index_add(x, 0, repeated, source, alpha=w["alpha"])
        assert torch.equal(run(x.clone(), repeated, source), expected)


@needs_compilers
@pytest.mark.parametrize("text", CASES[:2])
def test_indices_out_of_range_are_skipped_and_reported_and_do_not_count_as_repeated(text, straight):
    w, run = spread(text, "unique")
    x, index, source = w.operator.examples(w, "integer", 0, "cpu")
    index[3:6] = torch.tensor([-1, len(x), len(x)])
    source[3:6] = 0
    expected = torch.index_add(x, 0, index.clamp(0, len(x) - 1), source, alpha=w["alpha"])
    assert torch.equal(run(x.clone(), index, source), expected)
    assert fault_reported()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("index_add(x=f32[4,3], dim=0, index=i64[5], source=f32[5,3])", "of 5 indices of 4 places"),
        ("index_add(x=f32[4,0], dim=0, index=i64[3], source=f32[3,0])", "nothing to compute"),
        ("index_add(x=f32[4,3], dim=0, index=i64[0], source=f32[0,3])", "nothing to compute"),
        ("scatter_add(x=f32[9,4], dim=0, index=i64[3,4], src=f32[3,4])", "go separate ways"),
    ],
)
def test_what_it_does_not_take_is_said_in_words(text, words):
    assert words in IMPL.unsupported(Workload.parse(text), DEVICES["h200"])


def test_workspace_is_four_bytes_a_place_or_what_the_sort_takes():
    device = DEVICES["h200"]
    for w in SUITES["rows_unique"].workloads():
        places, count = w["x"].shape[0], w["index"].numel
        _, workspace = IMPL.launches(w, served_rows(w), IMPL.heuristic(w, device), device)
        assert workspace.bytes <= max(4 * places, 48 * count, 2**16) + 512


@pytest.mark.skipif(nvrtc.missing() is not None, reason="NVRTC is not installed")
@pytest.mark.parametrize("device", ["a100", "h200", "b200"])
@pytest.mark.parametrize(("dtype", "flag"), [("f32", ""), ("bf16", "!donate=x"), ("f64", "")])
def test_as_many_rows_in_flight_as_are_allowed_do_not_spill(dtype, flag, device):
    text = f"x={dtype}[4000,256], dim=0, index=i64[2000], source={dtype}[2000,256], alpha=2.0"
    w, spec = Workload.parse(f"index_add({text}){flag}"), DEVICES[device]
    config = max(IMPL.space(w, spec), key=lambda c: (c.unrolled * c.vec, c.block_threads))
    log = compiled(IMPL.task(config, w, spec)).log
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill stores", log)]
    assert spills
    assert not any(spills)
