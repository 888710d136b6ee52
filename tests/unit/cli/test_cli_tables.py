"""What tune and bench print and write of what they found."""

import dataclasses
import json
import math

import pytest
from reported import SOFTMAX, report

from tilewright.cli import options, render
from tilewright.cli.render import shortened
from tilewright.cli.tune import finish, refusals
from tilewright.errors import InvalidArgument
from tilewright.report import NoneRight
from tilewright.result_schema import validate
from tilewright.suite import SUITES

pytestmark = pytest.mark.usefixtures("own_folders")


def test_refusals_are_told_once_for_each_reason():
    rows = [
        {
            "workload": "a",
            "wrong": {},
            "refused": {"x": "no GPU", "y": "0.5 ulp too far"},
            "unsearched": {},
        },
        {
            "workload": "b",
            "wrong": {"z": "9 ulp exceeds 2"},
            "refused": {"x": "no GPU", "z": "9 ulp exceeds 2"},
            "unsearched": {"v": "not searched: too slow"},
        },
    ]
    assert refusals(rows) == [
        "x on 2 workloads: no GPU",
        "y on a: 0.5 ulp too far",
        "v on b: not searched: too slow",
    ]


def test_a_wrong_baseline_is_told_in_one_line_and_marked_in_the_table(capsys):
    found = report()
    found.rows[0] = dataclasses.replace(
        found.rows[0],
        wrong={"inductor": "9 ulp exceeds 2 at (3, 1)"},
        refused={"inductor": "9 ulp exceeds 2 at (3, 1)"},
    )
    assert finish("custom", found, None) == 0
    out, err = capsys.readouterr()
    assert "1.50x*" in out
    assert err.splitlines() == [
        "* inductor is wrong on 1 of 1 workloads and was not chosen there (9 ulp exceeds 2 at "
        f"(3, 1)); tilewright verify '{SOFTMAX}' --impl inductor shows it"
    ]
    assert finish("custom", found, None, device="cpu") == 0
    assert f"tilewright verify '{SOFTMAX}' --impl inductor --device cpu shows it" in (
        capsys.readouterr().err
    )


def test_workloads_are_shortened_where_the_first_argument_tells_them_apart():
    norm, lerp = (
        "layer_norm(x=f16[8,{0}], weight=f16[{0}])",
        "lerp(x=f32[8], end=f32[8], weight={})",
    )
    texts = [norm.format(768), norm.format(1024), lerp.format(0.5), lerp.format(1.0), SOFTMAX]
    assert shortened(texts) == [
        "layer_norm(x=f16[8,768], …)",
        "layer_norm(x=f16[8,1024], …)",
        *texts[2:4],
        SOFTMAX,
    ]
    assert shortened(["scatter(x=f32[8], dim=0)!indices=zipf"]) == [
        "scatter(x=f32[8], …)!indices=zipf"
    ]


def test_the_quickstart_table_fits_100_columns(capsys, monkeypatch):
    monkeypatch.setattr(render, "PIPE_WIDTH", 100)
    found = report()
    (row,) = found.rows
    found.rows[:] = [dataclasses.replace(row, workload=t) for t in SUITES["quickstart"].texts]
    finish("quickstart", found, None)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert sum("fused" in line for line in lines) == len(found.rows)
    assert len(lines) <= len(found.rows) + 6  # no row is broken in two


def test_json_has_null_where_a_number_is_not_finite(tmp_path):
    options.write_json([{"max_ulp": math.inf, "others": (math.nan, 1.5)}], str(tmp_path / "x.json"))
    assert json.loads((tmp_path / "x.json").read_text()) == [
        {"max_ulp": None, "others": [None, 1.5]}
    ]


def test_the_table_has_time_ratios_floor_and_verdict(capsys):
    assert finish("custom", report(), None) == 0
    line = next(s for s in capsys.readouterr().out.splitlines() if SOFTMAX in s)
    assert line.split()[1:] == ["fused", "10.0", "us", "2.00x", "1.50x", "0.50", "yes"]


@pytest.mark.parametrize(
    ("ci_us", "shown"),
    [((9.0, 10.2), "10.0 us ±10%"), ((9.9, 10.4), "10.0 us ±4%"), ((9.8, 10.2), "10.0 us ")],
)
def test_a_time_that_is_hardly_known_says_so(ci_us, shown, capsys):
    found = report()
    (row,) = found.rows
    found.rows[:] = [dataclasses.replace(row, own=dataclasses.replace(row.own, ci_us=ci_us))]
    assert finish("custom", found, None) == 0
    out = capsys.readouterr().out
    assert shown in out
    assert ("±" in out) == ("±" in shown)


@pytest.mark.parametrize(("configs", "told"), [(82, "82 refused"), (0, "none tried")])
def test_the_table_tells_what_of_ours_was_refused(configs, told, capsys):
    found = report()
    failed = {"fused": NoneRight(configs, "9 ulp exceeds 2" if configs else "")}
    (row,) = found.rows
    found.rows[:] = [
        dataclasses.replace(row, own=None, verified=None, chosen="aten", none_right=failed)
    ]
    assert finish("custom", found, None) == 0
    out, err = capsys.readouterr()
    assert f"aten, {told}" in out
    assert err.startswith(f"fused on {SOFTMAX}: ")


def test_json_on_standard_output_is_all_there_is_on_it(capsys):
    assert finish("custom", report(), "-") == 0
    out, err = capsys.readouterr()
    assert validate(json.loads(out)) == []
    assert SOFTMAX in err


def test_the_result_file_is_valid(tmp_path):
    assert finish("custom", report(), str(tmp_path / "new" / "r.json")) == 0
    assert validate(json.loads((tmp_path / "new" / "r.json").read_text())) == []


def test_a_file_that_can_no_longer_be_written_costs_no_table(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgument, match="cannot write"):
        finish("custom", report(), str(tmp_path / "file" / "below.json"))
    assert SOFTMAX in capsys.readouterr().out


def test_a_table_that_nobody_reads_costs_no_file(tmp_path, monkeypatch):
    def closed(*_):
        raise BrokenPipeError

    monkeypatch.setattr(render, "results", closed)
    with pytest.raises(BrokenPipeError):
        finish("custom", report(), str(tmp_path / "r.json"))
    assert validate(json.loads((tmp_path / "r.json").read_text())) == []


def test_a_failed_workload_is_exit_code_1_and_named(capsys):
    assert finish("custom", report(failed={"lerp(...)": "no memory"}), None) == 1
    assert "lerp(...): no memory" in capsys.readouterr().err


def test_an_interrupted_run_shows_its_rows_and_ends_with_130(capsys):
    assert finish("custom", report(interrupted=True), None) == 130
    out, err = capsys.readouterr()
    assert SOFTMAX in out
    assert err.splitlines()[-1] == "interrupted; what was measured before is recorded"


def test_an_interrupted_bench_does_not_claim_to_have_recorded(capsys):
    found = report(interrupted=True)
    assert finish("custom", found, None, winner="fastest", recording=False) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted"


def test_a_reason_is_told_once_however_many_workloads_it_is_of():
    reasons = [("a", "x", "no GPU"), ("b", "x", "no GPU"), ("b", "y", "too large")]
    assert render.told_once(reasons) == ["x on 2 workloads: no GPU", "y on b: too large"]


def test_where_a_table_s_words_do_not_fit_each_row_is_a_list(monkeypatch, capsys):
    columns, rows = (
        ["=name", ">time", "why"],
        [["scatter_exchange", "8.0 us", "it is here"], ["a", None, "no"]],
    )

    def shown(width):
        monkeypatch.setattr(render, "PIPE_WIDTH", width)
        render.table(columns, rows)
        return [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]

    assert shown(30)[0] == ["name", "time", "why"]
    assert shown(29) == [
        ["name", "scatter_exchange"],
        ["time", "8.0", "us"],
        ["why", "it", "is", "here"],
        ["name", "a"],
        ["why", "no"],
    ]


def test_a_word_that_is_too_long_anyway_makes_no_list_of_a_table(monkeypatch, capsys):
    monkeypatch.setattr(render, "PIPE_WIDTH", 40)
    render.table(["config", "time"], [["vector=4," * 20, "8.0 us"]])
    assert capsys.readouterr().out.splitlines()[1].split() == ["config", "time"]
