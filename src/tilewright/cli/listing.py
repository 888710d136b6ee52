"""tilewright list"""

from __future__ import annotations

from typing import Any

import click

from tilewright.cli import options, render
from tilewright.profiling.listing import KINDS

COLUMNS = {
    "operators": ("operator", "what it computes"),
    "implementations": ("=implementation", "backend", "serves", "what it does"),
    "suites": ("=suite", ">workloads", "what they are, and their source"),
    "strategies": ("=strategy", "how it searches"),
    "devices": ("device", "arch", ">SMs", ">L2", ">memory", ">f16 tensor", ">f32"),
}


@click.command("list")
@click.argument("kind", type=click.Choice(list(KINDS)), required=False)
@options.import_option
@options.json_option
def list_(kind: str | None, json_target: str | None) -> None:
    """Operators, implementations, suites, strategies and devices.

    Without KIND all of them. Rates of devices are those of their datasheets; --json has each.
    """
    if json_target in KINDS:
        raise click.BadParameter(
            f"{json_target!r} is a kind, not a file; write --json - or put --json last"
        )
    found = {k: KINDS[k]() for k in ([kind] if kind else KINDS)}
    options.tell(found, json_target, lambda: _render(found))


def _render(found: dict[str, list[dict[str, Any]]]) -> None:
    for name, things in found.items():
        render.table(COLUMNS[name], [_row(name, thing) for thing in things])


def _row(kind: str, thing: dict[str, Any]) -> tuple[Any, ...]:
    match kind:
        case "operators":
            return thing["signature"], thing["summary"]
        case "implementations":
            served = thing["operators"]
            serves = "every operator" if served is None else ", ".join(served)
            return thing["name"], thing["backend"], serves, thing["summary"]
        case "suites":
            return thing["name"], thing["workloads"], f"{thing['summary']} {thing['source']}"
        case "devices":
            return _numbers(thing)
        case _:
            return thing["name"], thing["summary"]


def _numbers(device: dict[str, Any]) -> tuple[Any, ...]:
    def told(number: float, unit: float, form: str) -> str | None:
        return form.format(number / unit) if number else None

    return (
        device["name"],
        device["arch"],
        device["sms"] if device["kind"] == "cuda" else None,
        told(device["l2_bytes"], 2**20, "{:.0f} MiB"),
        told(device["dram_bytes_per_s"], 1e12, "{:.2f} TB/s"),
        *(told(device["flops"].get(d, 0), 1e12, "{:.0f} TFLOP/s") for d in ("f16_tensor", "f32")),
    )
