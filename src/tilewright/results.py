"""The result file of a run, with its summaries, and its table."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tilewright.environment import commit
from tilewright.errors import InvalidArgument
from tilewright.files import write_whole
from tilewright.report import Report
from tilewright.result_schema import SCHEMA, validate
from tilewright.suite import SUITES
from tilewright.summaries import summary, summary_by


def as_dict(suite: str, report: Report) -> dict[str, Any]:
    """The result file of a run, as plain JSON values; with summaries by the suite's groups."""
    by, counts = (SUITES[suite].by, SUITES[suite].count_of()) if suite in SUITES else ((), {})
    return {
        "schema": SCHEMA,
        "suite": suite,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": report.device,
        "versions": report.versions,
        "tuning_s": round(report.tuning_s, 3),
        "compiling": {
            name: {"kernels": effort.kernels, "cpu_s": round(effort.cpu_s, 3)}
            for name, effort in report.compiling.items()
        },
        "rows": [row.as_dict() for row in report.rows],
        **({"failed": dict(report.failed)} if report.failed else {}),
        "summary": summary(report.rows, counts),
        **({"summary_by": {f: summary_by(report.rows, f, counts) for f in by}} if by else {}),
    }


def write(path: str | Path, suite: str, report: Report) -> dict[str, Any]:
    """Write the result file atomically and return what was written.

    Raises:
        InvalidArgument: the file cannot be written; the message names the path and the reason.
    """
    return write_data(path, as_dict(suite, report))


def write_data(path: str | Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """As `write`, of what `as_dict` gave."""
    data = json.loads(json.dumps(content, allow_nan=False))
    problems = validate(data)
    assert not problems, problems
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(data, indent=1) + "\n")
    except OSError as error:
        raise InvalidArgument(
            f"cannot write {path}: {error.strerror}; give --json another path"
        ) from error
    return data


def table_rows(report: Report) -> list[dict[str, Any]]:
    """What a table shows of each workload: times in microseconds, ratios, verified or not."""
    return [
        {
            "workload": row.workload,
            "method": row.method,
            "chosen": row.chosen,
            "us": row.chosen_us,
            "ci_us": row.chosen_time.ci_us,
            "own": row.own.implementation if row.own else None,
            "own_us": row.own.median_us if row.own else None,
            "vs_aten": row.baselines["aten"].median_us / row.chosen_us,
            "vs_inductor": row.baselines["inductor"].median_us / row.chosen_us
            if "inductor" in row.baselines
            else None,
            "chosen_of_floor": row.floor_us / row.chosen_us if row.floor_us else None,
            "verified": (row.chosen_verified or row.verified) is not None,
            "candidates": row.candidates,
            "wrong": row.wrong,
            "refused": {**row.refused, **{name: str(n) for name, n in row.none_right.items()}},
            "none_right": None if row.own else [n.configs for n in row.none_right.values()],
            "unsearched": row.unsearched,
            "fought": row.fought,
            "disturbed": row.disturbed,
        }
        for row in report.rows
    ]
