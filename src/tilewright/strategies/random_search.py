"""Random configs, none twice."""

from tilewright.search import strategy


@strategy
def random_search(space, rng, starts=(), batch=32):
    """Uniform draws without repetition, until the space is exhausted."""
    seen: set[object] = set()
    # A sample larger than all that was seen must hold something new, if there is anything left.
    while fresh := [c for c in space.sample(rng, len(seen) + batch) if c not in seen]:
        seen.update(fresh)
        yield fresh
