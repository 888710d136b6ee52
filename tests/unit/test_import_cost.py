"""The command line answers before torch could have been imported."""

import json
import os
import subprocess
import sys

import pytest

COMMANDS = ["doctor", "list", "tune", "bench", "verify", "explain", "records"]
LOADED = """
import json, sys
from tilewright.cli import main
code = main({args!r})
print(json.dumps([code, sorted(m for m in ("torch", "sqlalchemy", "rich") if m in sys.modules)]))
"""


def loaded_by(args: list[str]) -> tuple[int, list[str]]:
    script = LOADED.format(args=args)
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return tuple(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("args", [["--help"], ["--version"], *([c, "--help"] for c in COMMANDS)])
def test_help_and_version_import_no_torch_no_sqlalchemy_no_rich(args):
    assert loaded_by(args) == (0, [])


def test_bad_options_are_refused_without_importing_torch():
    assert loaded_by(["tune", "softmax(x=f32[4,4])", "--budget", "soon"]) == (2, [])


@pytest.mark.parametrize("kind", ["suites", "strategies", "devices"])
def test_what_needs_no_torch_is_listed_without_it(kind):
    assert loaded_by(["list", kind, "--json"]) == (0, [])


def test_help_costs_less_than_a_third_of_a_second_of_cpu():
    def once() -> float:
        before = os.times()
        subprocess.run(
            [sys.executable, "-m", "tilewright.cli", "--help"], capture_output=True, check=True
        )
        after = os.times()
        return (after.children_user + after.children_system) - (
            before.children_user + before.children_system
        )

    assert min(once() for _ in range(3)) < 0.3
