"""The command line: what it reads, what it refuses, and how it ends."""

import dataclasses
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from recorded import many

from tilewright import cli, registry, tune
from tilewright.cli import options, render
from tilewright.cli.options import ConfigValues, Knob, Seconds, read_targets, workloads_in
from tilewright.cli.render import shortened
from tilewright.cli.tune import finish, refusals
from tilewright.errors import CompileError, InvalidArgument, TilewrightError
from tilewright.measure.verify import Verdict, verification_error
from tilewright.op import Workload
from tilewright.report import Baseline, NoneRight, Own, Report, Row, Verified
from tilewright.result_schema import validate
from tilewright.store import Store
from tilewright.suite import SUITES

SOFTMAX = "softmax(x=f32[64,100])"


@pytest.fixture(autouse=True)
def own_store(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_STORE", f"sqlite:///{tmp_path / 'records.db'}")
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))


def converted(kind: click.ParamType, text: str):
    return kind.convert(text, None, None)


# --- values ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("60s", 60), ("1.5m", 90), ("2m", 120), ("1h", 3600)]
)
def test_duration_is_read_in_seconds(text, seconds):
    assert converted(Seconds(), text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "-5s", "5 days", "s"])
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(click.BadParameter, match="is not a duration such as 60s"):
        converted(Seconds(), text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("split_k=1,2,4", ("split_k", (1, 2, 4))),
        ("split_k=1:5:2", ("split_k", (1, 3, 5))),
        ("split_k=1:3", ("split_k", (1, 2, 3))),
        ("split_k=8:2:-3", ("split_k", (8, 5, 2))),
        ("split_k=1,8:32:8,1", ("split_k", (1, 8, 16, 24, 32))),
        ("storage=registers,shared", ("storage", ("registers", "shared"))),
        ("stream_loads=True,False", ("stream_loads", (True, False))),
        ("scale=0.5", ("scale", (0.5,))),
        ("bulk=true,False,none", ("bulk", (True, False, None))),
    ],
)
def test_param_takes_lists_and_ranges_with_both_ends(text, expected):
    assert converted(Knob(), text) == expected


def test_a_range_of_128_by_1_has_128_values():
    assert converted(Knob(), "split_k=1:128:1")[1] == tuple(range(1, 129))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("split_k", "should be NAME=VALUES"),
        ("=1", "should be NAME=VALUES"),
        ("split_k=", "should be NAME=VALUES"),
        ("split_k=1:0:1", "never reaches its end"),
        ("split_k=1:9:0", "never reaches its end"),
        ("split_k=1,,2", "neither a value nor a range"),
        ("split_k=a:b", "neither a value nor a range"),
        ("split_k=1:99999999", "has 99999999 values"),
    ],
)
def test_param_says_what_it_cannot_read(text, message):
    with pytest.raises(click.BadParameter, match=message):
        converted(Knob(), text)


def test_config_reads_what_tables_print():
    text = "vector=8,storage=registers,stream_loads=True,scale=0.5"
    assert converted(ConfigValues(), text) == {
        "vector": 8,
        "storage": "registers",
        "stream_loads": True,
        "scale": 0.5,
    }


@pytest.mark.parametrize("text", ["vector", "=8", "vector="])
def test_config_without_name_or_value_is_refused(text):
    with pytest.raises(click.BadParameter, match="should be name=value"):
        converted(ConfigValues(), text)


# --- targets ---------------------------------------------------------------------------------


def test_a_suite_alone_gives_its_name_and_method():
    found = read_targets([], ["quickstart"], None)
    assert (found.name, len(found.workloads), found.method) == ("quickstart", 12, "events")


def test_only_thins_out_a_suite_that_keeps_its_name():
    found = read_targets([], ["norms_sweep"], None, ["[16,768]", "softmax(x=f32[16,"])
    assert (found.name, found.method) == ("norms_sweep", "graph")
    assert len(found.workloads) == 3 * 3 + 14 - 1
    with pytest.raises(InvalidArgument, match=r"none of 378 .* holds 'no_such'"):
        read_targets([], ["norms_sweep"], None, ["no_such"])


def test_a_suite_without_some_of_its_workloads_keeps_its_name():
    found = read_targets([], ["resnet50_v15_wgrad"], None, ["x=f16[8,"], ["kernel_size=[7,7]"])
    assert (found.name, len(found.workloads)) == ("resnet50_v15_wgrad", 22)
    with pytest.raises(InvalidArgument, match=r"none of 12 workloads is without 'f32' and 'bf16'"):
        read_targets([], ["quickstart"], None, [], ["f32", "bf16"])


def test_targets_of_all_sources_are_joined_without_duplicates(tmp_path):
    listed = tmp_path / "workloads.json"
    listed.write_text(json.dumps(["softmax(x=f32[4096,4096])", SOFTMAX]))
    found = read_targets([SOFTMAX], ["quickstart"], listed)
    assert found.name == "custom"
    assert len(found.workloads) == 13
    assert str(found.workloads[-1]) == SOFTMAX


@pytest.mark.parametrize(
    "content",
    [
        [SOFTMAX],
        {"workloads": [SOFTMAX]},
        {"workloads": [{"workload": SOFTMAX}]},
        {"rows": [{"workload": SOFTMAX, "floor_us": 1.0}]},
    ],
)
def test_workloads_are_read_from_lists_and_from_result_files(content, tmp_path):
    path = tmp_path / "workloads.json"
    path.write_text(json.dumps(content))
    assert workloads_in(path) == [SOFTMAX]


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "3", '["a", 3]'])
def test_a_file_without_workloads_is_refused_by_name(content, tmp_path):
    path = tmp_path / "workloads.json"
    path.write_text(content)
    with pytest.raises(InvalidArgument, match=r"workloads\.json"):
        workloads_in(path)


def test_no_target_at_all_names_the_suites():
    with pytest.raises(InvalidArgument, match="quickstart"):
        read_targets([], [], None)


# --- how it ends -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["frobnicate"], "No such command 'frobnicate'"),
        (["tune"], "name a workload, --suite or --from"),
        (["tune", "--suite", "no_such"], "unknown suite 'no_such'; known:"),
        (["tune", "softmax"], "cannot read workload 'softmax'"),
        (["tune", "sofmax(x=f32[4,4])"], "unknown operator 'sofmax'; did you mean softmax"),
        (["bench", "softmax(x=i64[4,4])"], "x is i64, expected one of f16"),
        (["bench", "softmax(x=fp32[4,4])"], "softmax: x: unknown dtype 'fp32'; did you mean f32?"),
        (["verify", SOFTMAX, "--impl", "no_such"], "unknown implementation 'no_such'"),
        (["tune", SOFTMAX, "--device", "tpu"], "unknown device 'tpu'; use cpu, cuda or cuda:<ind"),
        (["tune", SOFTMAX, "--device", "h200"], "'h200' is a kind of device; use one of cpu"),
        (["tune", SOFTMAX, "--device", "h200"], "tilewright explain --device-spec h200"),
        (["tune", SOFTMAX, "--device", "cuda:99"], "device 'cuda:99' is not here; use one of cpu"),
        (["tune", SOFTMAX, "--strategy", "no_such"], "unknown strategy 'no_such'"),
        (["explain", SOFTMAX, "--device-spec", "no_such"], "unknown device 'no_such'"),
        (["tune", "--json", SOFTMAX], "reads as a workload, not as a file"),
        (["bench", SOFTMAX, "--json", "/proc/new.json"], "/proc/new.json cannot be written: No s"),
        (["verify", SOFTMAX, "--json", "/tmp"], "/tmp cannot be written: Is a directory; name ano"),
        (["tune", "--from", "no_such.json"], "does not exist"),
        (
            ["explain", "softmax(x=f32[99999999999,99999999999])"],
            "softmax: x: f32[99999999999,99999",
        ),
        (["verify", SOFTMAX, "--seed", "9" * 23], "is not in the range"),
        (["tune", SOFTMAX, "--seed", "9" * 23], "is not in the range"),
        (["records", "list", "--store", "foo"], "cannot use 'foo' as a record store"),
        (
            ["records", "prune"],
            "say what to delete: --before, --superseded, --other-versions, --op",
        ),
    ],
)
def test_bad_input_is_one_clear_message_and_exit_code_2(args, message, capsys):
    assert cli.main(args) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert "Traceback" not in err
    assert out == ""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidArgument("x has N=8, expected N=16"), 2),
        (CompileError("g++: no"), 1),
        (TilewrightError("no"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_an_error_decides_the_exit_code(error, code, monkeypatch, capsys):
    def fail() -> None:
        raise error

    monkeypatch.setitem(cli.cli.commands, "fail", click.Command("fail", callback=fail))
    assert cli.main(["fail"]) == code
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert (str(error) or "interrupted") in err


def test_debug_adds_the_traceback(monkeypatch, capsys):
    def fail() -> None:
        raise CompileError("no")

    monkeypatch.setitem(cli.cli.commands, "fail", click.Command("fail", callback=fail))
    assert cli.main(["--debug", "fail"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_every_command_takes_json():
    for command in cli.cli.commands.values():
        for leaf in command.commands.values() if isinstance(command, click.Group) else [command]:
            assert any("--json" in p.opts for p in leaf.params), leaf.name


def test_commands_are_listed_as_they_are_used(capsys):
    assert cli.main(["--help"]) == cli.main(["records", "--help"]) == 0
    told = capsys.readouterr().out
    names = re.findall(r"^  (\w+)  ", told, re.M)
    assert names == [
        *("doctor", "list", "tune", "bench", "verify", "explain", "records", "summary", "compare"),
        *("list", "show", "study", "export", "import", "prune"),
    ]


def test_a_closed_pipe_is_no_traceback():
    script = "import sys; from tilewright.cli import main; sys.exit(main(['records', '--help']))"
    done = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert done.stdout is not None
    done.stdout.close()
    assert done.stderr is not None
    assert b"Traceback" not in done.stderr.read()
    done.wait()


@pytest.mark.parametrize("args", [["records", "list"], ["records", "list", "--json"], ["--help"]])
def test_output_that_cannot_be_written_is_one_message_and_exit_code_1(args, tmp_path):
    with Store(f"sqlite:///{tmp_path / 'records.db'}") as store:
        store.add(many(40))  # more than Python gathers before it writes
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "tilewright.cli", *args]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (
        1,
        "cannot write to standard output: No space left on device; send it elsewhere\n",
    )


def test_an_error_of_the_system_that_is_not_of_the_output_is_not_called_one(monkeypatch):
    def fail() -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(cli.cli.commands, "fail", click.Command("fail", callback=fail))
    with pytest.raises(OSError, match="No space left"):
        cli.main(["fail"])


# --- results -----------------------------------------------------------------------------------


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


def report(**changes) -> Report:
    row = Row(
        workload=SOFTMAX,
        floor_us=5.0,
        copy_us=4.0,
        method="cpu",
        distribution=None,
        host_us={},
        baselines={"aten": Baseline(20.0, (19.0, 21.0)), "inductor": Baseline(15.0, (14.0, 16.0))},
        own=Own(10.0, (9.9, 10.1), "fused", {"rows": 2}),
        chosen="fused",
        candidates=7,
        verified=Verified(1.0, 4.0, None, True),
        refused={},
    )
    versions = {"torch": "2.13.0", "tilewright": "0.1.0"}
    return Report([row], {"name": "Some CPU"}, versions, 3.0, **changes)


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


def test_bench_measures_without_a_record_and_keeps_none(capsys):
    args = ["bench", SOFTMAX, "--device", "cpu", "--budget", "0.5s", "--baseline", "aten"]
    assert cli.main([*args, "--json"]) == 0
    out, table = capsys.readouterr()
    found = json.loads(out)
    assert validate(found) == []
    assert [row["workload"] for row in found["rows"]] == [SOFTMAX]
    assert "fastest" in table
    assert "chosen" not in table  # nothing was
    assert cli.main(["records", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_verify_of_what_is_right_exits_0_with_its_verdict(capsys):
    assert cli.main(["verify", SOFTMAX, "--impl", "fused", "--device", "cpu", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["workload"], row["implementation"], row["ok"]) == (SOFTMAX, "fused", True)
    assert row["max_ulp"] <= row["bound_ulp"]
    (output,) = row["outputs"]
    assert output["ulp"] == row["max_ulp"]
    assert output["apart_ulp"] <= output["ulp"] + output["vendor_ulp"]


def test_a_workload_that_cannot_be_verified_costs_no_other_its_verdict(capsys):
    huge, indexed = "softmax(x=f32[9000000000,100])", "gather(x=f32[9], dim=0, index=i64[3])"
    args = ["verify", huge, indexed, SOFTMAX, "--impl", "fused", "--device", "cpu", "--json"]
    assert cli.main(args) == 1
    out, err = capsys.readouterr()
    assert [(row["workload"], row["ok"]) for row in json.loads(out)] == [(SOFTMAX, True)]
    assert f"LaunchError: {huge}: " in err
    assert f"NoImplementation: no implementation of {indexed} on cpu" in err
    assert re.findall(r"\[(\d/3)\] \d+ s .*: (.*)", err) == [
        ("1/3", "failed"),
        ("2/3", "failed"),
        ("3/3", "1 of 1 right"),
    ]


def test_what_is_refused_of_one_workload_costs_no_other_its_verdict(monkeypatch, capsys):
    def verified(w, *_, **__):
        if w.op != "softmax":
            raise InvalidArgument(f"{w}: it draws masks; write a seed")
        return [("fused", {}, Verdict(True, 1.0, 2.0, None, True, ""))]

    monkeypatch.setattr(tune, "verify_all", verified)
    args = ["verify", SOFTMAX, "rms_norm(x=f32[2,4])", "softmax(x=f32[8,8])", "--impl", "fused"]
    assert cli.main([*args, "--device", "cpu", "--json"]) == 2
    out, err = capsys.readouterr()
    assert [row["workload"] for row in json.loads(out)] == [SOFTMAX, "softmax(x=f32[8,8])"]
    assert err.splitlines()[-1] == (
        "InvalidArgument: rms_norm(x=f32[2,4]): it draws masks; write a seed"
    )


def test_implementations_that_do_not_support_a_workload_are_named_with_the_reason(capsys):
    assert cli.main(["verify", "gather(x=f32[9], dim=0, index=i64[3])", "--device", "cpu"]) == 0
    err = capsys.readouterr().err
    (line,) = (line for line in err.splitlines() if line.startswith("gather_cuda on gather("))
    assert "cpu" in line
    assert err.count("gather_cuda") == 1


def test_a_reason_is_told_once_however_many_workloads_it_is_of():
    reasons = [("a", "x", "no GPU"), ("b", "x", "no GPU"), ("b", "y", "too large")]
    assert render.told_once(reasons) == ["x on 2 workloads: no GPU", "y on b: too large"]


def test_an_interrupted_verify_shows_its_verdicts_and_ends_with_130(monkeypatch, capsys):
    verdict = Verdict(True, 1.0, 2.0, None, True, "")

    def verified(w, *_, **__):
        if w.op != "softmax":
            raise KeyboardInterrupt
        return [("fused", {}, verdict)]

    monkeypatch.setattr(tune, "verify_all", verified)
    assert cli.main(["verify", SOFTMAX, "rms_norm(x=f32[2,4])", "--device", "cpu"]) == 130
    out, err = capsys.readouterr()
    assert SOFTMAX in out
    assert err.splitlines()[-1] == "interrupted"


def test_verify_lays_the_differences_to_pytorch_out_as_the_documentation_does(capsys):
    text = (
        "conv2d_weight_grad(x=f16[4,8,9,9]@channels_last, grad_output=f16[4,8,9,9]@channels_last, "
        "kernel_size=1)"
    )
    args = ["verify", text, "--impl", "conv2d_weight_grad_f32", "--device", "cpu"]
    assert cli.main(args) == 0
    header, _, line = filter(str.strip, capsys.readouterr().out.splitlines())
    page = (Path(__file__).parents[3] / "docs" / "weight_gradient.md").read_text()
    (table,) = re.findall(r"^\| column \|.*?\n\n", page, re.M | re.S)
    told = re.findall(r"`(.+?)`", "".join(re.findall(r"^\| `.*?\|", table, re.M)))
    heads = ["workload", "implementation", *told, "integers", "deterministic", "right"]
    assert re.split(r"\s{2,}", header.strip()) == heads
    assert len(set(heads)) == len(heads)
    values = line.split("conv2d_weight_grad_f32")[1].split()
    assert all(re.fullmatch(r"\d+\.\d\d\*?", v) for v in values[:4])
    assert all(re.fullmatch(r"\d+\.\d%", v) for v in values[4:7])


def test_a_wrong_result_names_the_command_that_shows_it_again():
    verdict = Verdict(False, 412.0, 6.1, None, True, "412 ulp exceeds 6.1 at (3, 1)")
    config = render.config({"rows": 2, "unroll": 1})
    text = str(verification_error(Workload.parse(SOFTMAX), "fused", config, verdict, 7, "cpu"))
    assert "fused is wrong on softmax(x=f32[64,100]) with rows=2 unroll=1: 412 ulp exceeds" in text
    command = text.splitlines()[1].partition("reproduce: ")[2]
    name, *args = shlex.split(command)
    assert name == "tilewright"
    again = cli.cli.commands["verify"].make_context("verify", args[1:]).params
    assert again["workloads"] == (SOFTMAX,)
    assert (again["implementation"], again["seed"], again["device"]) == ("fused", 7, "cpu")
    assert again["config"] == {"rows": 2, "unroll": 1}


def test_the_command_that_shows_a_wrong_result_again_imports_its_function(
    tmp_path, monkeypatch, capsys, forgets_functions
):
    monkeypatch.setattr(registry, "imported", [])
    kernels = tmp_path / "kernels of mine.py"
    kernels.write_text("import tilewright as tw\n\n\n@tw.fuse\ndef doubled(x):\n    return x * 2\n")
    registry.import_source(str(kernels))
    w = Workload.parse("doubled(x=f32[4])")
    wrong = Verdict(False, 412.0, 6.1, None, True, "412 ulp exceeds 6.1 at (3, 1)")
    command = str(verification_error(w, "fused", "", wrong, 0)).partition("reproduce: ")[2]
    assert shlex.split(command)[2:5] == ["--import", str(kernels), str(w)]
    found = report()
    found.rows[0] = dataclasses.replace(found.rows[0], workload=str(w), wrong={"inductor": "far"})
    assert finish("custom", found, None) == 0
    told = capsys.readouterr().err
    assert f"tilewright verify --import '{kernels}' '{w}' --impl inductor shows it" in told


def test_what_cannot_be_built_is_not_called_wrong(monkeypatch, capsys):
    monkeypatch.setenv("TILEWRIGHT_CXX", "no_such_compiler")
    assert cli.main(["verify", SOFTMAX, "--impl", "fused", "--device", "cpu"]) == 1
    out, err = capsys.readouterr()
    (line,) = (line for line in out.splitlines() if "fused" in line)
    assert line.split("fused")[1].split() == [*["-"] * 9, "not", "run"]
    assert "softmax.fused did not run on" in err
    assert "CompilerMissing: TILEWRIGHT_CXX=no_such_compiler is not a program" in err
    assert "wrong" not in err


def test_an_interrupt_ends_a_real_tune_with_130_and_no_traceback(tmp_path):
    command = [sys.executable, "-m", "tilewright.cli", "tune", SOFTMAX, "--device", "cpu"]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stderr is not None
    while "timed by cpu" not in process.stderr.readline():
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "interrupted" in err
