"""A person's function on the command line: imported, tuned forward and backward, then run so."""

import inspect
import json
import os
import subprocess
import sys

import dispatching as recording
import pytest
import torch

import tilewright as tw
from tilewright import cli, registry
from tilewright.compile import cxx
from tilewright.dispatch.functions.fuse import fuse
from tilewright.op import OPS, Workload
from tilewright.profiling import explain

FILE = """
import torch
import tilewright as tw
from widths import WIDTH


@tw.fuse
def swiglu(gate, up):
    return torch.nn.functional.silu(gate) * up


@tw.fuse
def product_and_sum(x, y):
    return x * y, (x + y).sum(-1)
"""
CALL = """
import torch
from kernels import WIDTH, swiglu
from tilewright.dispatch.prepared import state

gate, up = (torch.randn(64, WIDTH, requires_grad=True) for _ in range(2))
swiglu(gate, up).backward(torch.randn(64, WIDTH))
print(sorted((w.op, choice.source) for (w, *_), (_, choice) in state.built.items()))
"""
FORWARD = "swiglu(gate=f32[64,96], up=f32[64,96])"
BACKWARD = "swiglu_backward(grad_output=f32[64,96], gate=f32[64,96], up=f32[64,96])"
PAIR = (
    "product_and_sum_backward(grad_output0=f32[8,96], grad_output1=f32[8], x=f32[8,96], "
    "y=f32[8,96], grads=[x])"
)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "kernels.py").write_text(FILE)
    (tmp_path / "widths.py").write_text("WIDTH = 96\n")
    return tmp_path


def python(folder, *args, **variables):
    environment = {
        **os.environ,
        "TILEWRIGHT_STORE": f"sqlite:///{folder / 'records.db'}",
        "TILEWRIGHT_CACHE_DIR": str(folder / "cache"),
        **variables,
    }
    return subprocess.run(
        [sys.executable, *args],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )


def tilewright(folder, *args, **variables):
    return python(folder, "-m", "tilewright.cli", *args, **variables)


@pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing()))
def test_records_of_another_function_of_the_name_do_not_speak_for_it(store):
    """What was measured is found by its name, but is used for what it measured alone."""

    def chosen(function, text="renamed(x=f32[8,96])"):
        fuse(function, name="renamed")
        tw.reload_records()
        return recording.chosen(text).source

    def softmax(x):
        return torch.softmax(x, -1)

    def scaled(x, factor=2.0):
        if x.shape[0] == 9:
            raise ValueError("of these rows there was only softmax")
        return x * factor

    try:
        assert chosen(softmax) == "asked"
        for rows in (7, 8, 9):  # as many as a heuristic needs
            recording.record(store, f"renamed(x=f32[{rows},96])", "aten")
        assert chosen(softmax) == "record"
        assert chosen(softmax, "renamed(x=f32[10,96])") == "nearest"
        assert chosen(softmax, "renamed(x=f32[10,9600])") == "heuristic"
        for text in ("renamed(x=f32[8,96])", "renamed(x=f32[10,96])", "renamed(x=f32[10,9600])"):
            OPS.remove("renamed")
            assert chosen(scaled, text) == "asked"
        w = Workload.parse("renamed(x=f32[8,96])")
        assert explain.explain(w, device="cpu", measure=False).records == []
        recording.record(store, str(w), "aten", duel="of the other")
        for function in (scaled, softmax):  # neither hides the other's
            OPS.remove("renamed")
            assert chosen(function) == "record"
    finally:
        OPS.remove("renamed")


def test_a_program_is_what_is_computed_not_its_numbers_names_or_lines():
    constants = [torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])]
    functions = {
        "scaled": lambda x, a: x * a,
        "scaled_too": lambda y, a: a * y if False else y * a,
        "with_constants": lambda x, a: x * constants[0],
        "with_others": lambda x, a: x * constants[1],
        "shifted": lambda x, a: x + a,
    }
    try:
        programs = {}
        for name, function in functions.items():
            first = next(iter(inspect.signature(function).parameters))
            fuse(function, name=name, scalars=["a"])
            found = {Workload.parse(f"{name}({first}=f32[4,2], a={a})").program for a in (1.0, 2.0)}
            (programs[name],) = found
        assert programs.pop("scaled_too") == programs["scaled"]
        assert len(set(programs.values())) == len(programs)
    finally:
        for name in functions:
            OPS.remove(name)
    assert Workload.parse("softmax(x=f32[4,2])").program == ""


def test_a_plug_in_folder_may_hold_functions_too(folder):
    (folder / "ops").mkdir()
    (folder / "kernels.py").rename(folder / "ops" / "kernels.py")
    found = tilewright(
        folder,
        *("explain", BACKWARD, "--device", "cpu", "--no-measure"),
        TILEWRIGHT_PLUGINS=str(folder),
    )
    assert found.returncode == 0, found.stderr
    assert "fused (asked)" in found.stdout


@pytest.fixture
def here(folder, monkeypatch):
    """This process in the folder, and afterwards without what was imported there."""
    modules, operators = set(sys.modules), set(OPS)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    imported = [*registry.imported]
    registry.imported.clear()  # the list itself, which runners hold
    yield folder
    registry.imported[:] = imported
    for name in set(OPS) - operators:
        OPS.remove(name)
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
            del sys.modules[name]


@pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing()))
def test_a_function_is_tuned_forward_and_backward_and_later_calls_run_by_the_records(
    here, monkeypatch, capsys
):
    """The tune and the calls are processes of their own."""
    monkeypatch.setenv("TILEWRIGHT_STORE", f"sqlite:///{here / 'records.db'}")
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(here / "cache"))
    on = ["--import", "kernels.py", "--device", "cpu"]
    budget = ["--budget", "8s", "--configs", "1", "--baseline", "aten"]
    tuned = tilewright(here, "tune", FORWARD, BACKWARD, *on, *budget)
    assert tuned.returncode == 0, tuned.stdout + tuned.stderr
    assert cli.main(["records", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    kept = {r["workload"] for r in listed if r["final"] and r["status"] == "ok"}
    assert kept == {FORWARD, BACKWARD}
    called = python(here, "-c", CALL)
    assert called.stdout.strip() == "[('swiglu', 'record'), ('swiglu_backward', 'record')]"
    assert cli.main(["records", "show", BACKWARD, "--import", "kernels"]) == 0
    assert "fused" in capsys.readouterr().out
    verified = cli.main(["verify", FORWARD, BACKWARD, PAIR, *on, "--impl", "fused"])
    assert verified == 0, capsys.readouterr()


def test_a_function_of_a_tuple_of_numbers_is_worked_on_by_its_text(here, capsys):
    (here / "scaling.py").write_text(
        "import tilewright as tw\n\n\n@tw.fuse\ndef scaled(x, by=(1, 2)):\n"
        "    return x * by[0] + by[1]\n"
    )
    text = "scaled(x=f32[4,8], by=[0.5,-1e-07])"
    args = ["verify", "--import", "scaling.py", text, "--impl", "fused", "--device", "cpu"]
    assert cli.main([*args, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["workload"], row["ok"]) == (text, True)


@pytest.mark.parametrize(
    ("source", "content", "message"),
    [
        ("missing.py", None, "missing.py: there is no such Python file; give the path of one"),
        ("missing", None, "there is no module 'missing', looked for in"),
        ("./missing", None, "there is no such Python file"),
        ("", None, "there is no such Python file"),
        (".", None, "there is no such Python file"),
        ("raises.py", "x = 1\nx.y", "raises.py cannot be imported: AttributeError: 'int' object"),
        ("raises.py", "x = 1\nx.y", "raises.py:2); correct it"),
        ("leaves.py", "import sys\nsys.exit(3)", "leaves.py cannot be imported: SystemExit: 3"),
        ("lacks.py", "import nowhere", "lacks.py cannot be imported: ModuleNotFoundError"),
        ("json.py", "", "another module is named 'json'"),
        ("plain.py", "def f(x): return x", "plain.py fuses no function: decorate one"),
    ],
)
def test_what_cannot_be_imported_is_told_in_words(here, capsys, source, content, message):
    if content is not None:
        (here / source).write_text(content)
    assert cli.main(["verify", "--import", source, FORWARD]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("swiglu(gate=f32[4,8], up=f32[4,9])", "swiglu raises RuntimeError"),
        (PAIR.replace("0=f32[8,96]", "0=f32[8]"), "give grad_output0=f32[8,96], grad_output1=f32"),
        (
            PAIR.replace("0=", "=").replace(", grad_output1=f32[8]", ""),
            "give grad_output0=f32[8,96], grad_output1=f32[8]",
        ),
        ("swiglu_backward(gate=f32[4,8], up=f32[4,8])", "argument 'grad_output' is missing"),
        ("swiglu_backward_backward(x=f32[4])", "unknown operator 'swiglu_backward_backward'"),
        ("geglu(x=f32[4])", "a function of tw.fuse is known once its file is: --import FILE"),
    ],
)
def test_a_workload_that_does_not_fit_the_function_is_told_in_words(here, capsys, text, message):
    assert cli.main(["verify", "--import", "kernels.py", text]) == 2
    assert message in capsys.readouterr().err


def test_a_backward_takes_as_many_gradients_as_the_function_returns(here):
    registry.import_source("kernels.py")
    assert "product_and_sum_backward" in OPS
    assert "grad_output" in OPS["product_and_sum_backward"].parameters  # as long as none is named
    w = Workload.parse(PAIR)
    assert "grad_output1" in OPS["product_and_sum_backward"].parameters
    assert str(w) == PAIR
    assert OPS["product_and_sum_backward"] is w.operator
