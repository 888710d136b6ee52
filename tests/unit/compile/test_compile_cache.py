"""The cache of binaries: hits, keys, damage, several writers, and a writer killed half-way."""

import errno
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from processes import wait_until

from tilewright.build import CompileTask
from tilewright.compile import cache, cxx
from tilewright.compile.cache import cached, compiled
from tilewright.errors import CacheError, CompileError

SOURCE = 'extern "C" int answer() { return 42; }'
TASK = CompileTask("cxx", SOURCE, ("-shared", "-fPIC"), "answer")

# Counts its runs; "compiles" by copying the source behind a name that changes with every run.
COUNTING_COMPILER = r"""#!/bin/sh
if [ "$1" = --version ]; then echo "fake ${FAKE_VERSION:-1.0}"; exit; fi
echo run >> "$FAKE_RUNS"
sleep "${FAKE_SLEEP:-0}"
for argument; do case "$argument" in *.cpp) source=$argument ;; esac; library=$argument; done
{ cat "$source"; echo "// $$"; } > "$library"
"""


@pytest.fixture(autouse=True)
def cache_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def runs(monkeypatch, tmp_path):
    """Use the counting compiler; calling the fixture gives how often it ran."""
    script, log = tmp_path / "counting", tmp_path / "runs"
    script.write_text(COUNTING_COMPILER)
    script.chmod(0o755)
    log.touch()
    monkeypatch.setenv("TILEWRIGHT_CXX", str(script))
    monkeypatch.setenv("FAKE_RUNS", str(log))
    return lambda: len(log.read_text().splitlines())


def other_process(code):
    return subprocess.Popen([sys.executable, "-c", f"{PREAMBLE}\n{code}"])


PREAMBLE = f"""
import os, signal
from tilewright.build import CompileTask
from tilewright.compile import cache
task = {TASK!r}
"""


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_second_request_does_not_compile(runs):
    first = compiled(TASK)
    assert compiled(TASK) == first
    assert runs() == 1
    assert first.path.read_text().startswith(SOURCE)


def test_cached_only_looks(runs):
    assert cached(TASK) is None
    assert runs() == 0
    assert compiled(TASK) == cached(TASK)


@pytest.mark.parametrize(
    "other",
    [
        replace(TASK, source=SOURCE + " "),
        replace(TASK, flags=(*TASK.flags, "-O1")),
        replace(TASK, flags=("-shared -fPIC",)),
        replace(TASK, entry="question"),
    ],
)
def test_whatever_goes_into_the_compiler_goes_into_the_key(runs, other):
    assert compiled(TASK).key != compiled(other).key
    assert runs() == 2


def test_another_compiler_version_compiles_again(runs, monkeypatch):
    compiled(TASK)
    monkeypatch.setenv("FAKE_VERSION", "2.0")
    cxx._version.cache_clear()
    compiled(TASK)
    assert runs() == 2


def test_a_library_built_for_another_cpu_is_not_used(runs, monkeypatch):
    compiled(TASK)
    monkeypatch.setattr(cxx, "isa", lambda: "another")
    assert cached(TASK) is None


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "remove"])
@pytest.mark.parametrize("suffix", [".so", ".json"])
def test_a_damaged_entry_is_compiled_again(runs, cache_dir, suffix, damage):
    compiled(TASK)
    (path,) = (f for f in files(cache_dir) if f.suffix == suffix)
    content = path.read_bytes()
    if damage == "remove":
        path.unlink()
    elif damage == "flip":
        path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    else:
        path.write_bytes(content[: len(content) // 2 if damage == "truncate" else 0])
    assert cached(TASK) is None
    repaired = compiled(TASK)
    assert runs() == 2
    assert repaired.path.read_text().startswith(SOURCE)
    assert cached(TASK) == repaired


@pytest.mark.parametrize("content", ["null", "[]", '{"binary": 3}', "\xff"])
def test_a_description_of_the_wrong_shape_is_compiled_again(runs, cache_dir, content):
    compiled(TASK)
    (path,) = (f for f in files(cache_dir) if f.suffix == ".json")
    path.write_text(content, encoding="latin-1")
    assert cached(TASK) is None
    compiled(TASK)
    assert runs() == 2


def test_nothing_but_whole_entries_remains_in_the_folder(runs, cache_dir):
    compiled(TASK)
    assert sorted(path.suffix for path in files(cache_dir)) == [".json", ".so"]


def test_processes_compiling_the_same_task_at_once_leave_one_valid_entry(
    runs, monkeypatch, tmp_path
):
    monkeypatch.setenv("FAKE_SLEEP", "0.3")  # all of them are past the look-up before one is done
    code = f"""
import pathlib, time
here = pathlib.Path({str(tmp_path)!r})
(here / f"ready.{{os.getpid()}}").touch()
while len(list(here.glob("ready.*"))) < 4:
    time.sleep(0.01)
found = cache.compiled(task)
assert task.source in found.path.read_text()
"""
    processes = [other_process(code) for _ in range(4)]
    assert [process.wait(120) for process in processes] == [0] * 4
    assert runs() > 1
    found = cached(TASK)
    assert found is not None
    assert found.path.read_text().startswith(SOURCE)


def test_a_process_killed_while_it_compiles_leaves_no_entry(runs, cache_dir, monkeypatch):
    monkeypatch.setenv("FAKE_SLEEP", "60")
    process = other_process("cache.compiled(task)")
    wait_until(runs)
    process.kill()
    process.wait()
    assert files(cache_dir) == []
    monkeypatch.setenv("FAKE_SLEEP", "0")
    assert compiled(TASK) == cached(TASK)


@pytest.mark.parametrize("moves", [0, 1])
def test_a_process_killed_while_it_writes_leaves_no_entry(runs, moves):
    """Killed before the binary is in place, and between the binary and its description."""
    process = other_process(f"""
moved, move = [], os.replace
def killed(*paths):
    if len(moved) == {moves}:
        os.kill(os.getpid(), signal.SIGKILL)
    moved.append(move(*paths))
os.replace = killed
cache.compiled(task)
""")
    assert process.wait(30) == -signal.SIGKILL
    assert cached(TASK) is None
    assert compiled(TASK) == cached(TASK)
    assert runs() == 2


def test_a_folder_that_cannot_be_written_is_named_with_the_remedy(runs, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(CacheError, match=r"file/cache: Not a directory.*TILEWRIGHT_CACHE_DIR"):
        compiled(TASK)


def test_a_full_disk_is_named_with_the_remedy_and_leaves_nothing(runs, cache_dir, monkeypatch):
    def full(*paths):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cache.os, "replace", full)
    with pytest.raises(CacheError, match=r"No space left.*free space.*TILEWRIGHT_CACHE_DIR"):
        compiled(TASK)
    assert files(cache_dir) == []


def test_a_rejected_source_leaves_no_entry(cache_dir):
    with pytest.raises(CompileError):
        compiled(replace(TASK, source="no C++"))
    assert files(cache_dir) == []


def test_the_description_says_what_made_the_binary(cache_dir):
    compiled(TASK)
    (path,) = (f for f in files(cache_dir) if f.suffix == ".json")
    description = json.loads(path.read_text())
    assert description["compiler"][:2] == ["cxx", cxx.version()]
    assert description["flags"] == list(TASK.flags)
