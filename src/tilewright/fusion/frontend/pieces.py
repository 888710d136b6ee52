"""Tensors that are put together of values: what `cat` returns, and gradients of slices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from tilewright.fusion.frontend.axes import Value
from tilewright.tensor_spec import TensorSpec

Box = tuple[range, ...]
"""For each factor of the dims of a tensor some of its elements."""


@dataclass(frozen=True)
class Pieces:
    """Values that are stored as one tensor: each element of it is one of one value.

    Attributes:
        sizes: of each dim the factors that boxes know, outermost first; none for a size of 1.
        boxes: the values, and where they are; each has a dim for each range of its box.
    """

    sizes: tuple[tuple[int, ...], ...]
    boxes: tuple[tuple[Box, Value], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(math.prod, self.sizes))

    @property
    def factors(self) -> tuple[int, ...]:
        return tuple(itertools.chain(*self.sizes))

    def are_cut(self, dims: Iterable[int]) -> bool:
        """Whether pieces have some elements of one of these dims alone."""
        numbers = iter(range(len(self.factors)))
        places = [[next(numbers) for _ in factors] for factors in self.sizes]
        return any(
            len(box[k]) < self.factors[k] for d in dims for k in places[d] for box, _ in self.boxes
        )

    def of(self, whole: TensorSpec) -> Iterator[tuple[Value, TensorSpec, int]]:
        """Each value with the slice of the tensor that it is, and where that begins."""
        split = split_of(whole, self.sizes)
        for box, value in self.boxes:
            spec, offset = split, 0
            for d, elements in enumerate(box):
                spec, more = slice_of(spec, d, elements)
                offset += more
            yield value, spec, offset


def slice_of(spec: TensorSpec, d: int, elements: range) -> tuple[TensorSpec, int]:
    """Some elements of a dim of a tensor, and the offset of the first."""
    shape, strides = list(spec.shape), list(spec.real_strides)
    offset = elements.start * strides[d]
    shape[d], strides[d] = len(elements), strides[d] * elements.step
    align = math.gcd(spec.align, offset * spec.itemsize)
    return TensorSpec(spec.dtype, tuple(shape), tuple(strides), align), offset


def split_of(spec: TensorSpec, sizes: Sequence[Sequence[int]]) -> TensorSpec:
    """The tensor with a dim for each factor of its dims."""
    shape = [n for factors in sizes for n in factors]
    strides = [
        stride * math.prod(factors[k + 1 :])
        for factors, stride in zip(sizes, spec.real_strides, strict=True)
        for k in range(len(factors))
    ]
    return TensorSpec(spec.dtype, tuple(shape), tuple(strides), spec.align)


def view_of(
    spec: TensorSpec, shape: Sequence[int], order: Sequence[int] | None = None
) -> TensorSpec | None:
    """The tensor's elements, in row-major order of its dims in that order, along other dims; None
    if no strides do."""
    whole = torch.empty_strided(spec.shape, spec.real_strides, device="meta")
    whole = whole if order is None else whole.permute(*order)
    try:
        strides = whole.view(shape).stride()
    except RuntimeError:
        return None
    return TensorSpec(spec.dtype, tuple(shape), strides, spec.align)


# ---- elements of a dim; none of these is empty, but where it is said ----


def ordinary(elements: range) -> range:
    """Equal elements as an equal range that ends behind the last."""
    step = elements.step if len(elements) > 1 else 1
    return range(elements[0], elements[-1] + 1, step)


def common(a: range, b: range) -> range:
    """The elements that are in both, which may be none."""
    first = max(0, -((a.start - b.start) // a.step))
    start = next((i for i in a[first:][: b.step] if i in b), None)
    if start is None:
        return range(0)
    return ordinary(range(start, min(a.stop, b.stop), math.lcm(a.step, b.step)))


def within(elements: range, whole: range) -> range:
    """Where in `whole` they are."""
    first, last = ((i - whole.start) // whole.step for i in (elements[0], elements[-1]))
    return ordinary(range(first, last + 1, max(elements.step // whole.step, 1)))


def others(elements: range, size: int) -> list[range]:
    """What is left of a dim without them; of every n-th what is between them in as many turns."""
    first, step = elements[0], elements.step
    if len(elements) > 1 and elements == range(first, size, step) and first < step:
        return [ordinary(range(k, size, step)) for k in range(min(step, size)) if k != first]
    between = (range(elements[0] + k, elements[-1], elements.step) for k in range(1, elements.step))
    found = [range(elements[0]), *between, range(elements[-1] + 1, size)]
    return [ordinary(r) for r in found if r]


def met(a: Box, b: Box) -> Box | None:
    """What is in both boxes."""
    found = tuple(map(common, a, b))
    return found if all(found) else None


def apart(box: Box, other: Box) -> list[Box]:
    """The box as boxes of which each is inside of another one, or beside it."""
    if met(box, other) is None:
        return [box]
    found, inside = [], box
    for d, (elements, of_other) in enumerate(zip(box, other, strict=True)):
        shared = common(elements, of_other)
        for left in others(within(shared, elements), len(elements)):
            beside = ordinary(elements[left.start : left.stop : left.step])
            found.append((*inside[:d], beside, *inside[d + 1 :]))
        inside = (*inside[:d], shared, *inside[d + 1 :])
    return [inside, *found]


def boxed(elements: range, sizes: Sequence[int]) -> Box | None:
    """The elements of a dim by its factors; None where they are no box of these."""
    if len(sizes) < 2 or not elements:
        return (elements,) if sizes and elements else None
    inner = math.prod(sizes[1:])
    outer = range(elements[0] // inner, elements[-1] // inner + 1)
    if len(outer) == 1:
        inside = range(elements[0] % inner, elements[-1] % inner + 1, elements.step)
    elif elements.step % inner == 0:
        outer = range(outer.start, outer.stop, elements.step // inner)
        inside = range(elements[0] % inner, elements[0] % inner + 1)
    else:
        first, step = elements[0] % inner, elements.step
        inside = range(first, inner, step)
        whole = first < step and inner % step == 0
        if not whole or len(outer) * len(inside) != len(elements):
            return None
    rest = boxed(ordinary(inside), sizes[1:])
    return None if rest is None else (ordinary(outer), *rest)


def in_boxes(elements: range, sizes: Sequence[int], most: int) -> list[range] | None:
    """The elements of a dim in ranges, one after another, each of which is a box of its factors;
    None where that takes more than so many."""
    if boxed(elements, sizes) is not None:
        return [elements]
    inner = math.prod(sizes[1:])
    first, last = elements[0] // inner, elements[-1] // inner
    if first == last:
        start = first * inner
        inside = range(elements.start - start, elements.stop - start, elements.step)
        found = in_boxes(inside, sizes[1:], most)
        return found and [range(r.start + start, r.stop + start, r.step) for r in found]
    ends = [-((elements.start - row * inner) // elements.step) for row in (first + 1, last)]
    ends = [0, *ends, len(elements)]  # the first row, whole ones, and the last
    for a, b in ((1, 3), (0, 2), (1, 2)):
        whole = elements[ends[a] : ends[b]]
        if whole and boxed(whole, sizes) is not None:
            rest = [elements[: ends[a]], whole, elements[ends[b] :]]
            break
    else:
        if last - first >= most:
            return None
        cuts = [
            -((elements.start - row * inner) // elements.step) for row in range(first, last + 2)
        ]
        rest = [elements[max(i, 0) : j] for i, j in itertools.pairwise(cuts)]
    split = [in_boxes(r, sizes, most) for r in rest if r]
    found = [r for ranges in split for r in ranges or ()]
    return None if None in split or len(found) > most else found
