"""What executables are verified on: inputs that make a fault visible, and which part is compared.

- random: the operator's own random example; every element of the result is compared.
- integer: where the operator says that small integers give exact results. Elsewhere integers prove
  little: with few distinct values the rounding errors of a sum drift in one direction.
- heavy: half of the elements have nearly the same magnitude, so that each is a sizeable term of
  any sum over them; the others are small, of many magnitudes, so that their results fall close to
  every rounding boundary and show a change far below half an ulp.
- light: heavy and small elements exchanged and the signs turned, for workloads of a few rows,
  where one example cannot make every element heavy.
- special: NaN and infinities in some rows.

All but the first compare a sample of the slices along a dim over which the operator is independent
(its batch dim, found by trying).
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tilewright.errors import InvalidArgument, NoImplementation
from tilewright.fusion.frontend.picks import named
from tilewright.op import Workload

SAMPLE_ELEMENTS = 2**21
"""Elements that an example compares; the random one compares all."""

SAMPLE_SLICES = 8
"""At least so many slices, however large."""

FEW_SLICES = 16
"""With fewer slices than this, the heavy example is followed by its complement."""

PARAMETER_SCALE = 1 / 16
"""Of the heavy example's other tensors: added to the first, they leave its elements heavy."""


@dataclass(frozen=True)
class Batch:
    """A dim along which the operator treats every slice by itself.

    Attributes:
        dim: counted from the end, as broadcasting aligns shapes; 0: the operator has none.
        size: number of slices, 1 without a dim.
    """

    dim: int = 0
    size: int = 1

    def carried_by(self, shape: Sequence[int]) -> bool:
        return self.dim < 0 and len(shape) >= -self.dim and shape[self.dim] == self.size

    def narrow(self, tensors: Sequence[Tensor], start: int, length: int) -> list[Tensor]:
        """Slices `start` to `start + length` of all tensors that have the dim."""
        return [
            t.narrow(self.dim, start, length) if self.carried_by(t.shape) else t for t in tensors
        ]

    def select(self, tensors: Sequence[Tensor], slices: Tensor) -> list[Tensor]:
        return [
            t.index_select(self.dim, slices) if self.carried_by(t.shape) else t for t in tensors
        ]

    def workload(self, w: Workload, length: int) -> Workload:
        """The same problem with `length` slices, all tensors contiguous."""
        if self.dim == 0:
            return w
        changes = {}
        for name, spec in w.tensors.items():
            shape = list(spec.shape)
            if self.carried_by(shape):
                shape[self.dim] = length
            changes[name] = replace(spec, shape=tuple(shape), strides=None)
        return w.with_args(**changes)


def find_batch(w: Workload, tensors: Sequence[Tensor]) -> Batch:
    """The first dim with at least FEW_SLICES independent slices, else the one with most."""
    shape = w.outputs[0].shape
    if w.seed is not None:
        return Batch()  # what an element draws depends on its place among all
    if w.operator.fused and named(w).picked is not None:
        return Batch()  # an index may be beyond a part of a row, which ends a GPU's context
    if w.operator.indexed is not None:
        declared = w.operator.indexed.batch_dim(w)
        return Batch(declared, shape[declared]) if declared else Batch()
    found = Batch()
    for dim, size in enumerate(shape):
        batch = Batch(dim - len(shape), size)
        if size > found.size and _independent(w, tensors, batch):
            found = batch
            if size >= FEW_SLICES:
                break
    return found


def _independent(w: Workload, tensors: Sequence[Tensor], batch: Batch) -> bool:
    """Whether two slices computed together are what each is alone."""
    if not all(batch.carried_by(o.shape) for o in w.outputs):
        return False
    if not any(batch.carried_by(t.shape) for t in tensors):
        return False
    failures = logging.getLogger("torch._subclasses.fake_tensor")  # it would log what may fail here
    failures.disabled = True
    try:
        pair = w.operator.truth(batch.workload(w, 2), batch.narrow(tensors, 0, 2))
        one = batch.workload(w, 1)
        alone = [w.operator.truth(one, batch.narrow(tensors, i, 1)) for i in (0, 1)]
    except (InvalidArgument, NoImplementation, RuntimeError, IndexError, ValueError):
        return False  # something else is tied to this dim
    finally:
        failures.disabled = False
    for i, singles in enumerate(alone):
        for together, single in zip(pair, singles, strict=True):
            part = together.narrow(batch.dim, i, 1)
            if part.shape != single.shape:
                return False
            if not torch.allclose(part, single, rtol=1e-9, atol=0.0, equal_nan=True):
                return False
    return True


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
