"""What a result file is held against: that it has all fields, and that they agree."""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tilewright.errors import InvalidArgument
from tilewright.op import Workload
from tilewright.report import Row

SCHEMA = 1


@dataclass(frozen=True)
class _Device:
    name: str


@dataclass(frozen=True)
class _Versions:
    torch: str
    tilewright: str


@dataclass(frozen=True)
class _Compiled:
    kernels: int
    cpu_s: float


@dataclass(frozen=True)
class _File:
    """What `as_dict` gives."""

    schema: int
    suite: str
    commit: str | None
    date: str
    device: _Device
    versions: _Versions
    tuning_s: float
    rows: list[Row]
    summary: dict[str, Any]
    compiling: dict[str, _Compiled] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def validate(data: Any) -> list[str]:
    """What is wrong with a result file that was read back, one line each; [] if nothing is."""
    if isinstance(data, Mapping) and data.get("schema", SCHEMA) != SCHEMA:
        return [f"schema is {data['schema']!r}, not {SCHEMA}: another tilewright wrote it"]
    problems = list(_misfits(data, _File, "file"))
    for i, row in enumerate(() if problems else data["rows"]):
        problems += _inconsistencies(row, f"file.rows[{i}]", data["device"])
    return problems


def _misfits(value: Any, hint: Any, where: str) -> Iterator[str]:
    """How a JSON value is not what a field's type says; fields of a newer version are no fault."""
    kind, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    json_type, told = _JSON.get(kind, (Mapping, "an object"))
    if kind is Any:
        return
    if kind is types.UnionType:
        found = [list(_misfits(value, each, where)) for each in inner]
        if all(found):
            yield from found[0]
    elif not isinstance(value, json_type) or (isinstance(value, bool) and kind is not bool):
        yield f"{where} is {value!r:.80}, not {told}"
    elif kind is float and not 0 <= value <= sys.float_info.max:
        yield f"{where} is {value}, not a number from 0"
    elif kind is tuple and len(value) != len(inner):
        yield f"{where} is {value!r:.80}, not a list of {len(inner)}"
    elif kind in (list, tuple):
        for i, each in enumerate(value):
            yield from _misfits(each, inner[0], f"{where}[{i}]")
    elif kind is dict:
        for name, each in value.items():
            yield from _misfits(each, inner[1], f"{where}.{name}")
    elif json_type is Mapping:
        hints = _hints(kind)
        for f in dataclasses.fields(kind):
            if f.name in value:
                yield from _misfits(value[f.name], hints[f.name], f"{where}.{f.name}")
            elif f.default is f.default_factory is dataclasses.MISSING:
                yield f"{where}.{f.name} is missing"


_JSON: dict[Any, tuple[Any, str]] = {
    str: (str, "a text"),
    bool: (bool, "true or false"),
    int: (int, "a whole number"),
    float: ((int, float), "a number"),
    list: (list, "a list"),
    tuple: (list, "a list"),
    types.NoneType: (types.NoneType, "null"),
}
"""Type of a field -> types of its value in a file, in words too; of all others it is an object."""


@functools.cache
def _hints(of: type) -> dict[str, Any]:
    hints = typing.get_type_hints(of)
    if of is Row:  # older files have the names alone
        hints["wrong"] |= list[str]
    return hints


def _promises_more(text: str, device: Mapping[str, Any]) -> bool:
    """Whether aten may not be chosen, however fast it is."""
    try:
        w = Workload.parse(text)
    except InvalidArgument:  # a function of tw.fuse, or an operator of then
        return False
    return w.promises_more("cuda" if "sms" in device else "cpu")


def _inconsistencies(
    row: Mapping[str, Any], where: str, device: Mapping[str, Any]
) -> Iterable[str]:
    if "aten" not in row["baselines"]:
        yield f"{where}.baselines.aten is missing"
        return
    measured = dict(row["baselines"])
    if row["own"]:
        measured[row["own"]["implementation"]] = row["own"]
    for name, m in measured.items():
        ci = m["ci_us"]
        if not 0 < ci[0] <= m["median_us"] <= ci[1]:
            yield f"{where}: {name} has median {m['median_us']} us outside its interval {ci}"
    if row["chosen"] not in measured:
        yield f"{where}: chosen {row['chosen']!r} was not measured"
    elif (
        "aten" not in row.get("wrong", ())
        and not _promises_more(row["workload"], device)
        and measured[row["chosen"]]["median_us"] > measured["aten"]["median_us"]
        and _waited_us(row, row["chosen"], measured) >= _waited_us(row, "aten", measured)
    ):
        yield f"{where}: chosen {row['chosen']!r} is slower than aten"


def _waited_us(row: Mapping[str, Any], name: str, measured: Mapping[str, Any]) -> float:
    """What a caller waits for each of many eager calls; of a graph's the measured time."""
    us: float = measured[name]["median_us"]
    called = row["host_us"] if row["method"] == "events" else {}
    return max(us, called.get(name if name in row["baselines"] else "own", 0.0))
