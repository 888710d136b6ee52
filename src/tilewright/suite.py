"""Suites: named lists of real workloads, each with its source."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tilewright.errors import InvalidArgument
from tilewright.registry import Registry

if TYPE_CHECKING:
    from tilewright.op import Workload

CUSTOM = "custom"
"""The name in a result file of workloads that are no suite, or a part of one named one by one."""


@dataclass(frozen=True)
class Suite:
    """Workloads in their text form, and how a GPU times them.

    Attributes:
        method: "events" or "graph" on a GPU (see measure/timing.py); a CPU has one method.
        by: groups that its result is also summarised by, as `summaries.summary_by` reads them.
        counts: how often a network has each workload; empty where they are of no network.
        doc: the docstring of its file: what the workloads are, and their source.
    """

    name: str
    texts: tuple[str, ...]
    method: str = "events"
    by: tuple[str, ...] = ()
    counts: tuple[int, ...] = ()
    doc: str = ""

    def workloads(self) -> list[Workload]:
        from tilewright.op import Workload

        try:
            return [Workload.parse(text) for text in self.texts]
        except InvalidArgument as error:
            raise InvalidArgument(f"suite {self.name}: {error}") from None

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
    doc = _doc_of_the_file()
    return SUITES.add(name, Suite(name, tuple(texts), method, tuple(by), tuple(counts), doc))


def _doc_of_the_file() -> str:
    """The docstring of the file that is being imported, whichever helper it calls."""
    frame = sys._getframe()
    while frame.f_back and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    return frame.f_globals.get("__doc__") or ""
