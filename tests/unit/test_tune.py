"""The tuner: what it records, what it chooses, and how it keeps its budget."""

from __future__ import annotations

import dataclasses
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from measured_fakes import fakes  # noqa: F401

from tilewright.build import CompileTask, Resources
from tilewright.compile.cache import Compiled
from tilewright.errors import CompileError, CompilerMissing, InvalidArgument, NoImplementation
from tilewright.impl import IMPLS
from tilewright.measure.candidate import Candidate, Limits
from tilewright.measure.replay import Replay
from tilewright.measure.runner import InProcess, Isolated
from tilewright.op import Workload
from tilewright.record import Record
from tilewright.results import Row
from tilewright.search import STRATEGIES
from tilewright.store import Store
from tilewright.tune import Progress, bench, tune, verify_all
from tilewright.tune.ahead import grouped
from tilewright.tune.choice import simplest_of_fastest
from tilewright.tune.run import tune_one
from tilewright.tune.session import Options, Session

WORKLOAD = "fake_double(x=f32[64,128])"
FAKES = ("fake_own", "fake_never")
FAST = {"fault": ("none",)}


@pytest.fixture(scope="module")
def w(fakes) -> Workload:  # noqa: F811
    return Workload.parse(WORKLOAD)


@pytest.fixture(scope="module")
def runner(w) -> Iterator[InProcess]:
    with InProcess("cpu") as runner:
        yield runner


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(f"sqlite:///{tmp_path / 'records.db'}") as store:
        yield store


def quick(w: Workload, runner, store, **changed) -> Row:
    options = {"budget_s": 2.0, "baselines": (), "params": FAST, "strategy": "exhaustive"}
    options["implementations"] = FAKES
    report = tune([w], runner=runner, store=store, **{**options, **changed})
    assert not report.failed, report.failed
    (row,) = report.rows
    return row


def statuses(store: Store) -> dict[str, set[str]]:
    """implementation -> statuses of its records."""
    found: dict[str, set[str]] = {}
    for record in store.query():
        found.setdefault(record.implementation, set()).add(record.status)
    return found


@pytest.fixture
def slow_aten(runner, monkeypatch) -> Iterator[None]:
    """aten takes 20 ms longer, so that a fake can win."""
    build = IMPLS["aten"].build

    def slow(config, w, device):
        executable = build(config, w, device)
        original = type(executable).__call__

        class Slow(type(executable)):
            def __call__(self, *tensors):
                time.sleep(0.02)
                return original(self, *tensors)

        executable.__class__ = Slow
        return executable

    monkeypatch.setattr(IMPLS["aten"], "build", slow, raising=False)
    runner._bench._w = None  # forget what is built
    yield
    runner._bench._w = None


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


def test_aten_is_chosen_when_every_kernel_of_ours_is_slower(w, runner, store):
    row = quick(w, runner, store, params={**FAST, "delay_us": (4000,)})
    assert row.chosen == "aten"
    assert row.own.median_us > 4000
    assert row.chosen_us <= row.baselines["aten"].median_us
    finals = {r.implementation: r.status for r in store.query(final=True) if r.duel}
    assert finals["fake_own"] == "slower"


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
    exact = dataclasses.replace(row.verified, integer_exact=None)
    assert again == dataclasses.replace(row, verified=exact)


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


def test_a_budget_in_configs_is_kept(w, runner, store):
    quick(w, runner, store, budget_s=None, budget_configs=3)
    searched = store.query(implementation="fake_own", final=False)
    assert len({tuple(r.config.items()) for r in searched}) == 3
    assert {"delay_us": 300, "fault": "none"} in [r.config for r in searched]


def test_a_budget_in_seconds_is_kept(w, runner, store):
    other = [w, Workload.parse("fake_double(x=f32[63,128])")]
    start = time.monotonic()
    report = tune(
        other,
        runner=runner,
        store=store,
        baselines=(),
        params=FAST,
        budget_s=3.0,
        implementations=FAKES,
    )
    assert time.monotonic() - start < 6.0
    assert len(report.rows) == 2
    assert report.tuning_s < 6.0


def test_candidates_that_kill_the_worker_or_hang_do_not_end_the_search(w, store):
    with Isolated("cpu", run_limit_s=2.0) as isolated:
        row = quick(w, isolated, store, params={"delay_us": (0,)}, budget_s=60.0)
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


def test_a_workload_that_no_kernel_of_ours_supports_still_has_a_row(runner, store, fakes):  # noqa: F811
    w = Workload.parse("fake_double(x=f32[64])")
    row = quick(w, runner, store)
    assert row.own is None
    assert row.verified is None
    assert row.chosen == "aten"
    assert row.refused["fake_own"] == "x has rank 1; fake_own takes matrices"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"strategy": "clairvoyant"}, "clairvoyant"),
        ({"implementations": ("nobody",)}, "nobody"),
        ({"params": {"tile_q": (1,)}}, "unknown knob 'tile_q'"),
        ({"params": {"delay_us": ("soon",)}}, "delay_us='soon' is not like the values"),
        ({"baselines": ("nobody",)}, "nobody"),
    ],
)
def test_bad_options_are_named(w, runner, store, wrong, said):
    with pytest.raises(InvalidArgument, match=said):
        quick(w, runner, store, **wrong)


# --- compiling -------------------------------------------------------------------------------


class Pool:
    """Compiles nothing: what comes back depends on the fault that the source names."""

    def compile(self, tasks):
        for task in tasks:
            if "segfault" in task.source:
                yield task, CompileError("error: expected ';'")
                continue
            spill_bytes = 16 if "'exit'" in task.source else 0
            resources = Resources(32, spill_bytes, spill_bytes, 0)
            yield task, Compiled(task.source, Path("/nowhere"), resources, "", 0.0)


def with_tasks(monkeypatch: pytest.MonkeyPatch, missing: bool = False) -> None:
    def task(config, w, device):
        if missing:
            raise CompilerMissing("no g++; apt-get install g++")
        return CompileTask("cxx", str(config), (), "entry")

    monkeypatch.setattr(IMPLS["fake_own"], "task", task, raising=False)


def session(runner, store, **options) -> Session:
    chosen = {
        "strategy": "exhaustive",
        "baselines": (),
        "implementations": FAKES,
        "budget_s": 4.0,
        **options,
    }
    return Session(runner, Pool(), store, Options(**chosen), None, Progress())  # type: ignore[arg-type]


def test_spillers_and_what_does_not_compile_are_recorded_and_not_run(w, runner, store, monkeypatch):
    with_tasks(monkeypatch)
    params = {"fault": ("none", "exit", "segfault"), "delay_us": (0, 100)}
    row = tune_one(session(runner, store, params=params), w)
    assert row.own.config["fault"] == "none"
    assert row.own.resources["registers"] == 32
    assert row.candidates == 2
    (spilled,) = {(r.config["fault"], r.message) for r in store.query(status="spilled")}
    assert spilled == ("exit", "spills 16 bytes per thread")
    failed = store.query(status="compile_error")
    assert {r.config["fault"] for r in failed} == {"segfault"}
    assert "expected ';'" in failed[0].message


def test_spillers_are_tried_where_nothing_else_is_left(w, runner, store, monkeypatch):
    with_tasks(monkeypatch)
    monkeypatch.setattr(Pool, "compile", _all_spill)
    params = {**FAST, "delay_us": (0,)}
    row = tune_one(session(runner, store, params=params), w)
    assert row.own.config == {"delay_us": 0, "fault": "none"}
    assert row.own.resources["spill_bytes"] == 8


def _all_spill(self, tasks):
    for task in tasks:
        yield task, Compiled(task.source, Path("/nowhere"), Resources(255, 8, 8, 0), "", 0.0)


def test_a_missing_compiler_is_told_once_and_ends_the_search(w, runner, store, monkeypatch):
    with_tasks(monkeypatch, missing=True)
    row = tune_one(session(runner, store), w)
    assert row.own is None
    assert row.refused["fake_own"] == "no g++; apt-get install g++"
    assert len(store.query(status="compile_error")) <= 8


@pytest.mark.parametrize("overlap", [False, True])
def test_groups_hold_every_binary_once_in_order(overlap):
    items = [(Candidate("i", (("n", n),)), None) for n in range(100)]
    groups = list(grouped((item for item in items), overlap))
    assert [item for group in groups for item in group] == items
    assert max(map(len, groups)) <= 32


def test_an_error_of_the_pool_reaches_the_caller():
    def broken():
        yield Candidate("i"), None
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        list(grouped(broken(), overlap=True))


def test_leaving_a_group_early_ends_the_compilation():
    closed = []

    def endless():
        try:
            while True:
                time.sleep(0.001)
                yield Candidate("i"), None
        finally:
            closed.append(True)

    groups = grouped(endless(), overlap=True)
    next(groups)
    groups.close()
    assert closed == [True]


# --- choosing --------------------------------------------------------------------------------


def timed(name: str, us: float, half: float, **config) -> Record:
    return Record(
        WORKLOAD, "fake_double", name, config, "ok", "cpu",
        median_us=us, ci_low_us=us - half, ci_high_us=us + half,
    )  # fmt: skip


HEURISTIC = {"delay_us": 300, "fault": "none"}


@pytest.mark.parametrize(
    ("records", "winner"),
    [
        ([timed("aten", 10, 1), timed("fake_own", 5, 1, **HEURISTIC)], 1),
        ([timed("aten", 6, 1), timed("fake_own", 5, 1, **HEURISTIC)], 0),
        ([timed("aten", 5, 1), timed("fake_own", 6, 0.5, **HEURISTIC)], 0),
        (
            [
                timed("aten", 10, 1),
                timed("fake_own", 5, 1, delay_us=0, fault="none"),
                timed("fake_own", 5.5, 1, **HEURISTIC),
            ],
            2,
        ),
        ([timed("inductor", 5, 1), timed("fake_own", 5.5, 1, **HEURISTIC), timed("aten", 9, 1)], 1),
        ([timed("aten", 6, 0.1), timed("inductor", 4.8, 0.95), timed("fake_own", 7, 3)], 1),
    ],
    ids=["clear", "tie with aten", "slower", "tie of ours", "tie with inductor", "never slower"],
)
def test_the_winner_is_the_simplest_of_the_fastest(w, runner, records, winner):
    assert simplest_of_fastest(records, w, runner.describe().spec) is records[winner]


# --- other entry points ----------------------------------------------------------------------


def test_bench_measures_the_recorded_choice_and_records_nothing(w, runner, store, slow_aten):
    tuned = quick(w, runner, store, params={**FAST, "delay_us": (0, 2000)})
    count = len(store.query())
    (row,) = bench(
        [w], runner=runner, store=store, baselines=(), implementations=FAKES, budget_s=2.0
    ).rows
    assert len(store.query()) == count
    assert row.own.config == tuned.own.config == {"delay_us": 0, "fault": "none"}
    assert row.own.heuristic_us > 300


def test_bench_of_an_untuned_workload_measures_the_heuristic(w, runner, store):
    (row,) = bench(
        [w], runner=runner, store=store, baselines=(), implementations=FAKES, budget_s=2.0
    ).rows
    assert row.own.config == HEURISTIC
    assert store.query() == []


def test_verify_all_checks_every_implementation_that_supports_the_workload(w, runner):
    found = {name: verdict for name, _, verdict in verify_all(w, runner=runner)}
    assert {"aten", "fake_own"} <= set(found)
    assert "fake_never" not in found
    assert found["aten"].ok
    assert found["fake_own"].ok


def test_verify_all_reproduces_one_candidate(w, runner):
    ((name, config, verdict),) = verify_all(w, "fake_own", {"fault": "wrong"}, 3, runner=runner)
    assert (name, config) == ("fake_own", {"delay_us": 300, "fault": "wrong"})
    assert not verdict.ok
    assert "reference" in verdict.message


def test_verify_all_names_what_cannot_be_verified(w, runner):
    with pytest.raises(NoImplementation, match="never fits"):
        verify_all(w, "fake_never", runner=runner)
    with pytest.raises(InvalidArgument, match="delay_us=7"):
        verify_all(w, "fake_own", {"delay_us": 7}, runner=runner)
    with pytest.raises(InvalidArgument, match="one implementation"):
        verify_all(w, None, {"delay_us": 0}, runner=runner)


@pytest.mark.parametrize("strategy", ["exhaustive", "hill_climb", "random_search", "sample_climb"])
def test_replay_finds_the_recorded_optimum_without_hardware(w, runner, store, strategy):
    """A convex landscape of recorded times: every strategy must come down to its bottom."""
    space = IMPLS["fake_own"].space(w, runner.describe().spec)
    records = [timed("aten", 5000.0, 1.0)]
    records += [
        timed("fake_own", 100.0 + c.delay_us + 50 * abs(len(c.fault) - 4), 1.0,
              **dataclasses.asdict(c)) for c in space
    ]  # fmt: skip
    replay = Replay(
        [dataclasses.replace(r, max_ulp=0.5, deterministic=True) for r in records],
        runner.describe(),
    )
    row = quick(w, replay, store, strategy=strategy, params={})
    assert row.chosen == "fake_own"
    assert row.own.median_us == 100.0
    assert row.baselines["aten"].median_us == 5000.0


def test_sample_climb_never_proposes_a_config_twice_and_ends():
    space = IMPLS["aten"].space(None, None)
    assert len(list(space)) == 1
    strategy = STRATEGIES["sample_climb"](space, random.Random(0), starts=list(space))
    batch = next(strategy)
    assert set(batch) == set(space)
    with pytest.raises(StopIteration):
        strategy.send([math.inf] * len(batch))
