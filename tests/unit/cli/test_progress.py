"""What a run shows while it goes."""

import io

import pytest

from tilewright import cli
from tilewright.cli import progress
from tilewright.cli.progress import Shown, ShownLive
from tilewright.device import spec_of
from tilewright.measure.candidate import Description
from tilewright.measure.ceilings import Ceilings
from tilewright.op import Workload
from tilewright.profiling import doctor, explain


@pytest.mark.parametrize(
    ("method", "phases", "spare", "told"),
    [
        ("cpu", ["prepare", "duel", "prepare"], -0.5, 1),
        ("cpu", ["prepare", "duel", "prepare"], -0.1, 0),
        ("cpu", ["prepare"], 6.0, 0),
        ("cpu", ["prepare"], None, 0),
        ("cpu", [], -0.5, 0),  # all is read from the records
        ("events", ["prepare"], -0.5, 0),
    ],
)
def test_a_busy_machine_is_told_once_before_a_cpu_is_measured(
    method, phases, spare, told, monkeypatch
):
    spec = spec_of(None)
    idle = None if spare is None else spec.threads + spare
    monkeypatch.setattr(progress, "idle_cores", lambda: idle)
    shown = Shown(io.StringIO())
    shown.device(Description("cpu", spec, "Some CPU", {}, {}), method)
    for phase in phases:
        shown.phase(phase)
    assert shown.stream.getvalue().count("other programs leave") == told


def test_a_live_line_says_what_is_waited_for_before_there_is_a_workload():
    shown = ShownLive(io.StringIO())
    assert str(shown.line()) == "    0 s · starting"
    shown.workload(Workload.parse("softmax(x=f32[4,4])"), 0, 2)
    shown.phase("prepare")
    assert str(shown.line()) == "[1/2] softmax(x=f32[4,4])\n    0 s · prepare"


@pytest.mark.parametrize(
    ("module", "command"), [(doctor, ["doctor"]), (explain, ["explain", "softmax(x=f32[4,4])"])]
)
def test_that_ceilings_are_measured_is_told(module, command, own_folders, monkeypatch, capsys):
    told = []
    curves = ((4096, 1.0),)
    ceilings = Ceilings("cpu", curves, curves, curves, 1.0, 1e9)
    shown = Shown(io.StringIO())
    monkeypatch.setattr(shown, "phase", told.append)
    monkeypatch.setattr(progress, "shown", lambda: shown)
    monkeypatch.setattr(module, "measure_ceilings", lambda *args, **more: ceilings)
    assert cli.main([*command, "--device", "cpu", "--no-measure"]) == 0
    assert told == []
    assert cli.main([*command, "--device", "cpu"]) == 0
    assert told == ["ceilings"]
