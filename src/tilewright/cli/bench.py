"""tilewright bench"""

from __future__ import annotations

import functools
from pathlib import Path

import click

from tilewright.cli import options
from tilewright.cli.tune import finish


@click.command()
@options.targets
@click.option(
    "--budget",
    "budget_s",
    type=options.Seconds(),
    help="Time for all workloads together, compiling the baselines not counted: 60s, 5m. Nothing "
    "is left out for want of time, only measured less often.",
)
@options.measuring
def bench(
    workloads: tuple[str, ...],
    suites: tuple[str, ...],
    from_file: Path | None,
    only: tuple[str, ...],
    without: tuple[str, ...],
    budget_s: float | None,
    implementations: tuple[str, ...],
    baselines: tuple[str, ...],
    method: str | None,
    jobs: int | None,
    seed: int,
    device: str | None,
    store_url: str | None,
    json_target: str | None,
) -> int:
    """Measure what is chosen now, untuned kernels and every baseline. No search, no records."""
    targets = options.read_targets(workloads, suites, from_file, only, without)
    options.tell_unserved(implementations, targets.workloads)
    from tilewright import tune as engine
    from tilewright.cli.progress import shown
    from tilewright.dispatch.call import as_called
    from tilewright.store import Store

    with Store(store_url) as store, shown() as progress:
        report = engine.bench(
            targets.workloads,
            device=device,
            store=store,
            budget_s=budget_s,
            jobs=jobs,
            implementations=implementations or None,
            baselines=baselines or None,
            method=method or targets.method,
            seed=seed,
            progress=progress,
            as_called=functools.partial(as_called, store_url),
        )
    return finish(
        targets.name, report, json_target, winner="fastest", recording=False, device=device
    )
