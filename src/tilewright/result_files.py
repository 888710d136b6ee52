"""Result files read back, and put together where a suite was measured in parts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from tilewright.build import Effort
from tilewright.errors import InvalidArgument
from tilewright.measure.activity import Activity
from tilewright.record import runtime_of, same_runtime
from tilewright.report import Baseline, Measured, NoneRight, Own, Report, Row, Verified
from tilewright.result_schema import validate
from tilewright.results import as_dict
from tilewright.suite import CUSTOM, SUITES

T = TypeVar("T")


def read(path: str | Path) -> dict[str, Any]:
    """A result file.

    Raises:
        InvalidArgument: it cannot be read, or is none.
    """
    try:
        data = json.loads(Path(path).read_text(), parse_float=_finite, parse_constant=_finite)
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path} is not readable JSON: {error}") from None
    if problems := validate(data):
        raise InvalidArgument(f"{path} is no result file: {problems[0]}")
    return data


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no number that JSON has")
    return value


def merged(files: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One result file of several; of rows of one workload and method the last file's counts.

    The seconds of tuning, and what was compiled, add up, those of each run once; commits that
    differ are all named, and each row tells its own. What failed in one file and has a row in
    another did not fail. Workloads that were named one by one (--from) are a part of the other
    files' suite where it has all of them.

    Raises:
        InvalidArgument: they differ in suite, device, torch, CUDA, driver, or a compiler or library
            that both tell: their times cannot stand beside each other.
    """
    last = max(files, key=lambda data: data["date"])
    suite = _suite_of(files)
    for data in files:
        names = [each["device"]["name"] for each in (data, last)]
        if names[0] != names[1]:
            raise InvalidArgument(f"the files differ in device: {names[0]} and {names[1]}")
        one, other = runtime_of(data["versions"]), runtime_of(last["versions"])
        if not same_runtime(one, other):
            raise InvalidArgument(f"the files differ in versions: {one} and {other}")
    commits = dict.fromkeys(str(data["commit"]) for data in files)
    rows = {}
    for data in files:
        own = {"commit": str(data["commit"])} if len(commits) > 1 else {}
        rows.update({(row["workload"], row["method"]): {**own, **row} for row in data["rows"]})
    runs = _runs(files)
    tuning_s = sum(data["tuning_s"] for data in runs)
    compiling: dict[str, Effort] = {}
    for name, effort in ((n, e) for data in runs for n, e in data.get("compiling", {}).items()):
        total = compiling.setdefault(name, Effort())
        total.kernels += effort["kernels"]
        total.cpu_s += effort["cpu_s"]
    found = [row_of(row) for row in rows.values()]
    measured = {row.workload for row in found}
    failures = ((w, why) for data in files for w, why in data.get("failed", {}).items())
    failed = {w: why for w, why in failures if w not in measured}
    report = Report(
        found, last["device"], last["versions"], tuning_s, failed=failed, compiling=compiling
    )
    return {**as_dict(suite, report), "commit": ", ".join(commits), "date": last["date"]}


def _runs(files: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The files but those whose every row another one has, too: the same again, or a part of it."""
    found: list[Mapping[str, Any]] = []
    for data in sorted(files, key=lambda data: len(data["rows"]), reverse=True):
        if not any(_holds(other, data) for other in found):
            found.append(data)
    return found


def _holds(whole: Mapping[str, Any], part: Mapping[str, Any]) -> bool:
    if not part["rows"]:
        return whole == part
    rows = [_measurement(row) for row in whole["rows"]]
    return all(_measurement(row) in rows for row in part["rows"])


def _measurement(row: Mapping[str, Any]) -> Row:
    return replace(row_of(row), commit=None)


def _suite_of(files: Sequence[Mapping[str, Any]]) -> str:
    """The one suite that the files are parts of."""
    names = list(dict.fromkeys(data["suite"] for data in files if data["suite"] != CUSTOM))
    if len(names) > 1:
        raise InvalidArgument(f"the files differ in suite: {names[0]} and {names[1]}")
    if not names:
        return CUSTOM
    (name,) = names
    texts = {str(w) for w in SUITES[name].workloads()} if name in SUITES else set()
    for data in files:
        for text in (*(row["workload"] for row in data["rows"]), *data.get("failed", ())):
            if data["suite"] == CUSTOM and text not in texts:
                raise InvalidArgument(f"the files differ in suite: {text} is not of {name}")
    return name


def row_of(data: Mapping[str, Any]) -> Row:
    """A row as `Row.as_dict` wrote it, or that of a newer version, whose further fields are left
    out."""
    own, wrong = data["own"], data.get("wrong", ())
    verdicts = {part: data.get(part) for part in ("verified", "chosen_verified")}
    return _made(
        Row,
        {
            **data,
            "baselines": _measured(Baseline, data["baselines"]),
            "others": _measured(Measured, data.get("others", {})),
            "own": _measured(Own, {"own": own})["own"] if own else None,
            **{part: _made(Verified, v) if v else None for part, v in verdicts.items()},
            "wrong": wrong if isinstance(wrong, Mapping) else dict.fromkeys(wrong, ""),
            "none_right": {n: _made(NoneRight, r) for n, r in data.get("none_right", {}).items()},
            "activity": {name: _made(Activity, a) for name, a in data.get("activity", {}).items()},
        },
    )


def _made(of: type[T], data: Mapping[str, Any]) -> T:
    known = {f.name for f in fields(of)}  # type: ignore[arg-type]
    return of(**{name: value for name, value in data.items() if name in known})


def _measured(of: type[T], by_name: Mapping[str, Mapping[str, Any]]) -> dict[str, T]:
    return {n: _made(of, {**m, "ci_us": tuple(m["ci_us"])}) for n, m in by_name.items()}
