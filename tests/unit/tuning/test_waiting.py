"""Of eager calls what a caller waits least for is chosen; in a graph the device alone counts."""

import json

import pytest
from measured_fakes import FAST

from tilewright.compile.pool import CompilePool
from tilewright.measure.candidate import Candidate
from tilewright.measure.runner import InProcess
from tilewright.measure.timing import Timing
from tilewright.record import Record
from tilewright.report import Report
from tilewright.result_schema import validate
from tilewright.results import as_dict
from tilewright.tune import Progress
from tilewright.tune.choice import candidate_of, host_us, winner
from tilewright.tune.run import tune_one
from tilewright.tune.session import Options, Session
from tilewright.tune.spread import Worst, worst_cases

MANY_LAUNCHES, ONE_LAUNCH = 0, 100
"""Values of the knob `delay_us` that stand for schedules of an implementation."""


class Invented(InProcess):
    """(device, host) in microseconds, by name or knob."""

    def __init__(self, times):
        super().__init__("cpu")
        self.times = times

    def ceilings(self, method):
        return super().ceilings("cpu")

    def prepare(self, w, method, seed=0):
        return super().prepare(w, "cpu", seed)

    def activity(self, w, candidates, method):
        return {}

    def time(self, w, candidates, method, **options):
        return {c: self._timing(c, method) for c in candidates}

    def _timing(self, c: Candidate, method: str) -> Timing:
        key = c.values.get("delay_us", c.implementation)
        us, host = self.times.get(key, (300.0, None))
        return Timing(us, (us, us), 9, host_us=host if method == "events" else None)


def tuned(w, store, method, times):
    with Invented({"copy": (1.0, None), **times}) as runner, CompilePool(1) as pool:
        options = Options("exhaustive", baselines=(), implementations=("fake_own",), params=FAST)
        session = Session(runner, pool, store, options, None, Progress())
        session.method = method
        row = tune_one(session, w)
        again = tune_one(session, w)
        assert (again.chosen, again.own, again.host_us) == (row.chosen, row.own, row.host_us)
        return row, store.best(str(w), session.device.key, session.device.versions)


SMALL = {MANY_LAUNCHES: (10.0, 28.0), ONE_LAUNCH: (11.0, 11.5), "aten": (14.0, 20.0)}


@pytest.mark.parametrize(("method", "knob"), [("events", ONE_LAUNCH), ("graph", MANY_LAUNCHES)])
def test_small_work_that_is_called_goes_to_what_costs_the_host_least(w, store, method, knob):
    row, best = tuned(w, store, method, SMALL)
    assert row.chosen == best.implementation == "fake_own"
    assert row.own.config["delay_us"] == best.config["delay_us"] == knob
    if method == "events":
        assert row.host_us == {"own": 11.5, "aten": 20.0}
        assert best.message == "a call costs the host 11.5 us"
        (lost,) = (
            r for r in store.query(status="tied", final=True) if r.implementation == "fake_own"
        )
        assert lost.config["delay_us"] == MANY_LAUNCHES
        assert lost.message == "a call costs the host 28 us"


def test_what_the_device_is_long_at_goes_to_what_it_does_fastest(w, store):
    row, best = tuned(
        w, store, "events", {0: (80.0, 28.0), 100: (95.0, 11.5), "aten": (120.0, None)}
    )
    assert best.config["delay_us"] == row.own.config["delay_us"] == MANY_LAUNCHES
    assert best.message == ""


def test_where_the_device_is_kept_busy_a_second_launch_costs_nothing(w, store):
    row, best = tuned(
        w, store, "events", {0: (14.1, 17.0), 100: (15.4, 13.4), "aten": (70.0, 40.0)}
    )
    assert best.config["delay_us"] == row.own.config["delay_us"] == MANY_LAUNCHES


def test_aten_s_own_time_on_the_device_does_not_save_it_from_its_host_s(w, store):
    times = {MANY_LAUNCHES: (9.0, 9.5), ONE_LAUNCH: (50.0, 9.0), "aten": (7.0, 16.0)}
    row, best = tuned(w, store, "events", times)
    assert (row.chosen, best.config["delay_us"]) == ("fake_own", MANY_LAUNCHES)
    report = Report([row], {"name": "a GPU"}, {"torch": "2.11", "tilewright": "0.1"}, 1.0)
    written = json.loads(json.dumps(as_dict("none", report)))
    slower = "file.rows[0]: chosen 'fake_own' is slower than aten"
    assert slower not in validate(written)
    written["rows"][0]["host_us"]["aten"] = 9.0
    assert slower in validate(written)


def test_among_equal_waits_the_device_decides(w, runner):
    records = [record("aten", 7.0), record("fake_own", 3.0)]
    host = {candidate_of(records[0]): 9.0, candidate_of(records[1]): 9.2}
    spec = runner.describe().spec
    assert winner(records, host, w, spec) is records[1]
    assert winner(records, {**host, candidate_of(records[1]): 12.0}, w, spec) is records[0]


def record(name, us, status="ok", method="events"):
    return Record(
        "w", "op", name, {}, status, "gpu", median_us=us, ci_low_us=us, ci_high_us=us, method=method
    )


def test_a_duel_that_did_not_time_the_host_of_all_says_nothing_of_it():
    timed = [record("aten", 14.0), record("fake_own", 11.0), record("slow", 400.0)]
    aten, own = record("aten", 20.0, "host"), record("fake_own", 9.0, "host")
    assert host_us([*timed, aten]) == {}
    assert host_us([*timed, aten, own]) == {candidate_of(aten): 20.0, candidate_of(own): 9.0}
    graph = [record(r.implementation, 9.0, r.status, "graph") for r in (*timed, aten, own)]
    assert host_us(graph) == {}


def test_no_distribution_of_indices_is_waited_for_less_than_the_host():
    many, one = Candidate("many"), Candidate("one")
    times = {many: {"uniform": 5.0, "constant": 60.0}, one: {"uniform": 10.0, "constant": 50.0}}
    assert worst_cases(times, {})[one] == Worst(2.0, "uniform")
    found = worst_cases(times, {many: 30.0, one: 10.0})
    assert found == {many: Worst(3.0, "uniform"), one: Worst(1.0, "uniform")}
