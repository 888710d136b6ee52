"""Parts of the tuner: compiling ahead, choosing, bench, verify_all, replay."""

from __future__ import annotations

import dataclasses
import math
import random
import time
import types
from pathlib import Path

import pytest
from measured_fakes import FAKES, FAST, HEURISTIC, WORKLOAD, quick

from tilewright.build import CompileTask, Resources
from tilewright.compile.cache import Compiled
from tilewright.device import DEVICES
from tilewright.errors import CompileError, CompilerMissing, InvalidArgument, NoImplementation
from tilewright.impl import IMPLS
from tilewright.measure.candidate import Candidate, Outcome
from tilewright.measure.replay import Replay
from tilewright.measure.timing import Eager
from tilewright.op import Workload
from tilewright.record import Record
from tilewright.report import Baseline, Row
from tilewright.search import STRATEGIES
from tilewright.tune import Progress, bench, rows, tune, verify_all
from tilewright.tune.ahead import grouped
from tilewright.tune.choice import simplest_of_fastest
from tilewright.tune.run import _recorded, _with_activity, bench_one, tune_one
from tilewright.tune.session import Clock, Options, Session
from tilewright.tune.trial import Entry, Trial

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


class Phases(Progress):
    def __init__(self):
        self.told = []

    def phase(self, name):
        self.told.append(name)


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


def test_spillers_are_timed_where_that_is_asked_for(w, runner, store, monkeypatch):
    with_tasks(monkeypatch)
    monkeypatch.setattr(Pool, "compile", _slow_ones_spill)
    for asked, times in ((False, set()), (True, {100})):
        params = {"fault": ("none",), "delay_us": (0, 100)}
        tune_one(session(runner, store, params=params, force=True, spilled=asked), w)
        found = store.query(status="spilled")
        assert {r.config["delay_us"] for r in found} == {100}
        assert {r.config["delay_us"] for r in found if r.median_us} == times


def test_spillers_are_tried_where_nothing_else_is_left(w, runner, store, monkeypatch):
    with_tasks(monkeypatch)
    monkeypatch.setattr(Pool, "compile", _all_spill)
    params = {**FAST, "delay_us": (0,)}
    row = tune_one(session(runner, store, params=params), w)
    assert row.own.config == {"delay_us": 0, "fault": "none"}
    assert row.own.resources["spill_bytes"] == 8


def test_what_calls_run_untuned_is_timed_though_it_spills(w, runner, store, monkeypatch):
    with_tasks(monkeypatch)
    monkeypatch.setattr(Pool, "compile", _all_spill)
    row = bench_one(session(runner, store), w)
    assert row.own.resources["spill_bytes"] == 8
    assert row.own.median_us > 0


def _heuristics_spill(self, tasks):
    for task in tasks:
        spill_bytes = 8 * ("delay_us=300, fault='none'" in task.source)
        resources = Resources(255, spill_bytes, 0, 0)
        yield task, Compiled(task.source, Path("/nowhere"), resources, "", 0.0)


@pytest.mark.parametrize("one", [bench_one, tune_one])
def test_what_runs_in_place_of_a_heuristic_that_spills_is_timed(w, runner, store, monkeypatch, one):
    """And is what a row tells of its untuned time."""
    with_tasks(monkeypatch)
    first = IMPLS["fake_own"].heuristic(w, runner.describe().spec)
    other = dataclasses.replace(first, delay_us=100)
    monkeypatch.setattr(IMPLS["fake_own"], "untuned", lambda w, device: other, raising=False)
    monkeypatch.setattr(Pool, "compile", _heuristics_spill)
    params = {"params": {**FAST, "delay_us": (100, 300)}} if one is tune_one else {}
    row = one(session(runner, store, **params), w)
    assert row.own.config == {"delay_us": 100, "fault": "none"}
    assert row.own.heuristic_us == row.own.median_us


def test_spills_of_one_of_a_librarys_kernels_are_read_off_its_log(w, runner, store, monkeypatch):
    def resources(config, log):
        assert log == "of all kernels"
        return Resources(255, 8 * (config.delay_us == 100), 0, 0)

    with_tasks(monkeypatch)
    monkeypatch.setattr(Pool, "compile", _one_library)
    monkeypatch.setattr(IMPLS["fake_own"], "resources", resources, raising=False)
    row = tune_one(session(runner, store, params={**FAST, "delay_us": (0, 100)}), w)
    assert row.own.resources["registers"] == 255
    (spilled,) = store.query(status="spilled")
    assert (spilled.config["delay_us"], spilled.message) == (100, "spills 8 bytes per thread")


def _one_library(self, tasks):
    for task in tasks:
        yield task, Compiled("library", Path("/nowhere"), None, "of all kernels", 0.0)


def _slow_ones_spill(self, tasks):
    for task in tasks:
        resources = Resources(255, 8 * ("delay_us=100" in task.source), 0, 0)
        yield task, Compiled(task.source, Path("/nowhere"), resources, "", 0.0)


def _all_spill(self, tasks):
    for task in tasks:
        yield task, Compiled(task.source, Path("/nowhere"), Resources(255, 8, 8, 0), "", 0.0)


def test_a_missing_compiler_is_told_once_and_ends_the_search(w, runner, store, monkeypatch):
    with_tasks(monkeypatch, missing=True)
    row = tune_one(session(runner, store), w)
    assert row.own is None
    assert row.refused["fake_own"] == "no g++; apt-get install g++"
    assert len(store.query(status="compile_error")) <= 8
    with_tasks(monkeypatch)
    again = tune_one(session(runner, store, params=FAST), w)  # the compiler has come
    assert again.own is not None
    assert "fake_own" not in again.refused


def test_beside_a_gpu_compilers_begin_before_inputs_are_made(w, runner, store, monkeypatch):
    with_tasks(monkeypatch)
    done = []
    prepare = Session.prepare
    monkeypatch.setattr(Session, "overlap", True)
    monkeypatch.setattr(Session, "prepare", lambda s, w: done.append("inputs") or prepare(s, w))
    monkeypatch.setattr(Pool, "ahead", lambda _, tasks: done.extend(tasks), raising=False)
    row = tune_one(session(runner, store, params={**FAST, "delay_us": (0, 300)}), w)
    untuned = CompileTask("cxx", str(IMPLS["fake_own"].heuristic(w, DEVICES["cpu"])), (), "entry")
    assert row.own is not None
    assert done == [untuned, "inputs"]


def test_that_ceilings_are_measured_is_told_once(w, runner, store):
    opened = session(runner, store)
    opened.progress = Phases()
    for _ in range(2):
        opened.prepare(w)
    assert opened.progress.told == ["ceilings", "prepare", "prepare"]


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


# --- budget ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("used_s", "workloads", "share_s"),
    [(0.0, 4, 5.0), (15.0, 12, 1.0), (30.0, 12, 1.0), (30.0, 1, 1.0)],
)
def test_each_workload_has_its_part_of_what_is_left_but_a_second_at_least(
    w, runner, store, monkeypatch, used_s, workloads, share_s
):
    monkeypatch.setattr(Clock, "seconds", lambda self: used_s)
    run, shares = session(runner, store, budget_s=20.0), []

    def one(session, w):
        shares.append(session.share().seconds)
        raise KeyboardInterrupt

    run.pool.effort = {}
    run.run([w] * workloads, one)
    assert shares == [share_s]


# --- choosing --------------------------------------------------------------------------------


def timed(name: str, us: float, half: float, **config) -> Record:
    return Record(
        WORKLOAD, "fake_double", name, config, "ok", "cpu",
        median_us=us, ci_low_us=us - half, ci_high_us=us + half,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("records", "winner"),
    [
        ([timed("aten", 10, 1), timed("fake_own", 5, 1, **HEURISTIC)], 1),
        ([timed("aten", 5.2, 1), timed("fake_own", 5, 1, **HEURISTIC)], 0),
        ([timed("aten", 5, 1), timed("fake_own", 6, 0.5, **HEURISTIC)], 0),
        (
            [
                timed("aten", 10, 1),
                timed("fake_own", 5, 1, delay_us=0, fault="none"),
                timed("fake_own", 5.2, 1, **HEURISTIC),
            ],
            2,
        ),
        ([timed("inductor", 5, 1), timed("fake_own", 5.2, 1, **HEURISTIC), timed("aten", 9, 1)], 1),
        ([timed("aten", 6, 0.1), timed("inductor", 5.95, 0.95), timed("fake_own", 6.1, 3)], 0),
        ([timed("aten", 9, 8), timed("inductor", 5, 4), timed("fake_own", 7, 6, **HEURISTIC)], 1),
        ([timed("aten", 6.1, 3), timed("fake_own", 5, 1, **HEURISTIC)], 0),
        ([timed("aten", 6.4, 3), timed("fake_own", 5, 1, **HEURISTIC)], 1),
        ([timed("fake_own", 5, 1, delay_us=0), timed("fake_own", 5.1, 1, **HEURISTIC)], 1),
    ],
    ids=[
        "clear",
        "tie with aten",
        "slower",
        "tie of ours",
        "tie with inductor",
        "never slower than aten",
        "busy",
        "less than a quarter, in doubt",
        "more than a quarter",
        "no aten",
    ],
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


def test_bench_reports_what_a_call_of_the_public_operator_costs(w, runner, store, monkeypatch):
    asked = []

    def public_eager(w, as_called, method):
        asked.append((w, as_called))
        return Eager(9.5, 30.0)

    monkeypatch.setattr(runner, "public_eager", public_eager)
    options = {"runner": runner, "store": store, "baselines": (), "implementations": FAKES}
    (row,) = bench([w], **options, budget_s=1.0, as_called=print).rows
    assert (row.host_us["public"], row.eager_us["public"]) == (9.5, 30.0)
    assert asked == [(w, print)]
    (row,) = bench([w], **options, budget_s=1.0).rows
    assert "public" not in row.host_us


def test_eager_calls_of_a_duel_are_in_its_row_and_in_its_records(w, runner, store, monkeypatch):
    def eager(w, candidates, method):
        return {c: Eager(5.0 + i, 50.0 + i) for i, c in enumerate(candidates)}

    monkeypatch.setattr(runner, "eager", eager)
    row = quick(w, runner, store)
    assert row.host_us == {"aten": 5.0, "own": 6.0}
    assert row.eager_us == {"aten": 50.0, "own": 51.0}
    again = quick(w, runner, store)
    assert (again.host_us, again.eager_us, again.own) == (row.host_us, row.eager_us, row.own)


def test_bench_counts_what_a_call_of_each_contestant_allocates(w, runner, store):
    options = {"runner": runner, "store": store, "baselines": (), "implementations": FAKES}
    (row,) = bench([w], **options, budget_s=1.0).rows
    assert set(row.activity) == {"own", "aten"}
    assert row.activity["aten"].allocations >= 1
    assert row.as_dict()["activity"]["own"]["kernels"] == 0


def test_tuning_counts_what_a_call_of_each_contestant_allocates(w, runner, store):
    options = {"runner": runner, "store": store, "baselines": (), "implementations": FAKES}
    params = {"fault": ("none",), "delay_us": (0,)}
    (row,) = tune([w], **options, params=params, budget_s=1.0).rows
    assert set(row.activity) == {"own", "aten"}
    assert row.activity["own"].allocations >= 1


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


@pytest.mark.parametrize(
    ("config", "starts"),
    [({"delay_us": 600}, [(600, "none")]), ({"delay_us": 600, "knob": 1}, [])],
    ids=["a knob came since", "a knob is gone"],
)
def test_a_search_starts_from_what_won_before_a_knob_came(config, starts, w, runner, store):
    trial, device = Trial(session(runner, store), w), runner.describe()
    store.add(
        Record(str(w), w.op, name, chosen, "ok", device.key, us, device_info=device.info,
               versions=device.versions, final=True, duel="before")
        for name, chosen, us in (("fake_own", config, 10.0), ("aten", {}, 20.0))
    )  # fmt: skip
    found = _recorded(trial, "fake_own", IMPLS["fake_own"].space(w, device.spec))
    assert [(c.delay_us, c.fault) for c in found] == starts


def test_sample_climb_never_proposes_a_config_twice_and_ends():
    space = IMPLS["aten"].space(None, None)
    assert len(list(space)) == 1
    strategy = STRATEGIES["sample_climb"](space, random.Random(0), starts=list(space))
    batch = next(strategy)
    assert set(batch) == set(space)
    with pytest.raises(StopIteration):
        strategy.send([math.inf] * len(batch))


# --- rows ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "text", "floor_us"),
    [
        ("h200", "softmax(x=f32[4096,4096])", 30.0),  # moves what the copy moves: the copy's time
        # half as much again
        ("h200", "lerp(x=f32[4096,4096], end=f32[4096,4096], weight=0.5)", 40.0),
        ("cpu", "softmax(x=f32[4096,4096])", 40.0),  # a copy there has no pages to fault in
        # a matrix product's is its operations
        (
            "h200",
            "conv2d_weight_grad(x=f16[8,8,9,9], grad_output=f16[8,8,9,9], kernel_size=[1,1])",
            40.0,
        ),
    ],
)
def test_a_copy_in_the_same_duel_bounds_the_floor_on_a_gpu(device, text, floor_us):
    w, references = Workload.parse(text), {"floor": 40.0, "copy": 30.0}
    assert rows._floor_us(references, [], w, DEVICES[device]) == floor_us


def test_plain_operations_take_their_time_whatever_a_copy_takes():
    w = Workload.parse(
        "conv2d_weight_grad(x=f16[80,96,56,56], grad_output=f16[80,96,56,56], kernel_size=[7,7],"
        " padding=[3,3], groups=96)"
    )
    references = {"floor": 40.0, "copy": 30.0}
    h200 = DEVICES["h200"]
    assert rows._floor_us(references, [], w, h200) == w.flops / h200.flops["f32"] * 1e6 > 30.0


def test_a_right_result_in_less_than_the_ceilings_allow_is_the_floor_on_a_cpu():
    w, references = Workload.parse("softmax(x=f32[64,64])"), {"floor": 40.0, "copy": 30.0}
    wrong = Record(str(w), "softmax", "inductor", {}, "wrong_result", "cpu", median_us=20.0)
    right = Record(str(w), "softmax", "aten", {}, "slower", "cpu", median_us=35.0)
    assert rows._floor_us(references, [wrong, right], w, DEVICES["cpu"]) == 35.0
    slow = Record(str(w), "softmax", "aten", {}, "ok", "cpu", median_us=50.0)
    assert rows._floor_us(references, [wrong, slow], w, DEVICES["cpu"]) == 40.0


def test_of_a_baselines_configs_the_fastest_that_runs_is_profiled(w, runner, store):
    def entry(name, us, status):
        outcome = Outcome(status, "", 0.0)
        return Entry(Candidate(name, (("n", us),)), "", outcome=outcome, us=us)

    entries = [
        entry("aten", 5.0, "launch_error"),
        entry("aten", 8.0, "ok"),
        entry("aten", 6.0, "wrong_result"),
        entry("fake_double", 1.0, "ok"),
    ]
    asked = []
    runner = types.SimpleNamespace(activity=lambda w, c, method: asked.extend(c) or {})
    session = types.SimpleNamespace(runner=runner, method="cpu")
    trial = types.SimpleNamespace(session=session, w=w, entries={e.candidate: e for e in entries})
    m = Baseline(6.0, (5.9, 6.1))
    row = Row(str(w), 1.0, None, "cpu", None, {}, {"aten": m}, None, "aten", 0, None)
    assert _with_activity(trial, row).activity == {}
    assert asked == [Candidate("aten", (("n", 6.0),))]
