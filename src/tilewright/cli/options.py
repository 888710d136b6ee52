"""Options that several commands share, and how their values are read."""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tilewright.errors import InvalidArgument
from tilewright.files import check_writable, write_whole
from tilewright.text import counted

if TYPE_CHECKING:
    from tilewright.op import Workload

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
P = TypeVar("P", str, Path)

MAX_RANGE = 65536
"""A range with more values than this is a slip of the pen, not a list of candidates."""


class InOrder(click.Group):
    """Lists commands as they are used, not by the alphabet."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@dataclass(frozen=True)
class Targets:
    """What a command works on. `name` is the suite's, or CUSTOM for anything else.

    `method` is how the suite wants a GPU timed; None leaves it to the engine.
    """

    name: str
    workloads: list[Workload]
    method: str | None


def thinning(command: F) -> F:
    """--only and --without; see `thinned`."""
    for decorate in (
        click.option(
            "--without",
            multiple=True,
            metavar="TEXT",
            help="Of all these, only workloads that do not hold this text.",
        ),
        click.option(
            "--only",
            multiple=True,
            metavar="TEXT",
            help="Of all these, only workloads that hold this text: softmax, [8192, or f16.",
        ),
    ):
        command = decorate(command)
    return command


def thinned(
    found: Iterable[T],
    only: Sequence[str],
    without: Sequence[str],
    text: Callable[[T], str] = str,
) -> list[T]:
    """What holds any of the texts `only`, if there are such, and none of `without`, in order.

    Args:
        text: of one workload.

    Raises:
        InvalidArgument: nothing is left.
    """
    everything = list(found)
    left = [w for w in everything if meant(text(w), only, without)]
    if not left:
        told = [f"holds {' or '.join(map(repr, only))}"] * bool(only)
        told += [f"is without {' and '.join(map(repr, without))}"] * bool(without)
        there = counted(len(everything), "workload")
        raise InvalidArgument(f"none of {there} {' and '.join(told)}")
    return left


def meant(text: str, only: Sequence[str], without: Sequence[str]) -> bool:
    return (not only or any(t in text for t in only)) and not any(t in text for t in without)


def _import(ctx: click.Context, param: click.Parameter, sources: Sequence[str]) -> None:
    for source in sources:
        from tilewright.op import OPS
        from tilewright.registry import import_source

        before = set(OPS)
        with contextlib.redirect_stdout(sys.stderr):  # what it prints is no result
            new = import_source(source)
        if new and set(OPS) == before:
            raise InvalidArgument(
                f"{source} fuses no function: decorate one with @tw.fuse at its top level, not "
                'below `if __name__ == "__main__"`'
            )


import_option = click.option(
    "--import",
    "sources",
    multiple=True,
    metavar="FILE|MODULE",
    expose_value=False,
    callback=_import,
    help="A .py file or a module with functions of tw.fuse; may be repeated.",
)


def targets(command: F) -> F:
    """WORKLOAD..., --import, --suite and --from, thinned out; see `read_targets`."""
    for decorate in (
        thinning,
        click.option(
            "--from",
            "from_file",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            help="A JSON file with a list of workloads, or a result file.",
        ),
        click.option("--suite", "suites", multiple=True, help="A named suite; may be repeated."),
        import_option,
        click.argument("workloads", nargs=-1),
    ):
        command = decorate(command)
    return command


def read_targets(
    texts: Sequence[str],
    suites: Sequence[str],
    from_file: Path | None,
    only: Sequence[str] = (),
    without: Sequence[str] = (),
) -> Targets:
    """The distinct workloads of all three sources, `thinned`.

    Raises:
        InvalidArgument: nothing was named or is left, or something named cannot be read.
    """
    from tilewright.suite import CUSTOM, SUITES

    found: dict[Workload, None] = {}
    for name in suites:
        found.update(dict.fromkeys(SUITES[name].workloads()))
    listed = workloads_in(from_file) if from_file else []
    found.update(dict.fromkeys(read_workload(text) for text in [*listed, *texts]))
    if not found:
        raise InvalidArgument(
            f"name a workload, --suite or --from; suites here: {', '.join(SUITES)}"
        )
    alone = len(suites) == 1 and not listed and not texts
    methods = {SUITES[name].method for name in suites}
    return Targets(
        suites[0] if alone else CUSTOM,
        thinned(found, only, without),
        methods.pop() if len(methods) == 1 else None,
    )


def tell_unserved(implementations: Iterable[str], workloads: Sequence[Workload]) -> None:
    """Of those that were named, which compute none of the workloads: a line for each on stderr."""
    from tilewright.impl import IMPLS

    for named in filter(None, map(IMPLS.get, implementations)):
        if named.operators and not any(named.serves(w.op) for w in workloads):
            click.echo(
                f"--impl {named.name} takes no part: it computes {', '.join(named.operators)}",
                err=True,
            )


def read_workload(text: str) -> Workload:
    """Raises InvalidArgument for what cannot be read, or what a person's function refuses."""
    from tilewright.op import Workload

    w = Workload.parse(text)
    if w.operator.fused:  # what its function makes of these shapes is known to itself alone
        w.operator.output_specs(w)
    return w


def workloads_in(path: Path) -> list[str]:
    """Workload texts of a JSON file: a list of texts, or of rows that have a "workload"; and, of a
    result file, those that failed."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path} is not readable JSON: {error}") from None
    if isinstance(content, dict):
        failed = content.get("failed", {})
        content = content.get("workloads", content.get("rows"))
        if isinstance(content, list) and isinstance(failed, dict):
            content = [*content, *failed]
    rows = content if isinstance(content, list) else []
    texts = [row.get("workload") if isinstance(row, dict) else row for row in rows]
    named = [text for text in texts if isinstance(text, str)]
    if not named or len(named) < len(texts):
        raise InvalidArgument(
            f'{path} should hold a list of workloads such as ["softmax(x=f32[4096,4096])"]'
        )
    return named


# --- values ----------------------------------------------------------------------------------


class Seconds(click.ParamType):
    """A duration, in seconds: 90, 90s, 2m, 1.5h."""

    name = "duration"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|h|)", str(value).strip())
        if not match:
            self.fail(f"{value!r} is not a duration such as 60s, 5m or 1h", param, ctx)
        number, unit = match.groups()
        return float(number) * {"": 1, "s": 1, "m": 60, "h": 3600}[unit]


class Knob(click.ParamType):
    """NAME=VALUES, where VALUES are a list 1,2,4 and ranges first:last:step, the last included."""

    name = "name=values"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, tuple[Any, ...]]:
        if isinstance(value, tuple):
            return value
        name, equals, listed = value.partition("=")
        if not name.strip() or not equals or not listed.strip():
            self.fail(
                f"{value!r} should be NAME=VALUES, such as split_k=1,2,4 or split_k=1:128:1",
                param,
                ctx,
            )
        try:
            values = [v for part in listed.split(",") for v in _values(part.strip())]
        except ValueError as error:
            self.fail(f"{value!r}: {error}", param, ctx)
        return name.strip(), tuple(dict.fromkeys(values))


class ConfigValues(click.ParamType):
    """name=value,... as errors and tables print a config."""

    name = "name=value,..."

    def convert(self, value: Any, param: Any, ctx: Any) -> dict[str, Any]:
        if isinstance(value, dict):
            return value
        config = {}
        for part in filter(None, (p.strip() for p in value.split(","))):
            name, equals, text = part.partition("=")
            if not name or not equals or not text:
                self.fail(f"{part!r} should be name=value", param, ctx)
            config[name.strip()] = literal(text.strip())
        return config


def literal(text: str) -> Any:
    """An int, a float, true, false or none (in any case) if it reads as one, else the text."""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def _values(part: str) -> Iterator[Any]:
    if not re.fullmatch(r"-?\d+:-?\d+(:-?\d+)?", part):
        if not part or ":" in part:
            raise ValueError(f"{part!r} is neither a value nor a range first:last:step")
        yield literal(part)
        return
    first, last, step = [*map(int, part.split(":")), 1][:3]
    if step == 0 or (last - first) * step < 0:
        raise ValueError(f"the range {part} never reaches its end")
    values = range(first, last + (1 if step > 0 else -1), step)
    if len(values) > MAX_RANGE:
        raise ValueError(f"the range {part} has {len(values)} values, more than {MAX_RANGE}")
    yield from values


# --- output ----------------------------------------------------------------------------------


def writable(ctx: click.Context, param: click.Parameter, value: P) -> P:
    """Refuses what cannot be written before the work whose result it is to hold; - is standard
    output."""
    try:
        if str(value) != "-":
            check_writable(value)
    except OSError as error:
        raise click.BadParameter(
            f"{value} cannot be written: {error.strerror}; name another file", ctx, param
        ) from None
    return value


def _json_target(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value and "(" in value:
        raise click.BadParameter(
            f"{value!r} reads as a workload, not as a file; write --json - or put --json last",
            ctx,
            param,
        )
    if value == "-":  # what a person's function prints while it is traced is no JSON
        ctx.meta[_STDOUT] = sys.stdout
        ctx.with_resource(contextlib.redirect_stdout(sys.stderr))
    return value and writable(ctx, param, value)


_STDOUT = f"{__name__}.stdout"
json_option = click.option(
    "--json",
    "json_target",
    is_flag=False,
    flag_value="-",
    metavar="[FILE]",
    callback=_json_target,
    help="Write the result as JSON to FILE, or to standard output without one.",
)
device_option = click.option(
    "--device", metavar="D", help="cpu, cuda or cuda:1; the GPU if torch sees one, else the CPU."
)
store_option = click.option(
    "--store", "store_url", metavar="URL", help="SQLAlchemy URL of the records."
)


def seed_option(of: str = "the example inputs") -> Callable[[F], F]:
    return click.option(
        "--seed",
        type=click.IntRange(-(2**63), 2**63 - 1),  # what PyTorch's generators take
        metavar="N",
        default=0,
        show_default=True,
        help=f"Of {of}.",
    )


def measuring(command: F) -> F:
    """What tune and bench share: who takes part, how to measure, where, and where the result
    goes."""
    for decorate in (
        json_option,
        store_option,
        device_option,
        seed_option("the example inputs, and of tune's search"),
        click.option("--jobs", type=click.IntRange(1), help="Compilers at once; one per CPU."),
        click.option(
            "--method", type=click.Choice(["events", "graph"]), help="How a GPU is timed."
        ),
        click.option(
            "--baseline",
            "baselines",
            multiple=True,
            metavar="I",
            help="Only these baselines besides aten; may be repeated.",
        ),
        click.option(
            "--impl",
            "implementations",
            multiple=True,
            metavar="I",
            help="Only these of our own implementations; may be repeated.",
        ),
    ):
        command = decorate(command)
    return command


def tell(content: Any, json_target: str | None, show: Callable[[], None]) -> None:
    """Write `content` where --json asks for it, and `show` it unless that is standard output.

    The file comes first: a closed pipe costs no result, nor a full disk the table.
    """
    try:
        if json_target:
            write_json(content, json_target)
    finally:
        if json_target != "-":
            show()


def write_json(content: Any, target: str) -> None:
    """Write `content` to the file `target`, or to standard output for "-".

    JSON has no infinity: what is not finite becomes null.
    """
    text = json.dumps(_finite(content), indent=1, allow_nan=False)
    if target == "-":
        command = click.get_current_context(silent=True)
        out = command.meta[_STDOUT] if command and _STDOUT in command.meta else sys.stdout
        if out is not None:  # whoever started it closed it
            click.echo(text, file=out)
        return
    path = Path(target)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text + "\n")
    except OSError as error:
        raise InvalidArgument(f"cannot write --json {path}: {error.strerror}") from None


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {name: _finite(value) for name, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def merged(pairs: Iterable[tuple[str, tuple[Any, ...]]]) -> dict[str, tuple[Any, ...]]:
    """Repeated --param of one name add up."""
    chosen: dict[str, tuple[Any, ...]] = {}
    for name, values in pairs:
        chosen[name] = chosen.get(name, ()) + values
    return chosen
