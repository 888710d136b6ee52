"""Compiles what a search would measure first, and tells what it took: a Markdown table.

Needs no GPU. What it compiles is in the cache afterwards, so that a search on a machine with the
same headers in the same place spends no time on it.

    python benchmarks/compile_table.py --impl conv2d_weight_grad_cutlass3 --device-spec h200 \\
        --suite resnet50_v1_wgrad
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from tilewright.build import CompileTask
from tilewright.cli import options
from tilewright.compile.pool import CompilePool
from tilewright.device import DEVICES, DeviceSpec
from tilewright.errors import CompileError
from tilewright.impl import IMPLS, Implementation
from tilewright.op import Workload


def first_configs(
    impl: Implementation, workloads: Iterable[Workload], spec: DeviceSpec, most: int | None
) -> dict[str, tuple[CompileTask, Any]]:
    """Task and config of each kernel, by what is baked into it: untuned ones, then promising ones,
    at most so many of a workload."""
    found = {}
    for w in workloads:
        if reason := impl.unsupported(w, spec):
            click.echo(f"{w}: {reason}", err=True)
            continue
        configs = dict.fromkeys([impl.heuristic(w, spec), *impl.promising(w, spec)])
        for config in list(configs)[:most]:
            if task := impl.task(config, w, spec):
                found.setdefault(impl.compile_key(config, w), (task, config))
    return found


def table(
    impl: Implementation, kernels: Iterable[tuple[CompileTask, Any]], jobs: int | None
) -> list[Sequence[object]]:
    """Seconds that a compiler took, and registers and spilled bytes, beside each config's knobs."""
    kernels = list(kernels)
    with CompilePool(jobs) as pool:
        results = dict(pool.compile([task for task, _ in kernels]))
    lines: list[Sequence[object]] = []
    for task, config in kernels:
        knobs = [getattr(config, f.name) for f in fields(config)]
        found = results[task]
        if isinstance(found, CompileError):
            lines.append([*knobs, "", "", str(found).partition("\n")[0]])
            continue
        told = found.resources or impl.resources(config, found.log)
        spent = f"{found.compile_s:.1f}"
        lines.append([*knobs, spent, *((told.registers, told.spill_bytes) if told else ("", ""))])
    return lines


@click.command()
@options.targets
@click.option("--impl", "implementation", required=True)
@click.option("--device-spec", "device", default="h200", show_default=True)
@click.option("--most", type=click.IntRange(1), help="Configs of a workload; all without.")
@click.option("--jobs", type=click.IntRange(1), help="Compilers at once; one per CPU without.")
def main(
    workloads: tuple[str, ...],
    suites: tuple[str, ...],
    from_file: Path | None,
    only: tuple[str, ...],
    without: tuple[str, ...],
    implementation: str,
    device: str,
    most: int | None,
    jobs: int | None,
) -> None:
    targets = options.read_targets(workloads, suites, from_file, only, without)
    impl, spec = IMPLS[implementation], DEVICES[device]
    kernels = first_configs(impl, targets.workloads, spec, most)
    if not kernels:
        return
    began_s = time.perf_counter()
    lines = table(impl, kernels.values(), jobs)
    took_s = time.perf_counter() - began_s
    (_, config), *_ = kernels.values()
    head = [*(f.name for f in fields(config)), "seconds", "registers", "spilled"]
    for line in (head, ["--"] * len(head), *lines):
        click.echo(f"| {' | '.join(map(str, line))} |")
    libraries = len({task for task, _ in kernels.values()})
    click.echo(f"\n{len(lines)} kernels in {libraries} binaries, {took_s:.0f} s")


if __name__ == "__main__":
    main()
