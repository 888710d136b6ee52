"""What the documentation points at exists, and what it says to type is accepted."""

import inspect
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
import torch
from dispatching import CPU, record

from tilewright import tune
from tilewright.cli import cli
from tilewright.dispatch import selection
from tilewright.fusion import passes
from tilewright.op import Workload
from tilewright.record import best_by, read_lines
from tilewright.suite import SUITES

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)[^)]*\)")
HASHES = r"[0-9a-f]{7}(?:(?:, | and )[0-9a-f]{7})*"
NAMED = re.compile(rf"\[({HASHES})\]\(([^)]*results/[^)]*\.json)\)")
BEHIND = re.compile(rf"\]\(([^)]*results/[^)]*\.json)\)\)?,?\s+\(?(?:commits? )?({HASHES})")
"""A result file and its commits, in its link or behind it."""
FILE = re.compile(r"`((?:\w+/)+\w+\.(?:py|cuh|cu|hpp|h))`")
FOLDERS = ("src", "tests", "benchmarks")
CODE = re.compile(r"^```(?:sh|console)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def pages_with(pattern: re.Pattern[str]) -> list:
    return [
        pytest.param(page, found, id=f"{page.name}: {found.splitlines()[0][:60]}")
        for page in PAGES
        for found in pattern.findall(page.read_text())
    ]


def commands() -> list:
    found = []
    for page in PAGES:
        if page.name == "extending.md":
            continue  # test_extending.py runs those
        for block in CODE.findall(page.read_text()):
            lines = block.replace("\\\n", " ").splitlines()
            for name, value in re.findall(r'^(\w+)="(.*)"$', block, re.M):
                lines = [line.replace(f"${name}", value) for line in lines]
            found += [
                pytest.param(line, id=f"{page.name}: {line[:60]}")
                for line in lines
                if line.startswith("tilewright ")
            ]
    return found


@pytest.mark.parametrize(("page", "target"), pages_with(LINK))
def test_link_points_at_a_file_of_the_repository(page, target):
    assert (page.parent / target).exists()


@pytest.mark.parametrize(("page", "file"), pages_with(FILE))
def test_file_of_ours_is_where_it_is_said_to_be(page, file):
    assert any(source.match(file) for folder in FOLDERS for source in (ROOT / folder).rglob("*.*"))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commits_named_beside_a_result_file_are_those_it_was_measured_at(page):
    text = page.read_text()
    found = [*NAMED.findall(text), *(m[::-1] for m in BEHIND.findall(text))]
    for named, target in found:
        measured = json.loads((page.parent / target).read_text())["commit"]
        assert set(re.findall(r"\w{7}", named)) <= {c[:7] for c in measured.split(", ")}, target


@pytest.mark.parametrize("line", commands())
def test_command_in_the_documentation_is_accepted(line):
    name, *args = shlex.split(line.partition(" #")[0])[1:]
    command = cli.commands[name]
    if isinstance(command, click.Group):
        command, args = command.commands[args[0]], args[1:]
    args = [a for a in args if a != "--help"]
    parsed, rest, _ = command.make_parser(click.Context(command)).parse_args(args)
    assert not rest
    given = {name: v for name, v in parsed.items() if isinstance(v, (str, list, tuple))}
    if given.get("sources"):  # workloads of a person's own file
        return
    for text in given.get("workloads", ()):
        Workload.parse(text)
    if "workload" in given:
        Workload.parse(given["workload"])
    for suite in given.get("suites", ()):
        assert suite in SUITES


def test_make_targets_named_in_the_documentation_exist():
    makefile = (ROOT / "Makefile").read_text()
    named = {t for page in PAGES for t in re.findall(r"`?make (\w+)`?$", page.read_text(), re.M)}
    assert {"tune", "test"} <= named
    assert all(re.search(rf"^{target}:", makefile, re.M) for target in named)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_paths_in_backticks_exist(page):
    paths = re.findall(r"`((?:src|tests|docs|benchmarks|examples)/[\w./-]+)`", page.read_text())
    assert [p for p in paths if not (ROOT / p).exists()] == []


def test_the_table_of_passes_is_the_compilers_list():
    section = (ROOT / "docs" / "fusion.md").read_text().partition("\n## Passes\n")[2]
    rows = re.findall(r"^\| (`.*?`) \| ", section, re.M)
    told = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    run = {p.__name__ for p in (passes.drop_roundings, *passes.PASSES)}
    assert sorted(told) == sorted(run)


def test_readme_and_pictures_are_in_step_with_the_result_files():
    script = ROOT / "benchmarks" / "readme_table.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_study_of_register_caps_says_what_its_records_say():
    rows = read_lines(ROOT / "benchmarks" / "results" / "h200" / "study_5140.jsonl")
    found = best_by(rows, ("rows_per_thread", "tail", "max_registers"))
    records = {tuple(map(str, values)): r for values, r, _ in found}
    table = (
        (ROOT / "docs" / "row_kernels.md").read_text().partition("| rows per thread, tail | none ")
    )
    caps, _, *lines = (table[1] + table[2]).partition("\n\n")[0].replace("none", "0").splitlines()
    for line in lines:
        name, *cells = line.strip("| ").replace("*", "").split(" | ")
        for cap, cell in zip(caps.strip("| ").split(" | ")[1:], cells, strict=True):
            told = re.fullmatch(r"([\d.]+)(?: us)? \((\d+)(?:, ([\d.]+ k?B))?\)", cell)
            assert told is not None, cell
            time, registers, spilled = told.groups()
            r = records.pop((*name.split(", "), cap))
            assert time in (f"{r.median_us:.1f}", f"{r.median_us:.0f}"), (name, cap)
            assert int(registers) == r.resources["registers"], (name, cap)
            bytes_ = r.resources["spill_bytes"]
            assert spilled in (f"{bytes_} B" if bytes_ else None, f"{bytes_ / 1000:.1f} kB")
    assert not records


def test_the_example_in_the_readme_runs(monkeypatch, tmp_path):
    monkeypatch.setenv("TILEWRIGHT_STORE", f"sqlite:///{tmp_path / 'records.db'}")
    (block,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.S | re.M)
    names: dict = {}
    exec(block, names)
    x, weight, bias = names["x"], names["weight"], names["bias"]
    expected = torch.nn.functional.layer_norm(x, (768,), weight, bias)
    torch.testing.assert_close(names["y"], expected)


FROM_PYTHON = re.compile(r"^## From Python\n\n```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def test_tuning_from_python_goes_as_it_is_written(monkeypatch, store, capsys):
    (snippet,) = FROM_PYTHON.findall((ROOT / "docs" / "measuring.md").read_text())
    taken, rows = inspect.signature(tune.tune), []
    w = record(SimpleNamespace(add=rows.extend), "softmax(x=f32[4096,4096])", "inductor")

    def tuned(*args, **kwargs):
        assert taken.bind(*args, **kwargs).arguments["workloads"] == [w]
        store.add(rows)
        return SimpleNamespace(
            rows=[SimpleNamespace(workload=str(w), chosen="inductor", chosen_us=10.0)]
        )

    before = selection.choose(w, CPU).implementation
    monkeypatch.setattr(tune, "tune", tuned)
    exec(snippet, {})
    assert (before, selection.choose(w, CPU).implementation) == ("aten", "inductor")
    assert capsys.readouterr().out == f"{w} inductor 10.0\n"
