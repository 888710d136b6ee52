"""A duel that other programs disturb is fought again; one that stays disturbed does not stand."""

import json

import pytest
from measured_fakes import FAKES, WORKLOAD, quick

from tilewright.cli.tune import disturbed
from tilewright.measure.candidate import COPY
from tilewright.measure.timing import Timing
from tilewright.report import Report
from tilewright.result_schema import validate
from tilewright.results import as_dict, table_rows
from tilewright.tune import bench
from tilewright.tune.duel import DISTURBED, FIGHTS

US = {"aten": 20.0, 0: 10.0, 100: 12.0}
"""Undisturbed times, by name or knob."""
ONCE = {"params": {"delay_us": (0, 100), "fault": ("none",)}}


class Disturbed:
    """Stands for a runner's `time`: each duel takes as many times what a search does as its number
    says, but for the knobs that are spared, and in all that are disturbed aten seems the
    fastest."""

    def __init__(self, factors, spared):
        self.factors, self.spared, self.duels = list(factors), spared, 0

    def __call__(self, w, candidates, method, **options):
        factor = 1.0
        if COPY in candidates:
            factor = self.factors[min(self.duels, len(self.factors) - 1)]
            self.duels += 1
        return {c: self._timing(c, factor) for c in candidates}

    def _timing(self, c, factor):
        knob = c.values.get("delay_us", c.implementation)
        us = US.get(knob, 1.0) * (1.0 if knob in self.spared else factor)
        if factor > 1 and c.implementation == "aten":
            us /= 100
        return Timing(us, (us, us), 9)


@pytest.fixture
def timed(runner, monkeypatch):
    def by(*factors, spared=()):
        timer = Disturbed(factors, spared)
        monkeypatch.setattr(runner, "time", timer)
        return timer

    return by


def told_by_the_floor(store):
    (config,) = {tuple(sorted(r.config.items())) for r in store.query(implementation="floor")}
    return dict(config)


def test_a_duel_like_its_search_is_fought_once(w, runner, store, timed):
    timer = timed(DISTURBED - 0.5)
    row = quick(w, runner, store, **ONCE)
    assert (timer.duels, row.fought, row.disturbed) == (1, 1, None)
    assert not {"fought", "disturbed"} & told_by_the_floor(store).keys()


def test_a_disturbed_duel_is_fought_again_and_the_row_and_its_record_say_so(
    w, runner, store, timed
):
    timer = timed(13.0, 1.0)
    row = quick(w, runner, store, **ONCE)
    assert (row.chosen, row.own.median_us) == ("fake_own", 10.0)
    assert (timer.duels, row.fought, row.disturbed) == (2, 2, None)
    assert told_by_the_floor(store)["fought"] == 2
    again = quick(w, runner, store, **ONCE)
    assert (timer.duels, again.fought) == (2, 2)  # it stands
    assert disturbed(table_rows(Report([row], {}, {}, 0.0))) == []


@pytest.mark.parametrize("spared", [0, 100])
def test_a_candidate_that_was_spared_does_not_hide_that_others_were_disturbed(
    w, runner, store, timed, spared
):
    timer = timed(13.0, 1.0, spared=(spared,))
    row = quick(w, runner, store, **ONCE)
    assert (row.chosen, row.own.median_us) == ("fake_own", 10.0)
    assert (timer.duels, row.fought, row.disturbed) == (2, 2, None)


def test_where_all_are_disturbed_the_least_decides_and_does_not_stand(w, runner, store, timed):
    timer = timed(13.0, 5.0, 40.0, 1.0)
    row = quick(w, runner, store, **ONCE)
    assert (timer.duels, row.fought, row.disturbed) == (FIGHTS, FIGHTS, 5.0)
    assert row.own.median_us == 50.0
    assert told_by_the_floor(store)["disturbed"] == 5.0
    report = Report([row], {"name": "cpu"}, {"torch": "2.13", "tilewright": "0"}, 0.0)
    assert validate(json.loads(json.dumps(as_dict("custom", report)))) == []
    (line,) = disturbed(table_rows(report))
    assert line.startswith(f"{WORKLOAD}: in the duel, fought 3 times, candidates took 5 times what")
    again = quick(w, runner, store, **ONCE)
    assert (timer.duels, again.chosen, again.disturbed) == (FIGHTS + 1, "fake_own", None)


def test_a_disturbed_bench_is_fought_again(w, runner, store, timed):
    timer = timed(13.0, 1.0)
    options = {"baselines": (), "implementations": FAKES}
    (row,) = bench([w], runner=runner, store=store, **options).rows
    assert (timer.duels, row.fought) == (2, 2)
