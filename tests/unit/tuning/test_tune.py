"""The tuner: what it records, what it chooses, and how it keeps its budget."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from measured_fakes import FAKES, FAST, quick, statuses

from tilewright import environment
from tilewright.compile import cxx
from tilewright.errors import InvalidArgument
from tilewright.impl import IMPLS
from tilewright.measure.candidate import COPY, Limits
from tilewright.measure.runner import InProcess, Isolated
from tilewright.op import Workload
from tilewright.record import utc_now
from tilewright.report import NoneRight
from tilewright.search import Budget
from tilewright.tune import Progress, bench, duel, tune
from tilewright.tune.duel import LONGEST_S, SHORTEST_S
from tilewright.tune.session import Clock


def test_the_fastest_verified_config_wins_and_everything_is_recorded(w, runner, store, slow_aten):
    faults = ("none", "wrong", "raise", "refused")
    row = quick(w, runner, store, params={"delay_us": (0, 600, 4000), "fault": faults})
    assert row.chosen == "fake_own"
    assert row.own.config == {"delay_us": 0, "fault": "none"}
    assert row.own.workspace_bytes == 64
    assert row.verified.deterministic
    assert row.baselines["aten"].median_us > row.own.median_us
    assert row.copy_us > 0
    assert row.floor_us > 0
    assert row.refused == {"fake_never": "never fits"}
    by_config = {(r.config.get("fault"), r.status) for r in store.query()}
    assert {("wrong", "wrong_result"), ("refused", "compile_error"), ("raise", "launch_error")} <= (
        by_config
    )
    assert statuses(store)["fake_never"] == {"unsupported"}
    wrong = store.query(status="wrong_result")[0]
    assert "got" in wrong.message
    assert wrong.median_us is None


def test_the_store_s_winner_is_the_row_s_choice(w, runner, store):
    row = quick(w, runner, store)
    best = store.best(str(w), runner.describe().key, runner.describe().versions)
    assert best.implementation == row.chosen
    assert best.median_us == row.chosen_us
    assert best.final
    assert best.duel


def test_a_librarys_configs_are_searched_and_its_best_is_a_baseline(w, runner, store, slow_aten):
    params = {**FAST, "delay_us": (600, 4000)}
    row = quick(w, runner, store, params=params, baselines=("fake_library",))
    tried = {r.config["delay_us"] for r in store.query() if r.implementation == "fake_library"}
    assert tried == {600, 4000}
    assert 600 < row.baselines["fake_library"].median_us < 4000
    assert row.baselines["fake_library"].config == {"delay_us": 600, "fault": "none"}
    assert row.baselines["fake_library"].candidates == 2
    assert row.baselines["aten"].candidates == 1
    assert row.own.implementation == "fake_own"
    again = quick(w, runner, store, params=params, baselines=("fake_library",))
    assert again.baselines == row.baselines


def test_a_library_is_searched_however_slow_it_is_untuned(w, runner, store, monkeypatch):
    library = IMPLS["fake_library"]
    slow = library.Config(delay_us=4000)
    monkeypatch.setattr(library, "heuristic", lambda w, device: slow, raising=False)
    row = quick(w, runner, store, baselines=("fake_library",))
    tried = {r.config["delay_us"] for r in store.query() if r.implementation == "fake_library"}
    assert len(tried) > 1
    assert row.baselines["fake_library"].config["delay_us"] < 4000
    assert row.unsearched == {}


def test_what_is_only_compared_with_is_timed_and_told_but_not_chosen(
    w, runner, store, slow_aten, monkeypatch
):
    options = {"baselines": ("fake_library",), "params": {**FAST, "delay_us": (0,)}}
    before = quick(w, runner, store, implementations=("fake_never",), **options)
    assert before.chosen == "fake_library"
    library = IMPLS["fake_library"]
    monkeypatch.setattr(library, "only_compared", lambda w: "a yardstick", raising=False)
    row = quick(w, runner, store, implementations=("fake_never",), **options)
    assert row.chosen == "aten"
    assert row.baselines["fake_library"].median_us < row.chosen_us
    (told, *_) = store.query(implementation="fake_library", final=True)
    assert (told.status, told.message) == ("tied", "a yardstick")
    best = store.best(str(w), runner.describe().key, runner.describe().versions)
    assert best.implementation == "aten"


def test_a_library_that_was_not_asked_for_is_left_alone(w, runner, store):
    row = quick(w, runner, store, params={**FAST, "delay_us": (0,)})
    assert set(row.baselines) == {"aten"}


def test_what_is_hopelessly_slower_untuned_is_measured_but_not_searched(w, runner, store):
    class Hopeless(type(IMPLS["fake_own"])):
        name = "fake_hopeless"

        def heuristic(self, w, device):
            return self.Config(delay_us=4000)

    try:
        row = quick(w, runner, store, implementations=("fake_own", "fake_hopeless"))
    finally:
        IMPLS._things.pop("fake_hopeless")
    records = store.query()
    tried = {r.config["delay_us"] for r in records if r.implementation == "fake_hopeless"}
    assert tried == {4000}
    assert set(row.unsearched) == {"fake_hopeless"}
    assert "times as long as the best untuned one" in row.unsearched["fake_hopeless"]
    assert "fake_hopeless" in {r.implementation for r in records if r.final}
    assert row.own.implementation == "fake_own"
    assert len({r.config["delay_us"] for r in records if r.implementation == "fake_own"}) > 3


def test_what_an_implementation_finds_promising_is_measured_first(w, runner, store, monkeypatch):
    fake = IMPLS["fake_own"]
    promising = [fake.Config(delay_us=us) for us in (900, 100)]
    monkeypatch.setattr(fake, "promising", lambda w, device: promising, raising=False)
    quick(w, runner, store, params={}, budget_s=20.0, budget_configs=3)
    tried = [r.config["delay_us"] for r in store.query(final=False) if r.status == "ok"]
    assert set(tried) == {300, 900, 100}


def test_aten_is_chosen_when_every_kernel_of_ours_is_slower(w, runner, store):
    row = quick(w, runner, store, params={**FAST, "delay_us": (4000,)})
    assert row.chosen == "aten"
    assert row.own.median_us > 4000
    assert row.chosen_us <= row.baselines["aten"].median_us
    finals = {r.implementation: r.status for r in store.query(final=True) if r.duel}
    assert finals["fake_own"] == "slower"


def test_a_baseline_that_is_wrong_is_told_with_its_reason(w, runner, store, monkeypatch):
    build, calls = IMPLS["aten"].build, itertools.count()

    def drifting(config, w, device):
        right = build(config, w, device)
        called = {"__call__": lambda self, x: right(x) + float(next(calls))}
        return type("Drifting", (type(right),), called)(w)

    monkeypatch.setattr(IMPLS["aten"], "build", drifting, raising=False)
    runner._bench._w = None
    row = quick(w, runner, store, params={**FAST, "delay_us": (600,)})
    runner._bench._w = None
    assert row.chosen == "fake_own"
    assert row.chosen_us > row.baselines["aten"].median_us
    assert set(row.wrong) == {"aten"}
    assert "got" in row.wrong["aten"]


def test_finalists_baselines_copy_and_floor_share_one_duel(w, runner, store):
    quick(w, runner, store)
    finals = store.query(final=True)
    assert len({r.duel for r in finals}) == 1
    assert {r.implementation for r in finals} == {"aten", "fake_own", "copy", "floor"}
    assert {r.status for r in finals if r.implementation in ("copy", "floor")} == {"ceiling"}
    heuristic = {"delay_us": 300, "fault": "none"}
    assert heuristic in [r.config for r in finals if r.implementation == "fake_own"]


def test_a_second_run_finds_its_records_and_measures_nothing(w, runner, store):
    row = quick(w, runner, store)
    count = len(store.query())
    again = quick(w, runner, store)
    assert len(store.query()) == count
    exact, chosen = (
        dataclasses.replace(v, integer_exact=None) for v in (row.verified, row.chosen_verified)
    )
    assert again == dataclasses.replace(row, verified=exact, chosen_verified=chosen, activity={})


def test_force_and_a_new_implementation_search_again(w, runner, store, monkeypatch):
    def duels() -> int:
        return len({r.duel for r in store.query(final=True)})

    quick(w, runner, store, implementations=())
    assert duels() == 1
    quick(w, runner, store)
    assert duels() == 2
    quick(w, runner, store)
    assert duels() == 2
    quick(w, runner, store, force=True)
    assert duels() == 3


@pytest.mark.parametrize(
    "restricted",
    [{"implementations": ()}, {"baselines": ()}, {"params": {**FAST, "delay_us": (0, 300)}}],
    ids=["implementations", "baselines", "knobs"],
)
def test_a_restricted_run_does_not_stand_for_one_without(w, runner, store, restricted):
    def duels() -> int:
        return len({r.duel for r in store.query(final=True)})

    everything = {"baselines": ("fake_library",)}
    first = quick(w, runner, store, **everything)
    quick(w, runner, store, force=True, **{**everything, **restricted})
    assert duels() == 2
    again = quick(w, runner, store, **everything)
    assert duels() == 3
    assert (set(again.baselines), again.none_right) == (set(first.baselines), {})
    quick(w, runner, store, **everything)
    assert duels() == 3


def test_of_two_methods_the_latest_duel_stands(w, runner, store, monkeypatch):
    quick(w, runner, store)
    other = [dataclasses.replace(r, method="graph", duel="graph", created=utc_now())
             for r in store.query(final=True)]  # fmt: skip
    store.add(other)
    quick(w, runner, store)
    (latest, *_) = store.query(final=True)
    assert (latest.method, latest.duel != "graph") == ("cpu", True)


def test_under_another_compiler_a_workload_is_measured_again(w, runner, store, monkeypatch):
    quick(w, runner, store, implementations=())
    monkeypatch.setattr(environment, "_version_of", lambda compiler: "g++ 1.0")
    with InProcess("cpu") as later:
        quick(w, later, store, implementations=())
    final = store.query(final=True, implementation="aten", status="ok")
    assert [r.versions["compiler"] for r in final] == ["g++ 1.0", cxx.version()]


def test_a_budget_in_configs_is_kept(w, runner, store):
    quick(w, runner, store, budget_s=None, budget_configs=3)
    searched = store.query(implementation="fake_own", final=False)
    assert len({tuple(r.config.items()) for r in searched}) == 3
    assert {"delay_us": 300, "fault": "none"} in [r.config for r in searched]


@pytest.mark.parametrize(
    ("left_s", "expected_s"), [(0.0, SHORTEST_S), (3.0, 3.0), (1000.0, LONGEST_S)]
)
def test_a_duel_is_sampled_for_a_while_whatever_is_left_of_the_budget(
    w, runner, store, monkeypatch, left_s, expected_s
):
    given, time = [], runner.time

    def timed(w, candidates, method, **options):
        if COPY in candidates:
            given.append(options["budget_s"])
        return time(w, candidates, method, **options | {"budget_s": 0.0})

    monkeypatch.setattr(runner, "time", timed)
    monkeypatch.setattr(duel, "LONGEST_S", LONGEST_S)
    monkeypatch.setattr(Budget, "left_s", left_s)
    quick(w, runner, store, budget_configs=1)
    assert given == [expected_s]


@pytest.mark.parametrize(("budget_s", "all_tried"), [(3.0, False), (1000.0, True)])
def test_a_budget_in_seconds_is_kept(w, runner, store, monkeypatch, budget_s, all_tried):
    """Whoever looks at the clock does so a second after the one before."""
    seconds = itertools.count()
    monkeypatch.setattr(Clock, "seconds", lambda self: next(seconds))
    both = [w, Workload.parse("fake_double(x=f32[63,128])")]
    report = tune(
        both, runner=runner, store=store, baselines=(), params=FAST, budget_s=budget_s,
        implementations=FAKES, strategy="exhaustive",
    )  # fmt: skip
    assert len(report.rows) == 2
    space = list(IMPLS["fake_own"].space(w, None).restricted(FAST))
    for one in both:
        tried = store.query(workload=str(one), implementation="fake_own", final=False)
        assert (len({r.config["delay_us"] for r in tried}) == len(space)) == all_tried


def test_candidates_that_kill_the_worker_or_hang_do_not_end_the_search(w, store):
    with Isolated("cpu", run_limit_s=5.0) as isolated:
        row = quick(w, isolated, store, params={"delay_us": (0,)}, budget_s=1000.0)
    assert row.own.config == {"delay_us": 0, "fault": "none"}
    found = {
        r.config["fault"]: r.status for r in store.query(implementation="fake_own", final=False)
    }
    assert found == {
        "none": "ok",
        "segfault": "launch_error",
        "exit": "launch_error",
        "hang": "timeout",
        "raise": "launch_error",
        "wrong": "wrong_result",
        "refused": "compile_error",
    }


INTERRUPTED = """
import sys
from tilewright import tune
from tilewright.op import Workload
from tilewright.record import utc_now
from tilewright.store import Store

class Tells(tune.Progress):
    def best(self, candidate, us):
        print("best", flush=True)

report = tune.tune([Workload.parse(sys.argv[1])] * 50, store=Store(sys.argv[2]), progress=Tells(),
                   device="cpu", implementations=("fake_own",), baselines=(), budget_s=1000,
                   strategy="random_search", params={"fault": ("none",)}, force=True)
print("interrupted", report.interrupted, len(report.rows), flush=True)
"""


def test_ctrl_c_at_a_terminal_ends_worker_and_run_and_keeps_the_records(w, store):
    """SIGINT reaches the whole foreground group; the worker must outlive it until told to end."""
    run = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(w), str(store.url)],
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert run.stdout is not None
    assert run.stdout.readline() == "best\n"
    workers = _children(run.pid)
    assert workers
    os.killpg(run.pid, signal.SIGINT)
    rest, _ = run.communicate(timeout=60)
    assert run.returncode == 0
    assert "interrupted True" in rest
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    assert "ok" in statuses(store)["fake_own"]


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


class Interrupts(Progress):
    def best(self, candidate, us):
        raise KeyboardInterrupt


def test_ctrl_c_ends_the_run_and_keeps_what_was_recorded(w, runner, store):
    report = tune(
        [w], runner=runner, store=store, params=FAST, implementations=FAKES, progress=Interrupts()
    )
    assert report.interrupted
    assert report.rows == []
    assert "ok" in statuses(store)["fake_own"]


def test_a_time_below_the_hard_limit_is_recorded_as_invalid_and_never_chosen(
    w, runner, store, monkeypatch, slow_aten
):
    monkeypatch.setattr(runner, "prepare", lambda *args: Limits(1.0, 3000.0))
    row = quick(w, runner, store, params={**FAST, "delay_us": (0, 4000)})
    assert row.own.config["delay_us"] == 4000
    invalid = [r.config["delay_us"] for r in store.query(status="invalid")]
    assert set(invalid) <= {0, 300}
    assert 0 in invalid


def test_a_workload_that_no_kernel_of_ours_supports_still_has_a_row(runner, store, fakes):
    w = Workload.parse("fake_double(x=f32[64])")
    row = quick(w, runner, store)
    assert row.own is None
    assert row.verified is None
    assert row.chosen == "aten"
    assert row.chosen_verified.deterministic
    assert row.refused["fake_own"] == "x has rank 1; fake_own takes matrices"


def test_a_row_tells_that_none_of_our_configs_was_right_and_so_does_its_record(w, runner, store):
    options = {"params": {"fault": ("wrong", "raise"), "delay_us": (0, 300)}, "budget_s": 100.0}
    row = quick(w, runner, store, **options)
    assert row.own is None
    (failed,) = row.none_right.values()
    assert failed.configs == 4
    assert "got" in failed.first or "no luck" in failed.first
    again = quick(w, runner, store, **options)
    assert again.none_right == row.none_right
    assert row.none_right == quick(w, runner, store, force=True, **options).none_right


def test_a_row_tells_that_the_budget_ended_before_any_config_was_tried(
    w, runner, store, monkeypatch
):
    seconds = itertools.count(step=1000)
    monkeypatch.setattr(Clock, "seconds", lambda self: next(seconds))
    row = quick(w, runner, store, params={"fault": ("wrong",)})
    assert row.own is None
    assert row.none_right == {"fake_own": NoneRight(0, "")}


def test_bench_leaves_no_implementation_out_however_short_its_budget(w, runner, store, monkeypatch):
    verify, budgets_s = runner.verify, []

    def noting(w, candidates, *, seed, budget_s):
        budgets_s.append(budget_s)
        return verify(w, candidates, seed=seed, budget_s=budget_s)

    monkeypatch.setattr(runner, "verify", noting)
    options = {"implementations": FAKES, "baselines": (), "budget_s": 1.0}
    bench([w], runner=runner, store=store, **options)
    assert budgets_s
    assert set(budgets_s) == {math.inf}


def test_a_bench_tells_that_the_untuned_config_was_refused(w, runner, store, monkeypatch):
    fake = IMPLS["fake_own"]
    wrong = fake.Config(fault="wrong")
    monkeypatch.setattr(fake, "heuristic", lambda w, device: wrong, raising=False)
    report = bench([w], runner=runner, store=store, implementations=FAKES, baselines=())
    (row,) = report.rows
    assert row.none_right["fake_own"].configs == 1
    assert "got" in row.none_right["fake_own"].first


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"strategy": "clairvoyant"}, "clairvoyant"),
        ({"implementations": ("nobody",)}, "nobody"),
        ({"implementations": ("aten",)}, "aten is a baseline, without kernels of ours"),
        ({"baselines": ("fake_own",)}, "fake_own is no baseline but an implementation of our own"),
        ({"params": {"tile_q": (1,)}}, "unknown knob 'tile_q'"),
        ({"params": {"delay_us": ("soon",)}}, "delay_us='soon' is not like the values"),
        ({"params": {"fault": ("odd",)}}, "fault='odd' is not like the values"),
        ({"baselines": ("nobody",)}, "nobody"),
    ],
)
def test_bad_options_are_named(w, runner, store, wrong, said):
    with pytest.raises(InvalidArgument, match=said):
        quick(w, runner, store, **wrong)


@pytest.mark.parametrize("measure", [tune, bench])
def test_an_unknown_baseline_is_named_before_anything_starts(w, store, measure):
    with pytest.raises(InvalidArgument, match="unknown implementation 'nobody'"):
        measure([w], runner=object(), store=store, baselines=("nobody",))


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"tile_q": (1,)}, "unknown knob 'tile_q'"),
        ({"delay_us": ("a",)}, "delay_us='a' is not like the values it lists"),
    ],
)
def test_a_wrong_knob_or_value_is_named_although_records_stand(w, runner, store, params, said):
    quick(w, runner, store)
    with pytest.raises(InvalidArgument, match=said):
        quick(w, runner, store, params=params)
