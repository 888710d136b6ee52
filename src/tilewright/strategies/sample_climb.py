"""A broad random sample, then a climb from the best of it."""

from tilewright.search import strategy


@strategy
def sample_climb(space, rng, starts=(), samples=96, climbers=3):
    """Look widely first, then at the neighbours of the best few, until those are the best known.

    All climbers' neighbours are proposed together, so that compilers work side by side.
    """
    batch = [*starts, *space.sample(rng, samples)]
    times: dict = {}
    while batch:
        times.update(zip(batch, (yield batch), strict=True))
        best = sorted(times, key=times.__getitem__)[:climbers]
        around = [near for config in best for near in space.neighbours(config)]
        batch = [config for config in dict.fromkeys(around) if config not in times]
