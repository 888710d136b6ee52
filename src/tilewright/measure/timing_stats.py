"""Order statistics of timing samples: no assumption about their distribution."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence


@functools.cache
def interval_rank(n: int) -> int:
    """The rank r (from 0) for which sorted samples r and n-1-r enclose the median at 95%.

    Of n samples, the number below the true median is binomial(n, 1/2); the interval misses it
    when that number is at most r or at least n - r. Below six samples no interval reaches 95%
    and the rank is 0, the whole range.
    """
    rank, below, ways = -1, 0, 1
    # 2 * sum(comb(n, k), k <= rank) / 2**n <= 1/20, in exact integers
    while 40 * (below + ways) <= 2**n:
        rank += 1
        below += ways
        ways = ways * (n - rank) // (rank + 1)
    return max(rank, 0)


def median_interval(samples: Sequence[float]) -> tuple[float, float]:
    """At least 95% confidence interval of the median (the range, below six samples)."""
    ordered = sorted(samples)
    rank = interval_rank(len(ordered))
    return ordered[rank], ordered[-1 - rank]


def relative_half_width(samples: Sequence[float]) -> float:
    """Half the width of the median's interval over the median."""
    low, high = median_interval(samples)
    return (high - low) / 2 / statistics.median(samples)
