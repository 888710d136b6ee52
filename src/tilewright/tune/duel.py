"""The duel: finalists, heuristics, every baseline and a copy, interleaved under one id.

Noise only adds to times. Where those of a duel are several times those of the search before it,
other programs had the machine, and the duel is fought again.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import uuid
from collections.abc import Mapping, Sequence

from tilewright.errors import LaunchError
from tilewright.impl import IMPLS, Implementation
from tilewright.measure.candidate import COPY, Candidate, Outcome
from tilewright.measure.timing import Timing
from tilewright.op import Workload
from tilewright.record import BESIDE, Record
from tilewright.report import Row
from tilewright.search import Budget
from tilewright.tune.choice import best_own, candidate_of, host_us, is_own, measured, winner
from tilewright.tune.rows import Fights, floor_of, none_right, row_of
from tilewright.tune.session import Session
from tilewright.tune.spread import Worst, measured_everywhere, robust, worst_cases
from tilewright.tune.trial import Entry, Trial

TARGET = 0.01
"""Half the width of each contestant's 95% interval, as a fraction of its median."""
VENDOR_STATUSES = ("ok", "wrong_result")
"""PyTorch may be wrong, as where it races for the last of several writes to one place: it is
compared with all the same."""
SHORTEST_S, LONGEST_S = 0.5, 8.0
"""Sampling a duel that does not reach the target goes on for so long at least, whatever is left of
the budget, and at most, however large that is."""
DISTURBED = 3.0
"""A duel was disturbed whose candidates take this many times what their search measured."""
FIGHTS = 3
"""So often at most a duel is fought until one is not disturbed; else the least disturbed counts."""

Timings = dict[Candidate, Timing | Outcome]


def baseline_entries(trial: Trial) -> list[Entry]:
    """Baselines that support the workload, built and verified; compiling them is not charged.

    One whose result is wrong stays in the comparison, but cannot be chosen.

    Raises:
        LaunchError: aten itself does not run.
    """
    session, w = trial.session, trial.w
    session.progress.phase("baselines")
    entries: list[Entry] = []
    for baseline in session.baselines(w):
        if reason := baseline.unsupported(w, session.spec):
            trial.refuse(baseline.name, reason)
            continue
        entry = _baseline_entry(trial, baseline)
        outcome = entry.outcome
        assert outcome is not None
        session.clock.excluded_s += outcome.build_s
        if outcome.status in ("ok", "wrong_result"):
            entries.append(entry)
        elif baseline.name == "aten":
            raise LaunchError(f"aten cannot run {w}: {outcome.message}")
        if outcome.status != "ok":
            trial.refused[baseline.name] = outcome.message
    return entries


def _baseline_entry(trial: Trial, baseline: Implementation) -> Entry:
    config = baseline.heuristic(trial.w, trial.session.spec)
    candidate = Candidate.of(baseline.name, config)
    if candidate not in trial.entries:
        trial.verify([trial.entry(candidate)])
    return trial.entries[candidate]


def duel(trial: Trial, own: Sequence[Entry], budget: Budget) -> Row:
    """Time everything that may win against each other, record it, and choose.

    Args:
        own: verified candidates of ours; the heuristics' among them.
        budget: what is left of the workload's.
    """
    session, w = trial.session, trial.w
    contestants = [*baseline_entries(trial), *own]
    session.progress.phase("duel")
    by_candidate = {entry.candidate: entry for entry in contestants}
    timings, fights = _fought(trial, by_candidate, min(max(budget.left_s, SHORTEST_S), LONGEST_S))
    records = _records(trial, timings, by_candidate, fights)
    try:
        records = _judged(records, trial)
        records += _eager(trial, records)
    except BaseException:  # then they decide nothing, and are kept
        timed = [r for r in records if r.status not in BESIDE]
        session.add([dataclasses.replace(r, final=False, duel=None) for r in timed])
        raise
    session.add(records)
    exact = {
        c: e.outcome.verdict.integer_exact
        for c, e in by_candidate.items()
        if e.outcome and e.outcome.verdict
    }
    names = [i.name for i in session.searched(w) if i.name not in trial.refused]
    return row_of(
        records,
        w,
        session.spec,
        trial.distinct,
        trial.refused,
        exact,
        unsearched=trial.unsearched,
        none_right=none_right(trial.records, records, names),
        spreads=trial.spreads,
    )


def _fought(
    trial: Trial, entries: Mapping[Candidate, Entry], budget_s: float
) -> tuple[Timings, Fights]:
    """The times that decide, and what it took to have them: see DISTURBED.

    Args:
        budget_s: of each fight.
    """
    session, fought = trial.session, list[tuple[float, Timings]]()
    while len(fought) < FIGHTS and all(times >= DISTURBED for times, _ in fought):
        timings = session.runner.time(
            trial.w, [COPY, *entries], session.method, target=TARGET, budget_s=budget_s
        )
        fought.append((_times_the_search(timings, entries), timings))
    times, timings = min(fought, key=lambda fight: fight[0])
    return timings, Fights(len(fought), times if times >= DISTURBED else None)


def _times_the_search(timings: Timings, entries: Mapping[Candidate, Entry]) -> float:
    """How many times what their search measured the candidates take, by the median of them; 0 where
    it timed none."""
    return statistics.median(
        [
            timing.median_us / entry.us
            for candidate, entry in entries.items()
            if isinstance(timing := timings[candidate], Timing) and 0 < entry.us < math.inf
        ]
        or [0.0]
    )


def _records(
    trial: Trial, timings: Timings, entries: dict[Candidate, Entry], fights: Fights
) -> list[Record]:
    """One record for each contestant that was timed, and for the floor and the copy."""
    session, w = trial.session, trial.w
    limits, name = trial.limits, uuid.uuid4().hex
    floor = Timing(limits.floor_us, (limits.floor_us, limits.floor_us), 0)
    tried = [c for c in trial.entries if c.implementation not in trial.uncompiled]
    beside = ((floor_of(session, tried, fights), floor), (COPY, timings[COPY]))
    records = [
        session.record(w, candidate, "ceiling", timing=timing, duel=name)
        for candidate, timing in beside
        if isinstance(timing, Timing)
    ]
    for candidate, entry in entries.items():
        timing, outcome = timings[candidate], entry.outcome
        if isinstance(timing, Outcome):
            trial.failed(entry, timing)
            continue
        assert outcome is not None
        status, message = outcome.status, outcome.message
        if timing.median_us < limits.hard_limit_us:
            status = "invalid"
            message = f"faster than the hard limit of {limits.hard_limit_us:.3g} us"
        record = session.record(
            w,
            candidate,
            status,
            message=message,
            code_hash=entry.code_hash,
            outcome=outcome,
            resources=entry.resources,
            timing=timing,
            duel=name,
        )
        records.append(record)
        if timing.host_us is not None:
            records.append(_of_call(session, w, candidate, "host", timing.host_us, name))
    return records


def _of_call(
    session: Session, w: Workload, candidate: Candidate, status: str, us: float, duel: str | None
) -> Record:
    return session.record(w, candidate, status, timing=Timing(us, (us, us), 1), duel=duel)


def _judged(records: list[Record], trial: Trial) -> list[Record]:
    """Statuses by which "the lowest median among ok" is the choice."""
    only_compared = {
        r.implementation: reason
        for r in records
        if r.status not in BESIDE and (reason := IMPLS[r.implementation].only_compared(trial.w))
    }
    fit = [r for r in records if r.status == "ok" and r.implementation not in only_compared]
    if kept := [r for r in fit if _keeps_promises(r, trial)]:
        fit = kept
    timed = [r for r in records if r.implementation == "aten" and r.status in VENDOR_STATUSES]
    if not fit or not timed:
        raise LaunchError(f"aten could not be timed on {trial.w}; see the records")
    compared = [*fit, *(r for r in timed if r not in fit)]
    trial.spreads = measured_everywhere(trial.session, trial.w, compared)
    host = host_us(records)
    eligible = {candidate_of(r) for r in fit}
    worst = worst_cases({c: on for c, on in trial.spreads.items() if c in eligible}, host)
    chosen = winner(robust(fit, worst), host, trial.w, trial.session.spec)
    chosen_us = measured(chosen).median_us
    aten_us = min(measured(r).median_us for r in timed)
    judged = []
    for record in records:
        status = record.status
        if status == "ok" and record is not chosen:
            us = measured(record).median_us
            slower = is_own(record) and us > aten_us
            status = "tied" if us <= chosen_us else "slower" if slower else "ok"
        if status not in BESIDE:
            told = record.message or only_compared.get(record.implementation)
            told = told or _reasons(record, worst, host)
            record = dataclasses.replace(record, status=status, message=told)
        judged.append(record)
    return judged


def _reasons(
    record: Record, worst: Mapping[Candidate, Worst], host: Mapping[Candidate, float]
) -> str:
    """What counted for or against it besides its time."""
    candidate = candidate_of(record)
    found = [str(worst[candidate])] if candidate in worst else []
    if host.get(candidate, 0.0) > measured(record).median_us:
        found.append(f"a call costs the host {host[candidate]:.4g} us")
    return "; ".join(found)


def _keeps_promises(record: Record, trial: Trial) -> bool:
    """Whether what was timed may run at all where no one asks for it by name."""
    w, name = trial.w, record.implementation
    if "nondeterministic" in w.flags or name == "aten_deterministic":
        return True
    return IMPLS[name].keeps_promises or not w.promises_more(trial.session.spec.kind)


def _eager(trial: Trial, records: list[Record]) -> list[Record]:
    """What one eager call of aten and of the best of ours costs the host, if that is not known from
    the duel, and takes."""
    session, w = trial.session, trial.w
    session.progress.phase("eager calls")
    own = best_own(records, w, session.spec)
    contestants = [r for r in records if r.status not in BESIDE]
    timed = [r for r in contestants if r.implementation == "aten" or r is own]
    known = {candidate_of(r) for r in records if r.status == "host"}
    found = session.runner.eager(w, [candidate_of(r) for r in timed], session.method)
    return [
        _of_call(session, w, candidate, status, us, records[0].duel)
        for candidate, call in found.items()
        for status, us in (("host", call.host_us), ("eager", call.us))
        if status == "eager" or candidate not in known
    ]
