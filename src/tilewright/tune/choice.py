"""Who wins a duel: the fastest, and among those that noise cannot tell apart the simplest.

Of calls that are made one by one (method "events") those take part that a caller waits least for:
small work ends on the device before the host has launched the next. In a graph, as on a CPU, the
measured time is all there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TypeVar

from tilewright.device import DeviceSpec
from tilewright.impl import IMPLS, OWN_BACKENDS
from tilewright.measure.candidate import Candidate
from tilewright.measure.timing import HOST_MATTERS_US
from tilewright.op import Workload
from tilewright.record import Record
from tilewright.report import Measured

T = TypeVar("T")
HOST_DECIDES_US = 12.0
"""Where no contestant takes the device so long, calls from Python do not keep it busy: one kernel
through PyTorch costs the host of an H200 8 to 15 us (aten in scatter_maskrcnn.json, 9b8614d)."""
COMPETING = ("ok", "slower", "tied")
"""Statuses of a duel's verified contestants; only "ok" can win."""

NEAR = 1.05
"""However wide the intervals, a median further than this from the fastest is no tie: on a busy
machine intervals overlap that hold a factor of ten."""
NEAR_ATEN = 1.25
"""The same for aten: no call gets slower because of a quarter that noise may have made."""


def candidate_of(record: Record) -> Candidate:
    return Candidate.of(record.implementation, record.config)


def measured(record: Record) -> Measured:
    assert record.median_us is not None
    low = record.median_us if record.ci_low_us is None else record.ci_low_us
    high = record.median_us if record.ci_high_us is None else record.ci_high_us
    return Measured(record.median_us, (low, high))


def is_own(record: Record) -> bool:
    """Whether the record is of an implementation with kernels of ours."""
    return is_of_ours(record.implementation)


def is_of_ours(implementation: str) -> bool:
    return implementation in IMPLS and IMPLS[implementation].backend in OWN_BACKENDS


def least_waited(contestants: Iterable[T], waited_us: Callable[[T], float]) -> list[T]:
    """Those that a caller waits for no longer than for any other, to within what noise makes of
    it."""
    waited = [(waited_us(c), c) for c in contestants]
    limit_us = NEAR * min(us for us, _ in waited)
    return [c for us, c in waited if us <= limit_us]


def host_us(records: Iterable[Record]) -> dict[Candidate, float]:
    """What a call of each contestant of a duel costs the host, where that is what a caller waits
    for: the device is done before the next call is there. Nothing of other duels, and of those
    that did not measure it of all contestants that are short."""
    called = [r for r in records if r.method == "events"]
    times = [measured(r).median_us for r in called if r.status in COMPETING]
    if not times or min(times) >= HOST_DECIDES_US:
        return {}
    found = {candidate_of(r): r.median_us for r in called if r.status == "host" and r.median_us}
    short = [r for r in called if r.status in COMPETING and measured(r).median_us < HOST_MATTERS_US]
    return found if all(candidate_of(r) in found for r in short) else {}


def winner(
    records: Sequence[Record], host: Mapping[Candidate, float], w: Workload, spec: DeviceSpec
) -> Record:
    """Of timed records the simplest of the fastest among those that a caller waits least for.

    Args:
        host: as `host_us` gives it.
    """

    def waited_us(r: Record) -> float:
        return max(measured(r).median_us, host.get(candidate_of(r), 0.0))

    return simplest_of_fastest(least_waited(records, waited_us) if host else records, w, spec)


def simplest_of_fastest(records: Sequence[Record], w: Workload, spec: DeviceSpec) -> Record:
    """The fastest of timed records; where its interval overlaps those of others near it, the
    simplest of them.

    Simplest is aten, then our kernels with the heuristic's config, then ours with the fewest knobs
    turned away from it, then other baselines (torch.compile costs a compilation in each process).
    A winner is never slower than aten, by their medians.
    """
    times = {id(r): measured(r) for r in records}
    fastest = min(times.values(), key=lambda m: m.median_us)
    vendor = [times[id(r)].median_us for r in records if r.implementation == "aten"]
    limit_us = min([NEAR * fastest.median_us, *vendor])

    def ties(r: Record) -> bool:
        of_aten = r.implementation == "aten"
        most_us = NEAR_ATEN * fastest.median_us if of_aten else limit_us
        return times[id(r)].overlaps(fastest) and times[id(r)].median_us <= most_us

    tied = [r for r in records if ties(r)]
    return min(tied, key=lambda r: (*_complexity(r, w, spec), times[id(r)].median_us))


def best_own(records: Sequence[Record], w: Workload, spec: DeviceSpec) -> Record | None:
    """The best of our own kernels in a judged duel; the choice itself if that is ours."""
    ours = [r for r in records if r.status in COMPETING and is_own(r)]
    chosen = chosen_of(records)
    if chosen in ours:
        return chosen
    return winner(ours, host_us(records), w, spec) if ours else None


def chosen_of(records: Sequence[Record]) -> Record:
    """The winner of a judged duel, by the rule of the store."""
    return min((r for r in records if r.status == "ok"), key=lambda r: measured(r).median_us)


def _complexity(record: Record, w: Workload, spec: DeviceSpec) -> tuple[int, int]:
    if record.implementation == "aten":
        return 0, 0
    if not is_own(record):
        return 2, 0
    default = asdict(IMPLS[record.implementation].heuristic(w, spec))
    return 1, sum(default.get(name) != value for name, value in record.config.items())
