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


def drawn(seed):
    """Costs, uses, first and last steps, and all sets that cut the ways between these."""
    draws = random.Random(seed)
    steps = range(draws.randint(1, 8))
    costs = {i: draws.randint(1, 4) for i in steps}
    uses = [(a, b) for a, b in itertools.combinations(steps, 2) if draws.random() < 0.4]
    first = {i for i in steps if draws.random() < 0.3}
    last = {i for i in steps if draws.random() < 0.3}
    every = (set(s) for n in range(len(steps) + 1) for s in itertools.combinations(steps, n))
    cuts = [s for s in every if first.isdisjoint(before(last, uses, s))]
    return costs, uses, first, last, cuts


@pytest.mark.parametrize("seed", range(100))
def test_cut_is_the_cheapest_and_of_those_the_last(seed):
    costs, uses, first, last, cuts = drawn(seed)
    least = min(sum(costs[i] for i in s) for s in cuts)
    cheapest = [s for s in cuts if sum(costs[i] for i in s) == least]
    found = cheapest_cut(costs, uses, first, last)
    assert found in cheapest
    assert all(before(last, uses, found) <= before(last, uses, s) for s in cheapest)


@pytest.mark.parametrize("seed", range(100))
def test_what_comes_behind_the_cut_costs_too(seed):
    costs, uses, first, last, cuts = drawn(seed)
    draws = random.Random(seed + 1000)
    again = {i: draws.randint(1, 6) for i in costs if draws.random() < 0.7}

    def cost(kept):
        behind = before(last, uses, kept)
        return sum(costs[i] for i in kept) + sum(again.get(i, 0) for i in behind)

    found = cheapest_cut(costs, uses, first, last, again)
    assert found in cuts
    assert cost(found) == min(map(cost, cuts))


def test_nothing_is_kept_where_no_way_leads_to_the_last_steps():
    assert cheapest_cut({0: 1, 1: 1}, [], [0], [1]) == frozenset()
    assert cheapest_cut({}, [], [], []) == frozenset()
