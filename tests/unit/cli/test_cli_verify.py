"""tilewright verify: what it tells, and how it ends."""

import dataclasses
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from reported import SOFTMAX, report

from tilewright import cli, registry, tune
from tilewright.cli import render
from tilewright.cli.tune import finish
from tilewright.errors import InvalidArgument
from tilewright.measure.verify import Verdict, verification_error
from tilewright.op import Workload

pytestmark = pytest.mark.usefixtures("own_folders")


def test_verify_of_what_is_right_exits_0_with_its_verdict(capsys):
    assert cli.main(["verify", SOFTMAX, "--impl", "fused", "--device", "cpu", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["workload"], row["implementation"], row["ok"]) == (SOFTMAX, "fused", True)
    assert row["max_ulp"] <= row["bound_ulp"]
    (output,) = row["outputs"]
    assert output["ulp"] == row["max_ulp"]
    assert output["apart_ulp"] <= output["ulp"] + output["vendor_ulp"]


def test_of_what_computes_something_else_the_operators_are_named(capsys):
    assert cli.main(["verify", SOFTMAX, "--impl", "bucket_sums", "--device", "cpu"]) == 1
    assert "bucket_sums: it computes scatter_add, scatter_reduce, index_add\n" in (
        capsys.readouterr().err
    )


def test_a_config_without_its_implementation_is_refused_before_anything_starts(capsys):
    args = ["verify", SOFTMAX, "rms_norm(x=f32[2,4])", "--config", "rows=1", "--device", "cpu"]
    assert cli.main(args) == 2
    assert capsys.readouterr().err == (
        "InvalidArgument: --config belongs to one implementation: name it (--impl)\n"
    )


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


@pytest.mark.parametrize("command", ["verify", "tune", "bench"])
def test_what_has_no_error_rule_costs_no_other_workload_its_row(command, tmp_path):
    kernels, found = tmp_path / "kernels.py", tmp_path / "found.json"
    kernels.write_text(
        "import tilewright as tw\n\n\n@tw.fuse(fallback=True)\ndef added(x):\n"
        "    return x.cumsum(-1)\n"
    )
    options = ["--device", "cpu", "--import", kernels, "--json", found]
    if command != "verify":
        store = f"sqlite:///{tmp_path}/records.db"
        options += ["--budget", "2s", "--baseline", "aten", "--store", store]
    workloads = ["softmax(x=f32[2,8])", "added(x=f32[2,8])", "softmax(x=f32[2,9])"]
    done = subprocess.run(
        [sys.executable, "-m", "tilewright.cli", command, *workloads, *map(str, options)],
        capture_output=True,
        text=True,
    )
    told = done.stdout + done.stderr
    assert done.returncode == 1, told
    assert "added cannot be fused: step aten.cumsum.default of the reference is none of" in told
    assert f"({kernels}:6); change that step. Its reference uses" in told
    assert "aten.cumsum.default, which has no error rule" in told
    assert "leave that step out of the function" in told
    written = found.read_text()
    assert all(f"softmax(x=f32[2,{n}])" in written for n in (8, 9))
