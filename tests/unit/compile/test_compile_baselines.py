"""Baselines compiled ahead of a bench are found by it, and kernels are timed one at a time."""

import itertools
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import compile_baselines

SOFTMAX = "softmax(x=f32[8,24])"
LATER = f"""
from torch._dynamo.utils import counters
from compile_baselines import compile_one
assert compile_one("inductor", "{SOFTMAX}") is None
print(counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"])
"""


@pytest.mark.slow
def test_another_process_finds_what_was_compiled(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    done = _run("compile_baselines.py", SOFTMAX)
    assert done.stdout.startswith("1 of 1 baselines compiled")
    assert "no inductor_max: max-autotune" in done.stderr
    assert _run("-c", LATER).stdout.split() == ["1", "0"]


def test_what_measures_waits_for_what_already_does(monkeypatch, tmp_path):
    monkeypatch.setattr(compile_baselines, "LOCK", tmp_path / "lock")
    spans = []

    @compile_baselines.alone
    def measure():
        start = time.perf_counter()
        time.sleep(0.05)
        spans.append((start, time.perf_counter()))

    threads = [threading.Thread(target=measure) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spans.sort()
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def _run(*arguments):
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(compile_baselines.__file__).parent,
    )
