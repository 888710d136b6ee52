"""Where a call does not tell how its indices are spread, the best worst case is chosen."""

import dataclasses
import json

import pytest

from tilewright.indexed import DISTRIBUTIONS
from tilewright.measure.candidate import Candidate
from tilewright.measure.runner import InProcess
from tilewright.measure.timing import Timing
from tilewright.op import Workload
from tilewright.record import Record, utc_now
from tilewright.result_schema import validate
from tilewright.results import as_dict
from tilewright.store import Store
from tilewright.tune import tune
from tilewright.tune.choice import candidate_of
from tilewright.tune.spread import Worst, others, robust

TEXT = "index_add(x=f32[40,16], dim=0, index=i64[90], source=f32[90,16])"


def record(name, us):
    return Record(
        TEXT, "index_add", name, {}, "ok", "cpu", median_us=us, ci_low_us=us, ci_high_us=us
    )


def test_a_workload_without_a_distribution_is_tried_on_every_other():
    spreads = [v.distribution for v in others(Workload.parse(TEXT))]
    assert spreads == ["zipf", "balanced", "sorted", "few_bins", "constant"]
    roomy = others(Workload.parse(TEXT.replace("x=f32[40", "x=f32[90")))
    assert [v.distribution for v in roomy] == ["zipf", "unique", "sorted", "few_bins", "constant"]
    assert others(Workload.parse(f"{TEXT}!indices=zipf")) == []
    assert others(Workload.parse("softmax(x=f32[4,8], dim=-1)")) == []


def test_only_the_best_worst_case_and_aten_may_be_chosen():
    records = [record("fragile", 5), record("steady", 7), record("aten", 20)]
    worst = {
        candidate_of(records[0]): Worst(30.0, "constant"),
        candidate_of(records[1]): Worst(1.4, "uniform"),
        candidate_of(records[2]): Worst(9.0, "zipf"),
    }
    assert robust(records, worst) == records[1:]
    assert robust(records, {}) == records


class Uneven(InProcess):
    """Times that tell the kernels apart: `private` is fast, except on constant indices."""

    def time(self, w, candidates, method, **options):
        return {c: self._invented(w, c) for c in candidates}

    def _invented(self, w, candidate: Candidate) -> Timing:
        us = {"copy": 1.0, "aten": 100.0}.get(candidate.implementation, 20.0)
        if candidate.values.get("method") == "private":
            us = 500.0 if w.distribution == "constant" else 10.0
        return Timing(us, (us, us), 9)


@pytest.mark.parametrize(("flag", "chosen"), [("", False), ("!indices=zipf", True)])
def test_the_tuner_measures_every_distribution_and_leaves_the_fragile_kernel(
    tmp_path, flag, chosen
):
    w = Workload.parse(TEXT + flag)
    with Uneven("cpu") as runner, Store(f"sqlite:///{tmp_path / 'records.db'}") as store:
        report = tune([w], store=store, runner=runner, baselines=(), implementations=["rows_cpp"])
        (row,) = report.rows
        assert row.own is not None
        assert (row.own.config["method"] == "private") is chosen
        again = tune([w], store=store, runner=runner, baselines=(), implementations=["rows_cpp"])
        assert again.rows[0].spreads == row.spreads
        others_code = store.query(workload=f"{TEXT}!indices=constant")
        changed = {"median_us": 1.0, "code_hash": "of other code", "created": utc_now()}
        store.add([dataclasses.replace(r, **changed) for r in others_code])
        again = tune([w], store=store, runner=runner, baselines=(), implementations=["rows_cpp"])
        assert again.rows[0].spreads == row.spreads
        known = {r.workload for r in store.query(op="index_add")}
        best = store.best(str(w), runner.describe().key, runner.describe().versions)
    written = json.loads(json.dumps(as_dict("none", report)))
    assert validate(written) == []
    (found,) = written["rows"]
    assert bool(found["spreads"]) is not chosen
    for candidate, on in found["spreads"].items():
        assert set(on) == set(DISTRIBUTIONS) - {"unique"}
        if "private" in candidate:
            assert (on["uniform"], on["constant"]) == (10.0, 500.0)
        else:
            assert set(on.values()) == {100.0 if candidate == "aten()" else 20.0}
    assert best is not None
    assert (best.config.get("method") == "private") is chosen
    assert (f"{TEXT}!indices=constant" in known) is not chosen
    told = [dataclasses.asdict(r)["message"] for r in [best]]
    assert all("times the fastest on" in m for m in told) is not chosen
