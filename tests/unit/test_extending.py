"""Each recipe of docs/extending.md, run as it stands there."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
RECIPES = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))
FILE = re.compile(r"^```python\n# (\w+/\w+\.py)\n(.*?)^```", re.DOTALL | re.MULTILINE)
COMMANDS = re.compile(r"^```sh\n(tilewright .*?)^```", re.DOTALL | re.MULTILINE)


def write_plugins(folder: Path) -> list[str]:
    """All files of the page: later recipes build on the first one's operator."""
    files = FILE.findall(PAGE)
    for name, code in files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)
    return [name for name, _ in files]


def run(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    env = {
        **os.environ,
        "TILEWRIGHT_PLUGINS": str(folder / "plugins"),
        "TILEWRIGHT_STORE": f"sqlite:///{folder / 'records.db'}",
        "TILEWRIGHT_CACHE_DIR": str(folder / "cache"),
    }
    command = [sys.executable, "-m", "tilewright.cli", *shlex.split(line)[1:]]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)


def test_there_is_a_recipe_for_each_plug_in_folder(tmp_path):
    assert {name.split("/")[0] for name in write_plugins(tmp_path)} == {
        "ops",
        "impls",
        "devices",
        "strategies",
        "suites",
    }


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_works_as_written(recipe, tmp_path):
    write_plugins(tmp_path / "plugins")
    lines = [c for block in COMMANDS.findall(RECIPES[recipe]) for c in block.splitlines()]
    assert lines
    for line in lines:
        done = run(line, tmp_path)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        assert done.stdout


def test_plug_ins_are_formatted_like_the_package(tmp_path):
    write_plugins(tmp_path)
    ruff = Path(sys.executable).with_name("ruff")
    done = subprocess.run(
        [ruff, "format", "--check", "--line-length=100", tmp_path], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
