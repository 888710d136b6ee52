"""tilewright doctor"""

from __future__ import annotations

import click

from tilewright.cli import options, render


@click.command()
@options.device_option
@options.store_option
@click.option("--quick/--thorough", default=True, help="How finely to measure the ceilings.")
@click.option("--measure/--no-measure", default=True, help="Whether to measure them at all.")
@options.json_option
def doctor(
    device: str | None, store_url: str | None, quick: bool, measure: bool, json_target: str | None
) -> None:
    """What is here, and what is missing. Devices, compilers, versions, ceilings, records."""
    from tilewright.cli.progress import shown
    from tilewright.profiling.doctor import diagnose

    with shown() as progress:
        found = diagnose(device, store_url, measure, quick, progress)
    options.tell(found.as_dict(), json_target, lambda: render.diagnosis(found))
