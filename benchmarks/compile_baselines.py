"""Compiles the baselines of torch.compile by many processes, ahead of a large suite's bench.

One after the other they take most of a bench's time on a GPU. What is made here lies in
torch.compile's own cache afterwards. Where Triton's autotuning times kernels, one process
at a time does, behind a lock.

    python benchmarks/compile_baselines.py --suite norms_sweep --only "x=f32["
    tilewright bench --suite norms_sweep --only "x=f32[" --budget 10m --json norms.json
"""

from __future__ import annotations

import fcntl
import functools
import itertools
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import click

from tilewright.cli import options
from tilewright.device import current_device
from tilewright.errors import CompileError
from tilewright.impl import IMPLS
from tilewright.op import Workload

LOCK = Path(tempfile.gettempdir()) / "tilewright_baselines.lock"
BASELINES = ("inductor", "inductor_max")
FEWEST = 4
"""For each process: starting one takes as long as compiling one or two."""


def alone(measure: Callable[..., Any]) -> Callable[..., Any]:
    """`measure` while no other process of ours measures on the device."""

    @functools.wraps(measure)
    def locked(*args: Any, **kwargs: Any) -> Any:
        with LOCK.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return measure(*args, **kwargs)

    return locked


def start() -> None:
    """Of each process: one compiler, and measurements behind the lock."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    CachingAutotuner.bench = alone(CachingAutotuner.bench)


def compile_one(name: str, text: str) -> str | None:
    """What the compiler says where it refuses."""
    import torch

    w, (_, spec) = Workload.parse(text), current_device(None)
    baseline = IMPLS[name]
    try:
        baseline.build(baseline.heuristic(w, spec), w, spec)
    except CompileError as error:
        return str(error)
    finally:
        torch._dynamo.reset()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return None


def supported(workloads: Sequence[Workload]) -> list[tuple[str, str]]:
    """Names of baselines and workloads; reasons of those left out are told once."""
    _, spec = current_device(None)
    pairs = itertools.product(BASELINES, workloads)
    reasons = {(name, str(w)): IMPLS[name].unsupported(w, spec) for name, w in pairs}
    for name, reason in dict.fromkeys((name, why) for (name, _), why in reasons.items() if why):
        click.echo(f"no {name}: {reason}", err=True)
    return [pair for pair, reason in reasons.items() if reason is None]


@click.command()
@options.targets
@click.option("--jobs", type=click.IntRange(1), help="Processes at once; one per CPU without.")
def main(
    workloads: tuple[str, ...],
    suites: tuple[str, ...],
    from_file: Path | None,
    only: tuple[str, ...],
    without: tuple[str, ...],
    jobs: int | None,
) -> None:
    targets = options.read_targets(workloads, suites, from_file, only, without)
    work = supported(targets.workloads)
    most = min(jobs or len(os.sched_getaffinity(0)), 1 + len(work) // FEWEST)
    began_s, refused = time.perf_counter(), 0
    spawn = multiprocessing.get_context("spawn")  # a process that was forked has no CUDA
    with ProcessPoolExecutor(most, mp_context=spawn, initializer=start) as pool:
        waiting = {pool.submit(compile_one, *pair): pair for pair in work}
        for done in as_completed(waiting):
            if reason := done.result():
                refused += 1
                click.echo(": ".join([*waiting[done], reason]), err=True)
    took_s = time.perf_counter() - began_s
    click.echo(f"{len(work) - refused} of {len(work)} baselines compiled in {took_s:.0f} s")


if __name__ == "__main__":
    main()
