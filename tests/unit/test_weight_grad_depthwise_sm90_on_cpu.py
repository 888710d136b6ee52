"""The depthwise kernel for Hopper, run on a CPU: which sums are taps, whose place is free when."""

import struct
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from convolutions import weight_grad
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tensor_cores_on_cpu import DEVICE, OnCpu, without_a_gpu

from infinities import assert_infinities_stay, with_infinities
from tilewright.compile import cxx, nvrtc
from tilewright.impl import IMPLS
from tilewright.impls import _weight_grad_launch
from tilewright.impls import conv2d_weight_grad_depthwise_sm90 as depthwise_sm90
from tilewright.measure.verify import Verifier
from tilewright.op import Workload

pytestmark = pytest.mark.skipif(
    nvrtc.missing() is not None or cxx.missing() is not None, reason="a compiler is missing"
)
CPU = torch.device("cpu")
DEPTHWISE = IMPLS["conv2d_weight_grad_depthwise_sm90"]
HEADER = (Path(__file__).parent / "hopper_on_cpu.hpp").read_text()
READ = "for (int step = 0; step < steps; ++step) {\n    ask_in_turn"
AGAIN = "sum = sum_again<1>(x, grad, b, k, at)"
FEW = replace(DEVICE, sms=2)
"""So that small problems have blocks with several columns of lines."""


def depthwise(n, channels, size, kernel, stride=1, padding=None, dtype="f16"):
    padding = kernel // 2 if padding is None else padding
    height, width = size
    out = ",".join(str((s + 2 * padding - kernel) // stride + 1) for s in size)
    return weight_grad(
        f"{n},{channels},{height},{width}", f"{n},{channels},{out}",
        f"kernel_size={kernel}, stride={stride}, padding={padding}, groups={channels}", dtype=dtype,
    )  # fmt: skip


THREE, SEVEN = depthwise(20, 24, (6, 19), 3), depthwise(17, 16, (5, 7), 7, dtype="bf16")
STRIDED, BARE = depthwise(18, 16, (9, 21), 5, 2), depthwise(33, 24, (9, 20), 3, padding=0)
CASES = [
    THREE,
    SEVEN,
    STRIDED,
    BARE,
    depthwise(3, 8, (8, 9), 3, 2, 0),
    depthwise(16, 40, (4, 8), 2, 2, 1),
    depthwise(2, 16, (3, 30), 9),
    depthwise(5, 16, (4, 9), 3, 1, 5),
    Workload.parse(str(STRIDED).replace("weight_grad", "weight_bias_grad")),
    Workload.parse(str(THREE)[:-1] + ", into=f32[24,1,3,3])"),
]


def tiled(dtype, address, sizes, strides, box, stride):
    elements = 1, *(s // 2 for s in strides)
    return struct.pack("Q4q12i", address, *elements, *sizes, *box, *stride).ljust(128, b"\0")


@pytest.fixture(autouse=True)
def counters(monkeypatch):
    monkeypatch.setattr(depthwise_sm90.tensor_map, "tiled", tiled)
    zeros = without_a_gpu(monkeypatch, _weight_grad_launch)
    yield zeros
    assert not zeros.any()


def on_cpu(w, config, fault=("", ""), slow=False):
    """`slow`: all warps but the last let it go ahead as far as it may, and NaN stays NaN."""

    def task(config, w, device):
        text = DEPTHWISE.task(config, w, device).source
        if slow:
            assert text.count(READ) == text.count(AGAIN) == 1
            text = text.replace(AGAIN, "")
            wait = "if (threadIdx.x < THREADS - 32) for (int i = 0; i < 200; ++i) give_way();"
            text = text.replace(READ, READ.replace("\n", f"\n{wait}\n"))
        patience = "" if fault[0] else "#define PATIENCE 400000\n"
        return SimpleNamespace(source=patience + HEADER + text)

    return OnCpu(SimpleNamespace(build=DEPTHWISE.build, task=task), config, w, fault, FEW)


def config_of(w, **knobs):
    """The untuned one, or of those with these knobs the first."""
    if not knobs:
        return DEPTHWISE.heuristic(w, FEW)
    space = DEPTHWISE.space(w, FEW)
    return next(c for c in space if all(getattr(c, k) == v for k, v in knobs.items()))


@pytest.mark.parametrize("w", CASES, ids=str)
def test_it_is_right_and_deterministic_and_stays_in_its_memory(w):
    assert DEPTHWISE.unsupported(w, FEW) is None
    verdict = Verifier(w, CPU).check(on_cpu(w, config_of(w)))
    assert verdict.ok, verdict.message
    assert verdict.deterministic


@pytest.mark.parametrize(
    ("w", "knobs"),
    [
        (THREE, {"features": 32, "own": 2, "along": 1, "stages": 3}),
        (THREE, {"own": 3, "blocks": 1, "along": 2, "keeps": True}),
        (SEVEN, {"own": 2, "stages": 3, "keeps": True}),
        (SEVEN, {"own": 4, "blocks": 1, "waves": 0.5}),
        (STRIDED, {"own": 3, "blocks": 1}),
        (STRIDED, {"own": 2, "blocks": 1, "stages": 3}),
        (BARE, {"features": 32, "blocks": 2, "along": 1, "together": 1}),
        (BARE, {"features": 64, "own": 3}),
        (CASES[8], {"own": 2, "blocks": 1}),
    ],
    ids=str,
)
def test_warps_share_the_work_in_several_ways(w, knobs):
    verdict = Verifier(w, CPU).check(on_cpu(w, config_of(w, **knobs)))
    assert verdict.ok, verdict.message


@given(
    n=st.integers(1, 34),
    channels=st.sampled_from((8, 16, 24)),
    size=st.tuples(st.integers(1, 11), st.integers(1, 20)),
    kernel=st.tuples(st.integers(1, 5), st.integers(1, 9)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 6)),
    data=st.data(),
)
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_shape_and_any_config(n, channels, size, kernel, stride, padding, data):
    both = zip(size, kernel, stride, padding, strict=True)
    out = [(s + 2 * p - k) // t + 1 for s, k, t, p in both if s + 2 * p >= k]
    assume(len(out) == 2)
    attributes = (
        f"kernel_size={list(kernel)}, stride={list(stride)}, padding={list(padding)}, "
        f"groups={channels}"
    )
    shape = f"{n},{channels}"
    w = weight_grad(
        f"{shape},{','.join(map(str, size))}", f"{shape},{','.join(map(str, out))}", attributes
    )
    assume(DEPTHWISE.unsupported(w, FEW) is None)
    config = data.draw(st.sampled_from(list(DEPTHWISE.space(w, FEW))))
    verdict = Verifier(w, CPU).check(on_cpu(w, config))
    assert verdict.ok, verdict.message


@pytest.mark.parametrize(
    "fault",
    [
        ("barrier_wait(full(shared, step), step / STAGES & 1);", ""),
        ("tap * 8;", "tap * 8 + 8;"),
        ("i / LINES_TOGETHER, p", "i / LINES_TOGETHER / 2, p"),
        ("even + c % 2 * 0x2222", "even"),
        ("h + STRIDE_H);", "h);"),
    ],
)
def test_faults_are_found(fault):
    if "TOGETHER" in fault[0]:  # of what is summed again
        kernel = on_cpu(THREE, config_of(THREE), fault)
        x, grad = with_infinities(THREE)
        with pytest.raises(AssertionError):
            assert_infinities_stay(THREE, kernel(x, grad), x, grad)
        return
    slow = "full" in fault[0]  # who asks for a step comes after who needs it
    config = config_of(BARE, stages=3, own=3, blocks=1) if slow else config_of(BARE)
    assert not Verifier(BARE, CPU).check(on_cpu(BARE, config, fault, slow)).ok


@pytest.mark.parametrize("fault", [None, "lines", "rows"])
def test_nobody_is_overtaken(fault, monkeypatch):
    """Lines of grad_output and rows of x keep their places until every warp is done with them."""
    x, grad = THREE.operator.examples(THREE, "integer", 0, "cpu")
    (truth,) = THREE.operator.truth(THREE, (x, grad))
    wait, ring = ("", ""), depthwise_sm90._ring
    if fault == "lines":
        wait = ("barrier_wait(empty(shared, step), (step / STAGES - 1) & 1);", ";")
    if fault == "rows":
        monkeypatch.setattr(depthwise_sm90, "_ring", lambda *sizes: ring(*sizes) - 1)
    config = config_of(THREE, own=3, blocks=1, along=1, stages=3)
    found = on_cpu(THREE, config, wait, slow=True)(x, grad)
    assert torch.equal(found.double(), truth) == (fault is None)


@given(
    height=st.integers(1, 40),
    kernel=st.integers(1, 9),
    stride=st.integers(1, 4),
    padding=st.integers(0, 10),
    stages=st.sampled_from((3, 5, 8)),
    begin=st.integers(0, 19),
)
def test_the_ring_holds_what_steps_in_a_row_need(height, kernel, stride, padding, stages, begin):
    """By walking: rows are counted as they come, column after column, from any step on."""
    out_height = (height + 2 * padding - kernel) // stride + 1
    assume(height + 2 * padding >= kernel >= stride and 2 * begin < out_height)
    spans, brought, p, column = [], 0, 2 * begin, []
    while len(spans) < 3 * stages + out_height:
        top = p * stride - padding
        needed = range(max(top, 0), min(top + stride + kernel, height))
        column += [h for h in needed if not column or h > column[-1]]
        if needed:
            spans.append((brought + column.index(needed[0]), brought + len(column)))
        else:
            spans.append((brought + len(column), brought + len(column)))
        p += 2
        if p >= out_height:
            brought, p, column = brought + len(column), 0, []
    windows = zip(spans, spans[stages - 1 :], strict=False)
    most = max(last - first for (first, _), (_, last) in windows)
    ring = depthwise_sm90._ring(height, out_height, kernel, stride, padding, stages)
    assert most <= ring <= max(most, kernel + stride, ring if begin else 0)


@pytest.mark.parametrize("w", [THREE, STRIDED], ids=str)
def test_infinities_at_a_border_stay_with_their_taps(w):
    x, grad = with_infinities(w)
    assert_infinities_stay(w, on_cpu(w, config_of(w))(x, grad), x, grad)


def test_what_it_does_not_take_is_refused_in_words():
    older = replace(FEW, arch="sm_80")
    assert "h200 is sm_80" in DEPTHWISE.unsupported(THREE, older)
    wide = depthwise(2, 16, (3, 30), 11)
    assert "11 taps of a row" in DEPTHWISE.unsupported(wide, FEW)
    grouped = weight_grad("2,16,6,6", "2,16,6,6", "kernel_size=3, padding=1, groups=4")
    assert "not one filter for each channel" in DEPTHWISE.unsupported(grouped, FEW)
    coarse = depthwise(2, 16, (30, 30), 7, 4)
    assert "no room for 25 rows" in DEPTHWISE.unsupported(coarse, FEW)
