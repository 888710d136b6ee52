"""tilewright summary"""

from __future__ import annotations

from pathlib import Path

import click

from tilewright.cli import options, render


@click.command()
@click.argument(
    "files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option(
    "--by",
    "groupings",
    multiple=True,
    metavar="FIELD,...",
    help="A line for each value of op, x[0], x[-1], x.dtype, ...; may be repeated.",
)
@options.import_option
@options.thinning
@options.json_option
def summary(
    files: tuple[Path, ...],
    groupings: tuple[str, ...],
    only: tuple[str, ...],
    without: tuple[str, ...],
    json_target: str | None,
) -> None:
    """What result FILES say together. Those of one suite, measured in parts, become one.

    Without --by the suite's own groups are shown.
    """
    from tilewright import result_files, results
    from tilewright.suite import SUITES
    from tilewright.summaries import summary_by

    data = result_files.merged([result_files.read(path) for path in files])
    if only or without:
        left = options.thinned(data["rows"], only, without, lambda row: row["workload"])
        failures = data.get("failed", {}).items()
        failed = {w: why for w, why in failures if options.meant(w, only, without)}
        data = result_files.merged([{**data, "rows": left, "failed": failed}])
    rows = [result_files.row_of(row) for row in data["rows"]]
    counts = SUITES[data["suite"]].count_of() if data["suite"] in SUITES else {}
    groups = {fields: summary_by(rows, fields, counts) for fields in groupings}
    to_stderr = json_target == "-"
    for fields, lines in (groups or data.get("summary_by", {})).items():
        render.groups(fields, lines, to_stderr)
    render.summary(data, to_stderr)
    for text, reason in data.get("failed", {}).items():
        click.echo(f"{text}: {reason}", err=True)
    if json_target == "-":
        options.write_json(data, "-")
    elif json_target:
        results.write_data(json_target, data)
