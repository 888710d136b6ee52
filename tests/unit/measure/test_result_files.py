"""Result files put together, and summaries by group."""

import dataclasses
import json
import math

import pytest

from tilewright import result_files, results
from tilewright.cli import main
from tilewright.cli.tune import finish
from tilewright.errors import InvalidArgument
from tilewright.measure.activity import Activity
from tilewright.report import Baseline, Measured, Own, Report, Row, Verified
from tilewright.result_schema import validate
from tilewright.suite import CUSTOM, SUITES
from tilewright.summaries import summary_by

VERSIONS = {"torch": "2.11", "cuda": "13.0", "driver": "580", "nvrtc": "13.0", "tilewright": "0.1"}


def measured(us: float) -> Measured:
    return Measured(us, (us * 0.99, us * 1.01))


def baseline(us: float) -> Baseline:
    return Baseline(us, (us * 0.99, us * 1.01), {}, 1, True)


def row(workload: str, ours: float, quack: float | None = None) -> Row:
    others = {"quack": baseline(quack)} if quack else {}
    return Row(
        workload=workload,
        floor_us=4.0,
        copy_us=8.0,
        method="graph",
        distribution=None,
        host_us={"own": 8.0},
        baselines={"aten": baseline(40.0), **others},
        own=Own(ours, (ours, ours), "fused", {"threads": 128}),
        chosen="fused",
        candidates=7,
        verified=Verified(0.5, 2.0, None, True),
        wrong={"quack": "9 ulp exceeds 2"} if quack else {},
        activity={"own": Activity(1, 0, 0, 1, {"fused": 1})},
        eager_us={"own": 12.0, "aten": 41.0},
        others={"fused_training": measured(ours + 1)},
        unsearched={"fused_training": "not searched: too slow"},
        chosen_verified=Verified(0.5, 2.0, None, True),
    )


def report(*rows: Row) -> Report:
    return Report(list(rows), {"name": "NVIDIA H200"}, VERSIONS, 10.0)


def written(path, *rows: Row, suite: str = "norms_sweep", **changes):
    results.write_data(path, {**results.as_dict(suite, report(*rows)), **changes})
    return path


WIDE, NARROW, TALL = (
    "softmax(x=f16[16,1024])",
    "softmax(x=f16[16,768])",
    "softmax(x=f32[8192,768])",
)


def test_what_was_compiled_adds_up_and_is_told(tmp_path, capsys):
    parts = [
        written(tmp_path / f"{i}.json", row(text, 10.0), compiling={"nvrtc": effort})
        for i, (text, effort) in enumerate(
            [(WIDE, {"kernels": 30, "cpu_s": 2.0}), (NARROW, {"kernels": 10, "cpu_s": 3.0})]
        )
    ]
    older = written(tmp_path / "older.json", row(TALL, 10.0))
    data = json.loads(older.read_text())
    del data["compiling"]
    older.write_text(json.dumps(data))
    merged = result_files.merged([result_files.read(path) for path in (*parts, older)])
    assert merged["compiling"] == {"nvrtc": {"kernels": 40, "cpu_s": 5.0}}
    assert main(["summary", *map(str, parts)]) == 0
    assert "40 compiled by nvrtc, 8.0 a second and core" in " ".join(
        capsys.readouterr().out.split()
    )


def test_groups_are_in_the_order_of_their_numbers_with_means_and_worst_cases():
    rows = [row(WIDE, 10.0, 9.0), row(NARROW, 10.0, 20.0), row(TALL, 16.0, 8.0)]
    narrow, wide = summary_by(rows, "op, x[-1]")
    assert (narrow["op"], narrow["x[-1]"], narrow["workloads"]) == ("softmax", "768", 2)
    assert narrow["geomean_vs_quack"] == pytest.approx(math.sqrt(2.0 * 0.5))
    assert narrow["worst_vs_quack"] == pytest.approx(0.5)
    assert narrow["geomean_of_copy"] == pytest.approx(math.sqrt(0.8 * 0.5))
    assert (wide["x[-1]"], wide["workloads"]) == ("1024", 1)
    assert [g["x.dtype"] for g in summary_by(rows, "x.dtype")] == ["f16", "f32"]
    assert [g["dim"] for g in summary_by(rows, "dim")] == ["-1"]


@pytest.mark.parametrize("field", ["y[0]", "x[2]", "dim[0]", "x.shape", "nothing"])
def test_a_field_that_a_workload_does_not_have_is_named(field):
    with pytest.raises(InvalidArgument, match=r"field|has no"):
        summary_by([row(NARROW, 10.0)], field)


def test_a_suite_with_groups_has_them_in_its_result_file():
    data = results.as_dict("norms_sweep", report(row(NARROW, 10.0)))
    assert list(data["summary_by"]) == list(SUITES["norms_sweep"].by) == ["x[0]", "op,x[-1]"]
    assert "summary_by" not in results.as_dict("quickstart", report(row(NARROW, 10.0)))


def test_rows_read_back_are_the_rows_that_were_written(tmp_path):
    rows = [row(WIDE, 10.0, 9.0), dataclasses.replace(row(NARROW, 1.0), own=None, verified=None,
                                                      chosen="aten")]  # fmt: skip
    data = result_files.read(written(tmp_path / "a.json", *rows))
    assert [result_files.row_of(r) for r in data["rows"]] == rows


def test_a_file_that_tells_less_of_its_baselines_still_loads(tmp_path):
    path = written(tmp_path / "a.json", row(WIDE, 10.0, 9.0))
    data = json.loads(path.read_text())
    older = data["rows"][0]
    older["wrong"] = ["quack"]
    del older["unsearched"], older["chosen_verified"]
    for m in older["baselines"].values():
        del m["config"], m["candidates"], m["deterministic"]
    path.write_text(json.dumps(data))
    found = result_files.row_of(result_files.read(path)["rows"][0])
    assert found.wrong == {"quack": ""}
    assert found.chosen_verified is None
    assert found.baselines["aten"].candidates is None
    assert results.table_rows(report(found))[0]["verified"]


def test_fields_of_a_newer_version_are_left_out(tmp_path):
    path = written(tmp_path / "a.json", row(WIDE, 10.0, 9.0))
    data = json.loads(path.read_text())
    newer = data["rows"][0]
    for part in (data, newer, newer["own"], newer["baselines"]["aten"], newer["verified"]):
        part["news"] = 1
    path.write_text(json.dumps(data))
    assert result_files.row_of(result_files.read(path)["rows"][0]) == row(WIDE, 10.0, 9.0)
    assert main(["compare", str(path), str(path)]) == 0


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_a_number_that_json_has_not_is_refused_wherever_it_is(tmp_path, number, capsys):
    path = written(tmp_path / "a.json", row(WIDE, 10.0))
    path.write_text(path.read_text().replace('"threads": 128', f'"threads": {number}'))
    assert main(["summary", str(path)]) == 2
    assert f"{number} is no number that JSON has" in capsys.readouterr().err


def test_a_malformed_file_is_named_with_its_field(tmp_path, capsys):
    good = written(tmp_path / "good.json", row(WIDE, 10.0))
    data = json.loads(good.read_text())
    data["rows"][0]["own"]["ci_us"] = ["a", "b"]
    (tmp_path / "bad.json").write_text(json.dumps(data))
    for command in (["summary"], ["compare", str(good)]):
        assert main([*command, str(tmp_path / "bad.json")]) == 2
        assert "bad.json is no result file: file.rows[0].own.ci_us[0] is 'a', not a number" in (
            capsys.readouterr().err
        )


def test_a_file_of_endless_brackets_is_no_json(tmp_path, capsys):
    (tmp_path / "bad.json").write_text("[" * 200_000)
    assert main(["summary", str(tmp_path / "bad.json")]) == 2
    assert "bad.json is not readable JSON: maximum recursion depth" in capsys.readouterr().err


def test_parts_of_a_suite_become_one_file_and_the_later_row_counts(tmp_path):
    first = written(tmp_path / "a.json", row(WIDE, 10.0), row(NARROW, 10.0), commit="one")
    second = written(tmp_path / "b.json", row(NARROW, 20.0), row(TALL, 10.0), commit="two")
    data = result_files.merged([result_files.read(first), result_files.read(second)])
    assert validate(json.loads(json.dumps(data))) == []
    times = {r["workload"]: r["own"]["median_us"] for r in data["rows"]}
    assert times == {WIDE: 10.0, NARROW: 20.0, TALL: 10.0}
    assert (data["tuning_s"], data["commit"]) == (20.0, "one, two")
    assert data["summary"]["worst_of_copy"] == pytest.approx(0.4)
    commits = {WIDE: "one", NARROW: "two", TALL: "two"}
    assert {r["workload"]: r["commit"] for r in data["rows"]} == commits
    later = result_files.read(written(tmp_path / "c.json", row(TALL, 5.0), commit="three"))
    again = result_files.merged([data, later])
    assert {r["workload"]: r["commit"] for r in again["rows"]} == {**commits, TALL: "three"}
    assert result_files.merged([data, result_files.read(second)])["tuning_s"] == 20.0  # a part
    alone = result_files.merged([result_files.read(first)])
    assert not any("commit" in r for r in alone["rows"])


def test_a_run_is_counted_once_in_however_many_files_it_is(tmp_path):
    effort = {"nvrtc": {"kernels": 4, "cpu_s": 2.0}}
    paths = [
        written(tmp_path / "a.json", row(WIDE, 10.0), row(NARROW, 10.0), compiling=effort),
        written(tmp_path / "b.json", row(TALL, 10.0), compiling=effort),
        written(tmp_path / "failed.json", failed={TALL: "no memory"}),
    ]
    one, other, failed = (result_files.read(path) for path in paths)
    whole = result_files.merged([one, other])
    for files, runs in (
        ([one, one], 1),
        ([one, {**one, "date": "2026-11-24"}], 1),  # a copy
        ([failed, failed, one], 2),
        ([one, other, one], 2),
    ):
        data = result_files.merged(files)
        assert data["tuning_s"] == 10.0 * runs
    for files in ([whole, other], [one, whole]):
        data = result_files.merged(files)
        assert (data["tuning_s"], data["compiling"]) == (20.0, whole["compiling"])
    assert whole["compiling"]["nvrtc"]["kernels"] == 8


def test_what_was_named_one_by_one_is_a_part_of_the_suite_that_has_it(tmp_path):
    suite = written(tmp_path / "a.json", row(WIDE, 10.0), row(NARROW, 10.0))
    custom = written(tmp_path / "b.json", row(NARROW, 20.0), row(TALL, 10.0), suite=CUSTOM)
    files = [result_files.read(suite), result_files.read(custom)]
    for parts in (files, files[::-1]):
        data = result_files.merged(parts)
        assert (data["suite"], len(data["rows"])) == ("norms_sweep", 3)
        assert list(data["summary_by"]) == list(SUITES["norms_sweep"].by)
    assert result_files.merged(files[1:] * 2)["suite"] == CUSTOM


@pytest.mark.parametrize("suite", ["norms_sweep", "gone"])
def test_what_a_suite_does_not_have_is_no_part_of_it(tmp_path, suite):
    other = "softmax(x=f16[3,5])"
    parts = [
        result_files.read(written(tmp_path / "a.json", row(WIDE, 10.0), suite=suite)),
        result_files.read(written(tmp_path / "b.json", row(other, 10.0), suite=CUSTOM)),
    ]
    with pytest.raises(InvalidArgument, match=r"differ in suite: softmax.* is not of"):
        result_files.merged(parts)


def test_what_failed_is_kept_with_its_reason_until_a_later_part_has_it(tmp_path, capsys):
    one, two, three = (f"softmax(x=f32[{n},1024])" for n in (1, 2, 3))
    found = report(row(one, 5.0))
    found.failed.update({two: "no memory", three: "no memory either"})
    first = tmp_path / "first.json"
    assert finish("norms_sweep", found, str(first)) == 1
    assert result_files.read(first)["failed"] == found.failed
    second = written(tmp_path / "second.json", row(two, 5.0))
    capsys.readouterr()
    assert main(["summary", str(first), str(second), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["failed"] == {three: "no memory either"}
    assert f"{three}: no memory either" in err
    assert main(["summary", str(first), "--only", "[1,", "--json"]) == 0
    assert "failed" not in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"suite": "quickstart"}, "suite"),
        ({"device": {"name": "NVIDIA A100"}}, "device"),
        ({"versions": {**VERSIONS, "torch": "2.12"}}, "versions"),
        ({"versions": {**VERSIONS, "nvrtc": "13.1"}}, "versions"),
    ],
)
def test_times_that_cannot_stand_beside_each_other_are_not_put_together(tmp_path, changes, said):
    files = [
        result_files.read(written(tmp_path / "a.json", row(NARROW, 1.0))),
        result_files.read(written(tmp_path / "b.json", row(TALL, 1.0), **changes)),
    ]
    with pytest.raises(InvalidArgument, match=f"differ in {said}"):
        result_files.merged(files)


def test_a_file_that_is_no_result_is_refused_by_name(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(InvalidArgument, match=r"x\.json is no result file"):
        result_files.read(tmp_path / "x.json")
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(InvalidArgument, match=r"x\.json is not readable"):
        result_files.read(tmp_path / "x.json")


def test_the_command_prints_groups_and_writes_the_merged_file(tmp_path, capsys):
    a = written(tmp_path / "a.json", row(NARROW, 10.0, 20.0))
    b = written(tmp_path / "b.json", row(WIDE, 16.0, 8.0))
    out = tmp_path / "out.json"
    assert main(["summary", str(a), str(b), "--by", "x[-1]", "--json", str(out)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[2][:8] == ["768", "1", "4.00x", "(4.00)", "2.00x", "(2.00)", "0.80", "(0.80)"]
    assert lines[3][:8] == ["1024", "1", "2.50x", "(2.50)", "0.50x", "(0.50)", "0.50", "(0.50)"]
    assert len(json.loads(out.read_text())["rows"]) == 2


def test_without_groupings_the_command_shows_those_of_the_suite(tmp_path, capsys):
    path = written(tmp_path / "a.json", row(NARROW, 10.0, 20.0))
    assert main(["summary", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "x[0]" in shown
    assert "x[-1]" in shown


def test_figures_are_told_with_and_without_some_workloads(tmp_path, capsys):
    stem, layer = (SUITES["resnet50_v15_wgrad_n8"].texts[i] for i in (0, 1))
    path = written(
        tmp_path / "a.json", row(stem, 10.0), row(layer, 20.0), suite="resnet50_v15_wgrad"
    )
    kept = tmp_path / "kept.json"
    for more, times in ([], "2.83x"), (["--without", "kernel_size=[7,7]"], "2.00x"):
        assert main(["summary", str(path), *more, "--json", str(kept)]) == 0
        assert f"geometric mean: {times} eager" in " ".join(capsys.readouterr().out.split())
    data = result_files.read(kept)
    assert data["summary_by"]["x[0]"][0]["network_us_chosen"] == 20.0
    assert [r["workload"] for r in data["rows"]] == [layer]
    assert main(["summary", str(path), "--only", "no_such"]) == 2


def test_a_summary_tells_what_calls_in_a_row_take_beside_their_graph(tmp_path, capsys):
    path = written(tmp_path / "a.json", row(WIDE, 10.0), row(TALL, 8.0))
    summary = result_files.read(path)["summary"]
    assert summary["geomean_eager_vs_graph"] == pytest.approx(math.sqrt(1.2 * 1.5))
    assert summary["worst_eager_vs_graph"] == pytest.approx(1.5)
    assert main(["summary", str(path)]) == 0
    assert "1.34 of the graph's time in calls one after the other" in " ".join(
        capsys.readouterr().out.split()
    )
    events = dataclasses.replace(row(WIDE, 10.0), method="events")
    assert "geomean_eager_vs_graph" not in results.as_dict("x", report(events))["summary"]


def test_of_both_methods_a_summary_tells_what_a_call_takes_beside_its_graph(tmp_path, capsys):
    called = [
        dataclasses.replace(row(WIDE, 11.0), method="events"),
        dataclasses.replace(row(TALL, 17.6), method="events"),
    ]
    files = [
        written(tmp_path / "graph.json", row(WIDE, 10.0), row(NARROW, 10.0), row(TALL, 20.0)),
        written(tmp_path / "events.json", *called),
    ]
    summary = result_files.merged([result_files.read(path) for path in files])["summary"]
    assert summary["geomean_events_vs_graph"] == pytest.approx(math.sqrt(1.1 * 0.88))
    assert summary["worst_events_vs_graph"] == pytest.approx(1.1)
    assert "worst_events_vs_graph" not in result_files.read(files[0])["summary"]
    assert main(["summary", *map(str, files)]) == 0
    assert "0.98 of the graph's time called from PyTorch" in " ".join(
        capsys.readouterr().out.split()
    )
