"""Cases of several axes, where all products of them would take too long."""

import itertools


def pairs(first, second, third):
    """Triples in which each value of an axis meets each of every other; the third is shortest."""
    third = list(third)
    both = itertools.product(enumerate(first), enumerate(second))
    return [(a, b, third[(i + j) % len(third)]) for (i, a), (j, b) in both]
