"""Result files: what they hold, their summary, and that a broken one is told."""

from __future__ import annotations

import copy
import json
import math
import os
import stat
from dataclasses import replace

import pytest

from tilewright import results
from tilewright.errors import InvalidArgument
from tilewright.report import Baseline, Measured, NoneRight, Own, Report, Row, Verified
from tilewright.result_files import row_of
from tilewright.result_schema import validate
from tilewright.summaries import summary


def measured(us: float) -> Baseline:
    return Baseline(us, (us * 0.99, us * 1.01), {}, 1, True)


def own(us: float) -> Own:
    return Own(us, (us * 0.99, us * 1.01), "fused", {"threads": 128}, {"registers": 32}, 0, us * 2)


def row(name: str, aten: float, inductor: float, ours: float | None, chosen: str) -> Row:
    return Row(
        workload=name,
        floor_us=5.0,
        copy_us=8.0,
        method="events",
        distribution=None,
        host_us={"own": 8.0, "aten": 6.0},
        baselines={"aten": measured(aten), "inductor": measured(inductor)},
        own=own(ours) if ours else None,
        chosen=chosen,
        candidates=7,
        verified=Verified(0.5, 2.0, True, True) if ours else None,
        refused={"other": "a reason"},
    )


@pytest.fixture
def report() -> Report:
    rows = [row("a", 40.0, 20.0, 10.0, "fused"), row("b", 10.0, 20.0, 20.0, "aten")]
    device = {"name": "NVIDIA H200", "sms": 132, "copy_bytes_per_s": 4.28e12}
    return Report(rows, device, {"torch": "2.11", "tilewright": "0.1", "driver": None}, 12.5)


def test_summary_compares_own_with_each_baseline_the_floor_and_copy(report):
    found = summary(report.rows)
    assert found["geomean_vs_aten"] == pytest.approx(math.sqrt(4.0 * 0.5))
    assert found["geomean_vs_inductor"] == pytest.approx(math.sqrt(2.0 * 1.0))
    assert found["geomean_of_floor"] == pytest.approx(math.sqrt(0.5 * 0.25))
    assert found["worst_of_floor"] == pytest.approx(0.25)
    assert found["geomean_of_copy"] == pytest.approx(math.sqrt(0.8 * 0.4))
    assert found["geomean_heuristic_vs_own"] == pytest.approx(0.5)
    assert "geomean_vs_inductor_max" not in found


def test_a_network_takes_what_its_layers_take_together(report):
    found = summary(report.rows, {"a": 3, "b": 2})
    a, b = report.rows
    times = {"chosen": 3 * a.chosen_us + 2 * b.chosen_us}
    for name in ("aten", "inductor"):
        times[name] = 3 * a.baselines[name].median_us + 2 * b.baselines[name].median_us
    assert {k.removeprefix("network_us_"): v for k, v in found.items() if "network" in k} == times
    assert times["chosen"] == 3 * 10.0 + 2 * 10.0
    assert not any("network" in k for k in summary(report.rows))


def test_a_workload_without_own_kernel_is_left_out_of_the_summary(report):
    report.rows.append(row("c", 10.0, 20.0, None, "aten"))
    assert summary(report.rows)["geomean_vs_aten"] == pytest.approx(math.sqrt(2.0))


def test_a_written_file_reads_back_valid_and_has_the_documented_keys(report, tmp_path):
    path = tmp_path / "new folder" / "suite.json"
    results.write(path, "some_suite", report)
    data = json.loads(path.read_text())
    assert validate(data) == []
    assert list(data) == [
        "schema", "suite", "commit", "date", "device", "versions", "tuning_s", "compiling", "rows",
        "summary",
    ]  # fmt: skip
    assert list(data["rows"][0]) == [
        "workload", "floor_us", "copy_us", "method", "distribution", "host_us", "baselines", "own",
        "chosen", "candidates", "verified", "wrong", "activity", "eager_us", "others",
        "unsearched", "none_right", "chosen_verified", "spreads", "fought", "disturbed",
    ]  # fmt: skip
    assert set(data["rows"][0]["own"]) == {
        "implementation", "config", "median_us", "ci_us", "resources", "workspace_bytes",
        "heuristic_us", "code_hash",
    }  # fmt: skip
    assert set(data["rows"][0]["baselines"]["aten"]) == {
        "median_us", "ci_us", "config", "candidates", "deterministic", "max_ulp",
    }  # fmt: skip
    assert data["rows"][0]["own"]["ci_us"] == [pytest.approx(9.9), pytest.approx(10.1)]
    assert [p.name for p in path.parent.iterdir()] == ["suite.json"]


def test_a_result_file_can_be_read_by_whom_the_umask_lets(report, tmp_path):
    before = os.umask(0o022)
    try:
        results.write(tmp_path / "suite.json", "s", report)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "suite.json").stat().st_mode) == 0o644


def test_a_path_that_cannot_be_written_is_named_and_the_old_file_stays(report, tmp_path):
    path = tmp_path / "suite.json"
    results.write(path, "s", report)
    before = path.read_text()
    with pytest.raises(InvalidArgument, match=r"suite\.json"):
        results.write(path / "below_a_file.json", "s", report)
    assert path.read_text() == before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.pop("tuning_s"), "file.tuning_s is missing"),
        (lambda d: d.update(schema=2), "schema is 2"),
        (lambda d: d["rows"][0].pop("floor_us"), "rows[0].floor_us is missing"),
        (lambda d: d["rows"][0]["baselines"].pop("aten"), "rows[0].baselines.aten is missing"),
        (lambda d: d["rows"][0].update(chosen="magic"), "'magic' was not measured"),
        (lambda d: d["rows"][1].update(chosen="fused"), "'fused' is slower than aten"),
        (lambda d: d["rows"][0]["own"].update(ci_us=[11, 12]), "outside its interval"),
        (lambda d: d["rows"][0]["own"].pop("config"), "rows[0].own.config is missing"),
        (lambda d: d["rows"][0]["verified"].update(max_ulp="small"), "rows[0].verified.max_ulp"),
        (lambda d: d["rows"][0].update(wrong="aten"), "rows[0].wrong is 'aten'"),
        (lambda d: d["rows"][0].update(unsearched=[]), "rows[0].unsearched is []"),
        (lambda d: d["rows"][0].update(chosen_verified={}), "rows[0].chosen_verified.max_ulp"),
        (lambda d: d["rows"][0].update(none_right={"x": {"configs": 2}}), "x.first is missing"),
        (lambda d: d["rows"][0].update(refused=3), "rows[0].refused is 3"),
        (lambda d: d["rows"][0].update(others=None), "rows[0].others is None"),
        (lambda d: d["rows"][0].update(others={"fused": {}}), "rows[0].others.fused.median_us"),
        (lambda d: d["rows"][0]["own"].update(ci_us=["a", "b"]), "rows[0].own.ci_us[0] is 'a', n"),
        (lambda d: d["rows"][0]["own"].update(ci_us=[1.0]), "ci_us is [1.0], not a list of 2"),
        (lambda d: d["rows"][0].update(activity=3), "rows[0].activity is 3, not an object"),
        (lambda d: d["rows"][0].update(activity={"own": {}}), "activity.own.kernels is missing"),
        (
            lambda d: d["rows"][0].update(host_us={"own": "8"}),
            "rows[0].host_us.own is '8', not a n",
        ),
        (lambda d: d["rows"][0].update(floor_us=-1), "rows[0].floor_us is -1, not a number from 0"),
        (lambda d: d["rows"][0].update(candidates=True), "candidates is True, not a whole number"),
        (lambda d: d.update(compiling={"cxx": {}}), "file.compiling.cxx.kernels is missing"),
        (lambda d: d.update(device=3), "file.device is 3, not an object"),
        (lambda d: d["rows"].append(None), "file.rows[2] is None, not an object"),
    ],
)
def test_the_validator_names_what_is_wrong(report, change, said):
    data = copy.deepcopy(json.loads(json.dumps(results.as_dict("s", report))))
    change(data)
    problems = validate(data)
    assert any(said in problem for problem in problems), problems


@pytest.mark.parametrize("data", [None, 3, [], ["rows"], {"rows": {}}])
def test_the_validator_takes_anything(data):
    assert results.validate(data)


@pytest.mark.parametrize(("device", "problems"), [({"sms": 132}, 0), ({}, 1)])
def test_a_choice_may_be_slower_than_an_aten_that_does_not_keep_a_promise(report, device, problems):
    data = copy.deepcopy(json.loads(json.dumps(results.as_dict("s", report))))
    data["rows"][1].update(
        chosen="fused",
        workload="index_add(x=f32[50,8], dim=0, index=i64[90], source=f32[90,8])",
    )
    data["device"] = {k: v for k, v in data["device"].items() if k != "sms"} | device
    assert len(validate(data)) == problems


@pytest.mark.parametrize("wrong", [["aten"], {"aten": "two runs differ"}])
def test_a_choice_may_be_slower_than_an_aten_that_is_wrong(report, wrong):
    data = copy.deepcopy(json.loads(json.dumps(results.as_dict("s", report))))
    data["rows"][1].update(chosen="fused", wrong=wrong)
    assert validate(data) == []


def test_rows_that_lack_the_untuned_configs_time_are_counted(report):
    first, second = report.rows
    assert "without_heuristic" not in summary(report.rows)
    assert first.own is not None
    missing = replace(first, own=replace(first.own, heuristic_us=None))
    found = summary([missing, second])
    assert found["without_heuristic"] == 1
    assert found["geomean_heuristic_vs_own"] == pytest.approx(0.5)


def test_a_choice_without_a_kernel_of_ours_is_told_as_verified_too(report):
    detour = replace(
        row("c", 40.0, 20.0, None, "inductor"), chosen_verified=Verified(1, 2, None, True)
    )
    unknown = row("d", 10.0, 20.0, None, "aten")
    report.rows[:] = [detour, unknown]
    assert [r["verified"] for r in results.table_rows(report)] == [True, False]


def test_a_row_without_a_kernel_of_ours_tells_why_in_the_file(report):
    failed = {"fused": NoneRight(82, "9 ulp exceeds 2"), "late": NoneRight(0, "")}
    report.rows[:] = [replace(row("c", 40.0, 20.0, None, "inductor"), none_right=failed)]
    data = json.loads(json.dumps(results.as_dict("s", report)))
    assert validate(data) == []
    (found,) = data["rows"]
    assert found["none_right"]["fused"] == {"configs": 82, "first": "9 ulp exceeds 2"}
    assert found["refused"] == {"other": "a reason"}
    assert row_of(found) == report.rows[0]
    (told,) = results.table_rows(report)
    assert told["none_right"] == [82, 0]
    assert told["refused"]["fused"] == "none right of 82 tried; the first: 9 ulp exceeds 2"
    assert "the budget ended" in told["refused"]["late"]


def test_table_rows_tell_the_chosen_time_against_the_baselines(report):
    first, second = results.table_rows(report)
    assert (first["chosen"], first["us"], first["vs_aten"]) == ("fused", 10.0, 4.0)
    assert (second["chosen"], second["us"], second["vs_aten"]) == ("aten", 10.0, 1.0)
    assert first["chosen_of_floor"] == 0.5
    assert first["verified"] is True


def test_intervals_that_touch_overlap():
    assert Measured(10.0, (9.0, 11.0)).overlaps(Measured(12.0, (11.0, 13.0)))
    assert not Measured(10.0, (9.0, 11.0)).overlaps(Measured(12.0, (11.5, 13.0)))
