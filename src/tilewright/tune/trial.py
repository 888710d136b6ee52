"""One workload's candidates on their way: compiled, verified, timed briefly, thinned out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tilewright.build import CompileTask, Resources
from tilewright.compile.cache import Compiled
from tilewright.errors import CompileError, CompilerMissing
from tilewright.impl import IMPLS
from tilewright.measure.candidate import Candidate, Outcome
from tilewright.measure.timing import Timing
from tilewright.op import Workload
from tilewright.record import Record
from tilewright.search import Budget, successive_halving
from tilewright.tune.ahead import built, grouped, needed
from tilewright.tune.choice import least_waited
from tilewright.tune.session import Session, code_hash
from tilewright.tune.spread import Times

BRIEF_ROUNDS = 3
"""Samples of a candidate's first timing: enough to tell factors, not percents."""
ENTRANTS = {"cpu": 6, "cuda": 24}
"""Candidates that successive halving starts from, by their first timing. A CPU's calls take so
long that more of them would leave no time to search."""
SPILLERS_TRIED = 8
FIRST_S = 0.5
"""The first candidates are verified even if compiling them has spent the budget."""


@dataclass
class Entry:
    """A candidate and what is known of it.

    Attributes:
        us: its latest median, infinite if it failed.
        waited_us: the same, or what a call costs the host if that is longer.
    """

    candidate: Candidate
    code_hash: str
    resources: Resources | None = None
    outcome: Outcome | None = None
    us: float = math.inf
    waited_us: float = math.inf

    @property
    def verified(self) -> bool:
        return self.outcome is not None and self.outcome.status == "ok"


class Trial:
    """The candidates of one workload in one run. Every outcome becomes a record at once.

    Attributes:
        records: of the search, in order, kept in the store or not.
        uncompiled: implementations whose compiler is not on this machine.
    """

    def __init__(self, session: Session, w: Workload):
        self.session, self.w = session, w
        self.limits = session.prepare(w)
        self.entries: dict[Candidate, Entry] = {}
        self.records: list[Record] = []
        self.refused: dict[str, str] = {}
        self.uncompiled: set[str] = set()
        self.unsearched: dict[str, str] = {}
        self.spreads: Times = {}
        self.compiled = 0
        self._spilled: list[Entry] = []
        self._best_us = math.inf

    @property
    def distinct(self) -> Counter[str]:
        """Of each implementation, executables that were verified, each counted once however often
        built."""
        found = {
            (e.candidate.implementation, e.code_hash) for e in self.entries.values() if e.verified
        }
        return Counter(name for name, _ in found)

    def refuse(self, implementation: str, reason: str) -> None:
        """The implementation takes no part in this workload."""
        self.refused[implementation] = reason
        candidate = Candidate(implementation)
        self._add([self._record(candidate, "unsupported", message=reason)])

    def assess(self, candidates: Sequence[Candidate], budget: Budget) -> list[float]:
        """Compile, verify and briefly time the new ones; seconds of each, infinite if it failed.

        Those that the budget leaves no time for are infinite too, and are not recorded.
        """
        fresh = [c for c in dict.fromkeys(candidates) if c not in self.entries]
        groups = self._built(fresh)
        for group in groups:
            ready = [entry for item in group if (entry := self._admit(*item))]
            self._time_briefly(self.verify(ready, budget))
            self._tell()
            if budget.left_s <= 0:
                break
        groups.close()
        return [self.entries[c].us * 1e-6 if c in self.entries else math.inf for c in candidates]

    def spills(self, candidate: Candidate) -> bool:
        """Whether it was compiled, and its kernel spills registers."""
        return any(e.candidate == candidate for e in self._spilled)

    def assess_spilled(self, candidates: Sequence[Candidate], budget: Budget) -> None:
        """Give those that spill their chance: the ones with the fewest spilled bytes."""
        entries = [e for e in self._spilled if e.candidate in candidates]
        entries.sort(key=lambda e: e.resources.spill_bytes if e.resources else 0)
        self._time_briefly(self.verify(entries[:SPILLERS_TRIED], budget))

    def verify(self, entries: Iterable[Entry], budget: Budget | None = None) -> list[Entry]:
        """Verify on the device; those that passed. Failures are recorded with their message."""
        waiting = {entry.candidate: entry for entry in entries}
        left_s = budget.left_s if budget else math.inf
        if not any(e.verified for e in self.entries.values()):
            left_s = max(left_s, FIRST_S)
        failures: list[Record] = []
        runner = self.session.runner
        for candidate, outcome in runner.verify(
            self.w, list(waiting), seed=self.session.options.seed, budget_s=left_s
        ):
            entry = waiting[candidate]
            entry.outcome = outcome
            entry.resources = entry.resources or outcome.resources
            self.entries[candidate] = entry
            if not entry.verified:
                failures.append(self._failure(entry, outcome))
        self._add(failures)
        return [entry for entry in waiting.values() if entry.verified]

    def thin(self, candidates: Sequence[Candidate], finalists: int, budget: Budget) -> list[Entry]:
        """The fastest of the verified ones, by successive halving within the budget; and the one
        that a caller waits least for, where that is none of them: it may have fewer launches."""
        entries = [e for c in candidates if (e := self.entries.get(c)) and e.us < math.inf]
        entries.sort(key=lambda e: e.us)
        if len(entries) <= finalists:
            return entries
        halved = successive_halving(
            [e.candidate for e in entries[: ENTRANTS[self.session.spec.kind]]],
            lambda alive, repeats: self._time(alive, rounds=BRIEF_ROUNDS * repeats),
            finalists=finalists,
            stop=budget.spent,
        )
        found = [self.entries[candidate] for candidate, _ in halved]
        soonest = least_waited(entries, lambda e: e.waited_us)
        if not any(e in soonest for e in found):
            found.append(min(soonest, key=lambda e: e.us))
        return found

    def entry(self, candidate: Candidate) -> Entry:
        """A new entry for a candidate that has no binary of its own."""
        return Entry(candidate, code_hash(candidate, self.session.device.versions))

    def failed(self, entry: Entry, outcome: Outcome) -> None:
        """A verified candidate failed while it was timed."""
        entry.outcome, entry.us, entry.waited_us = outcome, math.inf, math.inf
        self._add([self._failure(entry, outcome)])

    def _built(self, candidates: Sequence[Candidate]):
        if not self.session.runner.compiles:
            return grouped(((c, None) for c in candidates), overlap=False)
        items = built(self.session.pool, candidates, self._tasks)
        return grouped(items, self.session.overlap)

    def _tasks(self, candidate: Candidate) -> list[CompileTask]:
        implementation, w, spec = IMPLS[candidate.implementation], self.w, self.session.spec
        return needed(implementation, candidate.resolve(w, spec), w, spec)

    def _admit(self, candidate: Candidate, result: Compiled | CompileError | None) -> Entry | None:
        """The entry of a candidate that may be verified now; None for failures and spillers."""
        if isinstance(result, CompileError):
            outcome = Outcome.of_error(result)
            entry = self.entries[candidate] = Entry(candidate, "", outcome=outcome)
            if isinstance(result, CompilerMissing):
                self.refused[candidate.implementation] = str(result)
                self.uncompiled.add(candidate.implementation)
            self._add([self._failure(entry, outcome)])
            return None
        self.compiled += 1
        if result is None:
            return self.entry(candidate)
        resources = result.resources or IMPLS[candidate.implementation].resources(
            candidate.resolve(self.w, self.session.spec), result.log
        )
        entry = Entry(candidate, result.key, resources)
        if resources and resources.spill_bytes:
            self.entries[candidate] = entry
            self._spilled.append(entry)
            if self.session.options.spilled:
                return entry
            message = f"spills {resources.spill_bytes} bytes per thread"
            self._add([self._record(candidate, "spilled", entry, message=message)])
            return None
        return entry

    def _time_briefly(self, entries: Sequence[Entry]) -> None:
        self._time([e.candidate for e in entries], BRIEF_ROUNDS)
        for entry in entries:
            if entry.us < self._best_us:
                self._best_us = entry.us
                self.session.progress.best(entry.candidate, entry.us)

    def _time(self, candidates: Sequence[Candidate], rounds: int) -> list[float]:
        """Exactly so many rounds; medians into the entries, records into the store."""
        timings = self.session.runner.time(
            self.w, candidates, self.session.method, budget_s=0.0, min_rounds=rounds
        )
        records = []
        for candidate in candidates:
            entry, timing = self.entries[candidate], timings[candidate]
            if isinstance(timing, Outcome):
                self.failed(entry, timing)
                continue
            entry.us, entry.waited_us = timing.median_us, timing.waited_us
            records.append(self._record(candidate, self._status(entry, timing), entry, timing))
        self._add(records)
        return [self.entries[c].us * 1e-6 for c in candidates]

    def _status(self, entry: Entry, timing: Timing) -> str:
        """ "ok", or "invalid" for a time that physics rules out, which then counts for nothing."""
        if timing.median_us < self.limits.hard_limit_us:
            entry.us = entry.waited_us = math.inf
            return "invalid"
        return "spilled" if entry in self._spilled else "ok"

    def _failure(self, entry: Entry, outcome: Outcome) -> Record:
        return self._record(entry.candidate, outcome.status, entry, message=outcome.message)

    def _record(
        self,
        candidate: Candidate,
        status: str,
        entry: Entry | None = None,
        timing: Timing | None = None,
        message: str = "",
    ) -> Record:
        if entry is None:
            return self.session.record(self.w, candidate, status, message=message)
        return self.session.record(
            self.w,
            candidate,
            status,
            message=message,
            code_hash=entry.code_hash,
            outcome=entry.outcome,
            resources=entry.resources,
            timing=timing,
        )

    def _add(self, records: Sequence[Record]) -> None:
        self.records += records
        self.session.add(records)

    def _tell(self) -> None:
        verified = sum(e.verified for e in self.entries.values())
        failed = sum(e.outcome is not None and not e.verified for e in self.entries.values())
        self.session.progress.counts(self.compiled, verified, failed)
