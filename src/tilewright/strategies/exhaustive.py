"""Every config of the space."""

import itertools

from tilewright.search import strategy


@strategy
def exhaustive(space, rng, starts=(), batch=256):
    """Every config, in the order of the space: finds the optimum, if the budget allows."""
    configs = iter(space)
    while some := list(itertools.islice(configs, batch)):
        yield some
