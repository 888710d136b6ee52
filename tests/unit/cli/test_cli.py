"""The command line: what it reads, what it refuses, and how it ends."""

import json
import os
import re
import signal
import subprocess
import sys

import click
import pytest
from recorded import many
from reported import SOFTMAX

from tilewright import cli
from tilewright.cli import options
from tilewright.cli.options import ConfigValues, Knob, Seconds, read_targets, workloads_in
from tilewright.errors import CompileError, InvalidArgument, TilewrightError
from tilewright.result_schema import validate
from tilewright.store import Store

pytestmark = pytest.mark.usefixtures("own_folders")


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
        {"rows": [], "failed": {SOFTMAX: "out of memory"}},
    ],
)
def test_workloads_are_read_from_lists_and_from_result_files(content, tmp_path):
    path = tmp_path / "workloads.json"
    path.write_text(json.dumps(content))
    assert workloads_in(path) == [SOFTMAX]


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", "3", '{"rows": [], "failed": 3}', '["a", 3]', "[" * 200_000],
    ids=lambda content: content[:30],
)
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
        (["tune", "--suite", "no_such"], "unknown suite 'no_such'; `tilewright list suites` names"),
        (["tune", "softmax"], "cannot read workload 'softmax'"),
        (["tune", "sofmax(x=f32[4,4])"], "unknown operator 'sofmax'; did you mean softmax"),
        (["bench", "softmax(x=i64[4,4])"], "x is i64, expected one of f16"),
        (["bench", "softmax(x=fp32[4,4])"], "softmax: x: unknown dtype 'fp32'; did you mean f32?"),
        (["verify", SOFTMAX, "--impl", "no_such"], "unknown implementation 'no_such'"),
        (["tune", SOFTMAX, "--device", "tpu"], "unknown device 'tpu'; use cpu, cuda or cuda:<ind"),
        (["tune", SOFTMAX, "--device", "h200"], "'h200' is a kind of device; use one of cpu"),
        (["tune", SOFTMAX, "--device", "h200"], "tilewright explain --device-spec h200"),
        (["tune", SOFTMAX, "--device", "cuda:99"], "device 'cuda:99' is not here; use one of cpu"),
        (["tune", SOFTMAX, "--strategy", "no_such"], "unknown strategy 'no_such'; known: evolve, "),
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


def test_signs_that_the_output_has_not_are_replaced(tmp_path):
    """As `…` for the rest of a workload, where the locale is C."""
    with Store(f"sqlite:///{tmp_path / 'records.db'}") as store:
        for n in (4, 8):
            store.add(many(1, workload=f"rms_norm(x=f32[{n},4], weight=f32[4])", op="rms_norm"))
    command = [sys.executable, "-m", "tilewright.cli", "records", "list"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=environment, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"rms_norm(x=f32[8,4], ?)" in done.stdout


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


@pytest.mark.parametrize("args", [["records", "list"], ["list", "strategies"]])
def test_output_that_cannot_be_written_costs_no_file(args, tmp_path):
    path = tmp_path / "found.json"
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "tilewright.cli", *args, "--json", str(path)]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr[:34]) == (1, "cannot write to standard output: N")
    assert json.loads(path.read_text()) is not None


def test_json_alone_shows_no_table_anywhere(capsys):
    assert cli.main(["list", "strategies", "--json"]) == 0
    out, err = capsys.readouterr()
    assert ("strategies" in json.loads(out), err) == (True, "")


def test_a_file_that_cannot_be_written_costs_no_table(monkeypatch, capsys, tmp_path):
    def full(path, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(options, "write_whole", full)
    assert cli.main(["list", "strategies", "--json", str(tmp_path / "found.json")]) == 2
    shown = capsys.readouterr()
    assert "hill_climb" in shown.out
    assert "No space left on device" in shown.err


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_closed_standard_output_is_no_traceback(more):
    command = [sys.executable, "-m", "tilewright.cli", "records", "list", *more]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *command], stderr=subprocess.PIPE, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_help_is_on_standard_output_whatever_else_is_asked_for(capsys):
    assert cli.main(["list", "--json", "--help"]) == 0
    out, err = capsys.readouterr()
    assert (out.startswith("Usage: tilewright list"), err) == (True, "")


def test_what_a_function_prints_is_not_among_the_json(tmp_path, capsys, forgets_functions):
    path = tmp_path / "printing.py"
    path.write_text(
        "import tilewright as tw\nprint('imported')\n@tw.fuse\ndef printing(x):\n"
        "    print('traced')\n    return 2 * x\n"
    )
    args = ["explain", "printing(x=f32[8,16])", "--import", str(path), "--no-measure", "--json"]
    assert cli.main(args) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["workload"] == "printing(x=f32[8,16])"
    assert err.startswith("imported\ntraced\n")


def test_an_error_of_the_system_that_is_not_of_the_output_is_not_called_one(monkeypatch):
    def fail() -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(cli.cli.commands, "fail", click.Command("fail", callback=fail))
    with pytest.raises(OSError, match="No space left"):
        cli.main(["fail"])


# --- runs ----------------------------------------------------------------------------------


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


def test_bench_times_none_of_ours_but_those_that_are_named(capsys, measures_here):
    args = ["bench", SOFTMAX, "--device", "cpu", "--budget", "0.5s", "--baseline", "aten"]
    assert cli.main([*args, "--impl", "rows_cpp", "--json"]) == 0  # fused is left out
    out, err = capsys.readouterr()
    (row,) = json.loads(out)["rows"]
    assert (row["own"], list(row["baselines"])) == (None, ["aten"])
    assert "--impl rows_cpp takes no part: it computes " in err


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
