"""The depthwise kernels for Hopper, run on a CPU: which sums are taps, whose place is free when."""

import re
import struct
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from convolutions import weight_grad, with_bias
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tensor_cores_on_cpu import DEVICE, OnCpu, without_a_gpu

from infinities import assert_infinities_stay, assert_overflow_is_infinite, with_infinities
from on_cpu import fails
from tilewright.compile import cxx, nvrtc
from tilewright.impl import IMPLS
from tilewright.impls.weight_gradient import _launch
from tilewright.impls.weight_gradient import conv2d_weight_grad_depthwise_sm90 as depthwise_sm90
from tilewright.measure.verify import Verifier
from tilewright.op import Workload

pytestmark = pytest.mark.skipif(
    nvrtc.missing() is not None or cxx.missing() is not None, reason="a compiler is missing"
)
CPU = torch.device("cpu")
IMAGES = IMPLS["conv2d_weight_grad_depthwise_sm90"]
FMA = IMPLS["conv2d_weight_grad_depthwise_fma_sm90"]
BOTH = pytest.mark.parametrize("impl", [IMAGES, FMA], ids=lambda impl: impl.name)


def named(value):
    return getattr(value, "name", str(value))


HEADER = (Path(__file__).parent / "hopper_on_cpu.hpp").read_text()
READ = {
    IMAGES.name: "    ask_in_turn(step + STAGES - 2);",
    FMA.name: "    barrier_wait(full(shared, stage), parity);",
}
"""What those who multiply do first."""
IDLE = "static void idle() { for (int i = 0; i < 200; ++i) give_way(); }\n"
AGAIN = re.compile(r"if \(sum != sum.*sum_again<1>.*\n")
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
WIDE = depthwise(1, 8, (3, 300), 3)
"""Whose rows are cut."""
WIDER = depthwise(5, 16, (4, 9), 3, 1, 5)
"""By its padding."""
CASES = [
    THREE,
    SEVEN,
    STRIDED,
    BARE,
    depthwise(3, 8, (8, 9), 3, 2, 0),
    depthwise(16, 40, (4, 8), 2, 2, 1),
    depthwise(2, 16, (3, 30), 9),
    WIDER,
    Workload.parse(str(STRIDED).replace("weight_grad", "weight_bias_grad")),
    Workload.parse(str(THREE)[:-1] + ", into=f32[24,1,3,3])"),
    with_bias(THREE, "f32"),
]


def tiled(dtype, address, sizes, strides, box, stride=(1, 1, 1, 1), swizzled=True):
    elements = 1, *(s // 2 for s in strides)
    fields = (*sizes, *box, *stride, swizzled)
    return struct.pack("Q4q13i", address, *elements, *fields).ljust(128, b"\0")


@pytest.fixture(autouse=True)
def counters(monkeypatch):
    monkeypatch.setattr(depthwise_sm90.tensor_map, "tiled", tiled)
    zeros = without_a_gpu(monkeypatch, _launch)
    yield zeros
    assert not zeros.any()


SLOW = {
    IMAGES.name: {"stages": 3, "own": 3, "blocks": 1, "along": 1},
    FMA.name: {"stages": 3, "lines": 1, "shares": 4, "row_groups": 1},
}
"""Several warps, and few steps at once."""


def on_cpu(impl, w, config, fault=("", ""), slow="", again=True):
    """`slow`: "readers", all warps but the last, or "copies". Without `again` NaN stays NaN."""

    def task(config, w, device):
        text = impl.task(config, w, device).source
        assert len(AGAIN.findall(text)) == 1
        if not again:
            text = AGAIN.sub("", text)
        if slow == "readers":
            assert text.count(READ[impl.name]) == 1
            wait = "    if (threadIdx.x < THREADS - 32) idle();\n"
            text = text.replace(READ[impl.name], wait + READ[impl.name])
        elif slow == "copies":
            assert text.count(" ask(from") == 1
            text = text.replace(" ask(from", " idle(), ask(from")
        for barrier, name in (("sync 2", "everyone"), ("arrive 2", "arrive")):
            text = text.replace(f"bar.{barrier}, %0", f"bar.{name} %0")
        return SimpleNamespace(source=HEADER + IDLE + text)

    return OnCpu(SimpleNamespace(build=impl.build, task=task), config, w, fault, FEW)


def config_of(impl, w, **knobs):
    """The untuned one, or of those with these knobs the first."""
    if not knobs:
        return impl.heuristic(w, FEW)
    space = impl.space(w, FEW)
    return next(c for c in space if all(getattr(c, k) == v for k, v in knobs.items()))


@BOTH
@pytest.mark.parametrize("w", CASES, ids=str)
def test_it_is_right_and_deterministic_and_stays_in_its_memory(impl, w):
    assert impl.unsupported(w, FEW) is None
    verdict = Verifier(w, CPU).check(on_cpu(impl, w, config_of(impl, w)))
    assert verdict.ok, verdict.message
    assert verdict.deterministic


@pytest.mark.parametrize(
    ("impl", "w", "knobs"),
    [
        (IMAGES, THREE, {"features": 32, "own": 2, "along": 1, "stages": 3}),
        (IMAGES, THREE, {"own": 3, "blocks": 1, "along": 2, "keeps": True}),
        (IMAGES, SEVEN, {"own": 2, "stages": 3, "keeps": True}),
        (IMAGES, SEVEN, {"own": 4, "blocks": 1, "waves": 0.5}),
        (IMAGES, STRIDED, {"own": 3, "blocks": 1}),
        (IMAGES, STRIDED, {"own": 2, "blocks": 1, "stages": 3}),
        (IMAGES, BARE, {"features": 32, "blocks": 2, "along": 1, "together": 1}),
        (IMAGES, BARE, {"features": 64, "own": 3}),
        (IMAGES, CASES[8], {"own": 2, "blocks": 1}),
        (FMA, THREE, {"channels": 4, "lines": 4, "shares": 4, "row_groups": 1}),
        (FMA, SEVEN, {"channels": 4, "lines": 2, "row_groups": 3}),
        (FMA, STRIDED, {"channels": 4, "lines": 4, "row_groups": 2, "shares": 4}),
        (FMA, BARE, {"channels": 2, "lines": 7, "shares": 4}),
        (FMA, WIDE, {"row_groups": 2, "lines": 2, "shares": 14}),
        (FMA, CASES[8], {"row_groups": 2, "shares": 4, "lines": 1}),
        (FMA, THREE, {"whole": True, "lines": 4, "shares": 4}),
        (FMA, CASES[7], {"whole": True, "shares": 2}),
        (FMA, CASES[8], {"whole": True, "row_groups": 2, "lines": 2}),
    ],
    ids=named,
)
def test_threads_share_the_work_in_several_ways(impl, w, knobs):
    verdict = Verifier(w, CPU).check(on_cpu(impl, w, config_of(impl, w, **knobs)))
    assert verdict.ok, verdict.message


@pytest.mark.usefixtures("late_warps")
@BOTH
@pytest.mark.parametrize("w", [THREE, STRIDED], ids=str)
def test_any_warp_may_be_late(impl, w):
    verdict = Verifier(w, CPU).check(on_cpu(impl, w, config_of(impl, w)))
    assert verdict.ok, verdict.message


@BOTH
@given(
    n=st.integers(1, 34),
    channels=st.sampled_from((8, 16, 24)),
    size=st.tuples(st.integers(1, 11), st.integers(1, 20)),
    kernel=st.tuples(st.integers(1, 5), st.integers(1, 9)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 6)),
    data=st.data(),
)
@settings(max_examples=12)
def test_any_shape_and_any_config(impl, n, channels, size, kernel, stride, padding, data):
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
    assume(impl.unsupported(w, FEW) is None)
    config = data.draw(st.sampled_from(list(impl.space(w, FEW))))
    verdict = Verifier(w, CPU).check(on_cpu(impl, w, config))
    assert verdict.ok, verdict.message


@pytest.mark.parametrize(
    ("impl", "fault"),
    [
        (IMAGES, ("barrier_wait(full(shared, step), step / STAGES & 1);", "")),
        (FMA, ("barrier_wait(full(shared, stage), parity);", "")),
        (IMAGES, ("tap * 8;", "tap * 8 + 8;")),
        (IMAGES, ("i / LINES_TOGETHER, p", "i / LINES_TOGETHER / 2, p")),
        (IMAGES, ("even + c % 2 * 0x2222", "even")),
        (IMAGES, ("h + STRIDE_H);", "h);")),
        (FMA, ("(i - j + KEPT) % KEPT", "i")),
        (FMA, ("p = w.p + i % LINES_TOGETHER", "p = w.p")),
        (FMA, ("i < LINES_TOGETHER * SHARES", "i < LINES_TOGETHER")),
        (FMA, ("if (at < 0) at += SLOTS;", "if (at < 0) at = 0;")),
        (FMA, ("surround_with_zeros(memory, b);", ";")),
        (FMA, ("rows[r] = own_pixels + ZEROS_AT;", ";")),
    ],
    ids=named,
)
def test_faults_are_found(impl, fault):
    if "p = w.p" in fault[0] or "TOGETHER, p" in fault[0]:  # of what is summed again
        kernel = on_cpu(impl, THREE, config_of(impl, THREE), fault)
        x, grad = with_infinities(THREE)
        with pytest.raises(AssertionError):
            assert_infinities_stay(THREE, kernel(x, grad), x, grad)
        return
    slow = "" if "full" not in fault[0] else "readers" if impl is IMAGES else "copies"
    w = WIDER if "ZERO" in fault[0].upper() else BARE
    knobs = {"whole": True} if w is WIDER else SLOW[impl.name] if slow else {}
    kernel = on_cpu(impl, w, config_of(impl, w, **knobs), fault, slow, again=False)
    assert fails(lambda: Verifier(w, CPU).check(kernel).ok)


@BOTH
@pytest.mark.parametrize("fault", [None, "lines", "rows"])
def test_nobody_is_overtaken(impl, fault, monkeypatch):
    """Lines of grad_output and rows of x keep their places until every warp is done with them."""
    x, grad = THREE.operator.examples(THREE, "integer", 0, "cpu")
    (truth,) = THREE.operator.truth(THREE, (x, grad))
    config, there = config_of(impl, THREE, **SLOW[impl.name]), ("", "")
    if fault == "lines":
        there = ("barrier_wait(empty(shared, step), (step / STAGES - 1) & 1);", ";")
    elif fault == "rows" and impl is IMAGES:
        ring = depthwise_sm90._ring
        monkeypatch.setattr(depthwise_sm90, "_ring", lambda *sizes: ring(*sizes) - 1)
    elif fault == "rows":
        there = ("step % SLOTS * SLOT_PLACE", "step % STAGES * SLOT_PLACE")
    kernel = on_cpu(impl, THREE, config, there, "readers", again=False)
    if fault is None:
        assert torch.equal(kernel(x, grad).double(), truth)
    else:
        assert fails(lambda: torch.equal(kernel(x, grad).double(), truth))


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


@BOTH
@pytest.mark.parametrize("w", [THREE, STRIDED, WIDE], ids=str)
def test_infinities_at_a_border_stay_with_their_taps(impl, w):
    x, grad = with_infinities(w)
    assert_infinities_stay(w, on_cpu(impl, w, config_of(impl, w))(x, grad), x, grad)


def test_what_they_do_not_take_is_refused_in_words():
    older = replace(FEW, arch="sm_80")
    grouped = weight_grad("2,16,6,6", "2,16,6,6", "kernel_size=3, padding=1, groups=4")
    for impl in (IMAGES, FMA):
        assert "h200 is sm_80" in impl.unsupported(THREE, older)
        assert "not one filter for each channel" in impl.unsupported(grouped, FEW)
    wide = depthwise(2, 16, (3, 30), 11)
    assert "11 taps of a row" in IMAGES.unsupported(wide, FEW)
    coarse = depthwise(2, 16, (30, 30), 7, 4)
    assert "no room for 25 rows" in IMAGES.unsupported(coarse, FEW)
    large = depthwise(2, 16, (30, 30), 17)
    assert "17 x 17 leaves no room" in FMA.unsupported(large, FEW)


@BOTH
def test_results_beyond_the_range_of_a_half_are_infinite(impl):
    assert_overflow_is_infinite(THREE, on_cpu(impl, THREE, config_of(impl, THREE)))
