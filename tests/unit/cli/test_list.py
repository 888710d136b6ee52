"""list: what there is to name, and what each says of itself."""

import json

import pytest

from tilewright import cli
from tilewright.cli import render
from tilewright.device import DEVICES
from tilewright.impl import IMPLS
from tilewright.op import OPS
from tilewright.search import STRATEGIES
from tilewright.suite import SUITES

KINDS = {
    "operators": OPS,
    "implementations": IMPLS,
    "suites": SUITES,
    "strategies": STRATEGIES,
    "devices": DEVICES,
}


def listed(capsys, *args):
    assert cli.main(["list", *args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def one(capsys, kind, name):
    return next(thing for thing in listed(capsys, kind)[kind] if thing["name"] == name)


def test_without_a_kind_all_of_them_are_listed(capsys):
    found = listed(capsys)
    assert list(found) == list(KINDS)
    for kind, things in KINDS.items():
        assert [thing["name"] for thing in found[kind]] == list(things)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_alone_is_a_table_with_every_name(kind, capsys):
    assert list(listed(capsys, kind)) == [kind]
    assert cli.main(["list", kind]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in KINDS[kind])


def test_names_to_type_are_whole_on_80_columns(capsys, monkeypatch):
    monkeypatch.setattr(render, "PIPE_WIDTH", 80)
    assert cli.main(["list", "implementations"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert all(name in out for name in IMPLS)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "devices"])
def test_everything_says_what_it_is(kind, capsys):
    silent = [thing["name"] for thing in listed(capsys, kind)[kind] if not thing["summary"]]
    # A function that another test fused says what its writer wrote.
    assert [name for name in silent if name not in OPS or not OPS[name].fused] == []


def test_an_operator_has_the_signature_that_workloads_are_written_by(capsys):
    softmax = one(capsys, "operators", "softmax")
    assert softmax["signature"] == "softmax(x, dim=-1)"
    assert softmax["summary"].startswith("Exponentials of x, scaled to sum 1 along dim")


def test_operators_of_a_person_s_file_are_listed_where_it_is_imported(capsys, tmp_path):
    name = f"listed_{tmp_path.name.replace('-', '_')}"
    path = tmp_path / f"{name}.py"
    path.write_text(
        f"import torch\nimport tilewright as tw\n\n\n@tw.fuse\ndef {name}(x: torch.Tensor):\n"
        '    """Twice x."""\n    return x * 2\n'
    )
    try:
        assert cli.main(["list", "operators", "--import", str(path), "--json"]) == 0
        (found,) = (
            o for o in json.loads(capsys.readouterr().out)["operators"] if o["name"] == name
        )
        assert (found["signature"], found["summary"]) == (f"{name}(x, seed=None)", "Twice x.")
    finally:
        OPS.remove(name)


def test_an_implementation_names_its_backend_and_what_it_serves(capsys):
    assert one(capsys, "implementations", "fused")["operators"] is None
    gather = one(capsys, "implementations", "gather_cpp")
    assert (gather["backend"], gather["operators"]) == ("cpp", ["gather"])
    assert cli.main(["list", "implementations"]) == 0
    (line,) = (x for x in capsys.readouterr().out.splitlines() if x.startswith(" fused "))
    assert "every operator" in line


def test_implementations_of_one_file_each_say_what_they_do(capsys):
    names = [f"conv2d_weight_grad_{how}" for how in ("f32", "contiguous", "per_image")]
    assert len({one(capsys, "implementations", name)["summary"] for name in names}) == 3


def test_a_suite_has_a_number_of_workloads_and_a_source(capsys):
    found = one(capsys, "suites", "norms_sweep")
    assert found["workloads"] == 378
    assert found["source"].startswith("Source: the widths of NVIDIA/Fuser issue 383")


def test_suites_that_a_helper_makes_have_the_docstring_of_their_own_file(capsys):
    found = one(capsys, "suites", "unet_wgrad_n4")
    assert found["summary"].startswith("Weight gradients of a U-Net")


def test_a_device_has_its_datasheet_in_short(capsys):
    assert one(capsys, "devices", "h200")["flops"]["f64"] == 34e12
    assert cli.main(["list", "devices"]) == 0
    (line,) = (x for x in capsys.readouterr().out.splitlines() if "h200" in x)
    told = ["sm_90a", "132", "60 MiB", "4.80 TB/s", "989 TFLOP/s", "67 TFLOP/s"]
    assert line.split() == ["h200", *" ".join(told).split()]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["operator"], "'operator' is not one of 'operators', 'implementations'"),
        (["--json", "suites"], "'suites' is a kind, not a file; write --json - or put --json last"),
    ],
)
def test_what_is_no_kind_is_refused(args, message, capsys):
    assert cli.main(["list", *args]) == 2
    assert message in capsys.readouterr().err
