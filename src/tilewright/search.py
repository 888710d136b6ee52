"""Search: strategies propose configs and are told their times; the driver keeps the budget.

A strategy is one generator in a file of strategies/. It knows no GPU, no compiler and no store:

    @strategy
    def nearest_first(space, rng, starts=()):
        for config in starts:
            times = yield space.neighbours(config)

It yields lists of configs of the space and is sent their times in seconds, in the same order,
`math.inf` for a config that failed. It draws random numbers from `rng` alone, so that a seed
fixes what it does. `starts` are good configs known beforehand (a heuristic's, a record's); the
driver measures them first, whatever the strategy.
"""

from __future__ import annotations

import math
import random
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from tilewright.errors import InvalidArgument, PluginError
from tilewright.registry import Registry
from tilewright.space import ConfigSpace

C = TypeVar("C")
Strategy = Callable[..., Generator[list[Any], list[float], None]]
"""(space, rng, *, starts) -> generator of lists of configs, sent lists of seconds."""

STRATEGIES: Registry[Strategy] = Registry("strategies", "strategy")

STALE_ROUNDS = 100
"""A strategy that proposes nothing new this many times in a row has nothing more to say."""


def strategy(function: Strategy) -> Strategy:
    """Register a strategy under its function's name."""
    return STRATEGIES.add(function.__name__, function)


@dataclass
class Budget:
    """What a search may spend, counted from its creation; None is no limit.

    Attributes:
        seconds: wall-clock time.
        configs: evaluated configs.
        clock: seconds since some moment; tests pass their own.
    """

    seconds: float | None = None
    configs: int | None = None
    clock: Callable[[], float] = time.monotonic
    used: int = field(default=0, init=False)
    started_s: float = field(init=False)

    def __post_init__(self) -> None:
        for name, limit in (("seconds", self.seconds), ("configs", self.configs)):
            if limit is not None and not limit > 0:
                raise InvalidArgument(f"budget of {limit} {name}: expected a positive number")
        self.started_s = self.clock()

    @property
    def elapsed_s(self) -> float:
        return self.clock() - self.started_s

    @property
    def left_s(self) -> float:
        return math.inf if self.seconds is None else max(0.0, self.seconds - self.elapsed_s)

    @property
    def left_configs(self) -> float:
        return math.inf if self.configs is None else self.configs - self.used

    def spent(self) -> bool:
        return self.left_configs <= 0 or self.left_s <= 0

    def charge(self, configs: int) -> None:
        self.used += configs


def run_search(
    strategy: Strategy,
    space: ConfigSpace[C],
    rng: random.Random,
    evaluate: Callable[[list[C]], list[float]],
    budget: Budget,
    *,
    starts: Sequence[C] = (),
    chunk: int = 32,
) -> list[tuple[C, float]]:
    """Drive a strategy until it ends or the budget does.

    Args:
        evaluate: configs -> seconds of each, `math.inf` for a failure. It is given at most
            `chunk` at once, and fewer as the time left runs out, judged by what they took so far.
        starts: measured first, in this order; those outside the space (a record of an older
            version may hold one) are left out.

    Returns:
        Every evaluated config once, failures included, in the order of evaluation.

    Raises:
        InvalidArgument: the strategy proposed what is no config of the space.
        PluginError: it raised.
    """
    search = _Search(space, evaluate, budget, chunk)
    known = [config for config in starts if config in space]
    if search.times_of(known) is None:
        return list(search.times.items())
    proposals = strategy(space, rng, starts=known)
    times: list[float] | None = None
    stale = 0
    while stale < STALE_ROUNDS and (batch := _proposed(strategy, proposals, times)) is not None:
        count = len(search.times)
        times = search.times_of(batch)
        if times is None:
            break
        stale = stale + 1 if len(search.times) == count else 0
    proposals.close()
    return list(search.times.items())


def _proposed(
    strategy: Strategy, proposals: Generator[list[C], Any, None], times: list[float] | None
) -> list[C] | None:
    """The next batch, given the times of the last one, if there was any; None at the end."""
    try:
        return proposals.send(times)
    except StopIteration:
        return None
    except Exception as error:  # whatever a plug-in raises
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise PluginError(
            f"the strategy {strategy.__name__} raised {type(error).__name__}: {error} "
            f"({last.filename}:{last.lineno}); correct it, or search by another (--strategy)"
        ) from error


@dataclass
class _Search(Generic[C]):
    """What has been evaluated so far, and at what cost."""

    space: ConfigSpace[C]
    evaluate: Callable[[list[C]], list[float]]
    budget: Budget
    chunk: int
    times: dict[C, float] = field(default_factory=dict)
    cost_s: float = 0.0

    def times_of(self, batch: Sequence[C]) -> list[float] | None:
        """The times of a batch, measuring what is new; None once the budget is spent."""
        for config in batch:
            if not isinstance(config, self.space.config_type):
                kind = self.space.config_type.__name__
                raise InvalidArgument(f"the strategy proposed {config!r}, which is no {kind}")
            if config not in self.times and (reason := self.space.why_not(config)):
                raise InvalidArgument(
                    f"the strategy proposed {config}, which is not in the space: {reason}"
                )
        new = [config for config in dict.fromkeys(batch) if config not in self.times]
        while new and not self.budget.spent():
            room = self._room()
            self._measure(new[:room])
            new = new[room:]
        return None if new else [self.times[config] for config in batch]

    def _room(self) -> int:
        """How many configs the next call may hold: never none, so that the search moves."""
        room = min(float(self.chunk), self.budget.left_configs)
        if self.times and self.cost_s:
            room = min(room, self.budget.left_s / (self.cost_s / len(self.times)))
        return max(1, int(room))

    def _measure(self, configs: list[C]) -> None:
        begin_s = self.budget.elapsed_s
        self.budget.charge(len(configs))
        seconds = self.evaluate(configs)
        self.cost_s += self.budget.elapsed_s - begin_s
        for config, s in zip(configs, seconds, strict=True):
            self.times[config] = math.inf if math.isnan(s) else s


def successive_halving(
    candidates: Sequence[C],
    measure: Callable[[list[C], int], list[float]],
    *,
    finalists: int = 4,
    repeats: int = 1,
    stop: Callable[[], bool] = lambda: False,
) -> list[tuple[C, float]]:
    """Spend a measuring budget where it matters: on the candidates that may still win.

    All candidates are measured with few repeats, the faster half again with twice as many, and
    so on until at most `finalists` are left, so each round costs about the same. Noise that
    swaps near equals early costs little; a slow candidate costs one short measurement.

    Args:
        measure: (candidates, repeats) -> seconds of each, `math.inf` for a failure, which ends
            the candidate; recording why is up to `measure`.
        repeats: of the first round.
        stop: asked before each round but the first; True keeps the best so far.

    Returns:
        At most `finalists` candidates with their latest times, fastest first.
    """
    ranked = [(candidate, 0.0) for candidate in dict.fromkeys(candidates)]
    size = len(ranked)
    while ranked:
        alive = [candidate for candidate, _ in ranked[:size]]
        times = measure(alive, repeats)
        pairs = zip(alive, times, strict=True)
        ranked = sorted(((c, s) for c, s in pairs if s < math.inf), key=lambda pair: pair[1])
        if len(ranked) <= finalists or stop():
            break
        size, repeats = max(finalists, math.ceil(len(ranked) / 2)), repeats * 2
    return ranked[:finalists]
