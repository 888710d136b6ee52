"""What `make sanitize` runs: a case of every kernel; and that it tells what the tool reports."""

from dataclasses import fields, replace

import pytest
import torch

import sanitize
from own_memory import laid_out
from sanitized_cases import (
    CASES,
    EVENLY,
    FLAT_INDICES,
    FUSED,
    INDEXED_CASES,
    SM80,
    SM90,
    sanitized_dropout,
)
from tilewright.compile import nvrtc
from tilewright.compile.cache import compiled
from tilewright.device import DEVICES
from tilewright.fusion.cuda.pointwise.schedule import PointwiseSchedule
from tilewright.fusion.cuda.rows.schedule import RowSchedule
from tilewright.fusion.cuda.tiles.schedule import TileSchedule
from tilewright.impl import IMPLS
from tilewright.impls.weight_gradient import conv2d_weight_grad_sm80 as sm80
from tilewright.impls.weight_gradient import conv2d_weight_grad_sm90 as sm90
from tilewright.impls.weight_gradient._model import WAYS
from tilewright.op import OPS
from tilewright.tensor_spec import TensorSpec
from tilewright.text import parse_call

H200 = DEVICES["h200"]


SCHEDULED = [case for case in CASES if case.implementation == "fused" and case.knobs]


@pytest.fixture(autouse=True)
def _forget():
    yield
    OPS.remove(sanitized_dropout.__name__)


def configs(name):
    cases = [case for case in CASES if case.implementation == name]
    return [case.config(H200) for case in cases]


def test_every_implementation_with_kernels_of_a_gpu_has_a_case():
    own = {impl.name for impl in IMPLS.values() if impl.backend in ("cuda", "fused")}
    assert {case.implementation for case in CASES} == own


def test_every_kernel_with_an_index_has_a_case_with_indices_out_of_range(capsys):
    indexed = {case.implementation for case in CASES if case.w.operator.indexed}
    only = ["--only", "some indices out of range"]
    assert sanitize.main(["--list", "--device", "h200", *only]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines} == {*indexed, "flat_index"}
    assert not any("not on" in line for line in lines)


@pytest.mark.parametrize("case", INDEXED_CASES, ids=str)
def test_indices_out_of_range_are_negative_and_too_large_near_and_far(case):
    given = [case.w.call(c.tensors())["index"] for c in (case, replace(case, out_of_range=True))]
    places = case.w["x"].shape[case.w["dim"]] if "x" in case.w.tensors else case.w["num_weights"]
    (least, most), ends = map(int, given[0].aminmax()), torch.iinfo(given[0].dtype)
    assert 0 <= least <= most < places
    assert given[0].stride() == given[1].stride()
    beyond = (given[1] < 0) | (given[1] >= places)
    assert set(given[1][beyond].tolist()) == {-1, places, ends.min, ends.max}
    assert beyond.double().mean() < 0.1


@pytest.mark.parametrize("case", FLAT_INDICES, ids=str)
def test_index_tensors_are_in_range_or_told_to_be_out_of_it(case):
    wrong = replace(case, out_of_range=True)
    assert str(wrong) == f"{case}, some indices out of range"
    for sometimes, given in ((False, case.tensors()), (True, wrong.tensors())):
        pairs = zip(given, case.sizes, strict=True)
        assert [bool(((t < -n) | (t >= n)).any()) for t, n in pairs] == [sometimes] * len(given)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_case_is_served_and_its_config_fits(case):
    assert case.refusal(H200) is None
    config = case.config(H200)
    free = {k: [getattr(config, k)] for k in ("split_k", "blocks") if k in case.knobs}
    space = case.impl.space(case.w, H200)
    assert (space.restricted(free) if free else space).why_not(config) is None


@pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing()))
@pytest.mark.parametrize("case", SCHEDULED, ids=str)
def test_every_kind_of_schedule_is_built(case):
    assert compiled(case.impl.task(case.config(H200), case.w, H200)).resources is not None


@pytest.mark.parametrize("kind", [RowSchedule, TileSchedule, PointwiseSchedule])
def test_every_kind_of_schedule_is_there(kind):
    found = [config for config in configs("fused") if isinstance(config, kind)]
    for knob in fields(kind):
        there = {getattr(config, knob.name) for config in found}
        ways = {v for v in knob.metadata["values"] if isinstance(v, (str, bool))}
        assert ways <= there, knob.name
        assert len(there) > 1, knob.name


def test_every_way_to_split_is_there():
    assert {c.combine for c in configs(SM90)} == set(WAYS)
    assert {c.combine for c in configs(SM80)} == set(WAYS) - {"marked"}
    hopper = configs(SM90)
    assert {c.exchange for c in hopper} == set(sm90.EXCHANGES)
    assert {c.fetch for c in hopper} == set(sm90.FETCHES)
    assert any(c.cluster > 1 and c.split_k == c.cluster for c in hopper)
    assert any(c.cluster > 1 and c.split_k > c.cluster for c in hopper)
    assert {c.whole for c in hopper if c.blocks} == {True, False}
    assert any(c.halo for c in hopper)
    assert {c.tile_k for c in configs(SM80)} == set(sm80.STEPS.values())


def test_kernels_of_another_device_are_told_apart(capsys):
    assert (
        sanitize.main(
            ["--list", "--device", "a100", "--only", "_sm90", "--only", "lerp(x=f32[300,400]"]
        )
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "not on" not in line] == [f"fused {FUSED[0]} untuned"]
    assert any("wgmma is an instruction of sm_90a" in line for line in lines)
    assert sanitize.main(["--list", "--device", "a100", "--only", "bulk=True"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines
    assert all("not on a100" in line for line in lines), lines[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_runs_and_it_says_so(capsys):
    assert sanitize.main([]) == 0
    assert capsys.readouterr().out == "nothing is run: torch sees no GPU\n"


def test_without_the_tool_nothing_runs_and_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sanitize, "spec_of", lambda index: H200)
    monkeypatch.setattr(sanitize, "sanitizer", lambda: None)
    assert sanitize.main([]) == 0
    assert capsys.readouterr().out.startswith("nothing is run: there is no compute-sanitizer")


def test_a_filter_that_leaves_nothing_is_an_error(capsys):
    for filters in (["--only", "no such case"], ["--only", "gather_", "--without", "gather_"]):
        with pytest.raises(SystemExit) as ended:
            sanitize.main(filters)
        assert ended.value.code == 2
        assert "no case holds what --only asks for" in capsys.readouterr().err


def test_what_cannot_run_on_the_device_is_told_in_words(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sanitize, "spec_of", lambda index: DEVICES["a100"])
    monkeypatch.setattr(sanitize, "sanitizer", lambda: "compute-sanitizer")
    monkeypatch.setattr(sanitize, "compile_all", list)
    monkeypatch.setattr(sanitize, "report", lambda *_: None)
    assert sanitize.main(["--only", "x=f16[2640,", "--only", "gather_", "--tool", "racecheck"]) == 0
    told, clean = [], []
    for line in capsys.readouterr().out.splitlines():
        (told if "not run" in line else clean).append(line)
    assert len(told) == len(EVENLY)
    assert all(line.endswith("for 132 SMs, of which a100 has 108") for line in told)
    assert [line.split(":")[0] for line in clean] == [
        f"racecheck {name}" for name in ("gather_cuda", "gather_tiled")
    ]


def test_a_report_of_either_tool_is_a_failure(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sanitize, "spec_of", lambda index: H200)
    monkeypatch.setattr(sanitize, "sanitizer", lambda: "compute-sanitizer")
    monkeypatch.setattr(sanitize, "compile_all", list)
    calls = []

    def report(tool, program, command):
        calls.append((tool, *program[2:]))
        return "reports: a race" if calls[-1][:3] == ("racecheck", "--run", "gather_cuda") else None

    monkeypatch.setattr(sanitize, "report", report)
    only = ["--only", "gather_", "--only", "narrow_sm90", "--only", "exchange=sent"]
    assert sanitize.main([*only, "--without", "scatter"]) == 1
    first = ["conv2d_weight_grad_sm90", "conv2d_weight_grad_narrow_sm90"]
    names = ["gather_cuda", "gather_tiled"]
    assert [call[:3] for call in calls] == [
        *(("memcheck", "--run", name) for name in (*first, *names)),
        *(("racecheck", "--run", name) for name in names),
        *(("initcheck", "--run", name) for name in (*first, *names)),
    ]
    for tool, _, _, *rest in calls:
        left_out = ["scatter", *sanitize.NOT_FOLLOWED.get(tool, ())]
        assert rest == [*only, *(word for text in left_out for word in ("--without", text))]
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith(f"racecheck {first[1]} conv2d") for line in lines[4:6])
    assert all("not run: its warps wait" in line for line in lines[4:6])
    assert "exchange=sent: not run: racecheck misses" in lines[6]
    assert lines[7] == "racecheck gather_cuda: reports: a race"
    assert lines[8] == "racecheck gather_tiled: 2 clean"
    assert sanitize.main([*only, "--tool", "memcheck"]) == 0


@pytest.mark.parametrize(
    ("ending", "told"),
    [("exit 0", None), ("exit 99", "reports:"), ("exit 1", "exit code 1:"), ("sleep 9", "did not")],
)
def test_what_the_tool_reports_is_told(ending, told, tmp_path, monkeypatch):
    monkeypatch.setattr(sanitize, "LIMIT_S", 1)
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f'#!/bin/sh\necho "$@" no cache: $PYTORCH_NO_CUDA_MEMORY_CACHING\n{ending}\n')
    tool.chmod(0o755)
    found = sanitize.report("racecheck", ["python", "x.py"], str(tool))
    if told is None:
        assert found is None
    else:
        said = "--tool racecheck --error-exitcode 99 python x.py no cache: 1"
        assert found.startswith(told)
        assert said in found


@pytest.mark.parametrize(
    "text", ["f32[5,7]", "f16[3,4,5,2]@channels_last", "i64[30,4]@strides(1,0)", "f16[9]@align2"]
)
def test_memory_ends_where_a_tensor_does(text):
    spec = parse_call(f"f(x={text})", TensorSpec)[1]["x"]
    t = spec.empty("cpu", fill=3)
    moved = laid_out(t, "cpu")
    assert torch.equal(moved, t)
    assert moved.stride() == t.stride()
    last = moved.storage_offset() + spec.storage_elements
    assert moved.untyped_storage().nbytes() == last * t.element_size()
