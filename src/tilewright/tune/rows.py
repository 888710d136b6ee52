"""Rows from the records of a duel, whether it was fought just now or is read from the store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.compile.cache import Compiled, compiled
from tilewright.device import DeviceSpec
from tilewright.errors import CompileError, InvalidArgument
from tilewright.impl import IMPLS, OWN_BACKENDS
from tilewright.measure.candidate import COPY, Candidate
from tilewright.measure.ceilings import plain_units_us
from tilewright.op import Workload
from tilewright.record import BESIDE, Record
from tilewright.report import Baseline, NoneRight, Own, Row, Verified
from tilewright.space import ConfigSpace
from tilewright.tune.ahead import code_of, needed
from tilewright.tune.choice import (
    COMPETING,
    best_own,
    candidate_of,
    chosen_of,
    is_of_ours,
    is_own,
    measured,
)
from tilewright.tune.session import Session
from tilewright.tune.spread import Times, recorded_everywhere

FLOOR = Candidate("floor")
"""Not an implementation: the workload's floor, kept beside the duel it belongs to."""


@dataclass(frozen=True)
class Fights:
    """What it took to have the times of a duel; `Row` has both."""

    fought: int = 1
    disturbed: float | None = None


_NO_FAULT = (*COMPETING, *BESIDE, "unsupported")


def row_of(
    records: Sequence[Record],
    w: Workload,
    spec: DeviceSpec,
    candidates: Mapping[str, int],
    refused: Mapping[str, str],
    integer_exact: Mapping[Candidate, bool | None],
    *,
    unsearched: Mapping[str, str] | None = None,
    none_right: Mapping[str, NoneRight] | None = None,
    spreads: Times | None = None,
) -> Row:
    """The row of one duel.

    Args:
        records: all records of the duel, ceilings and host times among them.
        candidates: implementation -> distinct verified executables of it.
        integer_exact: where it is known.
        unsearched, none_right: as `Row` has them.
        spreads: what each took on every distribution of indices.
    """
    timed = [r for r in records if r.status not in BESIDE]
    chosen, own = chosen_of(records), best_own(records, w, spec)
    fights = fights_of(records)
    return Row(
        workload=str(w),
        floor_us=floor_us_of(records, w, spec),
        copy_us=_references(records).get(COPY.implementation),
        method=chosen.method,
        distribution=chosen.distribution,
        host_us=_of_calls(records, "host", own),
        baselines={
            r.implementation: Baseline(
                **vars(measured(r)),
                config=r.config,
                candidates=candidates.get(r.implementation, 0),
                deterministic=r.deterministic,
                max_ulp=r.max_ulp,
            )
            for r in _fastest_of_each([r for r in timed if not is_own(r)])
        },
        own=_own(own, timed, w, spec) if own else None,
        chosen=chosen.implementation,
        candidates=sum(n for name, n in candidates.items() if is_of_ours(name)),
        verified=_verified(own, integer_exact) if own else None,
        wrong={r.implementation: r.message for r in timed if r.status == "wrong_result"},
        refused=dict(refused),
        eager_us=_of_calls(records, "eager", own),
        others={
            r.implementation: measured(r)
            for r in _fastest_of_each([r for r in timed if own and _lost_to(own, r)])
        },
        unsearched=dict(unsearched or {}),
        none_right=dict(none_right or {}),
        chosen_verified=_verified(chosen, integer_exact),
        spreads={str(candidate): dict(times) for candidate, times in (spreads or {}).items()},
        fought=fights.fought,
        disturbed=fights.disturbed,
    )


def none_right(
    records: Sequence[Record], duel: Sequence[Record], names: Iterable[str]
) -> dict[str, NoneRight]:
    """Those of the implementations that have no right contestant in the duel.

    Args:
        records: what became of their configs, oldest first.
    """
    served = {r.implementation for r in duel if r.status in COMPETING}
    found = {}
    for name in names:
        if name not in served:
            failed = [r for r in records if r.implementation == name and r.status not in _NO_FAULT]
            first = (failed[0].message or failed[0].status) if failed else ""
            found[name] = NoneRight(len({candidate_of(r) for r in failed}), first)
    return found


def _lost_to(own: Record, r: Record) -> bool:
    """Whether it is of another of our implementations than the best, and right."""
    return is_own(r) and r.implementation != own.implementation and r.status in COMPETING


def _of_calls(records: Sequence[Record], status: str, own: Record | None) -> dict[str, float]:
    """Of eager calls, by implementation, and "own" for the best of ours."""
    found = {}
    for r in records:
        if r.status == status and r.median_us is not None:
            if own and candidate_of(r) == candidate_of(own):
                found["own"] = r.median_us
            elif not is_own(r):
                found[r.implementation] = r.median_us
    return found


def _fastest_of_each(records: Sequence[Record]) -> list[Record]:
    """One of each implementation: of one with configs there are several."""
    found: dict[str, Record] = {}
    for record in records:
        best = found.setdefault(record.implementation, record)
        if measured(record).median_us < measured(best).median_us:
            found[record.implementation] = record
    return list(found.values())


def floor_us_of(records: Sequence[Record], w: Workload, spec: DeviceSpec) -> float:
    """The floor that a duel is held against."""
    timed = [r for r in records if r.status not in BESIDE]
    return _floor_us(_references(records), timed, w, spec)


def _references(records: Iterable[Record]) -> dict[str, float | None]:
    """The floor by the device's ceilings, and the copy, of a duel."""
    return {r.implementation: r.median_us for r in records if r.status == "ceiling"}


def _floor_us(
    references: Mapping[str, float | None], timed: Sequence[Record], w: Workload, spec: DeviceSpec
) -> float:
    """The floor by the device's ceilings, or by what the same duel shows to be possible.

    Ceilings are measured minutes earlier, in other memory. On a GPU a copy that moves no more bytes
    than the workload corrects what they say of traffic, but not of matrix products, and operations
    take their time whatever a copy takes. On a CPU the copy has no pages to fault in, and
    last-level caches are shared with whatever else runs: the fastest right result there is a bound
    itself.
    """
    floor_us = references.get(FLOOR.implementation) or 0.0
    if spec.kind != "cuda":
        right = [r.median_us for r in timed if r.status in COMPETING and r.median_us is not None]
        return min([floor_us, *right])
    copy_us = references.get(COPY.implementation)
    moved = sum(w.bytes) / max(2 * w.main.numel * w.main.itemsize, 1)
    if copy_us is None or moved < 1 or w.operator.tensor_cores(w):
        return floor_us
    return max(min(floor_us, copy_us * moved), plain_units_us(w, spec))


def _own(record: Record, timed: Sequence[Record], w: Workload, spec: DeviceSpec) -> Own:
    name, implementation = record.implementation, IMPLS[record.implementation]
    times_us = {candidate_of(r): r.median_us for r in timed}
    heuristic_us = times_us.get(Candidate.of(name, implementation.heuristic(w, spec)))
    if heuristic_us is None:  # its kernel spills, and another one runs
        heuristic_us = times_us.get(Candidate.of(name, implementation.untuned(w, spec)))
    m = measured(record)
    return Own(
        median_us=m.median_us,
        ci_us=m.ci_us,
        implementation=record.implementation,
        config=record.config,
        resources=record.resources or {},
        workspace_bytes=record.workspace_bytes,
        heuristic_us=heuristic_us,
        code_hash=record.code_hash or "",
    )


def _verified(record: Record, integer_exact: Mapping[Candidate, bool | None]) -> Verified:
    return Verified(
        max_ulp=record.max_ulp or 0.0,
        bound_ulp=record.bound_ulp or 0.0,
        integer_exact=integer_exact.get(candidate_of(record)),
        deterministic=bool(record.deterministic),
    )


def recorded_row(session: Session, w: Workload) -> Row | None:
    """The row of the workload's latest duel, if a new one could not say anything else.

    It must have been fought on this device with these versions and this method, after a search by
    every implementation that would take part now, with the same knobs restricted, with the code
    that would be compiled now, undisturbed, and won by what may still be chosen.
    """
    known = session.store.query(
        workload=str(w), device=session.device.key, versions=session.device.versions
    )
    known = [r for r in known if r.program == w.program]
    last = next((r for r in known if r.final), None)
    if last is None or last.method != session.method:
        return None
    known = [r for r in known if r.method == session.method]
    fought = [r for r in known if r.duel == last.duel and r.final]
    if not any(r.status == "ok" for r in fought) or fights_of(fought).disturbed:
        return None
    tried, restricted = _searched_before(fought)
    if restricted != session.restricted:
        return None
    won = chosen_of(fought)
    chosen = won.implementation
    if chosen not in IMPLS or IMPLS[chosen].only_compared(w):
        return None
    refused = {}
    for i in (*session.searched(w), *session.baselines(w)):
        if reason := i.unsupported(w, session.spec):
            refused[i.name] = reason
        elif i.name not in tried:
            return None
    if chosen in refused:
        return None
    if is_own(won) and recorded_config(session.space(IMPLS[chosen], w), won) is None:
        return None
    if not all(_same_code(session, w, r) for r in fought if is_own(r)):
        return None
    verified = {(r.implementation, r.code_hash) for r in known if r.max_ulp is not None
                and r.code_hash and r.status != "wrong_result"}  # fmt: skip
    candidates = Counter(name for name, _ in verified)
    competing = [r for r in fought if r.status in COMPETING or r.implementation == "aten"]
    names = [i.name for i in session.searched(w) if i.name not in refused]
    return row_of(
        fought,
        w,
        session.spec,
        candidates,
        refused,
        {},
        none_right=none_right(known[::-1], fought, names),
        spreads=recorded_everywhere(session, w, competing),
    )


def floor_of(session: Session, tried: Iterable[Candidate], fights: Fights) -> Candidate:
    """The floor of a duel; its row tells what the search before it was of, and of disturbances.

    Args:
        tried: what was searched, right or not.
    """
    told: dict[str, Any] = {"tried": " ".join(sorted({c.implementation for c in tried}))}
    if session.restricted:
        told["restricted"] = session.restricted
    if fights.fought > 1:
        told["fought"] = fights.fought
    if fights.disturbed:
        told["disturbed"] = round(fights.disturbed, 1)
    return Candidate.of(FLOOR.implementation, told)


def _told_by_the_floor(fought: Sequence[Record]) -> dict[str, Any]:
    return next((r.config for r in fought if r.implementation == FLOOR.implementation), {})


def fights_of(fought: Sequence[Record]) -> Fights:
    """What the records of a duel tell."""
    told = _told_by_the_floor(fought)
    return Fights(told.get("fought", 1), told.get("disturbed"))


def _searched_before(fought: Sequence[Record]) -> tuple[set[str], str]:
    """Names of the implementations that were tried before a duel, and how knobs were restricted."""
    told = _told_by_the_floor(fought)
    if "tried" in told:
        return set(told["tried"].split()), told.get("restricted", "")
    return {r.implementation for r in fought}, ""  # from before floors told


def _same_code(session: Session, w: Workload, record: Record) -> bool:
    """Whether building the recorded candidate now would give the binaries that were measured."""
    implementation = IMPLS[record.implementation]
    if record.status in BESIDE or implementation.backend not in OWN_BACKENDS:
        return True
    space = implementation.space(w, session.spec)
    if set(record.config) != set(space.values):
        return False
    config, binaries = space.config(record.config), list[Compiled]()
    try:
        for _ in range(2):  # kernels beside it that spill give way to others, once compiled
            binaries = [*map(compiled, needed(implementation, config, w, session.spec))]
    except CompileError:
        return False
    return not binaries or code_of(binaries) == record.code_hash


def recorded_config(space: ConfigSpace[Any], record: Record) -> Any:
    """The config of a record, or None where its knobs or their values are gone."""
    try:
        config = space.config(record.config)
    except InvalidArgument:
        return None
    return config if config in space else None
