"""What one output must be on one example: an interval per element, and how far from the truth."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from tilewright.fusion.frontend.trace import trace_truth
from tilewright.measure.batch import Batch
from tilewright.measure.error_bound import bounds, truth_and_tolerance
from tilewright.op import Workload

CHUNK_ELEMENTS = {"cpu": 2**18, "cuda": 2**25}
"""Elements of a step: on a CPU its temporaries stay in cache, on a GPU they take a few GB."""

LIKE = 0.25
"""Of two sums of random terms the one with a quarter of the terms has half of the error."""


@dataclass(frozen=True)
class Mismatch:
    """An element outside its interval.

    Attributes:
        index: in the compared part of the output.
        written: False where the poison of its memory is still there.
        ulp, bound_ulp: distance from the reference, and the allowed one.
        count: of all such elements.
    """

    index: tuple[int, ...]
    got: float
    written: bool
    reference: float
    ulp: float
    bound_ulp: float
    count: int

    def text(self, place: str) -> str:
        """In words, with `place` for the coordinate."""
        if not self.written:
            return f"never written at {place}: reference {self.reference:.6g}"
        values = f"at {place}: got {self.got:.6g}, reference {self.reference:.6g}"
        if not math.isfinite(self.got - self.reference):
            return f"wrong {values}"
        return f"{self.ulp:.4g} ulp exceeds {self.bound_ulp:.3g} {values}"


@dataclass
class Expected:
    """Least and greatest acceptable value of each element of one output.

    PyTorch's own floating result is acceptable by definition: where it is outside the interval that
    an implementation of the stated arithmetic keeps, as its softmax over an outer dim is for halves
    on a CPU, the interval is widened to hold it. Where it is NaN and the truth is not, or the other
    way round, anything is accepted.

    Attributes:
        lo, hi: output's dtype; NaN where NaN is expected, (-inf, inf) where anything goes.
        truth: of the random example only; fp32 for halves, else fp64; NaN where anything goes, and
            where a choice that rounding makes counts for more than half an ulp: errors are told of
            all others.
        floor: errors of elements smaller than this, a power of two near the mean magnitude, are
            expressed in ulps of this.
        vendor_ulp: largest error of PyTorch's result, in ulps.
        vendor_misrounded: its share of elements that are not the nearest to the truth.
        widened: whether intervals had to be, to hold PyTorch's result.
        bound_ulp: largest error that any interval admits, in ulps.
        vendor: PyTorch's result, beside a truth.
    """

    lo: Tensor
    hi: Tensor
    truth: Tensor | None = None
    floor: float = 0.0
    vendor_ulp: float = 0.0
    vendor_misrounded: float = 0.0
    widened: bool = False
    bound_ulp: float = 0.0
    vendor: Tensor | None = None

    def mismatch(self, out: Tensor) -> Mismatch | None:
        """The first element of `out` outside its interval, or None."""
        flags = [((o >= lo) & (o <= hi)).all() for o, lo, hi in self._chunks(out, self.lo, self.hi)]
        if not flags or bool(torch.stack(flags).all()):
            return None
        bad = ~((out >= self.lo) & (out <= self.hi))
        if out.is_floating_point():
            bad &= ~(out.isnan() & self.lo.isnan())
            bad &= ~((self.lo == -math.inf) & (self.hi == math.inf))
        if not bad.any():
            return None
        return self._describe(out, bad)

    def worst_ulp(self, out: Tensor) -> float:
        """The largest error of `out` against the truth, in ulps of its dtype."""
        assert self.truth is not None
        worst = [
            _ulps(o, truth, o.dtype, self.floor).max() for o, truth in self._chunks(out, self.truth)
        ]
        return float(torch.stack(worst).max()) if worst else 0.0

    def apart_ulp(self, out: Tensor) -> float:
        """The largest difference between `out` and PyTorch's result, in ulps at the truth."""
        assert self.truth is not None
        assert self.vendor is not None
        worst = [
            (o.to(truth.dtype) - other.to(truth.dtype))
            .abs_()
            .div_(_unit(truth, o.dtype, self.floor))
            .nan_to_num_(0.0, math.inf)
            .max()
            for o, other, truth in self._chunks(out, self.vendor, self.truth)
        ]
        return float(torch.stack(worst).max()) if worst else 0.0

    def differing(self, out: Tensor) -> float:
        """The share of elements that are not PyTorch's."""
        assert self.vendor is not None
        return _share(_unequal(*pair) for pair in self._chunks(out, self.vendor))

    def misrounded(self, out: Tensor) -> float:
        """The share of elements that are not what the truth rounds to."""
        assert self.truth is not None
        return _share(
            _unequal(o, truth.to(o.dtype)) & ~truth.isnan()
            for o, truth in self._chunks(out, self.truth)
        )

    def worst(self, out: Tensor, allowed_ulp: float) -> Mismatch:
        """The element with the largest error against the truth."""
        assert self.truth is not None
        ulps = _ulps(out, self.truth, out.dtype, self.floor)
        return self._describe(out, ulps == ulps.max(), allowed_ulp)

    @property
    def exact(self) -> bool:
        """Whether each element has just one acceptable value."""
        return bool((self.lo == self.hi).all())

    def _describe(self, out: Tensor, bad: Tensor, allowed: float | None = None) -> Mismatch:
        index = first_true(bad)
        got, lo, hi = (t[index].double() for t in (out, self.lo, self.hi))
        reference = (lo + hi) / 2
        if self.truth is not None and not self.truth[index].isnan():
            reference = self.truth[index].double()
        unit = 1.0
        if out.is_floating_point():
            floor = self.floor or torch.finfo(out.dtype).tiny
            unit = float(_unit(reference, out.dtype, floor))
        if allowed is None:
            allowed = max(float(hi - reference), float(reference - lo)) / unit
        distance = float((got - reference).abs()) / unit
        return Mismatch(
            index,
            float(got),
            not (out.is_floating_point() and bool(bits(out[index]) == -1)),
            float(reference),
            math.inf if math.isnan(distance) else distance,
            allowed,
            int(bad.sum()),
        )

    def _chunks(self, out: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Corresponding flat pieces of tensors of one shape and layout."""
        flat = [_flat(t) for t in (out, *others)]
        step = CHUNK_ELEMENTS[out.device.type] * 4
        for start in range(0, out.numel(), step):
            yield tuple(t[start : start + step] for t in flat)


def expect(
    w: Workload,
    batch: Batch,
    tensors: Sequence[Tensor],
    vendor: Sequence[Tensor],
    keep_truth: bool,
    slack: float = 1.0,
) -> list[Expected]:
    """What each output of the workload must be on these tensors.

    Where results are copies, PyTorch's own count for nothing: its kernels race for the last write.

    Args:
        w: a workload with as many slices as the tensors have.
        vendor: PyTorch's outputs.
        keep_truth: measure errors in ulps, too; else only intervals are kept.
        slack: by this factor intervals are wider.
    """
    found = []
    for out in vendor:
        lo, hi = (_empty_like(out, out.dtype) for _ in range(2))
        truth = None
        if keep_truth and out.is_floating_point():
            half = out.dtype in (torch.float16, torch.bfloat16)
            truth = _empty_like(out, torch.float32 if half else torch.float64)
        found.append(Expected(lo, hi, truth, vendor=None if truth is None else out))

    if not any(out.numel() for out in vendor):
        return found
    indexed = w.operator.indexed

    largest = max(t.numel() for t in (*tensors, *vendor))
    per_slice = max(largest // max(batch.size, 1), 1)
    step = max(CHUNK_ELEMENTS[tensors[0].device.type] // per_slice, 1)
    for start in range(0, batch.size, step):
        length = min(step, batch.size - start)
        cw = batch.workload(w, length)
        parts = batch.narrow(tensors, start, length)
        graph = None if indexed else _graph(cw, cw.operator.reference)
        choices = list[str]()
        either = sure = truth_and_tolerance(cw, parts, graph, choices=choices)
        if keep_truth and choices:
            sure = truth_and_tolerance(cw, parts, graph, decided=True)
        for e, out, (value, tolerance), (_, least) in zip(found, vendor, either, sure, strict=True):
            targets = [t for t in (e.lo, e.hi, out, e.truth) if t is not None]
            lo, hi, own, *rest = batch.narrow(targets, start, length)
            lo_value, hi_value = bounds(value, tolerance * slack, out.dtype)
            lo.copy_(lo_value)
            hi.copy_(hi_value)
            if indexed is None or not indexed.exact(w):
                e.widened |= _admit(own, lo, hi)
            if rest:
                untold = (lo == -math.inf) & (hi == math.inf)
                if sure is not either:
                    unit = _unit(value.double(), out.dtype, torch.finfo(out.dtype).tiny)
                    untold |= tolerance - least > unit / 2
                rest[0].copy_(value).masked_fill_(untold, math.nan)
    for e, out in zip(found, vendor, strict=True):
        if e.truth is not None and out.numel():
            _measure(e, out)
    return found


@functools.lru_cache(maxsize=8)
def _graph(w: Workload, reference: Callable[..., Any]) -> fx.GraphModule:
    """The examples of a workload have a few sizes between them, each in several chunks.

    Args:
        reference: of the operator that `w` names now; a function fused again is another one.
    """
    assert w.operator.reference is reference
    return trace_truth(w)


def _empty_like(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Of the layout of `t`; where that repeats values, they are written out."""
    if any(n != 1 and not stride for n, stride in zip(t.shape, t.stride(), strict=True)):
        return torch.empty(t.shape, dtype=dtype, device=t.device)
    return torch.empty_strided(t.shape, t.stride(), dtype=dtype, device=t.device)


def _admit(vendor: Tensor, lo: Tensor, hi: Tensor) -> bool:
    """Widen [lo, hi] to hold the vendor's result; whether that was needed."""
    inside = (vendor >= lo) & (vendor <= hi)
    if inside.all() or not vendor.is_floating_point():
        return False
    disagree = vendor.isnan() != lo.isnan()
    lo.copy_(torch.fmin(lo, vendor))
    hi.copy_(torch.fmax(hi, vendor))
    lo.masked_fill_(disagree, -math.inf)
    hi.masked_fill_(disagree, math.inf)
    return not bool((inside | (vendor.isnan() & ~disagree)).all())


def _measure(e: Expected, vendor: Tensor) -> None:
    assert e.truth is not None
    sizes = e.truth.abs().nan_to_num_(0.0, math.inf)
    reach = torch.finfo(vendor.dtype)
    mean = sizes.masked_fill_(sizes > reach.max, 0.0).mean(dtype=torch.float64)
    e.floor = 2.0 ** math.floor(math.log2(max(float(mean), reach.tiny)))
    e.vendor_ulp, e.vendor_misrounded = e.worst_ulp(vendor), e.misrounded(vendor)
    e.bound_ulp = max(e.worst_ulp(e.lo), e.worst_ulp(e.hi))


def _share(masks: Iterable[Tensor]) -> float:
    """Of all elements of some masks those that are True; 0 of none."""
    counts = [(mask.sum(), mask.numel()) for mask in masks]
    elements = sum(n for _, n in counts)
    return float(torch.stack([found for found, _ in counts]).sum()) / elements if elements else 0.0


def _unequal(a: Tensor, b: Tensor) -> Tensor:
    """Two NaNs are equal."""
    return (a != b) & ~(a.isnan() & b.isnan())


def _ulps(out: Tensor, truth: Tensor, dtype: torch.dtype, floor: float) -> Tensor:
    """Beyond what the dtype reaches infinity is right."""
    error = (out.to(truth.dtype) - truth).abs_().div_(_unit(truth, dtype, floor))
    error.nan_to_num_(0.0, math.inf)
    infinite = out.isinf()
    if bool(infinite.any()):
        error.masked_fill_(infinite & (out == truth.to(dtype)), 0.0)
    return error


def _unit(truth: Tensor, dtype: torch.dtype, floor: float) -> Tensor:
    """One ulp of `dtype` at each element of `truth` (fp32 or fp64), at least that at `floor`."""
    if truth.dtype == torch.float64:
        power = truth.view(torch.int64).bitwise_and(0x7FF0000000000000).view(torch.float64)
    else:
        power = truth.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32)
    return power.clamp_(min=floor).mul_(torch.finfo(dtype).eps)


def bits(t: Tensor) -> Tensor:
    """The same memory as integers: all ones, a NaN or -1, are -1."""
    same_size = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return t.view(same_size[t.element_size()])


def first_true(mask: Tensor) -> tuple[int, ...]:
    """Coordinate of the first True, in logical order; there must be one."""
    place = mask.reshape(-1).to(torch.int8).argmax().cpu()
    return tuple(int(i) for i in torch.unravel_index(place, mask.shape))


def _flat(t: Tensor) -> Tensor:
    """All elements in the order of memory where they fill it, else in logical order."""
    span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return t.as_strided((t.numel(),), (1,)) if span == t.numel() else t.reshape(-1)
