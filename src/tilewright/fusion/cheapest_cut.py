"""The cheapest steps to keep so that later ones do not depend on what they were computed from."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

Place = tuple[int, str]
"""A step's operands ("in") or its value ("out"), which costs something to pass on."""
_SOURCE, _SINK = (-1, "out"), (-1, "in")


def cheapest_cut(
    costs: Mapping[int, int],
    uses: Iterable[tuple[int, int]],
    first: Collection[int],
    last: Collection[int],
    again: Mapping[int, int] | None = None,
) -> frozenset[int]:
    """Of all sets of steps that every way from `first` to `last` leads through one that costs
    least; of several, the one nearest to `last`.

    A minimum vertex cut by a maximum flow, along one shortest way after another (Edmonds and Karp,
    Theoretical improvements in algorithmic efficiency for network flow problems, 1972).

    Args:
        costs: of each step.
        uses: a step, and one that uses it.
        again: what a step costs besides, if it comes behind the set, between it and `last`; of
            those that are not listed, nothing.
    """
    room: dict[Place, dict[Place, float]] = defaultdict(dict)

    def join(a: Place, b: Place, most: float) -> None:
        room[a][b] = most
        room[b][a] = 0

    for i, cost in costs.items():
        join((i, "in"), (i, "out"), cost)
    for i, user in uses:
        join((i, "out"), (user, "in"), math.inf)
    for i in first:
        join(_SOURCE, (i, "in"), math.inf)
    for i in last:
        join((i, "out"), _SINK, math.inf)
    for i, cost in (again or {}).items():
        if i not in first:
            join(_SOURCE, (i, "in"), cost)
    while True:
        behind = _before(room, _SINK)
        if _SOURCE not in behind:
            return frozenset(i for i in costs if (i, "out") in behind and (i, "in") not in behind)
        way = [_SOURCE]
        while way[-1] != _SINK:
            way.append(behind[way[-1]])
        steps = list(itertools.pairwise(way))
        flow = min(room[here][there] for here, there in steps)
        for here, there in steps:
            room[here][there] -= flow
            room[there][here] += flow


def _before(room: Mapping[Place, Mapping[Place, float]], end: Place) -> dict[Place, Place]:
    """The places from which there is room to `end`, each with the next on a shortest way."""
    found, queue = {end: end}, [end]
    for b in queue:
        for a in room[b]:
            if a not in found and room[a][b] > 0:
                found[a] = b
                queue.append(a)
    return found
