"""What a tuning or benchmark run found: rows, their summary, the table and the result file."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.errors import InvalidArgument
from tilewright.op import Workload
from tilewright.suite import SUITES
from tilewright.summaries import summary, summary_by

if TYPE_CHECKING:
    from tilewright.build import Effort
    from tilewright.measure.activity import Activity

SCHEMA = 1


@dataclass(frozen=True)
class Measured:
    """A median in microseconds and the 95% interval of that median."""

    median_us: float
    ci_us: tuple[float, float]

    def overlaps(self, other: Measured) -> bool:
        return self.ci_us[0] <= other.ci_us[1] and other.ci_us[0] <= self.ci_us[1]


@dataclass(frozen=True)
class Baseline(Measured):
    """One of what our own kernels are compared with.

    Attributes:
        config: the fastest one, of an implementation that has configs; None in files that do not
            tell.
        candidates: distinct executables of it that were verified; None in files that do not tell.
        deterministic: whether two runs gave the same bits; None where nobody looked.
        max_ulp: its largest error against the fp64 truth; None in files that do not tell.
    """

    config: dict[str, Any] | None = None
    candidates: int | None = None
    deterministic: bool | None = None
    max_ulp: float | None = None


@dataclass(frozen=True)
class Own(Measured):
    """The best of our own kernels on one workload.

    Attributes:
        resources: what the compiler gave it; empty where the compiler does not say.
        heuristic_us: the same implementation's untuned config, in the same duel.
        code_hash: of what was compiled, by which the cache has it; "" where nothing was, and in
            older files.
    """

    implementation: str
    config: dict[str, Any]
    resources: dict[str, Any] = field(default_factory=dict)
    workspace_bytes: int = 0
    heuristic_us: float | None = None
    code_hash: str = ""


@dataclass(frozen=True)
class Verified:
    """How far a result is from the fp64 reference, in units of the output's last place."""

    max_ulp: float
    bound_ulp: float
    integer_exact: bool | None
    deterministic: bool


@dataclass(frozen=True)
class NoneRight:
    """That no config of an implementation was shown to be right.

    Attributes:
        configs: that were tried; 0 where the budget ended before any was, or no config has the
            knobs that were asked for.
        first: why the first of them was refused, or how it failed.
    """

    configs: int
    first: str

    def __str__(self) -> str:
        if not self.configs:
            return "no config tried: the budget ended before, or none has the knobs asked for"
        return f"none right of {self.configs} tried; the first: {self.first}"


@dataclass(frozen=True)
class Row:
    """One workload timed by one method. Times are microseconds.

    Attributes:
        floor_us: what the device allows, from ceilings of the same run; 0 where unknown.
        copy_us: `out.copy_(x)` on the main tensor in the same duel.
        host_us: what one eager call costs the host, on a GPU: of the executables "own" and
            "aten", of other baselines where a caller may wait for it (method "events", little
            work), and in a bench "public" of the public operator, its choice included.
        eager_us: what such a call takes, one of many in a row, until the device is done; empty on a
            CPU, where nothing else is timed.
        others: the fastest of each of our other implementations in the duel.
        unsearched: implementation of ours -> why its untuned config alone was measured; empty in a
            row that was read from the records.
        chosen_verified: of what selection takes; None in files that do not tell.
        spreads: of an operator with indices whose distribution no flag names: candidate (an
            implementation with its config) -> distribution -> median, of those among which the best
            worst case was chosen.
        own: the best of our own kernels; None where none supports the workload, or none is right:
            `refused` and `none_right` say which.
        chosen: the implementation that selection takes; unless aten is wrong, never slower than
            aten but where a caller waits longer for aten's host (method "events").
        candidates: distinct executables of our own that were verified.
        verified: of `own`.
        wrong: baseline whose result is wrong -> what is wrong with it, "" in files that do not
            tell; it is compared with, but never chosen.
        refused: implementation -> why it did not take part, or how it failed; a file has it of
            rows without `own`.
        none_right: implementations whose configs were tried, or were to be, and gave nothing.
        activity: what one call makes the device do: of "own" and of each baseline; empty in a row
            that was read from the records.
    """

    workload: str
    floor_us: float
    copy_us: float | None
    method: str
    distribution: str | None
    host_us: dict[str, float]
    baselines: dict[str, Baseline]
    own: Own | None
    chosen: str
    candidates: int
    verified: Verified | None
    wrong: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    activity: dict[str, Activity] = field(default_factory=dict)
    eager_us: dict[str, float] = field(default_factory=dict)
    others: dict[str, Measured] = field(default_factory=dict)
    unsearched: dict[str, str] = field(default_factory=dict)
    none_right: dict[str, NoneRight] = field(default_factory=dict)
    chosen_verified: Verified | None = None
    spreads: dict[str, dict[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.chosen in self.baselines or (
            self.own and self.chosen == self.own.implementation
        )

    @property
    def chosen_us(self) -> float:
        if self.chosen in self.baselines:
            return self.baselines[self.chosen].median_us
        assert self.own is not None
        return self.own.median_us

    def own_vs(self, baseline: str) -> float | None:
        """How many times faster than the baseline our own kernel is; None if either is missing."""
        if self.own is None or baseline not in self.baselines:
            return None
        return self.baselines[baseline].median_us / self.own.median_us

    @property
    def of_floor(self) -> float | None:
        return self.floor_us / self.own.median_us if self.own and self.floor_us else None

    @property
    def of_copy(self) -> float | None:
        return self.copy_us / self.own.median_us if self.own and self.copy_us else None

    @property
    def eager_vs_graph(self) -> float | None:
        """How much longer a call of our own kernel takes than its part of a graph."""
        if self.own is None or self.method != "graph" or "own" not in self.eager_us:
            return None
        return self.eager_us["own"] / self.own.median_us

    def as_dict(self) -> dict[str, Any]:
        """The row of a result file."""
        row = asdict(self)
        if self.own:
            del row["refused"]
        return row


@dataclass
class Report:
    """The outcome of one run.

    Attributes:
        device: name, sms, copy_bytes_per_s, matmul_flops_per_s, clock_mhz.
        tuning_s: wall time less the compilation of the baselines.
        interrupted: Ctrl-C ended the run; the rows are those finished before.
        failed: workload -> why there is no row for it.
        compiling: by compiler.
    """

    rows: list[Row]
    device: dict[str, Any]
    versions: dict[str, Any]
    tuning_s: float
    interrupted: bool = False
    failed: dict[str, str] = field(default_factory=dict)
    compiling: Mapping[str, Effort] = field(default_factory=dict)


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
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(data, file, indent=1)
                file.write("\n")
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
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
        }
        for row in report.rows
    ]


def commit() -> str | None:
    """The commit this package was run from, "-dirty" with local changes; None outside git."""
    here = Path(__file__)
    git = ["git", "-C", str(here.parent)]
    try:
        tracked = subprocess.run(
            [*git, "ls-files", "--error-unmatch", here.name], capture_output=True, timeout=10
        )
        if tracked.returncode:
            return None
        describe = [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(
            describe, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


# --- validation ------------------------------------------------------------------------------

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
            for part in ("wrong", "others", "refused", "none_right", "unsearched", "spreads"):
                kinds = (Mapping, list) if part == "wrong" else Mapping
                if not isinstance(row.get(part, {}), kinds):
                    found.append(f"{where}.{part} is {row[part]!r}, not an object")
            of_each = {"baselines": _MEASURED, "others": _MEASURED, "none_right": _NONE_RIGHT}
            for part, schema in of_each.items():
                things = row.get(part, {})
                for name, thing in things.items() if isinstance(things, Mapping) else ():
                    found += _mismatches(thing, schema, f"{where}.{part}.{name}")
            verdicts = (("verified", _VERIFIED), ("chosen_verified", _VERIFIED))
            for part, schema in (("own", _OWN), *verdicts):
                if row.get(part) is not None:
                    found += _mismatches(row[part], schema, f"{where}.{part}")
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
