"""tilewright records list|show|study|export|import|prune"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tilewright.cli import options, render
from tilewright.errors import InvalidArgument
from tilewright.record import STATUSES

if TYPE_CHECKING:
    from tilewright.record import Record
    from tilewright.registry import Registry
    from tilewright.store import Store

since_option = click.option(
    "--since", metavar="DATE", help="Created at this date or later (ISO 8601)."
)


def of_one(command: Any) -> Any:
    """--op, --impl and --status; see `asked`."""
    for decorate in (
        click.option("--status", type=click.Choice(STATUSES), help="Of one status."),
        click.option("--impl", "implementation", metavar="I", help="Of one implementation."),
        click.option("--op", metavar="NAME", help="Of one operator."),
    ):
        command = decorate(command)
    return command


def asked(store: Store, **fields: str | None) -> dict[str, Any]:
    """The fields that are given, with their values.

    Raises:
        InvalidArgument: an operator or implementation that is neither here nor has records.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    for field in ("op", "implementation"):
        name = given.get(field)
        if name is not None and name not in (recorded := store.names(field)):
            from tilewright.impl import IMPLS
            from tilewright.op import OPS

            registry: Registry[Any] = OPS if field == "op" else IMPLS
            if name not in registry:
                raise registry.unknown(name, recorded)
    return given


@click.group(cls=options.InOrder)
def records() -> None:
    """What was measured: list it, move it elsewhere, thin it out."""


@records.command("list")
@of_one
@since_option
@click.option(
    "--limit", type=click.IntRange(1), default=40, show_default=True, help="At most so many rows."
)
@options.store_option
@options.json_option
def list_(
    op: str | None,
    implementation: str | None,
    status: str | None,
    since: str | None,
    limit: int,
    store_url: str | None,
    json_target: str | None,
) -> None:
    """Rows, newest first."""
    from tilewright.store import Store

    with Store(store_url) as store:
        fields = asked(store, op=op, implementation=implementation, status=status)
        found = store.query(since=since, limit=limit + 1, **fields)
        _print(found[:limit], json_target, store)
    if len(found) > limit and json_target != "-":
        click.echo(f"these are the newest {limit}: --limit for more")


@records.command()
@click.argument("workload")
@options.import_option
@options.store_option
@options.json_option
def show(workload: str, store_url: str | None, json_target: str | None) -> None:
    """Every row of one WORKLOAD, the fastest first."""
    from tilewright.profiling.knobs import as_declared
    from tilewright.store import Store

    w = options.read_workload(workload)
    with Store(store_url) as store:
        rows = [as_declared(r, w) for r in store.query(workload=str(w))]
        rows.sort(key=lambda r: (r.median_us is None, r.median_us or 0.0))
        _print(rows, json_target, store)


@records.command()
@click.argument("workload")
@options.import_option
@click.option("--by", metavar="KNOB,...", required=True, help="One line for each of their values.")
@click.option("--across", metavar="KNOB", help="One column for each of this one's values.")
@click.option("--impl", "implementation", metavar="I", default="fused", show_default=True)
@click.option("--device", metavar="TEXT", help="Of devices whose name holds this text: H200.")
@click.option("--method", type=click.Choice(["cpu", "events", "graph"]), help="Timed like this.")
@click.option(
    "--from",
    "from_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Of a file that export wrote, not of the store.",
)
@options.store_option
@options.json_option
def study(
    workload: str,
    by: str,
    across: str | None,
    implementation: str,
    device: str | None,
    method: str | None,
    from_file: Path | None,
    store_url: str | None,
    json_target: str | None,
) -> None:
    """How the time of one WORKLOAD depends on some knobs. The best config for each value.

    There is a table for each device and way of timing; wrong results and invalid times are left
    out. With --across, each place of a table has the best time and its registers, spilled bytes
    too.
    """
    from tilewright.profiling.knobs import as_declared
    from tilewright.record import best_by, read_lines
    from tilewright.store import Store

    knobs = tuple(name.strip() for name in (*by.split(","), *([across] if across else [])))
    w = options.read_workload(workload)
    text = str(w)
    if from_file:
        rows = [r for r in read_lines(from_file)
                if (r.workload, r.implementation) == (text, implementation)]  # fmt: skip
    else:
        with Store(store_url) as store:
            rows = store.query(workload=text, implementation=implementation)
    if not rows:
        raise InvalidArgument(
            f"no records of {implementation} on {text} in {from_file or store}; tune it first, or "
            "name another implementation (--impl)"
        )
    found = [
        (values, as_declared(r, w), count)
        for values, r, count in best_by(_measured_there(rows, device, method), knobs)
    ]
    content = [
        {"device": r.device, "timed_by": r.method, **dict(zip(knobs, values, strict=True)),
         "configs": count, "median_us": r.median_us, "resources": r.resources,
         "config": r.config}
        for values, r, count in found
    ]  # fmt: skip

    def show() -> None:
        for (on, by_method), group in itertools.groupby(found, lambda each: _where(each[1])):
            click.echo(f"{on}, timed by {by_method}")
            _render_study(knobs, list(group), crossed=across is not None)

    options.tell(content, json_target, show)


def _where(r: Record) -> tuple[str, str]:
    return r.device, r.method


def _measured_there(rows: Sequence[Record], device: str | None, method: str | None) -> list[Record]:
    found = [
        r
        for r in rows
        if (device or "").casefold() in r.device.casefold() and method in (None, r.method)
    ]
    if rows and not found:
        there = "; ".join(f"{on}, timed by {by}" for on, by in sorted(set(map(_where, rows))))
        raise InvalidArgument(
            f"no such records with --device {device or 'any'} --method {method or 'any'}; "
            f"there are those of {there}"
        )
    return found


def _render_study(
    knobs: Sequence[str], found: Sequence[tuple[tuple[Any, ...], Record, int]], crossed: bool
) -> None:
    if crossed:
        render.crossed(knobs, [(values, _place(r)) for values, r, _ in found])
        return
    render.table(
        [*knobs, ">configs", ">best", ">registers", ">spilled", "its other knobs"],
        [
            (
                *map(str, values),
                count,
                render.duration(r.median_us),
                (r.resources or {}).get("registers"),
                (r.resources or {}).get("spill_bytes"),
                render.config({k: v for k, v in r.config.items() if k not in knobs}),
            )
            for values, r, count in found
        ],
    )


def _place(r: Record) -> str:
    registers, spilled = ((r.resources or {}).get(name) for name in ("registers", "spill_bytes"))
    told = f" ({registers}{f', {spilled} B spilled' if spilled else ''})" if registers else ""
    return f"{render.duration(r.median_us)}{told}"


@records.command()
@click.argument(
    "path",
    type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
    callback=options.writable,
)
@of_one
@since_option
@options.store_option
@options.json_option
def export(
    path: Path,
    op: str | None,
    implementation: str | None,
    status: str | None,
    since: str | None,
    store_url: str | None,
    json_target: str | None,
) -> None:
    """Write rows to PATH as JSON lines, oldest first. A PATH of - is standard output."""
    from tilewright.record import as_lines
    from tilewright.store import Store

    piped = str(path) == "-"
    if piped and json_target == "-":
        raise InvalidArgument("the rows go to standard output already: give --json a file")
    with Store(store_url) as store:
        fields = asked(store, op=op, implementation=implementation, status=status)
        if piped:
            rows = store.query(since=since, **fields)
            click.echo(as_lines(reversed(rows)), nl=False)
            count = len(rows)
        else:
            count = store.export(path, since=since, **fields)
        _tell({"exported": count, "path": str(path)}, json_target, to_stderr=piped)


@records.command("import")
@click.argument("path", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@options.store_option
@options.json_option
def import_(path: Path, store_url: str | None, json_target: str | None) -> None:
    """Add the rows of a file that export wrote. All or none; known ones are left out."""
    from tilewright.store import Store

    with Store(store_url) as store:
        _tell({"imported": store.import_(path), "path": str(path)}, json_target)


@records.command()
@of_one
@click.option("--before", metavar="DATE", help="Created before this date (ISO 8601).")
@click.option("--superseded", is_flag=True, help="Measured again later in the same way.")
@click.option(
    "--other-versions",
    is_flag=True,
    help="Measured on this device with another torch, CUDA, driver, compiler or library.",
)
@click.option(
    "--device",
    metavar="D",
    help="Measured on this device: cpu, cuda or cuda:1. Without it --other-versions takes the GPU "
    "if torch sees one, else the CPU, and the others take all devices.",
)
@options.store_option
@options.json_option
def prune(
    op: str | None,
    implementation: str | None,
    status: str | None,
    before: str | None,
    superseded: bool,
    other_versions: bool,
    device: str | None,
    store_url: str | None,
    json_target: str | None,
) -> None:
    """Delete the rows that meet every condition given."""
    from tilewright.device import current_device
    from tilewright.store import Store, environment

    if not (op or implementation or status or before or superseded or other_versions):
        raise InvalidArgument(
            "say what to delete: --before, --superseded, --other-versions, --op, --impl or --status"
        )
    key = versions = None
    if device is not None or other_versions:
        key, _, versions = environment(current_device(device)[0])
    with Store(store_url) as store:
        count = store.prune(
            before=before,
            superseded=superseded,
            other_versions_than=versions if other_versions else None,
            device=key,
            **asked(store, op=op, implementation=implementation, status=status),
        )
        _tell({"deleted": count, "store": str(store)}, json_target)


def _tell(content: dict[str, Any], json_target: str | None, to_stderr: bool = False) -> None:
    told = ", ".join(f"{name}: {value}" for name, value in content.items())
    options.tell(content, json_target, lambda: click.echo(told, err=to_stderr))


def _print(rows: Sequence[Record], json_target: str | None, store: Store) -> None:
    from tilewright.record import as_dict

    absent = ", which does not exist" if store.path and not store.path.exists() else ""

    def show() -> None:
        if rows:
            _render_records(rows)
        else:
            click.echo(f"no such records in {store}{absent}")

    options.tell([as_dict(row) for row in rows], json_target, show)


SHARED = ("workload", "implementation", "status", "duel", "device")
"""Columns that a table leaves out where its rows agree: their value stands above it."""


def _render_records(rows: Sequence[Record]) -> None:
    texts = list(dict.fromkeys(r.workload for r in rows))
    short = texts if len(texts) == 1 else render.shortened(texts)
    workload_of = dict(zip(texts, short, strict=True))
    everywhere = _common_knobs(rows)
    columns: dict[str, list[Any]] = {
        "workload": [workload_of[r.workload] for r in rows],
        "implementation": [r.implementation for r in rows],
        "config": [
            render.config(
                {k: v for k, v in r.config.items() if k not in everywhere[r.implementation]}
            )
            for r in rows
        ],
        "status": [r.status for r in rows],
        ">time": [render.duration(r.median_us) for r in rows],
        "duel": ["yes" if r.final else None for r in rows],
        "device": [r.device for r in rows],
        "created": [r.created[:16].replace("T", " ") for r in rows],
    }
    for heading in SHARED:
        first, *others = columns[heading]
        if others and all(value == first for value in others):
            click.echo(f"{heading}: {first or '-'}")
            del columns[heading]
    for implementation, knobs in everywhere.items():
        if knobs:
            click.echo(f"every {implementation} has {render.config(knobs)}")
    if not any(columns["config"]):
        del columns["config"]
    render.table(list(columns), zip(*columns.values(), strict=True))


def _common_knobs(rows: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """The knobs that all rows of an implementation have alike, where it has several."""
    configs: dict[str, list[dict[str, Any]]] = {}
    for r in rows:
        configs.setdefault(r.implementation, []).append(r.config)
    return {
        name: {
            knob: value
            for knob, value in first.items()
            if others and all(c.get(knob, ...) == value for c in others)
        }
        for name, (first, *others) in configs.items()
    }
