"""A record: what was measured, refused or failed, of what, where and with which versions.

Records travel as JSON lines: a header line that names the schema, then one record a line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from tilewright.errors import InvalidArgument, StoreError, known_names
from tilewright.files import write_whole

SCHEMA = 1
"""Raised when a column is added or changes meaning."""

HEADER = "tilewright_records"

FAR_AHEAD = timedelta(days=1)
"""More than clocks differ."""

BESIDE = ("ceiling", "host", "eager")
"""Statuses of what is kept beside a duel and does not compete: floor and copy, and what eager calls
cost the host and take."""

RIGHT = ("ok", "tied", "slower", "spilled")
"""Statuses of what was right, whose times can stand beside each other."""

STATUSES = (
    *RIGHT,
    *("wrong_result", "compile_error", "launch_error", "timeout", "invalid", "unsupported"),
    *BESIDE,
)

RUNTIME = ("torch", "cuda", "driver")
"""Versions that every record tells."""
NOT_RUNTIME = ("tilewright", "commit", "program")
"""The code that is measured, which a record's `code_hash` and `program` tell apart."""


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")


def utc_text(moment: str) -> str:
    """An ISO 8601 date or time in the one form that records hold, so that times compare as text.

    Without a zone it is UTC. Raises InvalidArgument for what is not a date.
    """
    try:
        parsed = datetime.fromisoformat(moment)
        utc = parsed.astimezone(UTC) if parsed.tzinfo else parsed.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        raise InvalidArgument(
            f"{moment!r} is not a date or time such as 2026-11-20 or 2026-11-20T14:00:00"
        ) from None
    return utc.isoformat(timespec="microseconds")


@dataclass(frozen=True)
class Record:
    """One outcome of one candidate on one workload, device and set of versions.

    Attributes:
        workload, op: the workload's text and its operator's name.
        implementation, config, code_hash: the candidate; `code_hash` is over the emitted source,
            the flags and the compiler's version, of several kernels over theirs.
        status: "ok", or why not, one of STATUSES; only "ok" can win.
        message: in words, what is behind the status.
        median_us, ci_low_us, ci_high_us, samples: the whole call's time and the 95% interval of
            the median; None where nothing was timed. Numbers that are not finite become None.
        resources, workspace_bytes: what the compiler gave the kernel; scratch of one call.
        max_ulp, bound_ulp, deterministic: the verdict against the fp64 truth.
        method, distribution, cold: how it was timed, on what kind of data, with caches flushed.
        final, duel: measured interleaved with the vendor's; rows of one duel share its id.
        device, device_info, versions: as `environment` gives them; among the versions is the
            `program` of a person's function.
        created: UTC, ISO 8601.
        prior: set by the store on what it returns: measured with another torch, CUDA or driver
            than asked for, or another compiler or library. It is not stored.
    """

    workload: str
    op: str
    implementation: str
    config: dict[str, Any]
    status: str
    device: str
    median_us: float | None = None
    ci_low_us: float | None = None
    ci_high_us: float | None = None
    samples: int = 0
    resources: dict[str, Any] | None = None
    workspace_bytes: int = 0
    max_ulp: float | None = None
    bound_ulp: float | None = None
    deterministic: bool | None = None
    message: str = ""
    code_hash: str = ""
    device_info: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)
    distribution: str | None = None
    method: str = ""
    cold: bool = True
    final: bool = False
    duel: str | None = None
    created: str = field(default_factory=utc_now)
    prior: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("median_us", "ci_low_us", "ci_high_us", "max_ulp", "bound_ulp"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                object.__setattr__(self, name, None)

    @functools.cached_property
    def id(self) -> str:
        """Hash of the content, so that a record imported twice is one row."""
        return hashlib.sha256(to_json(as_dict(self)).encode()).hexdigest()[:32]

    @property
    def program(self) -> str:
        """Which function of its name was measured, as `Workload.program` has it."""
        return str(self.versions.get("program", ""))


FIELDS = tuple(f.name for f in dataclasses.fields(Record) if f.name != "prior")
REQUIRED = tuple(
    f.name
    for f in dataclasses.fields(Record)
    if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
)


def _types(hint: Any) -> tuple[type, ...]:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return tuple(typing.get_origin(option) or option for option in options)


TYPES = {name: _types(hint) for name, hint in typing.get_type_hints(Record).items()}
"""Field -> Python types of its value; the columns of the store and the checks go by it."""


def as_dict(record: Record) -> dict[str, Any]:
    return {name: getattr(record, name) for name in FIELDS}


def to_json(value: Any) -> str:
    """The one JSON form of a value: equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def runtime_of(versions: Mapping[str, Any]) -> str:
    """What a measured time depends on besides device and code, as text: torch, CUDA and driver,
    and of compilers and libraries those that are there."""
    others = sorted(name for name in versions if name not in (*RUNTIME, *NOT_RUNTIME))
    known = [name for name in others if versions[name] is not None]
    return " ".join(f"{name}={versions.get(name)}" for name in (*RUNTIME, *known))


@functools.lru_cache(1024)
def same_runtime(one: str, other: str) -> bool:
    """Whether times measured under two runtimes can stand beside each other.

    A compiler or library that only one of them knows tells nothing: it was not there, or not asked.
    """
    a, b = (dict(re.findall(r"([\w-]+)=(.*?)(?= [\w-]+=|$)", text)) for text in (one, other))
    return all(a.get(name) == b.get(name) for name in (*RUNTIME, *(a.keys() & b.keys())))


def header_line() -> str:
    return to_json({HEADER: SCHEMA}) + "\n"


def record_line(record: Record) -> str:
    return to_json(as_dict(record)) + "\n"


def write_lines(path: Path, records: Iterable[Record]) -> int:
    """Write a file of records, whole or not at all, and missing folders; returns how many.

    Raises:
        StoreError: the file cannot be written.
    """
    records = list(records)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, as_lines(records))
    except OSError as error:
        raise StoreError(
            f"cannot write {path}: {error.strerror}; choose another file or folder"
        ) from None
    return len(records)


def as_lines(records: Iterable[Record]) -> str:
    """The content of a file of records."""
    return header_line() + "".join(record_line(record) for record in records)


def append_lines(path: Path, records: Iterable[Record]) -> None:
    """Append to a file of records, starting it if need be, or leave it as it was.

    Raises:
        OSError: the file cannot be written.
    """
    size = path.stat().st_size if path.exists() else 0
    lines = "".join(record_line(record) for record in records)
    try:
        with path.open("a") as file:
            file.write(lines if size else header_line() + lines)
    except OSError:
        if path.exists():
            os.truncate(path, size)
        raise


def best_by(
    records: Iterable[Record], knobs: Sequence[str]
) -> list[tuple[tuple[Any, ...], Record, int]]:
    """The fastest of one workload's records for each combination of values of some knobs, on each
    device and by each method: what is wrong or invalid has no time, and elsewhere is another time.

    Args:
        knobs: names of config values.

    Returns:
        (values, the fastest record with them, distinct configs timed with them), by device, method
        and value.

    Raises:
        InvalidArgument: nothing was timed, or no config has such a knob.
    """
    timed = [r for r in records if r.median_us is not None and r.status in RIGHT]
    if not timed:
        raise InvalidArgument("no right result was timed, so there is no best config")
    there = sorted({name for r in timed for name in r.config})
    for name in knobs:
        if name not in there:
            names = known_names(name, there)
            raise InvalidArgument(f"no timed record has the knob {name!r}; {names}")
    groups: dict[tuple[str, str, tuple[Any, ...]], list[Record]] = {}
    for r in timed:
        if all(name in r.config for name in knobs):
            values = tuple(r.config[name] for name in knobs)
            groups.setdefault((r.device, r.method, values), []).append(r)
    return [
        (
            values,
            min(found, key=lambda r: r.median_us or math.inf),
            len({to_json(r.config) for r in found}),
        )
        for (_, _, values), found in sorted(
            groups.items(), key=lambda item: (*item[0][:2], [*map(knob_order, item[0][2])])
        )
    ]


def knob_order(value: Any) -> tuple[int, float, str]:
    """Sorts a knob's values, of whatever types: none, numbers by size, then the rest as text."""
    if value is None:
        return 0, 0, ""
    return (1, value, "") if isinstance(value, (int, float)) else (2, 0, str(value))


def read_lines(path: Path) -> list[Record]:
    """The records of a file that `write_lines` wrote.

    Raises:
        InvalidArgument: the file is missing or is not one; the message names the line.
    """
    try:
        header, *lines = path.read_text().splitlines() or [""]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"cannot read records from {path}: {error}") from None
    first = None
    with contextlib.suppress(ValueError, RecursionError):
        first = json.loads(header)
    if not isinstance(first, dict) or not isinstance(first.get(HEADER), int):
        raise InvalidArgument(
            f"{path}:1: expected the header {header_line().strip()}, got {header[:80]!r}; "
            "is this a file of `tilewright records export`?"
        )
    if first[HEADER] > SCHEMA:
        raise InvalidArgument(
            f"{path}: records of schema {first[HEADER]}, but this tilewright reads up to {SCHEMA}: "
            "update tilewright"
        )
    return [_record(f"{path}:{i}", line) for i, line in enumerate(lines, 2) if line.strip()]


def _parsed(where: str, line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{where}: not JSON ({error}): {line[:80]!r}") from None


def _record(where: str, line: str) -> Record:
    given = _parsed(where, line)
    if not isinstance(given, dict):
        raise InvalidArgument(f"{where}: expected a record, got {line[:80]!r}")
    for name in REQUIRED:
        if name not in given:
            raise InvalidArgument(f"{where}: the record has no {name!r}")
    for name in given:
        if name not in FIELDS:
            raise InvalidArgument(f"{where}: unknown field {name!r}; {known_names(name, FIELDS)}")
    if problem := misfit(given):
        raise InvalidArgument(f"{where}: {problem}")
    try:
        if "created" in given:
            given["created"] = utc_text(given["created"])
        _check(given)
    except InvalidArgument as error:
        raise InvalidArgument(f"{where}: {error}") from None
    return Record(**given)


def misfit(given: Mapping[str, Any]) -> str | None:
    """What is wrong with the type of a field's value, in words; None if nothing is."""
    for name, value in given.items():
        if not _fits(value, TYPES[name]):
            wanted = " or ".join(t.__name__ for t in TYPES[name])
            return f"{name}={repr(value)[:80]} should be {wanted}"
    return None


def _check(given: Mapping[str, Any]) -> None:
    """What fields of the right types may not be. Raises InvalidArgument."""
    if given["status"] not in STATUSES:
        raise InvalidArgument(
            f"unknown status {given['status']!r}; {known_names(given['status'], STATUSES)}"
        )
    for knob, value in given["config"].items():
        if not (value is None or isinstance(value, (bool, int, float, str))):
            raise InvalidArgument(f"config: {knob}={value!r} should be one value")
    for name, value in given.items():
        if isinstance(value, str) and any("\ud800" <= c <= "\udfff" for c in value):
            raise InvalidArgument(f"{name}={value!r} is not text: it holds half of a character")
        finite = isinstance(value, (int, float)) and math.isfinite(value)
        if finite and not 0 <= value < 2**63:
            raise InvalidArgument(f"{name}={value} should be 0 or more, and less than 2^63")
    if given.get("created", "") > (datetime.now(UTC) + FAR_AHEAD).isoformat():
        raise InvalidArgument(
            f"created={given['created']} is still to come: no later run would win"
        )


def _fits(value: Any, allowed: tuple[type, ...]) -> bool:
    if isinstance(value, bool):
        return bool in allowed
    return isinstance(value, allowed) or (isinstance(value, int) and float in allowed)
