"""What executables are verified on: inputs that make a fault visible, and which part is compared.

- random: the operator's own random example; every element of the result is compared.
- integer: where the operator says that small integers give exact results. Elsewhere integers prove
  little: with few distinct values the rounding errors of a sum drift in one direction.
- heavy: half of the elements have nearly the same magnitude, so that each is a sizeable term of
  any sum over them; the others are small, of many magnitudes, so that their results fall close to
  every rounding boundary and show a change far below half an ulp.
- light: heavy and small elements exchanged and the signs turned, for workloads of few slices,
  where one example cannot make every element heavy.
- special: NaN and infinities in some rows.

All but the first compare a sample of the slices along the operator's batch dim.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.measure.batch import FEW_SLICES, Batch
from tilewright.op import Workload

SAMPLE_ELEMENTS = 2**21
"""Elements that an example compares; the random one compares all."""

SAMPLE_SLICES = 8
"""At least so many slices, however large."""

PARAMETER_SCALE = 1 / 16
"""Of the heavy example's other tensors: added to the first, they leave its elements heavy."""


@dataclass(frozen=True)
class Example:
    """Tensor arguments, and the slices whose results are compared (None: all of them)."""

    kind: str
    tensors: list[Tensor]
    slices: Tensor | None


def kinds(w: Workload, batch: Batch) -> Iterator[str]:
    yield "random"
    if w.operator.integer_exact:
        yield "integer"
    yield "heavy"
    if batch.size < FEW_SLICES:
        yield "light"
    yield "special"


def make_example(
    w: Workload, kind: str, batch: Batch | None, seed: int, device: torch.device
) -> Example:
    """The example of this kind and seed; the same one each time."""
    if kind == "random" or batch is None:
        return Example(kind, w.operator.examples(w, "random", seed, device), None)
    slices = sample(w, batch, device)
    if kind == "integer":
        return Example(kind, w.operator.examples(w, "integer", seed, device), slices)
    tensors = w.operator.examples(w, "random", seed + 1, device)
    generator = torch.Generator(device=device).manual_seed(seed + 2)
    if kind == "special":
        _add_special(tensors, batch, slices, generator)
    else:
        floating = [t for t in tensors if t.is_floating_point() and t.numel()]
        for i, t in enumerate(floating):
            _make_heavy(t, generator, kind == "light", PARAMETER_SCALE if i else 1.0)
    return Example(kind, tensors, slices)


def sample(w: Workload, batch: Batch, device: torch.device) -> Tensor | None:
    """Indices of evenly spaced slices, first and last included; None: all of them."""
    largest = max(s.numel for s in (*w.tensors.values(), *w.outputs))
    per_slice = max(largest // max(batch.size, 1), 1)
    count = max(SAMPLE_ELEMENTS // per_slice, SAMPLE_SLICES)
    if batch.dim == 0 or count >= batch.size:
        return None
    return torch.linspace(0, batch.size - 1, count, dtype=torch.float64, device=device).long()


def memory_span(t: Tensor) -> Tensor:
    """All elements between the first and the last of `t`, gaps included, each of them once."""
    span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return t.as_strided((span,), (1,))


def _distinct(t: Tensor) -> Tensor:
    """The view of `t` without repetitions: expanded dims have size 1."""
    shape = [n if stride else 1 for n, stride in zip(t.shape, t.stride(), strict=True)]
    return t.as_strided(shape, t.stride())


def _make_heavy(t: Tensor, generator: torch.Generator, complement: bool, scale: float) -> None:
    flat = memory_span(t)
    position = torch.rand(flat.shape, generator=generator, device=flat.device)
    if complement:
        position = 1 - position
    # Heavy within a factor of 1.43, so that exponentials of both signs are of one magnitude too.
    heavy = 0.35 + 0.3 * position
    small = torch.exp2(-2 - 16 * (position - 0.5))
    size = (scale * torch.where(position < 0.5, heavy, small)).to(flat.dtype)
    flat.copy_(torch.copysign(size, -flat if complement else flat))


_SPECIAL = (
    (math.nan,),
    (math.inf,),
    (-math.inf,),
    (math.inf, -math.inf),
    (math.nan, math.inf, -math.inf),
)
"""What is put at random places of one slice each."""


def _add_special(
    tensors: Sequence[Tensor], batch: Batch, slices: Tensor | None, generator: torch.Generator
) -> None:
    """NaN and infinities in some slices of the first tensor; one slice is -inf throughout."""
    floating = [t for t in tensors if t.is_floating_point() and t.numel()]
    if not floating:
        return
    sliced = [t for t in floating if batch.carried_by(t.shape) and t.stride(batch.dim)]
    if not sliced:
        _put(floating[0], _SPECIAL[0], generator)
        return
    chosen = range(batch.size) if slices is None else slices.tolist()
    step = max(len(chosen) // (len(_SPECIAL) + 1), 1)
    for values, index in itertools.zip_longest(_SPECIAL, chosen[::step]):
        if index is None:
            return
        part = sliced[0].select(batch.dim, index)
        if values is None:
            _distinct(part).fill_(-math.inf)
            return
        _put(part, values, generator)


def _put(t: Tensor, values: Sequence[float], generator: torch.Generator) -> None:
    for value in values:
        place = int(torch.randint(t.numel(), (), generator=generator, device=t.device))
        t[tuple(int(i) for i in torch.unravel_index(torch.tensor(place), t.shape))] = value
