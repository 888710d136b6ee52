"""Runners: a failing candidate costs exactly one outcome, and the search goes on."""

from __future__ import annotations

import itertools
import os
import signal

import pytest
import torch

from tilewright.errors import InvalidArgument
from tilewright.impl import IMPLS, Executable
from tilewright.measure.candidate import COPY, Candidate, Description, Outcome
from tilewright.measure.replay import Replay
from tilewright.measure.runner import InProcess, Isolated
from tilewright.measure.timing import Timing
from tilewright.op import Workload
from tilewright.record import Record

WORKLOAD = "fake_double(x=f32[64,64])"


def fake(fault: str = "none", delay_us: int = 0) -> Candidate:
    return Candidate.of("fake_own", {"delay_us": delay_us, "fault": fault})


@pytest.fixture(scope="module")
def w(fakes) -> Workload:
    return Workload.parse(WORKLOAD)


@pytest.fixture(scope="module")
def isolated(w):
    """One worker for all tests: starting one takes seconds."""
    with Isolated("cpu", run_limit_s=5.0) as runner:  # what is no candidate's fault takes less
        yield runner


def test_in_process_and_isolated_runner_give_the_same_verdicts(w, isolated):
    candidates = [fake(), fake("wrong"), fake("raise"), fake("refused")]
    with InProcess("cpu") as local:
        here = dict(local.verify(w, candidates))
    there = dict(isolated.verify(w, candidates))
    statuses = ["ok", "wrong_result", "launch_error", "compile_error"]
    assert [here[c].status for c in candidates] == statuses
    assert [there[c].status for c in candidates] == statuses
    assert here[fake()].verdict == there[fake()].verdict
    assert there[fake()].workspace_bytes == 64
    assert "no luck" in there[fake("raise")].message
    assert "fake compiler refused" in there[fake("refused")].message
    assert there[fake("wrong")].verdict.max_ulp > 1
    assert there[fake("wrong")].message


@pytest.mark.parametrize(
    ("name", "deterministic", "status"),
    [
        ("aten", False, "ok"),
        ("aten", True, "wrong_result"),
        ("conv2d_weight_grad_contiguous", False, "wrong_result"),
    ],
)
def test_aten_alone_may_differ_from_run_to_run_unless_torchs_flag_forbids_it(
    name, deterministic, status, monkeypatch
):
    build, calls = IMPLS[name].build, itertools.count()

    def racing(config, w, device):
        run = build(config, w, device)

        def call(self, *tensors):
            out = run(*tensors)
            out[0, 0, 0, 0] *= 1 + 2**-22 * (next(calls) % 2)
            return out

        return type("Racing", (Executable,), {"__call__": call})()

    monkeypatch.setattr(IMPLS[name], "build", racing, raising=False)
    w = Workload.parse(
        "conv2d_weight_grad(x=f32[2,4,9,9], grad_output=f32[2,6,9,9], kernel_size=1)"
    )
    torch.use_deterministic_algorithms(deterministic)
    try:
        with InProcess("cpu") as local:
            ((_, outcome),) = local.verify(w, [Candidate.of(name, {})])
    finally:
        torch.use_deterministic_algorithms(False)
    assert outcome.status == status
    assert outcome.verdict is not None
    assert not outcome.verdict.deterministic
    assert ("two runs" in outcome.message) == (status != "ok")


@pytest.mark.parametrize(
    ("fault", "status", "said"),
    [
        ("segfault", "launch_error", "SIGSEGV"),
        ("exit", "launch_error", "exit code 3"),
        ("hang", "timeout", "no answer within 5 s"),
    ],
)
def test_a_candidate_that_kills_or_hangs_the_worker_is_the_only_one_charged(
    w, isolated, fault, status, said
):
    candidates = [fake(delay_us=100), fake(fault), fake(delay_us=300)]
    outcomes = list(isolated.verify(w, candidates))
    assert [c for c, _ in outcomes] == candidates
    assert [o.status for _, o in outcomes] == ["ok", status, "ok"]
    assert said in outcomes[1][1].message


def test_a_crash_while_several_are_timed_is_charged_to_the_guilty_one_only(w, isolated):
    good = [fake(delay_us=d) for d in (0, 100, 300, 600)]
    found = isolated.time(w, [*good[:3], fake("exit"), good[3], COPY], "cpu", budget_s=0.1)
    assert isinstance(found[fake("exit")], Outcome)
    assert found[fake("exit")].status == "launch_error"
    assert all(isinstance(found[c], Timing) for c in [*good, COPY])
    assert found[good[3]].median_us >= 600
    assert found[good[0]].median_us < found[good[3]].median_us


def test_an_error_raised_while_timing_is_charged_to_the_guilty_one_only(w):
    with InProcess("cpu") as runner:
        found = runner.time(w, [fake(), fake("raise"), fake(delay_us=100)], "cpu", budget_s=0.0)
    assert found[fake("raise")].status == "launch_error"
    assert isinstance(found[fake()], Timing)
    assert isinstance(found[fake(delay_us=100)], Timing)


def test_verification_stops_at_its_budget_and_leaves_the_rest_out(w):
    with InProcess("cpu") as runner:
        assert list(runner.verify(w, [fake(), fake(delay_us=100)], budget_s=0.0)) == []


def test_the_worker_is_gone_after_close_and_comes_back_when_asked(w, isolated):
    list(isolated.verify(w, [fake()]))
    pid = isolated._process.pid
    isolated.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert dict(isolated.verify(w, [fake()]))[fake()].status == "ok"
    assert isolated._process.pid != pid


def test_a_worker_killed_from_outside_between_requests_is_replaced(w, isolated):
    list(isolated.verify(w, [fake()]))
    os.kill(isolated._process.pid, signal.SIGKILL)
    assert dict(isolated.verify(w, [fake()]))[fake()].status == "ok"


def test_an_abandoned_request_does_not_answer_the_next_one(w, isolated):
    for _, outcome in isolated.verify(w, [fake(), fake("wrong")]):
        assert outcome.status == "ok"
        break
    assert [o.status for _, o in isolated.verify(w, [fake("wrong")])] == ["wrong_result"]


def test_a_device_that_is_not_here_is_named_by_the_worker():
    with Isolated("cuda:99") as runner, pytest.raises(InvalidArgument, match="cuda:99"):
        runner.describe()


def test_the_worker_describes_its_device_like_this_process_would(isolated):
    with InProcess("cpu") as local:
        assert isolated.describe() == local.describe()


def test_limits_of_a_cpu_have_a_floor_and_no_hard_limit(w, isolated):
    limits = isolated.prepare(w, "cpu")
    assert limits.floor_us > 0
    assert limits.hard_limit_us == 0


def test_replay_answers_what_was_recorded(w):
    with InProcess("cpu") as runner:
        description: Description = runner.describe()

    def record(candidate: Candidate, status: str, us: float | None = None) -> Record:
        return Record(
            WORKLOAD,
            w.op,
            candidate.implementation,
            candidate.values,
            status,
            "cpu",
            median_us=us,
            max_ulp=0.5 if us else None,
            bound_ulp=2.0,
            message="" if us else "it failed",
        )

    slow, quick, broken = fake(delay_us=900), fake(), fake("exit")
    records = [record(slow, "ok", 900.0), record(quick, "slower", 9.0)]
    replay = Replay([*records, record(broken, "launch_error")], description)
    outcomes = dict(replay.verify(w, [slow, quick, broken, fake("wrong")]))
    assert [o.status for o in outcomes.values()] == ["ok", "ok", "launch_error", "unsupported"]
    assert outcomes[quick].verdict.max_ulp == 0.5
    timings = replay.time(w, [slow, quick, broken], "cpu")
    assert timings[slow].median_us == 900.0
    assert timings[quick].ci_us == (9.0, 9.0)
    assert timings[broken].status == "unsupported"


def test_a_candidate_is_the_same_in_any_order_of_its_values():
    assert Candidate.of("a", {"x": 1, "b": 2}) == Candidate.of("a", {"b": 2, "x": 1})
