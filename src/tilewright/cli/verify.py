"""tilewright verify"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tilewright.cli import options, render

if TYPE_CHECKING:
    from tilewright.measure.verify import Verdict
    from tilewright.op import Workload


@click.command()
@options.targets
@click.option("--impl", "implementation", metavar="I", help="Only this implementation.")
@click.option("--config", type=options.ConfigValues(), help="Its knobs; others are untuned.")
@options.seed_option
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
    """Hold every implementation against the fp64 reference; no timing."""
    targets = options.read_targets(workloads, suites, from_file, only, without)
    from tilewright.measure.runner import Isolated
    from tilewright.measure.verify import verification_error
    from tilewright.tune import verify_all

    found = []
    with Isolated(device) as runner:
        for w in targets.workloads:
            verdicts = verify_all(w, implementation, config, seed, runner=runner)
            found += [(w, *verdict) for verdict in verdicts]
    if json_target != "-":
        _render(found)
    if json_target:
        options.write_json([_row(*each) for each in found], json_target)
    wrong = [each for each in found if not each[3].ok]
    for w, name, values, verdict in wrong:
        error = verification_error(w, name, render.config(values), verdict, seed)
        click.echo(f"VerificationError: {error}", err=True)
    return 1 if wrong else 0


def _row(w: Workload, name: str, config: dict[str, Any], verdict: Verdict) -> dict[str, Any]:
    return {"workload": str(w), "implementation": name, "config": config, **asdict(verdict)}


def _render(found: list[tuple[Workload, str, dict[str, Any], Verdict]]) -> None:
    """A star marks an error of PyTorch's for which the bound was widened."""
    texts = list(dict.fromkeys(str(w) for w, *_ in found))
    short = dict(zip(texts, render.shortened(texts), strict=True))
    render.table(
        [
            *("workload", "implementation", ">ulp", ">PyTorch's", ">apart", ">allowed"),
            *(">differing", ">misrounded", ">PyTorch's", "integers", "deterministic", "right"),
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
