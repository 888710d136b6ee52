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


Times = dict[Candidate, dict[str, float]]
"""Of candidates: distribution -> median in microseconds."""


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
    named = (
        w.operator.workload(flags=[*w.flags, f"indices={spread}"], **dict(w.args))
        for spread in DISTRIBUTIONS
        if spread != w.distribution
    )
    return [*dict.fromkeys(named)]


def measured_everywhere(session: Session, w: Workload, duel: Sequence[Record]) -> Times:
    """What each of the duel's own kernels, and aten, takes on every distribution; empty where a
    call's distribution is known.

    Args:
        duel: its records of this workload, timed.
    """
    compared, spreads = _compared(duel), others(w)
    if not spreads or len(compared) < 2:
        return {}
    session.progress.phase("other distributions")
    found = _of_the_duel(w, compared)
    for v in spreads:
        timings = session.runner.time(
            v, list(compared), session.method, budget_s=0.0, min_rounds=ROUNDS
        )
        timed = {c: t for c, t in timings.items() if isinstance(t, Timing)}
        session.add(
            [
                session.record(v, c, "ok", timing=t, code_hash=compared[c].code_hash)
                for c, t in timed.items()
            ]
        )
        for c, t in timed.items():
            found[c][str(v.distribution)] = t.median_us
    return found


def recorded_everywhere(session: Session, w: Workload, duel: Sequence[Record]) -> Times:
    """The same as the records of the same code have it."""
    compared = _compared(duel)
    found: Times = {}
    for v in others(w):
        known = session.store.query(
            workload=str(v),
            device=session.device.key,
            versions=session.device.versions,
            method=session.method,
            status="ok",
        )
        for r in reversed(known):  # the newest of each remains
            if (c := candidate_of(r)) not in compared or r.code_hash != compared[c].code_hash:
                continue
            if r.median_us is not None:
                found = found or _of_the_duel(w, compared)
                found[c][str(v.distribution)] = r.median_us
    return found


def _compared(duel: Sequence[Record]) -> dict[Candidate, Record]:
    return {candidate_of(r): r for r in duel if is_own(r) or r.implementation == "aten"}


def _of_the_duel(w: Workload, compared: Mapping[Candidate, Record]) -> Times:
    return {
        c: {str(w.distribution): r.median_us} if r.median_us is not None else {}
        for c, r in compared.items()
    }


def worst_cases(times: Times, host: Mapping[Candidate, float]) -> dict[Candidate, Worst]:
    """How far behind each candidate is at worst.

    Args:
        times: of those that may be chosen.
        host: what a call costs the host, whatever the indices are: no caller waits less.
    """
    times = {
        c: {spread: max(us, host.get(c, 0.0)) for spread, us in on.items()}
        for c, on in times.items()
    }
    found: dict[Candidate, Worst] = {}
    for spread in dict.fromkeys(spread for on in times.values() for spread in on):
        fastest = min(on[spread] for on in times.values() if spread in on)
        for candidate, on in times.items():
            if spread in on:
                worst = Worst(on[spread] / max(fastest, 1e-3), spread)
                if candidate not in found or worst.ratio > found[candidate].ratio:
                    found[candidate] = worst
    return found


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
