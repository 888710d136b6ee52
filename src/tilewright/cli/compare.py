"""tilewright compare"""

from __future__ import annotations

from pathlib import Path

import click

from tilewright.cli import options, render

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.argument("old", type=_FILE)
@click.argument("new", type=_FILE)
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    default=2.0,
    show_default=True,
    help="Percent; a change by less is none.",
)
@options.json_option
def compare(old: Path, new: Path, tolerance: float, json_target: str | None) -> int:
    """What became of the rows of result file OLD in NEW. Exit code 1 if any is slower or gone.

    A row is slower if its time, its time over each baseline and its time over the floor all grew,
    each beyond their confidence intervals: a slower machine and another PyTorch are no
    regressions.
    """
    from dataclasses import asdict

    from tilewright import regressions, result_files

    found = regressions.changes(result_files.read(old), result_files.read(new), tolerance / 100)
    options.tell([asdict(c) for c in found], json_target, lambda: render.changes(found))
    return 1 if any(c.verdict in ("slower", "gone") for c in found) else 0
