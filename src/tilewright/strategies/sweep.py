"""The complete product of the knobs that the caller named."""

import itertools
from dataclasses import replace

from tilewright.search import strategy


@strategy
def sweep(space, rng, starts=()):
    """Every combination of the pinned knobs' values that fits; the others stay as in the first
    start, or in a random config without one. For tables, where each cell is one config."""
    for base in [*starts, *space.sample(rng, 1)][:1]:
        values = {name: space.values[name] for name in space.pinned}
        combinations = itertools.product(*values.values())
        configs = [replace(base, **dict(zip(values, c, strict=True))) for c in combinations]
        yield [config for config in configs if config in space]
