"""What a result file is held against: that it has all fields, and that they agree."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tilewright.errors import InvalidArgument
from tilewright.op import Workload

SCHEMA = 1

_NUMBER = (int, float)
_MEASURED = {"median_us": _NUMBER, "ci_us": list}
_FILE: dict[str, Any] = {
    "schema": int,
    "suite": str,
    "commit": (str, type(None)),
    "date": str,
    "device": {"name": str},
    "versions": {"torch": str, "tilewright": str},
    "tuning_s": _NUMBER,
    "rows": list,
    "summary": dict,
}
_ROW: dict[str, Any] = {
    "workload": str,
    "floor_us": _NUMBER,
    "copy_us": (*_NUMBER, type(None)),
    "method": str,
    "distribution": (str, type(None)),
    "host_us": dict,
    "baselines": {"aten": _MEASURED},
    "own": (dict, type(None)),
    "chosen": str,
    "candidates": int,
    "verified": (dict, type(None)),
}
_NONE_RIGHT: dict[str, Any] = {"configs": int, "first": str}
_OWN: dict[str, Any] = {
    **_MEASURED,
    "implementation": str,
    "config": dict,
    "resources": dict,
    "workspace_bytes": int,
    "heuristic_us": (*_NUMBER, type(None)),
}
_VERIFIED: dict[str, Any] = {
    "max_ulp": _NUMBER,
    "bound_ulp": _NUMBER,
    "integer_exact": (bool, type(None)),
    "deterministic": bool,
}


def validate(data: Mapping[str, Any]) -> list[str]:
    """What is wrong with a result file that was read back, one line each; [] if nothing is."""
    problems = list(_mismatches(data, _FILE, "file"))
    if data.get("schema") != SCHEMA:
        problems.append(f"schema is {data.get('schema')}, not {SCHEMA}")
    rows = data.get("rows")
    for i, row in enumerate(rows if isinstance(rows, list) else []):
        where = f"rows[{i}]"
        found = list(_mismatches(row, _ROW, where))
        if not found:
            for name in ("wrong", "others", "refused", "none_right", "unsearched", "spreads"):
                kinds = (Mapping, list) if name == "wrong" else Mapping
                if not isinstance(row.get(name, {}), kinds):
                    found.append(f"{where}.{name} is {row[name]!r}, not an object")
            of_each = {"baselines": _MEASURED, "others": _MEASURED, "none_right": _NONE_RIGHT}
            for key, schema in of_each.items():
                things = row.get(key, {})
                for name, thing in things.items() if isinstance(things, Mapping) else ():
                    found += _mismatches(thing, schema, f"{where}.{key}.{name}")
            verdicts = (("verified", _VERIFIED), ("chosen_verified", _VERIFIED))
            for key, schema in (("own", _OWN), *verdicts):
                if row.get(key) is not None:
                    found += _mismatches(row[key], schema, f"{where}.{key}")
        if not found:
            found += _inconsistencies(row, where, data.get("device", {}))
        problems += found
    return problems


def _mismatches(data: Any, schema: Mapping[str, Any], where: str) -> Iterable[str]:
    if not isinstance(data, Mapping):
        yield f"{where} is not an object"
        return
    for name, expected in schema.items():
        if name not in data:
            yield f"{where}.{name} is missing"
        elif isinstance(expected, Mapping):
            yield from _mismatches(data[name], expected, f"{where}.{name}")
        elif not isinstance(data[name], expected):
            yield f"{where}.{name} is {data[name]!r}, not {expected}"


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
    measured = dict(row["baselines"])
    if row["own"]:
        measured[row["own"]["implementation"]] = row["own"]
    for name, m in measured.items():
        ci = m["ci_us"]
        if len(ci) != 2 or not 0 < ci[0] <= m["median_us"] <= ci[1]:
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
