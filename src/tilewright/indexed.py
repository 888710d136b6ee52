"""Operators whose index tensors say where values go: their promises, distributions of indices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewright.settings import nondeterministic
from tilewright.tensor_spec import HALVES
from tilewright.text import VALUE_FLAGS

DISTRIBUTIONS = VALUE_FLAGS["indices"]
"""How indices are spread; a workload names one as `!indices=zipf`, without it they are uniform.
Unique and balanced ones are drawn alike: each place as often as any other, give or take one. They
are unique where there are no more indices than places, and balanced where there are."""

ZIPF_POWER = 6
"""Place i of V is drawn as V * u^6: a third of all draws hit the first of a thousand places, and
the i-th one is hit in proportion to i^(-5/6)."""

FEW_BINS = 16


@dataclass(frozen=True)
class Terms:
    """What a result must be, and what its rounding errors grow with. Shapes of the result.

    Attributes:
        value: exact, fp64; integers in their own dtype.
        magnitude: fp64, the sum of |terms| that each element adds up.
        count: how many terms these are; at most 1 where an element is only copied.
        product: whether they are multiplied: `magnitude` is the size of the product then.
    """

    value: Tensor
    magnitude: Tensor
    count: Tensor
    product: bool = False


@dataclass(frozen=True)
class Indexed:
    """How an operator with an index tensor is verified and what its memory traffic depends on.

    Attributes:
        terms: (workload, tensors) -> the result that the stated order of writes gives, on any
            device: PyTorch's own kernels race on a GPU where an index repeats.
        draws: (workload) -> how many indices are drawn at a time, and of how many places.
        batch_dim: (workload) -> the dim, counted from the end, whose slices are independent of
            one another; 0 without one. Trying, as for other operators, would cut the indexed dim
            and leave indices out of range.
        exact: (workload) -> whether results are copies of inputs, so that only one is right.
        last_wins: where an index repeats, the operator promises that the last position wins.
        races: PyTorch's CUDA kernels may give another result in each run where an index repeats.
        unchecked: PyTorch's CPU kernel leaves out what an index out of range adds, or reads beyond
            its memory.
    """

    terms: Callable[[Any, Sequence[Tensor]], Terms]
    draws: Callable[[Any], tuple[int, int]]
    batch_dim: Callable[[Any], int]
    exact: Callable[[Any], bool] = lambda w: False
    last_wins: bool = False
    races: bool = True
    unchecked: bool = False

    def named(self, w: Any) -> tuple[str, ...]:
        """The flags of a workload, by the name that its indices have: unique or balanced."""
        count, places = self.draws(w)
        alike = {"indices=unique", "indices=balanced"}
        right = "indices=balanced" if count > places else "indices=unique"
        return tuple(right if flag in alike else flag for flag in w.flags)

    def promises_values(self, dtype: str, device: str) -> bool:
        """Whether more is promised of the values where an index repeats than PyTorch's kernel
        keeps. On a GPU: which of several writes to one place wins, or that a sum has the same bits
        in every run; integers have one sum in any order. On a CPU: that a sum of halves is rounded
        once."""
        if not (self.races or self.last_wins):
            return False
        if device != "cuda":
            return device == "cpu" and dtype in HALVES and not self.last_wins
        return self.last_wins or not (dtype.startswith("i") or nondeterministic())


def draw(
    distribution: str,
    shape: Sequence[int],
    dim: int | None,
    size: int,
    generator: torch.Generator,
    device: torch.device | str,
) -> Tensor:
    """Indices of 0 to size - 1, int64, of `shape`.

    Args:
        dim: that along which they are unique, balanced or sorted; None: all of them are one
            sequence.
    """
    count = math.prod(shape)
    if dim is None or len(shape) < 2:
        return _sequence(distribution, count, size, generator, device).view(tuple(shape))
    if distribution in ("constant", "few_bins", "zipf", "uniform"):
        return _sequence(distribution, count, size, generator, device).view(tuple(shape))
    if distribution == "sorted":
        return (
            _sequence("uniform", count, size, generator, device).view(tuple(shape)).sort(dim).values
        )
    length, columns = shape[dim], count // max(shape[dim], 1)
    order = torch.rand(columns, max(size, length), generator=generator, device=device).argsort(1)
    rest = [n for i, n in enumerate(shape) if i != dim % len(shape)]
    return order[:, :length].remainder(size).view(*rest, length).movedim(-1, dim)


def _sequence(
    distribution: str,
    count: int,
    size: int,
    generator: torch.Generator,
    device: torch.device | str,
) -> Tensor:
    at: dict[str, Any] = {"generator": generator, "device": device}
    if distribution in ("unique", "balanced"):
        return torch.randperm(max(size, count), **at)[:count].remainder_(size)
    if distribution == "constant":
        return torch.full((count,), size // 2, device=device)
    if distribution == "few_bins":
        bins = min(FEW_BINS, size)
        return torch.randint(bins, (count,), **at).mul_(size // bins)
    if distribution == "zipf":
        u = torch.rand(count, dtype=torch.float64, **at)
        return u.pow_(ZIPF_POWER).mul_(size).long().clamp_max_(size - 1)
    drawn = torch.randint(size, (count,), **at)
    return drawn.sort().values if distribution == "sorted" else drawn


def expected_distinct(distribution: str, count: int, size: int) -> int:
    """How many different places `count` draws hit on average, of `size` places."""
    if not count or not size:
        return 0
    if distribution == "constant":
        return 1
    if distribution in ("unique", "balanced"):
        return min(count, size)
    if distribution == "few_bins":
        bins = min(FEW_BINS, size)
        return round(bins * -math.expm1(count * math.log1p(-1 / bins))) if bins > 1 else 1
    if distribution == "zipf":
        edges = torch.linspace(0, 1, size + 1, dtype=torch.float64).pow_(1 / ZIPF_POWER)
        hit = edges.diff().neg_().log1p_().mul_(count).expm1_().neg_()
        return round(float(hit.sum()))
    return round(size * -math.expm1(count * math.log1p(-1 / size))) if size > 1 else 1
