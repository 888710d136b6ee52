"""tilewright explain"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from tilewright.cli import options, render
from tilewright.errors import InvalidArgument
from tilewright.settings import SHOWN

if TYPE_CHECKING:
    from tilewright.profiling.explain import CandidateFacts, Explanation

RECORDS = 20
"""So many recorded rows, and forecasts, are listed; --json has all of them."""


@click.command()
@click.argument("workload")
@options.import_option
@click.option("--show", type=click.Choice(SHOWN), help="One candidate in full, as text.")
@click.option("--impl", "implementation", metavar="I", help="The candidate's implementation.")
@click.option("--config", type=options.ConfigValues(), help="Its knobs; others are untuned.")
@options.device_option
@click.option("--device-spec", metavar="NAME", help="Compile for a device that is not here: h200.")
@click.option(
    "--max-registers",
    type=click.IntRange(16, 255),
    help="With --show: compile a CUDA kernel with at most so many registers a thread.",
)
@click.option("--measure/--no-measure", default=True, help="Measure ceilings for the floor.")
@options.store_option
@options.json_option
def explain(
    workload: str,
    show: str | None,
    implementation: str | None,
    config: dict[str, Any] | None,
    device: str | None,
    device_spec: str | None,
    max_registers: int | None,
    measure: bool,
    store_url: str | None,
    json_target: str | None,
) -> None:
    """Which implementation runs WORKLOAD, and why. What limits it, and what was measured."""
    from tilewright.cli.progress import shown
    from tilewright.profiling import explain as engine

    if max_registers and show in (None, "schedule"):
        raise InvalidArgument(
            "--max-registers caps what --show compiles: add --show resources, source, ptx or sass"
        )
    w = options.read_workload(workload)
    if show:
        text = engine.show(
            w, show, device, device_spec, implementation, config, max_registers, store_url
        )
        options.tell({"workload": str(w), show: text}, json_target, lambda: click.echo(text))
        return
    with shown() as progress:
        found = engine.explain(
            w, device, device_spec, store_url, implementation, config, measure, progress
        )
    options.tell(found.as_dict(), json_target, lambda: _render(found))


def _render(found: Explanation) -> None:
    floor = render.duration(found.floor_us or None) or "not measured here"
    hard = render.duration(found.hard_limit_us or None) or "unknown"
    render.table(
        [found.workload, ""],
        [
            ("device", found.device),
            ("runs", f"{found.chosen} ({found.source})"),
            ("because", found.reason),
            ("reads, writes", f"{found.read_bytes:,} and {found.written_bytes:,} bytes"),
            ("flops", f"{found.flops:,}"),
            ("floor", floor),
            ("hard limit", hard),
        ],
    )
    render.table(
        ["implementation", "backend", ">configs", "config, or why not", "resources", "occupancy"],
        [_candidate(c) for c in found.candidates],
    )
    for r in found.unfit:
        config = f" ({render.config(r['config'])})" if r["config"] else ""
        click.echo(
            f"the record of {r['created'][:10]}, {r['implementation']}{config}, is not used: "
            f"{r['reason']}; tilewright tune searches again"
        )
    if found.disturbed:
        click.echo(
            f"the latest duel was disturbed: its candidates took {found.disturbed:.0f} times what "
            "their search measured; tilewright tune measures again"
        )
    if found.forecasts:
        _render_forecasts(found.forecasts)
    if found.records:
        render.table(
            ["recorded", "config", "status", ">time", ">GB/s", "in duel", "on"],
            [
                (
                    r["implementation"],
                    render.config(r["config"]),
                    r["status"],
                    render.duration(r["median_us"]),
                    _gigabytes_per_s(found, r["median_us"]),
                    render.yes(r["final"]) if r["final"] else None,
                    r["created"][:16],
                )
                for r in found.records[:RECORDS]
            ],
        )
        if len(found.records) > RECORDS:
            click.echo(f"{len(found.records) - RECORDS} more: tilewright records show WORKLOAD")


def _render_forecasts(forecasts: list[dict[str, Any]]) -> None:
    """A column for each number of the model; what was measured comes first."""
    outside = ("implementation", "config", "predicted_us", "measured_us", "registers")
    numbers = [name for name in forecasts[0] if name not in outside]
    measured = [f for f in forecasts if f["measured_us"]]
    rest = [f for f in forecasts if not f["measured_us"]]
    shown = sorted(measured, key=lambda f: f["measured_us"])[:RECORDS]
    shown += rest[: RECORDS - len(shown)]
    render.table(
        ["model of", "config", *[f">{n}" for n in numbers], ">registers", ">model", ">measured"],
        [
            (
                f["implementation"],
                render.config(f["config"]),
                *[str(f[name]) for name in numbers],
                f["registers"] and str(f["registers"]),
                render.duration(f["predicted_us"]),
                render.duration(f["measured_us"]),
            )
            for f in shown
        ],
    )


def _gigabytes_per_s(found: Explanation, median_us: float | None) -> str | None:
    """Decimal gigabytes that the workload must read and write, per second of its time."""
    moved = found.read_bytes + found.written_bytes
    if not median_us:
        return None
    rate = moved / median_us / 1e3
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


def _candidate(c: CandidateFacts) -> tuple[Any, ...]:
    if c.unsupported:
        return c.implementation, c.backend, None, c.unsupported, None, None
    resources = occupancy = None
    if c.resources:
        r = c.resources
        resources = f"{r.registers} registers, {r.spill_bytes} B spilled"
    if held := [o for o in c.occupancy if o]:
        occupancy = "; ".join(
            f"{o.blocks_per_sm} blocks ({o.warps_fraction:.0%}), limited by {o.limiter}"
            for o in held
        )
    return c.implementation, c.backend, c.configs, render.config(c.config), resources, occupancy
