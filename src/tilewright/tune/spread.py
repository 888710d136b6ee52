"""A choice for calls that do not tell how their indices are spread: the best worst case.

The duel of a workload that names no distribution is fought on uniform indices. Its contestants are
then timed on every other distribution too, and one that is among the fastest on most indices but
far behind on some gives way to one that is never far behind. Where a workload names a distribution
(`!indices=zipf`), that one alone counts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tilewright.indexed import DISTRIBUTIONS
from tilewright.measure.candidate import Candidate
from tilewright.measure.timing import Timing
from tilewright.op import Workload
from tilewright.record import Record
from tilewright.tune.choice import NEAR, candidate_of, is_own
from tilewright.tune.session import Session

ROUNDS = 3
"""Samples on each further distribution: what decides here are factors."""


@dataclass(frozen=True)
class Worst:
    """The distribution on which a candidate is furthest behind: it takes `ratio` times as long as
    the fastest does."""

    ratio: float
    distribution: str

    def __str__(self) -> str:
        return f"{self.ratio:.2f} times the fastest on {self.distribution} indices"


def others(w: Workload) -> list[Workload]:
    """The workload on every distribution but its own; none where it names one."""
    if w.distribution is None or any(flag.startswith("indices=") for flag in w.flags):
        return []
    spreads = [d for d in DISTRIBUTIONS if d != w.distribution]
    return [
        w.operator.workload(flags=[*w.flags, f"indices={spread}"], **dict(w.args))
        for spread in spreads
    ]


def worst_cases(session: Session, w: Workload, duel: Sequence[Record]) -> dict[Candidate, Worst]:
    """How far behind each of the duel's own kernels, and aten, is at worst; empty where a call's
    distribution is known.

    Args:
        duel: its records of this workload, timed.
    """
    compared = {candidate_of(r): r for r in duel if is_own(r) or r.implementation == "aten"}
    found: dict[Candidate, Worst] = {}
    spreads = others(w)
    if not spreads or len(compared) < 2:
        return found
    session.progress.phase("other distributions")
    times = {c: r.median_us for c, r in compared.items() if r.median_us is not None}
    _note(found, times, str(w.distribution))
    for v in spreads:
        timings = session.runner.time(
            v, list(compared), session.method, budget_s=0.0, min_rounds=ROUNDS
        )
        timed = {c: t for c, t in timings.items() if isinstance(t, Timing)}
        session.add([session.record(v, c, "ok", timing=t) for c, t in timed.items()])
        _note(found, {c: t.median_us for c, t in timed.items()}, str(v.distribution))
    return found


def _note(found: dict[Candidate, Worst], times: Mapping[Candidate, float], spread: str) -> None:
    fastest = min(times.values(), default=0.0)
    for candidate, us in times.items():
        worst = Worst(us / max(fastest, 1e-3), spread)
        if candidate not in found or worst.ratio > found[candidate].ratio:
            found[candidate] = worst


def robust(records: Sequence[Record], worst: Mapping[Candidate, Worst]) -> list[Record]:
    """Those whose worst case is near the best, and aten; all where nothing is known of them."""
    known: Collection[float] = [
        worst[candidate_of(r)].ratio for r in records if candidate_of(r) in worst
    ]
    if not known:
        return list(records)
    limit = NEAR * min(known)
    return [
        r
        for r in records
        if r.implementation == "aten"
        or (candidate_of(r) in worst and worst[candidate_of(r)].ratio <= limit)
    ]
