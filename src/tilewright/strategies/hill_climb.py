"""Greedy descent over one-step neighbours."""

from tilewright.search import strategy


@strategy
def hill_climb(space, rng, starts=(), restarts=8):
    """Descend from each start to its local optimum, then from `restarts` random configs."""
    for best in [*starts, *space.sample(rng, restarts)]:
        (best_s,) = yield [best]
        while around := space.neighbours(best):
            times = yield around
            if min(times) >= best_s:
                break
            best_s, best = min(zip(times, around, strict=True), key=lambda pair: pair[0])
