"""What executables are verified on: inputs that make a fault visible, and which part is compared.

- random: the operator's own random example; every element of the result is compared.
- integer: where the operator says that small integers give exact results. Elsewhere integers prove
  little: with few distinct values the rounding errors of a sum drift in one direction.
- heavy: half of the elements have nearly the same magnitude, so that each is a sizeable term of
  any sum over them; the others are small, of many magnitudes, so that their results fall close to
  every rounding boundary and show a change far below half an ulp. Those with which a row or a
  column begins and ends are the greatest and the least of it.
- light: heavy and small elements exchanged and the signs turned, for workloads of few slices,
  where one example cannot make every element heavy.
- uneven: slices of zeros, of numbers below zero, far from zero and large, whose exponentials and
  sums of squares overflow, of numbers so small that an epsilon decides their norm, and of a single
  large number at the end.
- special: NaN and infinities in some slices.

All but the first compare a sample of the slices along the operator's batch dim.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.fusion.frontend.picks import named
from tilewright.measure.batch import FEW_SLICES, Batch
from tilewright.op import Workload

SAMPLE_ELEMENTS = 2**21
"""Elements that an example compares; the random one compares all."""

SAMPLE_SLICES = 8
"""At least so many slices, however large."""

PARAMETER_SCALE = 1 / 16
"""Of the heavy example's other tensors: added to the first, they leave its elements heavy."""


SLACK = {"uneven": 64.0}
"""By so much intervals are wider. Far from zero and among large numbers usual ways to find a
variance or a softmax differ by more than rules allow; what such rows show is off by far more."""

_OF_GRADIENTS = ("_backward", "_training")
"""Where a softmax gives one class all, nothing but rounding is left of its gradient."""


@dataclass(frozen=True)
class Example:
    """Tensor arguments, and the slices whose results are compared (None: all of them)."""

    kind: str
    tensors: list[Tensor]
    slices: Tensor | None

    @property
    def slack(self) -> float:
        return SLACK.get(self.kind, 1.0)


def kinds(w: Workload, batch: Batch) -> Iterator[str]:
    """Those of a workload. An index that is computed from NaN or from large numbers may name no
    element, which ends a GPU's context."""
    computed = w.operator.fused and named(w).computed
    yield "random"
    if w.operator.integer_exact:
        yield "integer"
    elif w.operator.indexed is None and not (computed or w.op.endswith(_OF_GRADIENTS)):
        yield "uneven"
    yield "heavy"
    if batch.size < FEW_SLICES:
        yield "light"
    if not computed:
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
    floating = [t for t in tensors if t.is_floating_point() and t.numel()]
    if kind == "special":
        # Whether an infinity meets a product that has become zero is a matter of order.
        alone = dict(w.args).get("reduce") == "prod"
        _add_special(floating, batch, slices, generator, alone)
    elif kind == "uneven":
        _make_uneven(floating, batch, slices)
    else:
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
    _set_ends(_distinct(t), -END * scale if complement else END * scale)


END = 0.75
"""More than any other element of the heavy example."""

LEAST_WITH_ENDS = 16
"""Elements along a dim: of fewer its ends would be a sizeable part."""


def _set_ends(t: Tensor, number: float) -> None:
    """The first and the last elements along each dim are this number and its opposite, in turn."""
    for dim, n in enumerate(t.shape):
        if n < LEAST_WITH_ENDS:
            continue
        for place, end in ((-1, number), (0, -number)):
            face = t.select(dim, place)
            turns = torch.arange(face.numel(), device=t.device).remainder_(2).mul_(-2).add_(1)
            face.copy_(turns.mul(end).view(face.shape))


def _large(t: Tensor) -> None:
    t.mul_(64)


def _small(t: Tensor) -> None:
    t.mul_(2.0**-13)  # half precision still has them


def _far(t: Tensor) -> None:
    t.add_(1000 if t.dtype in (torch.float32, torch.float64) else 30)


def _below_zero(t: Tensor) -> None:
    t.abs_().neg_().sub_(1)


def _with_peak(t: Tensor) -> None:
    _below_zero(t)
    t[(-1,) * t.dim()] = 2048.0  # more than what is far from zero


UNEVEN = (_large, *(_far, torch.Tensor.zero_, _below_zero, _small) * 2, _with_peak)
"""What is done to a slice each; of fewer slices, what comes first, and to the last slice the last.
Of rows far from zero one may have a variance that is right by chance."""


def _make_uneven(tensors: Sequence[Tensor], batch: Batch, slices: Tensor | None) -> None:
    """In another order for each tensor. Without a batch dim slices are along the first dim."""
    for i, t in enumerate(tensors):
        dim, n = (batch.dim, batch.size) if batch.dim else (0, t.shape[0] if t.dim() else 0)
        if (batch.dim and not batch.carried_by(t.shape)) or not n or not t.stride(dim):
            continue
        chosen = range(n) if slices is None else slices.tolist()
        count = min(len(UNEVEN), len(chosen))
        changes = *UNEVEN[: count - 1], UNEVEN[-1]
        for k in range(count):
            place = chosen[(len(chosen) - 1) * k // max(count - 1, 1)]
            changes[(k - 2 * i) % count](_distinct(t.select(dim, place)))


_SPECIAL = (
    (math.nan,),
    (math.inf,),
    (-math.inf,),
    (math.inf, -math.inf),
    (math.nan, math.inf, -math.inf),
)
"""What is put at random places of one slice each."""


def _add_special(
    tensors: Sequence[Tensor],
    batch: Batch,
    slices: Tensor | None,
    generator: torch.Generator,
    alone: bool,
) -> None:
    """NaN and infinities in some slices of the first tensor, of which one is -inf throughout, and
    in other slices of others if it is not `alone`."""
    sliced = [t for t in tensors if batch.carried_by(t.shape) and t.stride(batch.dim)]
    if not sliced:
        for t in tensors[:1]:
            _put(t, _SPECIAL[0], generator)
        return
    chosen = range(batch.size) if slices is None else slices.tolist()
    for i, (t, own) in enumerate(_dealt(chosen, sliced[: 1 if alone else None])):
        for values, index in itertools.zip_longest(_SPECIAL, own):
            if index is None:
                break
            part = t.select(batch.dim, index)
            if values is None:
                if i == 0:
                    _distinct(part).fill_(-math.inf)
                break
            _put(part, values, generator)


def _dealt(
    chosen: Sequence[int], tensors: Sequence[Tensor]
) -> Iterator[tuple[Tensor, Sequence[int]]]:
    """Which slices are special in which tensor, each in one. Of few slices the first tensor has
    one for each of the special values, as far as there are so many, and the others what is left."""
    most = len(_SPECIAL) + 1
    step = len(chosen) // most
    if step > 1:
        yield from ((t, chosen[i::step]) for i, t in enumerate(tensors[:step]))
        return
    yield tensors[0], chosen[:most]
    others = tensors[1:]
    yield from ((t, chosen[most + i :: len(others)]) for i, t in enumerate(others))


def _put(t: Tensor, values: Sequence[float], generator: torch.Generator) -> None:
    for value in values:
        place = int(torch.randint(t.numel(), (), generator=generator, device=t.device))
        t[tuple(int(i) for i in torch.unravel_index(torch.tensor(place), t.shape))] = value
