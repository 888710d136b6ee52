"""tilewright tune"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tilewright.cli import options, render

if TYPE_CHECKING:
    from tilewright.report import Report

INTERRUPTED = 130
"""128 + SIGINT, as a shell reports it."""


@click.command()
@options.targets
@click.option(
    "--budget",
    "budget_s",
    type=options.Seconds(),
    help="Time for all workloads together, compiling the baselines not counted: 60s, 5m.",
)
@click.option("--configs", type=click.IntRange(1), help="At most so many configs per search.")
@click.option("--strategy", metavar="X", help="How to search: hill_climb, sweep, ...")
@click.option(
    "--param",
    "params",
    type=options.Knob(),
    multiple=True,
    help="The only values to try of a knob: vector=4,8 or split=1:128:1; may be repeated.",
)
@options.measuring
@click.option("--force", is_flag=True, help="Search again whatever is recorded.")
@click.option("--spilled", is_flag=True, help="Time configs that spill registers, too.")
def tune(
    workloads: tuple[str, ...],
    suites: tuple[str, ...],
    from_file: Path | None,
    only: tuple[str, ...],
    without: tuple[str, ...],
    budget_s: float | None,
    configs: int | None,
    strategy: str | None,
    params: tuple[tuple[str, tuple[Any, ...]], ...],
    implementations: tuple[str, ...],
    baselines: tuple[str, ...],
    method: str | None,
    jobs: int | None,
    seed: int,
    device: str | None,
    store_url: str | None,
    json_target: str | None,
    force: bool,
    spilled: bool,
) -> int:
    """Search, verify, measure and record; then print what was chosen.

    A workload is "softmax(x=f32[4096,4096])". Those with records that still stand are not searched
    again. Ctrl-C ends the run and keeps what was measured.
    """
    targets = options.read_targets(workloads, suites, from_file, only, without)
    options.tell_unserved(implementations, targets.workloads)
    from tilewright import tune as engine
    from tilewright.cli.progress import shown
    from tilewright.store import Store

    with Store(store_url) as store, shown() as progress:
        report = engine.tune(
            targets.workloads,
            device=device,
            store=store,
            strategy=strategy,
            budget_s=budget_s,
            budget_configs=configs,
            jobs=jobs,
            implementations=implementations or None,
            params=options.merged(params),
            baselines=baselines or None,
            method=method or targets.method,
            seed=seed,
            force=force,
            spilled=spilled,
            progress=progress,
        )
    if params and report.rows and not any(r.own or r.none_right for r in report.rows):
        click.echo("--param restricts nothing: no implementation with knobs takes part", err=True)
    return finish(targets.name, report, json_target, device=device)


def finish(
    suite: str,
    report: Report,
    json_target: str | None,
    winner: str = "chosen",
    recording: bool = True,
    device: str | None = None,
) -> int:
    """Print and write what a run found; the exit code that says how it went.

    `device` is as the caller named it, if he did.
    """
    from tilewright import results

    data = results.as_dict(suite, report)
    try:
        _show(data, report, json_target == "-", winner, device)
    finally:  # a full disk costs no table, nor a closed pipe the file
        if json_target == "-":
            options.write_json(data, "-")
        elif json_target:
            results.write_data(json_target, data)
    if report.interrupted:
        kept = "; what was measured before is recorded" if recording else ""
        click.echo(f"interrupted{kept}", err=True)
        return INTERRUPTED
    return 1 if report.failed else 0


def _show(
    data: Mapping[str, Any], report: Report, to_stderr: bool, winner: str, device: str | None
) -> None:
    from tilewright import results

    rows = results.table_rows(report)
    if rows:
        render.results(rows, to_stderr, winner)
        for fields, lines in data.get("summary_by", {}).items():
            render.groups(fields, lines, to_stderr, winner)
        render.summary(data, to_stderr)
    for line in (*wrong_baselines(rows, device), *disturbed(rows), *refusals(rows)):
        click.echo(line, err=True)
    for text, reason in report.failed.items():
        click.echo(f"{text}: {reason}", err=True)


def wrong_baselines(rows: Sequence[Mapping[str, Any]], device: str | None) -> list[str]:
    """Baselines that verification refused, one line each; their times stay in the table."""
    from tilewright.measure.verify import import_flags
    from tilewright.op import Workload

    found: dict[str, dict[str, str]] = {}
    for row in rows:
        for name, reason in row["wrong"].items():
            found.setdefault(name, {})[row["workload"]] = reason
    lines = []
    for name, reasons in found.items():
        text, reason = next(iter(reasons.items()))
        command = f"tilewright verify {import_flags(Workload.parse(text))}'{text}' --impl {name}"
        command += f" --device {device}" if device else ""
        lines.append(
            f"* {name} is wrong on {len(reasons)} of {len(rows)} workloads and was not chosen "
            f"there ({reason}); {command} shows it"
        )
    return lines


def disturbed(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Workloads whose times other programs made too long, each with how much."""
    return [
        f"{row['workload']}: in the duel, fought {row['fought']} times, candidates took "
        f"{row['disturbed']:.0f} times what their search measured: other programs disturb; tune "
        "measures it again when they have ended"
        for row in rows
        if row["disturbed"]
    ]


def refusals(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Who took no part, failed or was not searched, and why; one line for each reason, however many
    workloads."""
    return render.told_once(
        (row["workload"], name, reason)
        for row in rows
        for name, reason in (*row["refused"].items(), *row["unsearched"].items())
        if name not in row["wrong"]
    )
