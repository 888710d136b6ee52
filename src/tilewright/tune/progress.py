"""What a run tells while it goes."""

from __future__ import annotations

from tilewright.measure.candidate import Candidate, Description
from tilewright.op import Workload
from tilewright.report import Row


class Progress:
    """Callbacks of `tune`, `bench` and what else measures, all in the caller's thread; override
    those of interest."""

    def device(self, device: Description, method: str) -> None:
        """The device is known; comes first, and once."""

    def workload(self, w: Workload, index: int, total: int) -> None:
        """Work on `w` begins; `index` counts from 0."""

    def phase(self, name: str) -> None:
        """What is being done: "ceilings", "search fused", "baselines", "duel", ..."""

    def counts(self, compiled: int, verified: int, failed: int) -> None:
        """Candidates of this workload so far."""

    def best(self, candidate: Candidate, us: float) -> None:
        """A candidate is the fastest of this workload so far, by a brief timing."""

    def finished(self, w: Workload, row: Row | None, reason: str = "") -> None:
        """The row of `w`, or why there is none."""
