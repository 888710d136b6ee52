"""Suites: named lists of real workloads, each with its source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tilewright.registry import Registry

if TYPE_CHECKING:
    from tilewright.op import Workload


@dataclass(frozen=True)
class Suite:
    """Workloads in their text form, and how a GPU times them.

    Attributes:
        method: "events" or "graph" on a GPU (see measure/timing.py); a CPU has one method.
        by: groups that its result is also summarised by, as `summaries.summary_by` reads them.
        counts: how often a network has each workload; empty where they are of no network.
    """

    name: str
    texts: tuple[str, ...]
    method: str = "events"
    by: tuple[str, ...] = ()
    counts: tuple[int, ...] = ()

    def workloads(self) -> list[Workload]:
        from tilewright.op import Workload

        return [Workload.parse(text) for text in self.texts]

    def count_of(self) -> dict[str, int]:
        """How often a network has it, by workload; empty where they are of no network."""
        if not self.counts:
            return {}
        return {str(w): n for w, n in zip(self.workloads(), self.counts, strict=True)}


SUITES: Registry[Suite] = Registry("suites", "suite")


def suite(
    name: str,
    texts: Sequence[str],
    method: str = "events",
    by: Sequence[str] = (),
    counts: Sequence[int] = (),
) -> Suite:
    """Register a suite; called once in each file of suites/."""
    assert method in ("events", "graph"), method
    return SUITES.add(name, Suite(name, tuple(texts), method, tuple(by), tuple(counts)))
