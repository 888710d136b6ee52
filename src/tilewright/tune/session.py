"""One run over many workloads: the device, the clock, the records, and how a run ends."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tilewright.build import Resources
from tilewright.compile.pool import CompilePool
from tilewright.errors import InvalidArgument, LaunchError, NoErrorRule
from tilewright.impl import LIBRARY_BACKENDS, OWN_BACKENDS, Implementation, implementations
from tilewright.measure.candidate import AsCalled, Candidate, Limits, Outcome
from tilewright.measure.runner import Runner
from tilewright.measure.timing import Timing
from tilewright.op import Workload
from tilewright.record import Record
from tilewright.report import Report, Row
from tilewright.search import Budget
from tilewright.store import Store
from tilewright.tune.progress import Progress

SHARE_S = {"cpu": 12.0, "cuda": 18.0}
"""Seconds for each workload where the caller sets no budget."""


@dataclass(frozen=True)
class Options:
    """What the caller of `tune` or `bench` asked for; see there."""

    strategy: str | None = None
    budget_s: float | None = None
    budget_configs: int | None = None
    implementations: Collection[str] | None = None
    baselines: Collection[str] | None = None
    params: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    seed: int = 0
    force: bool = False
    spilled: bool = False
    recording: bool = True
    as_called: AsCalled | None = None


class Clock:
    """Wall time of a run, less what is kept apart from its budget."""

    def __init__(self) -> None:
        self._start_s = time.monotonic()
        self.excluded_s = 0.0

    def seconds(self) -> float:
        return time.monotonic() - self._start_s - self.excluded_s


class Session:
    """What every workload of a run shares."""

    def __init__(
        self,
        runner: Runner,
        pool: CompilePool,
        store: Store,
        options: Options,
        method: str | None,
        progress: Progress,
    ):
        self.runner, self.pool, self.store = runner, pool, store
        self.options, self.progress = options, progress
        self.clock = Clock()
        self.device = runner.describe()
        self.spec = self.device.spec
        self.method = "cpu" if self.spec.kind == "cpu" else method or "events"
        self._rates: dict[str, Any] = {}
        self._workloads = self._workloads_left = 1
        progress.device(self.device, self.method)

    @property
    def restricted(self) -> str:
        """The knobs that may have some values only, and which."""
        params = sorted(self.options.params.items())
        return " ".join(f"{name}={','.join(map(str, values))}" for name, values in params)

    @property
    def overlap(self) -> bool:
        """Whether compilers may run while the device times: not where they share its cores."""
        return self.spec.kind != "cpu"

    def run(self, workloads: Sequence[Workload], one: Callable[[Session, Workload], Row]) -> Report:
        """Apply `one` to each workload, until done or Ctrl-C."""
        report = Report([], {}, self.device.versions, 0.0)
        total = len(workloads)
        try:
            for i, w in enumerate(workloads):
                self._workloads, self._workloads_left = total, total - i
                self.progress.workload(w, i, total)
                try:
                    row = one(self, w)
                except (LaunchError, NoErrorRule) as error:  # it cannot be run here, or verified
                    report.failed[str(w)] = str(error)
                    self.progress.finished(w, None, str(error))
                    continue
                report.rows.append(row)
                self.progress.finished(w, row)
        except KeyboardInterrupt:
            report.interrupted = True
        report.tuning_s = self.clock.seconds()
        report.compiling = self.pool.effort
        report.device = {"name": self.spec.name, **self.device.info, **self._rates}
        return report

    def share(self) -> Budget:
        """What the present workload may spend from now on: its part of the time that is left, and a
        second where nothing is."""
        total_s = self.options.budget_s
        if total_s is None and self.options.budget_configs is not None:
            return Budget(clock=self.clock.seconds)
        if total_s is None:
            total_s = SHARE_S[self.spec.kind] * self._workloads
        share_s = (total_s - self.clock.seconds()) / self._workloads_left
        return Budget(max(share_s, 1.0), clock=self.clock.seconds)

    def prepare(self, w: Workload) -> Limits:
        """Have the runner make ready for a workload; the first call measures the ceilings."""
        if not self._rates:
            self.progress.phase("ceilings")
            if ceilings := self.runner.ceilings(self.method):
                self._rates = {
                    "copy_bytes_per_s": ceilings.copy_bytes_per_s,
                    "matmul_flops_per_s": dict(ceilings.matmul_flops_per_s),
                    "clock_mhz": ceilings.clock_mhz,
                }
        self.progress.phase("prepare")
        return self.runner.prepare(w, self.method, self.options.seed)

    def add(self, records: Sequence[Record]) -> None:
        if records and self.options.recording:
            self.store.add(records)

    def own(self, w: Workload) -> list[Implementation]:
        """Implementations with kernels of ours that serve the operator and were asked for."""
        own = [i for i in implementations(w) if i.backend in OWN_BACKENDS]
        wanted = self.options.implementations
        return own if wanted is None else [i for i in own if i.name in wanted]

    def searched(self, w: Workload) -> list[Implementation]:
        """Ours, and the libraries among the baselines: all that have configs to choose from."""
        wanted, named = self.options.baselines, self.options.implementations or ()
        libraries = [
            i
            for i in implementations(w)
            if i.backend in LIBRARY_BACKENDS and (wanted is None or i.name in {*wanted, *named})
        ]
        return [*self.own(w), *libraries]

    def baselines(self, w: Workload) -> list[Implementation]:
        """aten, and what else without configs is compared with, in the order that decides ties."""
        searched = (*OWN_BACKENDS, *LIBRARY_BACKENDS)
        others = [i for i in implementations(w) if i.backend not in searched]
        wanted = self.options.baselines
        if wanted is not None:
            others = [i for i in others if i.name == "aten" or i.name in wanted]
        return sorted(others, key=lambda i: (i.name != "aten", i.name))

    def space(self, implementation: Implementation, w: Workload):
        """The config space with the asked-for values of the knobs it has, in place of its own.

        Raises:
            InvalidArgument: a value is of another kind than those the knob lists.
        """
        space = implementation.space(w, self.spec)
        chosen = {}
        for name, asked in self.options.params.items():
            if name in space.values:
                listed = {str(v): v for v in space.values[name]}
                chosen[name] = [listed.get(str(v), v) for v in asked]
                kinds = {type(v) for v in listed.values()} - {str}
                least = 1 if name in space.counts else -math.inf
                strange = [
                    v
                    for v in chosen[name]
                    if v not in listed.values() and (type(v) not in kinds or v < least)
                ]
                if strange:
                    raise InvalidArgument(
                        f"{implementation.name}: {name}={strange[0]!r} is not like the values it "
                        f"lists: {', '.join(listed)}"
                    )
        return space.restricted(chosen)

    def record(
        self,
        w: Workload,
        candidate: Candidate,
        status: str,
        *,
        message: str = "",
        code_hash: str = "",
        outcome: Outcome | None = None,
        resources: Resources | None = None,
        timing: Timing | None = None,
        duel: str | None = None,
    ) -> Record:
        """A record of this device and these versions; not yet stored."""
        more: dict[str, Any] = {}
        verdict = outcome.verdict if outcome else None
        if outcome:
            more["workspace_bytes"] = outcome.workspace_bytes
        if resources:
            more["resources"] = asdict(resources)
        if timing:
            more.update(
                median_us=timing.median_us,
                ci_low_us=timing.ci_us[0],
                ci_high_us=timing.ci_us[1],
                samples=timing.samples,
            )
        if verdict:
            more.update(
                max_ulp=verdict.max_ulp,
                bound_ulp=verdict.bound_ulp,
                deterministic=verdict.deterministic,
            )
        return Record(
            workload=str(w),
            op=w.op,
            implementation=candidate.implementation,
            config=candidate.values,
            status=status,
            message=message,
            code_hash=code_hash,
            device=self.device.key,
            device_info=self.device.info,
            versions=self.device.versions | ({"program": w.program} if w.program else {}),
            method=self.method,
            distribution=w.distribution,
            cold=self.spec.kind != "cpu",
            final=duel is not None,
            duel=duel,
            **more,
        )


def code_hash(candidate: Candidate, versions: Mapping[str, Any]) -> str:
    """For a candidate that has no binary of its own: its code is PyTorch's."""
    text = f"{candidate} torch {versions.get('torch')}"
    return hashlib.sha256(text.encode()).hexdigest()
