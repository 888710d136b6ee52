"""What a tuning or benchmark run found: a row for each workload, and the report of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from tilewright.measure.activity import Activity

if TYPE_CHECKING:
    from tilewright.build import Effort


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
        code_hash: of what was compiled, by which the cache has it if it is one kernel; "" where
            nothing was, and in older files.
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
        fought: how many times the duel was fought, again where other programs disturbed it.
        disturbed: how many times what their search measured its candidates took, where that is so
            much that the duel was disturbed each time; None else, and in files that do not tell.
        commit: that measured it, in a file of several runs; None where it is the file's.
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
    fought: int = 1
    disturbed: float | None = None
    commit: str | None = None

    def __post_init__(self) -> None:
        assert self.chosen in self.baselines or (
            self.own and self.chosen == self.own.implementation
        )

    @property
    def chosen_time(self) -> Measured:
        if self.chosen in self.baselines:
            return self.baselines[self.chosen]
        assert self.own is not None
        return self.own

    @property
    def chosen_us(self) -> float:
        return self.chosen_time.median_us

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
        if self.commit is None:
            del row["commit"]
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
