"""Registries of plug-ins: loading from several threads, and files that cannot be imported."""

import ast
import os
import sys
import threading
from pathlib import Path

import pytest

import tilewright as tw
from tilewright.impl import IMPLS
from tilewright.registry import Registry
from tilewright.suite import SUITES

PACKAGE = Path(tw.__file__).parent
KINDS = ("ops", "impls", "devices", "strategies", "suites")

BROKEN = """
from tilewright.op import op


@op(flops=lambda w: w.main.numel)
def before_the_fault(x: "Tensor") -> "Tensor":
    \"\"\"x\"\"\"
    return x


import nothing_of_that_name
"""


def test_threads_that_load_at_once_all_see_everything():
    registry, start, seen = Registry("devices", "device"), threading.Barrier(8), []

    def look():
        start.wait()
        seen.append(list(registry))

    threads = [threading.Thread(target=look) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(seen) == 8
    assert all(names == seen[0] for names in seen)


def test_a_plug_in_that_cannot_be_imported_is_named_at_every_look_up(tmp_path, monkeypatch):
    (tmp_path / "ops").mkdir()
    path = tmp_path / "ops" / "broken.py"
    path.write_text(BROKEN)
    with monkeypatch.context() as patch:
        patch.setenv("TILEWRIGHT_PLUGINS", str(tmp_path))
        for _ in range(2):
            with pytest.raises(tw.PluginError) as caught:
                tw.Workload.parse("softmax(x=f32[4,8])")
            assert f"{path} cannot be imported: ModuleNotFoundError: No module named" in str(
                caught.value
            )
            assert "take its folder out of TILEWRIGHT_PLUGINS" in str(caught.value)
    from tilewright.op import OPS

    OPS._things.pop("before_the_fault")
    assert tw.Workload.parse("softmax(x=f32[4,8])").op == "softmax"


def test_a_folder_of_plug_ins_that_is_not_there_is_named_at_every_look_up(tmp_path, monkeypatch):
    missing = tmp_path / "missing"
    with monkeypatch.context() as patch:
        patch.setenv("TILEWRIGHT_PLUGINS", f"{tmp_path}{os.pathsep}{missing}")
        for _ in range(2):
            with pytest.raises(tw.PluginError, match=f"TILEWRIGHT_PLUGINS names {missing}, which"):
                "quickstart" in SUITES  # noqa: B015
    assert "quickstart" in SUITES


def test_a_plug_in_may_look_up_others_while_it_is_imported(tmp_path, monkeypatch):
    (tmp_path / "suites").mkdir()
    (tmp_path / "suites" / "curious.py").write_text(
        "from tilewright.suite import SUITES\nseen = list(SUITES)\n"
    )
    monkeypatch.setenv("TILEWRIGHT_PLUGINS", str(tmp_path))

    assert "quickstart" in list(SUITES)


def test_plug_ins_may_lie_in_folders_and_what_they_share_is_none(tmp_path, monkeypatch):
    suite = 'from tilewright.suite import suite\nsuite("{}", ["softmax(x=f32[4,4])"])\n'
    for name in ("of_a_folder", "_shared", "_private/of_a_private_folder"):
        path = tmp_path / "suites" / "mine" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(suite.format(path.stem))
    monkeypatch.setenv("TILEWRIGHT_PLUGINS", str(tmp_path))
    assert "of_a_folder" in SUITES
    SUITES._things.pop("of_a_folder")
    assert "_shared" not in SUITES
    assert "of_a_private_folder" not in SUITES


def imported_by(path: Path) -> set[str]:
    """Modules that a file imports, also those it names as `from package import module`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)


@pytest.mark.parametrize("kind", KINDS)
def test_no_plug_in_is_imported_by_its_neighbours(kind):
    files = sorted((PACKAGE / kind).rglob("*.py"))
    plug_ins = {module_name(f) for f in files if not f.stem.startswith("_")}
    list(Registry(kind, "plug-in"))  # loads them, in whatever folder they lie
    assert plug_ins <= set(sys.modules)
    assert {f.name: hit for f in files if (hit := imported_by(f) & plug_ins)} == {}


def test_whom_an_implementation_yields_to_is_there_and_never_yields_to_it():
    for name in IMPLS:
        before, seen = list(IMPLS[name].yields_to), set()
        while before:
            other = before.pop()
            assert other in IMPLS
            assert other != name
            if other not in seen:
                seen.add(other)
                before += IMPLS[other].yields_to
