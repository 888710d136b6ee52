"""The Hopper kernel for few channels, run on a CPU: who unfolds, who multiplies, who waits."""

import re
import struct
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from convolutions import bias_off_by, weight_grad, with_bias, with_fp32_bias
from tensor_cores_on_cpu import DEVICE, OnCpu, without_a_gpu

from infinities import assert_infinities_stay, assert_overflow_is_infinite, with_infinities
from on_cpu import fails
from tilewright.compile import cxx, nvrtc
from tilewright.impl import IMPLS
from tilewright.impls.weight_gradient import _launch
from tilewright.impls.weight_gradient import conv2d_weight_grad_narrow_sm90 as narrow_sm90
from tilewright.measure.verify import Verifier
from tilewright.op import Workload

pytestmark = pytest.mark.skipif(
    nvrtc.missing() is not None or cxx.missing() is not None, reason="a compiler is missing"
)
CPU = torch.device("cpu")
NARROW = IMPLS["conv2d_weight_grad_narrow_sm90"]
HEADER = (Path(__file__).parent / "hopper_on_cpu.hpp").read_text()
MULTIPLY = "if (here.prime == 0) {"
UNFOLD = "// Whose place in the ring, and among pieces of grad_output, is needed"
HOLD_UP = """if (group == std::atoi(std::getenv("LATE_GROUP")))
  for (int i = 0; i < 400; ++i) give_way();
"""
WAIT = "if (before >= 0) barrier_wait(done(shared, before), before / RING & 1);"
SYNC = '"bar.sync %0, %1;" ::"r"(group + 1), "n"(GROUP_THREADS)'
FEW = replace(DEVICE, sms=3)
"""So that small problems have blocks with several lines."""
STEM = weight_grad("2,3,32,24", "2,72,16,12", "kernel_size=7, stride=2, padding=3")
BARE = weight_grad("2,3,32,24", "2,72,13,9", "kernel_size=7, stride=2")
SMALL = weight_grad("1,3,41,16", "1,8,18,5", "kernel_size=7, stride=2")
CASES = [
    STEM,
    BARE,
    Workload.parse(str(STEM).replace("weight_grad", "weight_bias_grad")),
    Workload.parse(str(STEM)[:-1] + ", into=f32[72,3,7,7]@channels_last)"),
    with_bias(STEM, "f16", donated=True),
    with_bias(STEM, "f32"),
    weight_grad("1,3,5,130", "1,16,5,130", "kernel_size=3, padding=1", dtype="bf16"),
    weight_grad("3,4,9,20", "3,8,3,7", "kernel_size=3, stride=3, padding=1"),
]


def tiled(dtype, address, sizes, strides, box):
    (columns, pixels, lines), empty = sizes, [0] * 6
    return struct.pack("Q12i", address, columns, 0, pixels, lines, 0, box[1], *empty).ljust(
        128, b"\0"
    )


@pytest.fixture(autouse=True)
def counters(monkeypatch):
    monkeypatch.setattr(narrow_sm90.tensor_map, "tiled", tiled)
    zeros = without_a_gpu(monkeypatch, _launch)
    yield zeros
    assert not zeros.any()


def on_cpu(w, config, fault=("", ""), slow=False, late=False):
    """`slow`: warps that multiply let the others go ahead as far as they may. `late`: so does the
    group LATE_GROUP of those that unfold, of which the others may be so much ahead."""

    def task(config, w, device):
        text = NARROW.task(config, w, device).source
        if slow:
            assert text.count(MULTIPLY) == 1
            text = text.replace(MULTIPLY, "for (int i = 0; i < 24; ++i) give_way();\n" + MULTIPLY)
        if late:
            assert text.count(UNFOLD) == 1
            text = text.replace(UNFOLD, HOLD_UP + UNFOLD)
        text = re.sub(r"TW_DEVICE void multiply\(float \(&d\).*?\n}\n", "", text, flags=re.S)
        assert SYNC in text
        return SimpleNamespace(source=HEADER + text.replace("bar.sync %0, %1", "bar.group %0"))

    return OnCpu(SimpleNamespace(build=NARROW.build, task=task), config, w, fault, FEW)


@pytest.mark.parametrize("w", CASES, ids=str)
def test_it_is_right_and_deterministic_and_stays_in_its_memory(w):
    assert NARROW.unsupported(w, FEW) is None
    verdict = Verifier(w, CPU).check(on_cpu(w, NARROW.heuristic(w, FEW)))
    assert verdict.ok, verdict.message
    assert verdict.deterministic


def test_fp32_sums_of_the_bias_are_rounded_about_once():
    w = with_fp32_bias(weight_grad("4,3,24,40", "4,72,24,40", "kernel_size=1"))
    config, fault = NARROW.heuristic(w, FEW), ("rest += before", "0 * before")
    assert bias_off_by(on_cpu(w, config), w) < 1 < 1.1 < bias_off_by(on_cpu(w, config, fault), w)


@pytest.mark.parametrize("pending", [0, 1])
@pytest.mark.parametrize(
    ("stages", "groups", "lead"),
    [(2, 1, 2), (4, 1, 3), (1, 2, 2), (2, 2, 3), (3, 2, 2), (1, 4, 3)],
)
def test_stages_and_rings_go_round(stages, groups, lead, pending):
    heuristic = NARROW.heuristic(STEM, FEW)
    knobs = {"stages": stages, "groups": groups, "lead": lead, "pending": pending}
    config = replace(heuristic, producers=128, waves=0.5, **knobs)
    verifier = Verifier(STEM, CPU)
    for slow in (False, True):
        verdict = verifier.check(on_cpu(STEM, config, slow=slow))
        assert verdict.ok, verdict.message


@pytest.mark.parametrize("kernel_size", [1, 2, 3])
@pytest.mark.parametrize("groups", [2, 4])
def test_a_group_may_be_late(kernel_size, groups, monkeypatch):
    """Then others have gone round the ring: it must not take an old phase of a barrier for one that
    is to come."""
    size = 18 - kernel_size
    w = weight_grad("1,3,17,17", f"1,8,{size},{size}", f"kernel_size={kernel_size}")
    heuristic, verifier = NARROW.heuristic(w, FEW), Verifier(w, CPU)
    for lead in (2, 3):
        knobs = {"stages": 2, "groups": groups, "lead": lead, "pending": 0}
        config = replace(heuristic, producers=128, waves=0.5, **knobs)
        kernel = on_cpu(w, config, late=True)
        for late in range(groups):
            monkeypatch.setenv("LATE_GROUP", str(late))
            verdict = verifier.check(kernel)
            assert verdict.ok, verdict.message


@pytest.mark.usefixtures("late_warps")
@pytest.mark.parametrize("w", [STEM, CASES[6]], ids=str)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_any_warp_may_be_late(w, groups):
    config = replace(NARROW.heuristic(w, FEW), stages=2, groups=groups, pending=0)
    verdict = Verifier(w, CPU).check(on_cpu(w, config))
    assert verdict.ok, verdict.message


@pytest.mark.parametrize(
    "fault",
    [
        ("wait_for_copies<STAGES - 1>();", "wait_for_copies<STAGES>();"),
        ("barrier_wait(full(shared, step), step / RING & 1);", ""),
        ('aligned %0;" ::"n"(LINE_SEGMENTS - 1)', 'aligned %0;" ::"n"(LINE_SEGMENTS)'),
    ],
)
def test_who_waits_too_little_is_found(fault):
    """Without padding: beside padding, what became NaN would be summed again."""
    config = replace(NARROW.heuristic(BARE, FEW), groups=1, pending=0)
    assert Verifier(BARE, CPU).check(on_cpu(BARE, config)).ok
    broken = on_cpu(BARE, config, fault)
    assert fails(lambda: Verifier(BARE, CPU).check(broken).ok)


def test_nobody_is_overtaken():
    x, grad = SMALL.operator.examples(SMALL, "integer", 0, "cpu")
    (truth,) = SMALL.operator.truth(SMALL, (x, grad))
    config = NARROW.heuristic(SMALL, FEW)
    right, broken = (on_cpu(SMALL, config, fault, slow=True) for fault in (("", ""), (WAIT, "")))
    assert torch.equal(right(x, grad).double(), truth)
    assert fails(lambda: torch.equal(broken(x, grad).double(), truth))


def test_infinities_at_a_border_stay_with_their_taps():
    kernel = on_cpu(STEM, NARROW.heuristic(STEM, FEW))
    x, grad = with_infinities(STEM)
    assert_infinities_stay(STEM, kernel(x, grad), x, grad)


def test_other_devices_are_refused_in_words():
    older = replace(FEW, arch="sm_80")
    assert "wgmma is an instruction of sm_90a" in NARROW.unsupported(STEM, older)


def test_results_beyond_the_range_of_a_half_are_infinite():
    assert_overflow_is_infinite(STEM, on_cpu(STEM, NARROW.heuristic(STEM, FEW)))
