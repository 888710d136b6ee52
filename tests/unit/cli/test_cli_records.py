"""The command line's records, and a tune whose store or disk fails it."""

import dataclasses
import json
import re
import sqlite3
from pathlib import Path

import pytest
import torch

from tilewright import cli, store
from tilewright.cli import render
from tilewright.environment import environment
from tilewright.measure import candidate
from tilewright.record import STATUSES, Record, read_lines
from tilewright.store import Store

SOFTMAX = "softmax(x=f32[64,100])"
RMS_NORM = "rms_norm(x=f32[4,8], weight=f32[8])"
HERE, INFO, NOW = environment(torch.device("cpu"))
OLD = {**NOW, "torch": "1.0.0"}


def measured(text, implementation, us, created="2026-11-20T12:00:00", **more):
    given = {"device_info": INFO, "versions": NOW, "final": True, "duel": "d", "method": "cpu",
             "config": {}, "status": "ok", "device": HERE, **more}  # fmt: skip
    return Record(text, text.partition("(")[0], implementation, median_us=us,
                  created=f"{created}.000000+00:00", **given)  # fmt: skip


@pytest.fixture
def url(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    url = f"sqlite:///{tmp_path / 'records.db'}"
    monkeypatch.setenv("TILEWRIGHT_STORE", url)
    return url


@pytest.fixture
def filled(url):
    with Store(url) as opened:
        opened.add(
            [
                measured(SOFTMAX, "fused", 10.0),
                measured(SOFTMAX, "aten", 20.0, status="slower", created="2026-11-21T12:00:00"),
                measured(RMS_NORM, "fused", 5.0, versions=OLD, created="2026-11-01T12:00:00"),
            ]
        )
    return url


def answer(capsys, *args):
    assert cli.main(["records", *args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_list_shows_the_newest_first_and_filters(filled, capsys):
    rows = answer(capsys, "list")
    assert [r["implementation"] for r in rows] == ["aten", "fused", "fused"]
    assert len(answer(capsys, "list", "--limit", "1")) == 1
    assert [r["op"] for r in answer(capsys, "list", "--op", "rms_norm")] == ["rms_norm"]
    assert [r["status"] for r in answer(capsys, "list", "--status", "slower")] == ["slower"]
    assert len(answer(capsys, "list", "--since", "2026-11-20")) == 2
    assert cli.main(["records", "list", "--since", "0001-01-01T00:00:00+14:00"]) == 2
    assert "is not a date" in capsys.readouterr().err
    assert cli.main(["records", "list"]) == 0
    assert "10.0 us" in capsys.readouterr().out


def test_a_list_that_ends_at_its_limit_says_so(filled, capsys):
    for limit, more in (("2", True), ("3", False)):
        assert cli.main(["records", "list", "--limit", limit]) == 0
        assert ("the newest 2: --limit for more" in capsys.readouterr().out) == more


def test_what_all_rows_share_is_said_once_above_them(url, capsys, monkeypatch):
    monkeypatch.setattr(render, "PIPE_WIDTH", 80)
    text = "layer_norm(x=f16[8192,5140], weight=f16[5140], bias=f16[5140])"
    alike = {f"some_knob_{letter}": False for letter in "abcdefgh"}
    with Store(url) as opened:
        opened.add(
            [
                measured(text, "fused", us, config={**alike, "vector": vector}, final=vector == 2)
                for vector, us in ((2, 10.0), (4, 11.0), (8, None))
            ]
        )
    assert cli.main(["records", "list"]) == 0
    *above, head, _, one, two, three = filter(str.strip, capsys.readouterr().out.splitlines())
    assert above == [
        f"workload: {text}",
        "implementation: fused",
        "status: ok",
        f"device: {HERE}",
        f"every fused has {render.config(alike)}",
    ]
    assert head.split() == ["config", "time", "duel", "created"]
    lines = sorted(" ".join(line.split()) for line in (one, two, three))
    assert lines == [
        "vector=2 10.0 us yes 2026-11-20 12:00",
        "vector=4 11.0 us - 2026-11-20 12:00",
        "vector=8 - - 2026-11-20 12:00",
    ]


@pytest.mark.parametrize(
    ("device", "method", "knobs"),
    [
        (HERE, "cpu", "rows=2,unroll=4,gone=1"),
        ("NVIDIA H200, 132 SMs, 140 GiB", "graph", "vector=4,row_threads=128,gone=1"),
        ("NVIDIA Z1", "graph", "a=3,gone=1,z=2"),
    ],
)
def test_knobs_of_a_workload_are_in_the_order_of_their_space(url, capsys, device, method, knobs):
    config = dict(sorted(pair.split("=") for pair in knobs.split(",")))
    with Store(url) as opened:
        opened.add([measured(SOFTMAX, "fused", 10.0, config=config, device=device, method=method)])
    assert cli.main(["records", "show", SOFTMAX]) == 0
    assert f" {knobs} " in capsys.readouterr().out
    assert cli.main(["records", "study", SOFTMAX, "--by", "gone"]) == 0
    assert f" {knobs.replace(',gone=1', '')} " in capsys.readouterr().out


def test_what_rows_do_not_share_stays_with_each(filled, capsys):
    assert cli.main(["records", "list"]) == 0
    *above, head, _, _, _, _ = filter(str.strip, capsys.readouterr().out.splitlines())
    assert above == ["duel: yes", f"device: {HERE}"]
    assert head.split() == ["workload", "implementation", "status", "time", "created"]


def test_names_that_are_gone_are_reached_by_their_rows(filled, capsys):
    with Store(filled) as opened:
        opened.add([measured("gone_op(x=f32[2])", "gone_kernel", 1.0)])
    for asked in (["--op", "gone_op"], ["--impl", "gone_kernel"]):
        assert [r["implementation"] for r in answer(capsys, "list", *asked)] == ["gone_kernel"]
    assert answer(capsys, "list", "--impl", "quack") == []  # known, and never measured
    assert answer(capsys, "prune", "--op", "gone_op")["deleted"] == 1
    assert cli.main(["records", "list", "--op", "gone_op"]) == 2


@pytest.mark.parametrize("command", [["list"], ["export", "new.jsonl"], ["prune"]])
@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            ["--op", "sofmax"],
            "unknown operator 'sofmax'; did you mean softmax? `tilewright list operators` names "
            "them; no record has it\n",
        ),
        (["--impl", "gone_kernl"], "unknown implementation 'gone_kernl'; did you mean gone_kernel"),
        (["--status", "fine"], "'fine' is not one of 'ok', 'tied'"),
    ],
)
def test_what_neither_is_nor_was_is_refused(
    filled, command, asked, message, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with Store(filled) as opened:
        opened.add([measured(SOFTMAX, "gone_kernel", 1.0)])
    assert cli.main(["records", *command, *asked]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new.jsonl").exists()
    assert len(answer(capsys, "list")) == 4


def test_statuses_are_those_that_the_documentation_names():
    page = (Path(__file__).parents[3] / "docs" / "measuring.md").read_text()
    (told,) = re.findall(r"\nStatuses are (.*?) rows keep", page, re.S)
    assert sorted(re.findall(r"`(\w+)`", told)) == sorted(STATUSES)
    assert {status for _, status in candidate._STATUSES} <= set(STATUSES)


def test_show_lists_one_workload_the_fastest_first(filled, capsys):
    assert [r["median_us"] for r in answer(capsys, "show", SOFTMAX)] == [10.0, 20.0]


def test_study_gives_the_best_config_for_each_value_of_some_knobs(url, capsys):
    def timed(us, **config):
        return dataclasses.replace(measured(SOFTMAX, "fused", us), config=config)

    with Store(url) as opened:
        opened.add(
            [
                timed(12.0, vector=4, threads=64),
                timed(10.0, vector=4, threads=128),
                timed(11.0, vector=4, threads=128),
                timed(9.0, vector=8, threads=64),
            ]
        )
    assert cli.main(["records", "study", SOFTMAX, "--by", "vector", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(row["vector"], row["configs"], row["median_us"]) for row in found] == [
        (4, 2, 10.0),
        (8, 1, 9.0),
    ]
    assert cli.main(["records", "study", SOFTMAX, "--by", "vector,threads"]) == 0
    assert "12.0 us" in capsys.readouterr().out
    assert cli.main(["records", "study", SOFTMAX, "--by", "no_such"]) == 2
    assert "no timed record has the knob 'no_such'; known: threads, vector" in (
        capsys.readouterr().err
    )


def test_study_crosses_knobs_of_a_file_that_was_exported(url, capsys, tmp_path):
    def timed(us, spill_bytes, **config):
        resources = {"registers": 40, "spill_bytes": spill_bytes}
        record = measured(SOFTMAX, "fused", us, status="spilled" if spill_bytes else "ok")
        return dataclasses.replace(record, config=config, resources=resources)

    path = tmp_path / "records.jsonl"
    with Store(url) as opened:
        opened.add([timed(12.0, 0, rows=1, cap=0), timed(15.0, 8, rows=1, cap=40)])
        opened.add([timed(13.0, 0, rows=2, cap=0), measured(RMS_NORM, "fused", 1.0)])
    answer(capsys, "export", str(path))
    asked = ["records", "study", SOFTMAX, "--by", "rows", "--across", "cap", "--from", str(path)]
    assert cli.main([*asked, "--store", f"sqlite:///{tmp_path / 'empty.db'}"]) == 0
    where, _, head, _, one, two = capsys.readouterr().out.strip().splitlines()
    assert where == f"{HERE}, timed by cpu"
    assert head.split() == ["rows", "cap=0", "cap=40"]
    assert " ".join(one.split()) == "1 12.0 us (40) 15.0 us (40, 8 B spilled)"
    assert " ".join(two.split()) == "2 13.0 us (40) -"


@pytest.fixture
def studied(url):
    """Times by the knob `rows`: on two devices, by two methods, and such as are none."""
    outcomes = [
        (5.0, 1, {"device": "GPU A", "method": "graph"}),
        (1.0, 1, {"device": "GPU B", "method": "graph"}),
        (7.0, 1, {"device": "GPU A", "method": "events"}),
        (6.0, 2, {"device": "GPU A", "method": "graph", "status": "slower"}),
        (0.1, 2, {"device": "GPU A", "method": "graph", "status": "invalid"}),
        (0.2, 2, {"device": "GPU A", "method": "graph", "status": "wrong_result"}),
        (9.0, None, {"device": "GPU A", "method": "graph"}),
    ]
    with Store(url) as opened:
        opened.add(
            measured(SOFTMAX, "fused", us, config={"rows": rows}, **more)
            for us, rows, more in outcomes
        )
    return ["study", SOFTMAX, "--by", "rows"]


def test_study_ranks_right_results_on_each_device_by_each_method(studied, capsys):
    told = ("device", "timed_by", "rows", "median_us")
    found = [tuple(r[name] for name in told) for r in answer(capsys, *studied)]
    assert found == [
        ("GPU A", "events", 1, 7.0),
        ("GPU A", "graph", None, 9.0),
        ("GPU A", "graph", 1, 5.0),
        ("GPU A", "graph", 2, 6.0),
        ("GPU B", "graph", 1, 1.0),
    ]
    assert cli.main(["records", *studied]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "timed by" in line] == [
        "GPU A, timed by events",
        "GPU A, timed by graph",
        "GPU B, timed by graph",
    ]


def test_study_crosses_values_of_unlike_types(studied, capsys):
    assert cli.main(["records", *studied, "--across", "rows", "--device", "GPU A"]) == 0
    assert "rows=None" in capsys.readouterr().out


def test_study_takes_knobs_with_spaces_between_them(studied, capsys):
    assert len(answer(capsys, *studied[:-1], " rows , rows")) == 5


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--impl", "aten"], f"no records of aten on {SOFTMAX} in "),
        (["--impl", "fused", "--method", "cpu", "--device", "C"], "no right result was timed"),
    ],
)
def test_study_of_nothing_says_what_is_missing(studied, url, args, message, capsys):
    with Store(url) as opened:
        opened.add([measured(SOFTMAX, "fused", None, status="timeout", device="C")])
    assert cli.main(["records", *studied, *args]) == 2
    assert message in capsys.readouterr().err


def test_a_row_is_one_line_where_no_terminal_is(url, capsys):
    knobs = {f"knob_{letter}": "some_value" for letter in "abcdefghijklmnopqrst"}
    with Store(url) as opened:
        opened.add([measured(SOFTMAX, "fused", 1.0, config=knobs)])
    assert cli.main(["records", "list"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if SOFTMAX in line)
    assert ",".join(f"{name}={value}" for name, value in knobs.items()) in line


def test_study_keeps_to_a_device_and_a_method(studied, capsys):
    only = answer(capsys, *studied, "--device", "gpu a", "--method", "events")
    assert [r["median_us"] for r in only] == [7.0]
    assert cli.main(["records", *studied, "--device", "H200"]) == 2
    assert "there are those of GPU A, timed by events; GPU A, timed by graph; GPU B, timed by " in (
        capsys.readouterr().err
    )


def test_records_travel_to_another_store(filled, capsys, tmp_path):
    path, other = tmp_path / "records.jsonl", f"sqlite:///{tmp_path / 'other.db'}"
    assert answer(capsys, "export", str(path))["exported"] == 3
    assert answer(capsys, "import", str(path), "--store", other)["imported"] == 3
    assert answer(capsys, "import", str(path), "--store", other)["imported"] == 0
    assert len(answer(capsys, "list", "--store", other)) == 3


def test_an_export_to_standard_output_is_rows_alone(filled, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["records", "export", "-", "--op", "softmax"]) == 0
    out, err = capsys.readouterr()
    assert err == "exported: 2, path: -\n"
    Path("rows.jsonl").write_text(out)
    assert [r.implementation for r in read_lines(Path("rows.jsonl"))] == ["fused", "aten"]
    assert not Path("-").exists()
    assert cli.main(["records", "export", "-", "--json"]) == 2
    assert "give --json a file" in capsys.readouterr().err


def test_an_export_makes_missing_folders(filled, capsys, tmp_path):
    path = tmp_path / "new" / "folder" / "records.jsonl"
    assert answer(capsys, "export", str(path))["exported"] == 3
    assert len(read_lines(path)) == 3


@pytest.mark.parametrize("where", ["/proc/new.jsonl", "file/records.jsonl"])
def test_an_export_that_cannot_be_written_is_refused_in_words(
    filled, capsys, tmp_path, monkeypatch, where
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert cli.main(["records", "export", where]) == 2
    assert f"{where} cannot be written: " in capsys.readouterr().err


def test_an_export_to_a_link_reaches_what_it_leads_to(filled, capsys, tmp_path):
    target, link = tmp_path / "records.jsonl", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    answer(capsys, "export", str(link))
    assert link.is_symlink()
    assert len(read_lines(target)) == 3


def test_prune_deletes_what_meets_every_condition(filled, capsys):
    gpu = {"torch": NOW["torch"], "cuda": "13.0", "driver": "580.1"}
    away = dataclasses.replace(measured(SOFTMAX, "fused", 1.0), device="H200", versions=gpu)
    with Store(filled) as opened:
        opened.add([away, dataclasses.replace(away, created="2026-11-22T12:00:00.000000+00:00")])
    on_cpu = ("--device", "cpu")
    assert answer(capsys, "prune", "--superseded", *on_cpu)["deleted"] == 0
    assert answer(capsys, "prune", "--other-versions", *on_cpu)["deleted"] == 1
    assert answer(capsys, "prune", "--before", "2026-11-21", *on_cpu)["deleted"] == 1
    assert [r["device"] for r in answer(capsys, "list")] == ["H200", HERE, "H200"]
    assert answer(capsys, "prune", "--superseded")["deleted"] == 1
    assert answer(capsys, "prune", "--op", "softmax", "--impl", "aten")["deleted"] == 1
    assert answer(capsys, "prune", "--op", "softmax", "--status", "slower")["deleted"] == 0


@pytest.mark.parametrize("condition", ["--superseded", "--other-versions", "--before=2026-11-10"])
def test_prune_on_a_device_that_is_not_here_deletes_nothing(filled, capsys, condition):
    assert cli.main(["records", "prune", condition, "--device", "nonsense"]) == 2
    assert "unknown device 'nonsense'; use cpu, cuda or cuda:<index>" in capsys.readouterr().err
    assert len(answer(capsys, "list")) == 3


@pytest.mark.parametrize("command", [["list"], ["show", SOFTMAX], ["export", "records.jsonl"]])
@pytest.mark.parametrize(
    ("column", "value"), [("config", "{bad"), ("median_us", "soon"), ("message", b"\xff")]
)
def test_a_damaged_row_is_named_with_the_remedy(
    filled, capsys, tmp_path, command, column, value, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    damaged = measured(SOFTMAX, "fused", 10.0).id
    with sqlite3.connect(tmp_path / "records.db") as connection:
        connection.execute(f"UPDATE records SET {column} = ? WHERE id = ?", (value, damaged))
    assert cli.main(["records", *command]) == 1
    told = capsys.readouterr().err
    assert f"the row {damaged} (fused on {SOFTMAX}) is damaged: {column}={value!r} should" in told
    with sqlite3.connect(tmp_path / "records.db") as connection:
        connection.execute(told[told.index("DELETE FROM") :])
    assert cli.main(["records", *command]) == 0


def test_a_store_without_records_says_so(url, capsys, tmp_path):
    assert cli.main(["records", "list"]) == 0
    assert (
        capsys.readouterr().out
        == f"no such records in {tmp_path}/records.db, which does not exist\n"
    )
    with Store(url) as opened:
        opened.add([measured(SOFTMAX, "fused", 10.0)])
    assert cli.main(["records", "list", "--op", "rms_norm"]) == 0
    assert capsys.readouterr().out == f"no such records in {tmp_path}/records.db\n"


# --- a tune that cannot keep what it measures ------------------------------------------------


def tune(capsys):
    args = ["tune", SOFTMAX, "--device", "cpu", "--budget", "0.5s", "--baseline", "aten"]
    code = cli.main(args)
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return code, err


def test_a_corrupt_store_is_named_before_anything_is_measured(url, tmp_path, capsys):
    (tmp_path / "records.db").write_bytes(b"no database" * 1000)
    code, err = tune(capsys)
    assert code == 1
    assert "file is not a database; move the file away, or set TILEWRIGHT_STORE" in err


def test_a_locked_store_is_named_and_the_measurements_kept_in_a_file(
    filled, tmp_path, capsys, monkeypatch, measures_here
):
    monkeypatch.setattr(store.Store.__init__, "__kwdefaults__", {"busy_s": 0.2})
    writer = sqlite3.connect(tmp_path / "records.db", isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    try:
        code, err = tune(capsys)
    finally:
        writer.execute("ROLLBACK")
        writer.close()
    assert code == 1
    assert "database is locked; wait for the process that is writing, or end it" in err
    (kept,) = tmp_path.glob("*.jsonl")
    assert str(kept) in err
    assert read_lines(kept)


def test_a_cache_that_cannot_be_written_is_named_with_the_remedy(
    url, tmp_path, capsys, monkeypatch, measures_here
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "file" / "cache"))
    code, err = tune(capsys)
    assert code == 1
    assert "or set TILEWRIGHT_CACHE_DIR to a folder that can be written" in err


def test_without_a_compiler_pytorch_is_measured_and_the_reason_told(
    url, capsys, monkeypatch, measures_here
):
    monkeypatch.setenv("TILEWRIGHT_CXX", "/nowhere/c++")
    code, err = tune(capsys)
    assert code == 0, err
    assert "/nowhere/c++" in err
    with Store(url) as opened:
        assert "compile_error" in {r.status for r in opened.query()}


def test_a_compiler_that_hangs_costs_its_time_limit_and_is_recorded(
    url, tmp_path, capsys, monkeypatch, measures_here
):
    hanging = tmp_path / "c++"
    hanging.write_text('#!/bin/sh\n[ "$1" = --version ] && exec g++ --version\nexec sleep 60\n')
    hanging.chmod(0o755)
    monkeypatch.setenv("TILEWRIGHT_CXX", str(hanging))
    monkeypatch.setenv("TILEWRIGHT_COMPILE_TIMEOUT", "0.5")
    code, err = tune(capsys)
    assert code == 0, err
    with Store(url) as opened:
        found = [r for r in opened.query() if r.status == "timeout"]
    assert found
    assert "TILEWRIGHT_COMPILE_TIMEOUT" in found[0].message


def test_a_knob_that_restricts_nothing_is_told(url, capfd, measures_here):
    args = ["tune", SOFTMAX, "--device", "cpu", "--budget", "0.5s", "--baseline", "aten"]
    assert cli.main([*args, "--impl", "rows_cpp", "--param", "method=sorted"]) == 0
    assert "--param restricts nothing" in capfd.readouterr().err
    assert cli.main([*args, "--impl", "fused", "--param", "unroll=1", "--force"]) == 0
    assert "restricts nothing" not in capfd.readouterr().err
