"""Records that do not hold any more, of functions, knobs and implementations that changed since;
runs that end early."""

from __future__ import annotations

import dataclasses

import pytest
import sqlalchemy as sa
from measured_fakes import FAKES, FAST, HEURISTIC, quick

from tilewright.build import CompileTask
from tilewright.compile import cxx
from tilewright.compile.cache import cached, compiled
from tilewright.compile.cxx import DEFAULT_FLAGS as FLAGS
from tilewright.errors import InvalidArgument
from tilewright.impl import IMPLS
from tilewright.op import Workload
from tilewright.record import utc_now
from tilewright.space import ConfigSpace
from tilewright.tune import Progress, bench, duel, tune

FASTEST = {"params": {**FAST, "delay_us": (0,)}}


def duels(store) -> int:
    return len({r.duel for r in store.query(final=True)})


def of_another_version(store, text: str) -> None:
    """What is recorded, as for an operator that had other arguments."""
    store.add(
        [
            dataclasses.replace(r, workload=text, created=utc_now(), duel=f"{r.duel}_before")
            for r in store.query(final=True)
        ]
    )


@pytest.mark.parametrize(
    "text", ["fake_double(y=f32[64,128])", "fake_double(x=f32[64,128], y=f32[3])", "fake_double("]
)
def test_a_neighbour_of_another_version_is_no_place_to_start_from(w, runner, store, text):
    quick(w, runner, store)
    of_another_version(store, text)
    row = quick(Workload.parse("fake_double(x=f32[63,128])"), runner, store)
    assert row.own is not None


def test_nor_is_a_damaged_one(w, runner, store):
    quick(w, runner, store)
    with store._engine.begin() as connection:
        connection.execute(sa.text("UPDATE records SET config = '{bad'"))
    row = quick(Workload.parse("fake_double(x=f32[63,128])"), runner, store)
    assert row.own is not None


@pytest.mark.parametrize("gone", ["value", "implementation"])
def test_a_winner_that_may_not_be_chosen_any_more_does_not_stand(
    w, runner, store, slow_aten, monkeypatch, gone
):
    """Calls run PyTorch's kernel in its place until another one is found."""
    row = quick(w, runner, store)
    assert row.own.config["delay_us"] == 0
    own = IMPLS["fake_own"]
    if gone == "value":
        left = {"delay_us": (300, 100)}
        monkeypatch.setattr(own, "space", lambda w, d: ConfigSpace(own.Config, left), raising=False)
    else:
        monkeypatch.setattr(own, "unsupported", lambda w, device: "not here", raising=False)
    again = quick(w, runner, store)
    assert duels(store) == 2
    if gone == "value":
        assert again.own.config["delay_us"] == 100
    else:
        assert (again.chosen, again.refused["fake_own"]) == ("aten", "not here")
    quick(w, runner, store)
    assert duels(store) == 2


@pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing()))
def test_a_duel_of_a_kernel_whose_source_has_changed_since_does_not_stand(
    w, runner, store, monkeypatch
):
    for source, fought in (("", 1), ("", 1), ("int changed;", 2), ("int changed;", 2)):
        task = CompileTask("cxx", f'extern "C" {{ void own() {{}} {source} }}', FLAGS, "own")
        monkeypatch.setattr(IMPLS["fake_own"], "task", lambda *_, task=task: task, raising=False)
        row = quick(w, runner, store, **FASTEST)
        assert (duels(store), row.own.code_hash) == (fought, compiled(task).key)


@pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing()))
def test_nor_does_one_of_a_kernel_before_it_that_has_changed(w, runner, store, monkeypatch):
    own, *before = (
        CompileTask("cxx", f'extern "C" {{ void own() {{}} {source} }}', FLAGS, "own")
        for source in ("", "int before;", "int changed;")
    )
    monkeypatch.setattr(IMPLS["fake_own"], "task", lambda *_: own, raising=False)
    found = []
    for first, fought in ((before[0], 1), (before[0], 1), (before[1], 2), (before[1], 2)):
        tasks = first, own
        monkeypatch.setattr(IMPLS["fake_own"], "tasks", lambda *_, t=tasks: t, raising=False)
        found.append(quick(w, runner, store, **FASTEST).own.code_hash)
        assert duels(store) == fought
    assert found[0] == found[1] != found[2] == found[3]


@pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing()))
def test_a_kernel_before_it_that_gives_way_once_compiled_does_so_on_another_machine_too(
    w, runner, store, monkeypatch, tmp_path
):
    own, spilling, other = (
        CompileTask("cxx", f'extern "C" {{ void own() {{}} {source} }}', FLAGS, "own")
        for source in ("", "int spilling;", "int other;")
    )
    monkeypatch.setattr(IMPLS["fake_own"], "task", lambda *_: own, raising=False)
    monkeypatch.setattr(
        IMPLS["fake_own"],
        "tasks",
        lambda *_: (other if cached(spilling) else spilling, own),
        raising=False,
    )
    for cache, fought in (("one", 1), ("one", 2), ("one", 2), ("another", 2)):
        monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / cache))
        quick(w, runner, store, **FASTEST)
        assert duels(store) == fought


def test_bench_does_without_a_winner_whose_knob_or_value_is_gone(w, runner, store, slow_aten):
    quick(w, runner, store)
    winner = next(r for r in store.query(final=True, implementation="fake_own", status="ok"))
    for config in ({**winner.config, "old": 3}, {**winner.config, "delay_us": "soon"}):
        store.add([dataclasses.replace(winner, config=config, created=utc_now(), duel="newest")])
        report = bench([w], runner=runner, store=store, baselines=(), implementations=FAKES)
        assert report.rows[0].own.config == HEURISTIC


def test_values_that_are_asked_for_are_searched_whatever_was_searched_before(w, runner, store):
    quick(w, runner, store, params={}, budget_s=None, budget_configs=1)
    row = quick(w, runner, store, params={**FAST, "delay_us": (600,)})
    assert (row.own.config["delay_us"], duels(store)) == (600, 2)
    quick(w, runner, store, params={**FAST, "delay_us": (600,)})
    assert duels(store) == 2


def test_knobs_are_looked_at_before_anything_is_measured(w, runner, store):
    other = Workload.parse("softmax(x=f32[4,8])")
    with pytest.raises(InvalidArgument, match="unknown knob 'delay_us' for softmax"):
        tune([w, other], runner=runner, store=store, params={"delay_us": (0,)})
    assert store.query() == []


def test_values_that_no_config_has_are_refused_before_anything_is_measured(w, runner, store):
    """Of one workload: where another has such a config, its search finds none."""
    smaller = Workload.parse("softmax(x=f32[8,1])")
    with pytest.raises(
        InvalidArgument, match=r"no config of fused .* has rows=99; rows is one of "
    ):
        tune([smaller], runner=runner, store=store, params={"rows": (99,)}, baselines=())
    assert store.query() == []


def test_what_has_no_such_knob_does_not_count_as_having_such_a_config(w, runner, store):
    options = {"budget_s": None, "budget_configs": 1, "implementations": ("fused", *FAKES)}
    with pytest.raises(
        InvalidArgument, match=r"no config of fused .* has rows=99; rows is one of "
    ):
        quick(w, runner, store, params={"rows": (99,)}, **options)


class Interrupts(Progress):
    def __init__(self, name: str):
        self.name = name

    def phase(self, name: str) -> None:
        if name == self.name:
            raise KeyboardInterrupt


def test_the_times_of_a_duel_are_kept_whenever_the_run_ends(w, runner, store):
    report = tune(
        [w], runner=runner, store=store, implementations=FAKES, baselines=(),
        progress=Interrupts("eager calls"), **FASTEST,
    )  # fmt: skip
    assert report.interrupted
    assert duels(store) == 0  # which would decide what calls run
    (aten,) = store.query(implementation="aten", status="ok")
    assert aten.median_us > 0


def test_and_where_the_duel_cannot_be_judged(w, runner, store, monkeypatch):
    monkeypatch.setattr(duel, "VENDOR_STATUSES", ())
    report = tune([w], runner=runner, store=store, implementations=FAKES, baselines=(), **FASTEST)
    assert "aten could not be timed" in report.failed[str(w)]
    assert store.query(implementation="aten", status="ok")
    assert duels(store) == 0
