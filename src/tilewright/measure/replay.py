"""The runner that answers from records, so that strategies are tried without hardware."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from tilewright.build import Resources
from tilewright.measure.activity import Activity
from tilewright.measure.candidate import AsCalled, Candidate, Description, Limits, Outcome
from tilewright.measure.timing import Eager, Timing
from tilewright.measure.verify import Verdict
from tilewright.op import Workload
from tilewright.record import Record


class Replay:
    """Answers from recorded outcomes: what strategies and the tuner are tested with.

    A candidate that was never recorded is `unsupported`; of several records of one candidate the
    last counts.
    """

    compiles = False

    def __init__(self, records: Iterable[Record], description: Description):
        self._records: dict[tuple[str, Candidate], Record] = {}
        self._description = description
        for record in records:
            candidate = Candidate.of(record.implementation, record.config)
            self._records[record.workload, candidate] = record

    def describe(self) -> Description:
        return self._description

    def ceilings(self, method: str) -> None:
        return None

    def prepare(self, w: Workload, method: str, seed: int = 0) -> Limits:
        floor = self._records.get((str(w), Candidate("floor")))
        return Limits(floor.median_us or 0.0 if floor else 0.0, 0.0)

    def verify(
        self,
        w: Workload,
        candidates: Sequence[Candidate],
        *,
        seed: int = 0,
        budget_s: float = math.inf,
    ) -> Iterator[tuple[Candidate, Outcome]]:
        for candidate in candidates:
            yield candidate, _recorded(self._records.get((str(w), candidate)))

    def time(
        self,
        w: Workload,
        candidates: Sequence[Candidate],
        method: str,
        *,
        target: float = 0.01,
        budget_s: float = 2.0,
        min_rounds: int = 5,
    ) -> dict[Candidate, Timing | Outcome]:
        found: dict[Candidate, Timing | Outcome] = {}
        for candidate in candidates:
            record = self._records.get((str(w), candidate))
            if record is None or record.median_us is None:
                found[candidate] = Outcome("unsupported", "its time was not recorded")
                continue
            low, high = record.ci_low_us, record.ci_high_us
            ci = (low or record.median_us, high or record.median_us)
            found[candidate] = Timing(record.median_us, ci, record.samples)
        return found

    def eager(
        self, w: Workload, candidates: Sequence[Candidate], method: str
    ) -> dict[Candidate, Eager]:
        return {}

    def public_eager(self, w: Workload, as_called: AsCalled, method: str) -> Eager | None:
        return None

    def activity(
        self, w: Workload, candidates: Sequence[Candidate], method: str
    ) -> dict[Candidate, Activity]:
        return {}

    def close(self) -> None:
        pass


def _recorded(record: Record | None) -> Outcome:
    if record is None:
        return Outcome("unsupported", "no record of this candidate")
    verdict = None
    if record.max_ulp is not None:
        verdict = Verdict(
            record.status != "wrong_result",
            record.max_ulp,
            record.bound_ulp or 0.0,
            None,
            bool(record.deterministic),
            record.message,
        )
    resources = Resources(**record.resources) if record.resources else None
    timed = record.status in ("ok", "slower", "spilled")
    return Outcome(
        "ok" if timed else record.status,
        "" if timed else record.message,
        verdict,
        resources,
        record.workspace_bytes,
    )
