"""The search driver and successive halving: budgets are kept, nothing is measured twice."""

import itertools
import math
import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.errors import InvalidArgument, PluginError
from tilewright.search import STALE_ROUNDS, Budget, run_search, successive_halving
from tilewright.space import ConfigSpace, param


@dataclass(frozen=True)
class Point:
    x: int = param(*range(12))
    y: int = param(*range(12))


SPACE = ConfigSpace(Point, constraint=lambda p: "too far" if p.x + p.y > 18 else None)


def seconds(p):
    return math.inf if (p.x + p.y) % 5 == 0 else 1.0 + abs(p.x - 7) + abs(p.y - 3)


class Clock:
    """Stands still until told to move."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


class Bench:
    """Evaluates, remembers each batch, and takes `cost_s` on the clock for each config."""

    def __init__(self, clock=None, cost_s=0.0):
        self.batches, self.clock, self.cost_s = [], clock, cost_s

    def __call__(self, configs):
        self.batches.append(list(configs))
        if self.clock:
            self.clock.now_s += self.cost_s * len(configs)
        return [seconds(config) for config in configs]

    @property
    def configs(self):
        return [config for batch in self.batches for config in batch]


def everything(space, rng, starts=()):
    yield list(space)


def search(strategy=everything, bench=None, budget=None, **options):
    bench, budget = bench or Bench(), budget or Budget()
    return run_search(strategy, SPACE, random.Random(0), bench, budget, **options)


def test_every_result_is_returned_once_with_its_time_failures_included():
    found = search()
    assert found == [(p, seconds(p)) for p in SPACE]
    assert any(s == math.inf for _, s in found)


@given(st.lists(st.lists(st.sampled_from(list(SPACE)), max_size=8), max_size=12))
def test_no_config_is_evaluated_twice_and_a_strategy_hears_every_time_it_asks(batches):
    def repeats(space, rng, starts=()):
        for batch in batches:
            assert (yield batch) == [seconds(p) for p in batch]

    bench = Bench()
    found = search(repeats, bench)
    assert len(set(bench.configs)) == len(bench.configs)
    assert [p for p, _ in found] == bench.configs
    assert set(bench.configs) == {p for batch in batches for p in batch}


@given(st.integers(1, 200), st.integers(1, 40), st.integers(0, 5))
def test_a_budget_of_configs_is_spent_exactly(configs, chunk, starts):
    bench = Bench()
    budget = Budget(configs=configs)
    found = search(bench=bench, budget=budget, chunk=chunk, starts=list(SPACE)[-starts:])
    assert len(found) == len(bench.configs) == min(configs, len(list(SPACE)))
    assert all(len(batch) <= chunk for batch in bench.batches)
    assert budget.used == len(found)


@given(st.floats(0.5, 200), st.floats(0.01, 20), st.integers(1, 40))
def test_a_budget_of_seconds_is_overrun_by_less_than_one_config_after_the_first_batch(
    limit_s, cost_s, chunk
):
    clock = Clock()
    bench = Bench(clock, cost_s)
    budget = Budget(seconds=limit_s, clock=clock)
    found = search(bench=bench, budget=budget, chunk=chunk)
    first_s = cost_s * len(bench.batches[0])
    assert budget.elapsed_s <= max(limit_s + cost_s, first_s) + 1e-6
    assert len(found) == len(list(SPACE)) or budget.spent()


def test_a_budget_that_is_spent_already_evaluates_nothing():
    clock = Clock()
    budget = Budget(seconds=1, clock=clock)
    clock.now_s += 2
    bench = Bench()
    assert search(bench=bench, budget=budget, starts=[Point(1, 1)]) == []
    assert bench.batches == []


def test_one_budget_may_serve_several_searches():
    budget = Budget(configs=10)
    first = search(lambda space, rng, starts: (b for b in [list(space)[:7]]), budget=budget)
    second = search(budget=budget)
    assert (len(first), len(second)) == (7, 3)


def test_no_budget_means_no_limit():
    budget = Budget()
    assert (budget.left_s, budget.left_configs, budget.spent()) == (math.inf, math.inf, False)


@pytest.mark.parametrize("limits", [{"seconds": 0}, {"configs": 0}, {"seconds": -1.5}])
def test_a_budget_must_be_positive(limits):
    with pytest.raises(InvalidArgument, match="expected a positive number"):
        Budget(**limits)


def test_a_budget_of_nan_is_refused():
    with pytest.raises(InvalidArgument, match="budget of nan seconds"):
        Budget(seconds=math.nan)


def test_starts_are_measured_first_whatever_the_strategy_and_those_outside_are_left_out():
    bench = Bench()
    starts = [Point(5, 5), Point(11, 11), Point(2, 2)]
    seen = []

    def listens(space, rng, starts=()):
        seen.extend(starts)
        yield [Point(0, 0)]

    search(listens, bench, starts=starts)
    assert bench.configs == [Point(5, 5), Point(2, 2), Point(0, 0)]
    assert seen == [Point(5, 5), Point(2, 2)]


def test_a_proposal_outside_the_space_is_refused_with_its_reason():
    def strays(space, rng, starts=()):
        yield [Point(11, 11)]

    with pytest.raises(InvalidArgument, match=r"Point\(x=11, y=11\).*not in the space: too far"):
        search(strays)


def test_a_proposal_that_is_no_config_is_refused():
    def counts(space, rng, starts=()):
        yield [3]

    with pytest.raises(InvalidArgument, match="the strategy proposed 3, which is no Point"):
        search(counts)


@pytest.mark.parametrize("batches", [0, 1])
def test_a_strategy_that_raises_is_named_with_its_line(batches):
    def broken(space, rng, starts=()):
        for _ in range(batches):
            yield [Point(1, 1)]
        raise KeyError("no such tile")

    said = r"the strategy broken raised KeyError: 'no such tile' \(.*test_search\.py:\d+\); correct"
    with pytest.raises(PluginError, match=said):
        search(broken)


def test_a_strategy_that_repeats_itself_for_ever_is_ended():
    rounds = []

    def stuck(space, rng, starts=()):
        while True:
            rounds.append(1)
            yield [Point(1, 1)]

    assert len(search(stuck)) == 1
    assert len(rounds) <= STALE_ROUNDS + 2


def test_a_strategy_is_closed_when_the_budget_ends():
    ended = []

    def tidy(space, rng, starts=()):
        try:
            yield list(space)
        finally:
            ended.append(True)

    search(tidy, budget=Budget(configs=3))
    assert ended == [True]


def test_a_time_that_is_not_a_number_is_a_failure():
    found = run_search(
        everything, SPACE, random.Random(0), lambda cs: [math.nan] * len(cs), Budget(configs=2)
    )
    assert [s for _, s in found] == [math.inf, math.inf]


def test_an_interruption_passes_through():
    def interrupted(configs):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_search(everything, SPACE, random.Random(0), interrupted, Budget())


# --- successive halving -------------------------------------------------------------------------

times_s = st.floats(1e-6, 1e3) | st.just(math.inf)


@given(st.lists(times_s, max_size=80), st.integers(1, 6), st.integers(1, 8))
def test_exact_times_leave_the_fastest_in_order(times, finalists, repeats):
    rounds = []

    def measure(alive, count):
        rounds.append((len(alive), count))
        return [times[i] for i in alive]

    best = successive_halving(range(len(times)), measure, finalists=finalists, repeats=repeats)
    ranked = sorted((s, i) for i, s in enumerate(times) if s < math.inf)
    assert best == [(i, s) for s, i in ranked[:finalists]]
    for (before, few), (after, more) in itertools.pairwise(rounds):
        assert more == 2 * few
        assert after == max(finalists, math.ceil(before / 2)) or after < before
    if rounds:
        assert rounds[0] == (len(times), repeats)


def test_more_repeats_find_the_best_behind_the_noise():
    rng = random.Random(0)
    truth = {i: 1.0 + 0.02 * i for i in range(64)}

    def measure(alive, repeats):
        return [truth[i] + rng.gauss(0, 0.1) / math.sqrt(repeats) for i in alive]

    best = successive_halving(list(truth), measure, finalists=4, repeats=2)
    assert min(truth[i] for i, _ in best) <= 1.04


def test_each_candidate_is_measured_once_a_round_though_given_twice():
    measured = []

    def measure(alive, repeats):
        measured.extend(alive)
        return [1.0] * len(alive)

    assert len(successive_halving(["a", "b", "a"], measure)) == 2
    assert measured == ["a", "b"]


def test_a_candidate_that_fails_later_drops_out():
    def measure(alive, repeats):
        return [math.inf if c == 0 and repeats > 1 else float(c + 1) for c in alive]

    best = successive_halving(range(8), measure, finalists=2)
    assert [c for c, _ in best] == [1, 2]


def test_stopping_gives_the_best_so_far():
    rounds = []

    def measure(alive, repeats):
        rounds.append(repeats)
        return [float(c) for c in alive]

    best = successive_halving(range(100), measure, finalists=3, stop=lambda: len(rounds) >= 2)
    assert [c for c, _ in best] == [0, 1, 2]
    assert rounds == [1, 2]


def test_nothing_in_nothing_out():
    assert successive_halving([], lambda alive, repeats: []) == []
    failed = successive_halving([1, 2], lambda alive, repeats: [math.inf] * len(alive))
    assert failed == []
