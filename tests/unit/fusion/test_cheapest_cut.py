"""The cheapest cut of small random graphs, against all sets of steps."""

import itertools
import random

import pytest

from tilewright.fusion.cheapest_cut import cheapest_cut


def before(last, uses, without):
    """The steps from which a way leads to `last`, and to none of `without`."""
    found = set(last) - without
    for a, b in sorted(uses, key=lambda use: -use[1]):
        if b in found and a not in without:
            found.add(a)
    return found


@pytest.mark.parametrize("seed", range(100))
def test_cut_is_the_cheapest_and_of_those_the_last(seed):
    draws = random.Random(seed)
    steps = range(draws.randint(1, 8))
    costs = {i: draws.randint(1, 4) for i in steps}
    uses = [(a, b) for a, b in itertools.combinations(steps, 2) if draws.random() < 0.4]
    first = {i for i in steps if draws.random() < 0.3}
    last = {i for i in steps if draws.random() < 0.3}
    every = (set(s) for n in range(len(steps) + 1) for s in itertools.combinations(steps, n))
    cuts = [s for s in every if first.isdisjoint(before(last, uses, s))]
    least = min(sum(costs[i] for i in s) for s in cuts)
    cheapest = [s for s in cuts if sum(costs[i] for i in s) == least]
    found = cheapest_cut(costs, uses, first, last)
    assert found in cheapest
    assert all(before(last, uses, found) <= before(last, uses, s) for s in cheapest)


def test_nothing_is_kept_where_no_way_leads_to_the_last_steps():
    assert cheapest_cut({0: 1, 1: 1}, [], [0], [1]) == frozenset()
    assert cheapest_cut({}, [], [], []) == frozenset()
