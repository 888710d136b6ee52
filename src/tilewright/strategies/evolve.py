"""A broad random sample, then generations bred from the best configs known."""

import math
from dataclasses import asdict, replace

from tilewright.search import strategy


@strategy
def evolve(space, rng, starts=(), samples=128, parents=8, children=64, patience=6):
    """Mix two good configs, then change a knob or two; stop after `patience` barren generations.

    A climb by single knobs stops where two must change together, as when half the threads per row
    want twice the rows per block. Neighbours of the best are in every generation too.
    """
    times: dict = {}
    batch = [*starts, *space.sample(rng, samples)]
    barren = 0
    while batch and barren < patience:
        before = min(times.values(), default=math.inf)
        times.update(zip(batch, (yield batch), strict=True))
        best = sorted(times, key=times.__getitem__)[:parents]
        barren = barren + 1 if times[best[0]] >= 0.995 * before else 0
        around = [near for config in best[:2] for near in space.neighbours(config)]
        fresh = [near for near in around if near not in times]
        young = rng.sample(fresh, min(len(fresh), children // 3))
        for _ in range(20 * children):
            if len(young) >= children:
                break
            child = _child(space, rng, best)
            if child not in times and child in space:
                young.append(child)
        batch = list(dict.fromkeys(young))


def _child(space, rng, best):
    mother, father = rng.choice(best), rng.choice(best)
    knobs = {name: rng.choice((value, getattr(father, name)))
             for name, value in asdict(mother).items()}  # fmt: skip
    for name in rng.sample(list(space.values), rng.randint(0, min(2, len(space.values)))):
        knobs[name] = rng.choice(space.values[name])
    return replace(mother, **knobs)
