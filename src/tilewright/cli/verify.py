"""tilewright verify"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tilewright.cli import options, render
from tilewright.errors import (
    InvalidArgument,
    LaunchError,
    NoErrorRule,
    NoImplementation,
    TilewrightError,
)

if TYPE_CHECKING:
    from tilewright.measure.verify import Verdict
    from tilewright.op import Workload


@click.command()
@options.targets
@click.option("--impl", "implementation", metavar="I", help="Only this implementation.")
@click.option("--config", type=options.ConfigValues(), help="Its knobs; others are untuned.")
@options.seed_option()
@options.device_option
@options.json_option
def verify(
    workloads: tuple[str, ...],
    suites: tuple[str, ...],
    from_file: Path | None,
    only: tuple[str, ...],
    without: tuple[str, ...],
    implementation: str | None,
    config: dict[str, Any] | None,
    seed: int,
    device: str | None,
    json_target: str | None,
) -> int:
    """Hold every implementation against the fp64 reference; no timing.

    A workload that cannot be verified, and an implementation that does not support one, is told at
    the end and costs no other its verdicts.
    """
    targets = options.read_targets(workloads, suites, from_file, only, without)
    from tilewright.cli.progress import shown
    from tilewright.impl import IMPLS, implementations
    from tilewright.measure.runner import Isolated
    from tilewright.measure.verify import verification_error
    from tilewright.tune import unsupporting, verify_all

    if implementation is not None and implementation not in IMPLS:
        raise IMPLS.unknown(implementation)
    if config and implementation is None:
        raise InvalidArgument("--config belongs to one implementation: name it (--impl)")
    found: list[tuple[Workload, str, dict[str, Any], Verdict]] = []
    failed: dict[Workload, TilewrightError] = {}
    left_out: list[tuple[str, str, str]] = []
    interrupted = False
    with Isolated(device) as runner, shown() as progress:
        spec = runner.describe().spec
        try:
            for i, w in enumerate(targets.workloads):
                progress.workload(w, i, len(targets.workloads))
                try:
                    verdicts = verify_all(w, implementation, config, seed, runner=runner)
                except (InvalidArgument, LaunchError, NoErrorRule, NoImplementation) as error:
                    failed[w] = error
                    progress.ended(w, "failed")
                    continue
                found += [(w, *verdict) for verdict in verdicts]
                if implementation is None:
                    reasons = unsupporting(implementations(w), w, spec)
                    left_out += [(str(w), name, reason) for name, reason in reasons.items()]
                right = sum(verdict.ok for *_, verdict in verdicts)
                progress.ended(w, f"{right} of {len(verdicts)} right")
        except KeyboardInterrupt:
            interrupted = True
    options.tell([_row(*each) for each in found], json_target, lambda: _render(found))
    wrong = [
        verification_error(w, name, render.config(values), verdict, seed, device)
        for w, name, values, verdict in found
        if not verdict.ok
    ]
    for line in render.told_once(left_out):
        click.echo(line, err=True)
    for refusal in wrong:
        click.echo(f"VerificationError: {refusal}", err=True)
    for w, problem in failed.items():
        named = "" if str(w) in str(problem) else f"{w}: "
        click.echo(f"{type(problem).__name__}: {named}{problem}", err=True)
    if interrupted:
        raise KeyboardInterrupt
    return max([*(e.exit_code for e in (*wrong, *failed.values())), 0])


def _row(w: Workload, name: str, config: dict[str, Any], verdict: Verdict) -> dict[str, Any]:
    return {"workload": str(w), "implementation": name, "config": config, **asdict(verdict)}


def _render(found: list[tuple[Workload, str, dict[str, Any], Verdict]]) -> None:
    """A star marks an error of PyTorch's for which the bound was widened."""
    if not found:
        return
    texts = list(dict.fromkeys(str(w) for w, *_ in found))
    short = dict(zip(texts, render.shortened(texts), strict=True))
    render.table(
        [
            *("workload", "implementation", ">ulp", ">PyTorch's ulp", ">apart", ">allowed"),
            *(">differing", ">misrounded", ">PyTorch's misrounded"),
            *("integers", "deterministic", "right"),
        ],
        [
            (
                short[str(w)],
                name,
                _of_each(f"{a.ulp:.2f}" for a in v.outputs)
                or (f"{v.max_ulp:.2f}" if v.ran else None),
                _of_each(f"{a.vendor_ulp:.2f}{'' if a.vendor_within else '*'}" for a in v.outputs),
                _of_each(f"{a.apart_ulp:.2f}" for a in v.outputs),
                f"{v.bound_ulp:.2f}" if v.ran else None,
                _of_each(f"{a.differing:.1%}" for a in v.outputs),
                _of_each(f"{a.misrounded:.1%}" for a in v.outputs),
                _of_each(f"{a.vendor_misrounded:.1%}" for a in v.outputs),
                {None: None, True: "exact", False: "WRONG"}[v.integer_exact],
                render.yes(v.deterministic) if v.ran else None,
                render.yes(v.ok) if v.ran else "not run",
            )
            for w, name, _, v in found
        ],
    )


def _of_each(texts: Iterable[str]) -> str | None:
    """Of each output, in their order."""
    return ", ".join(texts) or None
