"""Two result files of one suite and device, row by row: what became slower, and what drifted.

A machine is never twice the same: clocks and neighbours multiply all times of a run, hosts add to
them (two H200s: 0.8 us to each call), and PyTorch's own kernels change with its releases. So a row
is slower only if it is in every way that two files offer, each beyond its confidence interval: in
time, in time over each baseline, which was measured in the same interleaved rounds, and in time
over the floor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilewright.errors import InvalidArgument

TOLERANCE = 0.02
"""A change by less is none: medians of one executable differ by up to 1% from run to run."""

Interval = tuple[float, float]


@dataclass(frozen=True)
class Change:
    """One workload of the older file.

    Attributes:
        verdict: "slower", "faster", "same", or "gone": the newer file has no kernel of ours for it.
        old_us, new_us: of our best kernel.
    """

    workload: str
    method: str
    verdict: str
    old_us: float
    new_us: float | None

    @property
    def times(self) -> float | None:
        """The newer time over the older one."""
        return self.new_us / self.old_us if self.new_us else None


def changes(
    old: Mapping[str, Any], new: Mapping[str, Any], tolerance: float = TOLERANCE
) -> list[Change]:
    """What became of each row of `old` that has a kernel of ours; what `new` adds is no change.

    Raises:
        InvalidArgument: the files are of different suites or devices, `old` has no kernel of ours,
            or the tolerance is no part.
    """
    if not 0 <= tolerance < math.inf:
        raise InvalidArgument(
            f"the tolerance is {tolerance}; give a part of the time, such as {TOLERANCE} "
            f"(--tolerance {TOLERANCE * 100:g})"
        )
    for what, of in (("suite", lambda d: d["suite"]), ("device", lambda d: d["device"]["name"])):
        if of(old) != of(new):
            raise InvalidArgument(
                f"the files differ in {what}: {of(old)} and {of(new)}; "
                f"give two files of the same {what}"
            )
    if not any(row["own"] for row in old["rows"]):
        raise InvalidArgument(
            "the older file has no row with a kernel of ours, so nothing can be held against it; "
            "give the file of a run that measured some"
        )
    later = {(row["workload"], row["method"]): row for row in new["rows"]}
    return [
        _change(row, later.get((row["workload"], row["method"])), tolerance)
        for row in old["rows"]
        if row["own"]
    ]


def _change(old: Mapping[str, Any], new: Mapping[str, Any] | None, tolerance: float) -> Change:
    before = old["own"]["median_us"]
    if new is None or not new["own"]:
        return Change(old["workload"], old["method"], "gone", before, None)
    then, now = _scales(old), _scales(new)
    found = {_moved(then[unit], now[unit], tolerance) for unit in then.keys() & now.keys()}
    verdict = found.pop() if len(found) == 1 else "same"
    return Change(old["workload"], old["method"], verdict, before, new["own"]["median_us"])


def _scales(row: Mapping[str, Any]) -> dict[str, Interval]:
    """Our time in microseconds, in floors, and in times of each baseline."""
    low, high = row["own"]["ci_us"]
    units = {"us": 1.0, "floor": row["floor_us"]}
    units |= {name: baseline["median_us"] for name, baseline in row["baselines"].items()}
    return {name: (low / unit, high / unit) for name, unit in units.items() if unit}


def _moved(old: Interval, new: Interval, tolerance: float) -> str:
    if new[0] > old[1] * (1 + tolerance):
        return "slower"
    return "faster" if new[1] * (1 + tolerance) < old[0] else "same"
