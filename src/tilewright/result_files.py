"""Result files read back, and put together where a suite was measured in parts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tilewright.build import Effort
from tilewright.errors import InvalidArgument
from tilewright.measure.activity import Activity
from tilewright.record import runtime_of, same_runtime
from tilewright.report import Baseline, Measured, NoneRight, Own, Report, Row, Verified
from tilewright.result_schema import validate
from tilewright.results import as_dict


def read(path: str | Path) -> dict[str, Any]:
    """A result file.

    Raises:
        InvalidArgument: it cannot be read, or is none.
    """
    try:
        data = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{path} is not readable JSON: {error}") from None
    if problems := validate(data):
        raise InvalidArgument(f"{path} is no result file: {problems[0]}")
    return data


def merged(files: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One result file of several; of rows of one workload and method the last file's counts.

    The seconds of tuning, and what was compiled, add up; commits that differ are all named.

    Raises:
        InvalidArgument: they differ in suite, device, torch, CUDA, driver, or a compiler or library
            that both tell: their times cannot stand beside each other.
    """
    last = max(files, key=lambda data: data["date"])
    for data in files:
        for what, of in _COMPARABLE.items():
            if of(data) != of(last):
                raise InvalidArgument(f"the files differ in {what}: {of(data)} and {of(last)}")
        one, other = runtime_of(data["versions"]), runtime_of(last["versions"])
        if not same_runtime(one, other):
            raise InvalidArgument(f"the files differ in versions: {one} and {other}")
    rows = {(row["workload"], row["method"]): row for data in files for row in data["rows"]}
    tuning_s = sum(data["tuning_s"] for data in files)
    compiling: dict[str, Effort] = {}
    for name, effort in ((n, e) for data in files for n, e in data.get("compiling", {}).items()):
        total = compiling.setdefault(name, Effort())
        total.kernels += effort["kernels"]
        total.cpu_s += effort["cpu_s"]
    found = [row_of(row) for row in rows.values()]
    report = Report(found, last["device"], last["versions"], tuning_s, compiling=compiling)
    commits = dict.fromkeys(str(data["commit"]) for data in files)
    return {**as_dict(last["suite"], report), "commit": ", ".join(commits), "date": last["date"]}


_COMPARABLE = {
    "suite": lambda data: data["suite"],
    "device": lambda data: data["device"]["name"],
}


def row_of(data: Mapping[str, Any]) -> Row:
    """A row as `Row.as_dict` wrote it."""
    own, wrong = data["own"], data.get("wrong", ())
    verdicts = {part: data.get(part) for part in ("verified", "chosen_verified")}
    return Row(
        **{
            **data,
            "baselines": {n: Baseline(**_measured(m)) for n, m in data["baselines"].items()},
            "others": {n: Measured(**_measured(m)) for n, m in data.get("others", {}).items()},
            "own": Own(**_measured(own)) if own else None,
            **{part: Verified(**found) if found else None for part, found in verdicts.items()},
            "wrong": wrong if isinstance(wrong, Mapping) else dict.fromkeys(wrong, ""),
            "none_right": {n: NoneRight(**r) for n, r in data.get("none_right", {}).items()},
            "activity": {name: Activity(**a) for name, a in data.get("activity", {}).items()},
        }
    )


def _measured(data: Mapping[str, Any]) -> dict[str, Any]:
    low, high = data["ci_us"]
    return {**data, "ci_us": (low, high)}
