"""Steps of tensors that are put together of pieces: each is a step of every piece."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from tilewright.fusion.far_means import ROUNDINGS
from tilewright.fusion.frontend.axes import Value, grouped, refined
from tilewright.fusion.frontend.builder import GraphBuilder
from tilewright.fusion.frontend.pieces import (
    Box,
    Pieces,
    apart,
    boxed,
    common,
    in_boxes,
    met,
    ordinary,
    others,
    within,
)
from tilewright.fusion.frontend.steps import Unsupported
from tilewright.tensor_spec import DTYPES

Held = Value | Pieces
BoxedValue = tuple[Box, Value]
MOST_PIECES = 64
"""Each may be a kernel of its own."""


class PieceBuilder(GraphBuilder):
    """What a tensor of pieces becomes, beside what a value does."""

    def of_each(
        self, step: Callable[[list[Value]], Value], operands: list[Held], shape: Sequence[int]
    ) -> Held:
        """The step of operands that broadcast to a shape."""
        sizes = self.sizes_of(shape, operands)
        flat = [n for factors in sizes for n in factors]
        given = [self.spread(held, sizes) for held in operands]

        def smaller(boxes: list[Box]) -> list[Box]:
            for pieces in given:
                both = [(met(box, o), v, o) for box in boxes for o, v in pieces]
                meets = [(box, v, o) for box, v, o in both if box is not None]
                boxes = [b for box, v, o in meets for b in self.boxes_inside(v, box, o)]
            return boxes

        boxes = smallest([tuple(map(range, flat))], smaller)
        found = []
        for box in boxes:
            inside = (
                next((o, v) for o, v in pieces if met(box, o) is not None) for pieces in given
            )
            found.append((box, step([self.inside(v, box, o) for o, v in inside])))
        return self.put_together(sizes, found)

    def concatenated(self, operands: list[Held], d: int) -> Held:
        """Tensors one after another along a dim."""
        operands = [one for held in operands for one in self.uncut(held, d)]
        ends = [*itertools.accumulate(held.shape[d] for held in operands)]
        shape = [*operands[0].shape[:d], ends[-1], *operands[0].shape[d + 1 :]]
        sizes = self.sizes_of(shape, operands, d)
        found = []
        for end, held in zip(ends, operands, strict=True):
            whole = range(end - held.shape[d], end)
            found += [(box, v) for box, v in self.placed_in(held, sizes, d, whole)]
        return self.put_together(sizes, found)

    def replaced(self, into: Held, src: Held, d: int, elements: range) -> Held:
        """A tensor in which some elements of a dim are others."""
        if not elements:
            return into
        if len(self.merged(into, d)) > 1:
            return self.replaced_in_boxes(into, src, d, elements)
        size, src = into.shape[d], self.concatenated([src], d)
        sizes = self.sizes_of(into.shape, [into, src], d)
        at = sum(len(factors) for factors in sizes[:d])
        found = self.placed_in(src, sizes, d, elements)
        for box, value in self.placed_in(into, sizes, d, range(size)):
            for left in others(elements, size):
                if kept := common(box[at], left):
                    smaller = (*box[:at], kept, *box[at + 1 :])
                    found += self.insides(value, smaller, box)
        return self.put_together(sizes, found)

    def replaced_in_boxes(self, into: Held, src: Held, d: int, elements: range) -> Held:
        """The same for a dim that is several: their boxes are replaced, one after another."""

        def put(whole: Held, some: Held, k: int, box: Box) -> Held:
            if len(box) > 1:
                some = put(self.elements(whole, k, box[0]), some, k + 1, box[1:])
            return self.replaced(whole, some, k, box[0])

        factors, shape, first = self.merged(into, d), into.shape, 0
        whole = self.regrouped(into, [*shape[:d], *factors, *shape[d + 1 :]])
        for some in self.in_boxes(elements, factors):
            box = boxed(some, factors)
            assert box is not None, (some, factors)
            own = self.elements(src, d, range(first, first + len(some)))
            own = self.regrouped(own, [*shape[:d], *map(len, box), *shape[d + 1 :]])
            whole, first = put(whole, own, d, box), first + len(some)
        return self.regrouped(whole, shape)

    def merged(self, held: Held, d: int) -> tuple[int, ...]:
        """The sizes of the dims that a dim is and cannot be walked as one."""
        if isinstance(held, Pieces):
            return held.sizes[d]
        dim = self.axes.factors(held.dims[d])
        one = all(f.axis is None for f in dim) or self.run(held, d) is not None
        return held.shape[d : d + 1] if one else tuple(f.size for f in dim)

    def in_boxes(self, elements: range, factors: Sequence[int]) -> list[range]:
        found = in_boxes(elements, factors, MOST_PIECES)
        if found is None:
            raise Unsupported(
                f"{len(elements)} elements of merged dims of {list(factors)}, which are more than "
                f"{MOST_PIECES} pieces"
            )
        return found

    def elements(self, held: Held, d: int, elements: range) -> Held:
        """Some elements of a dim."""
        factors = self.merged(held, d)
        if len(factors) > 1 and elements and boxed(elements, factors) is None:
            boxes = self.in_boxes(elements, factors)
            return self.concatenated([self.elements(held, d, some) for some in boxes], d)
        if isinstance(held, Value):
            return self.sliced(held, d, elements)
        target = boxed(elements, factors) if len(factors) > 1 else (elements,) * len(factors)
        if target is None or not elements:
            raise Unsupported(f"{len(elements)} elements of merged dims of {list(factors)}")
        first = sum(len(f) for f in held.sizes[:d])
        last = first + len(factors)
        whole = tuple(map(range, held.factors))
        wanted = (*whole[:first], *target, *whole[last:])
        found = []
        for box, value in held.boxes:
            if meet := met(box, wanted):
                for inside, piece in self.insides(value, meet, box):
                    found.append((tuple(map(within, inside, wanted)), piece))
        sizes = [*held.sizes]
        sizes[d] = tuple(map(len, target))
        return self.put_together(sizes, found)

    def uncut(self, held: Held, d: int) -> list[Held]:
        """Slices, one after another along a dim, of which none is cut along several factors of it:
        rows between those where pieces begin and end, or single ones."""
        if isinstance(held, Value) or len(held.sizes[d]) < 2:
            return [held]
        at = sum(len(factors) for factors in held.sizes[:d])
        rows = [box[at] for box, _ in held.boxes]
        ends = {0, held.sizes[d][0], *(e for r in rows for e in (r.start, r.stop) if r.step == 1)}
        ends |= {e for r in rows if r.step > 1 for i in r for e in (i, i + 1)}
        if len(ends) == 2:
            ends = {*range(held.sizes[d][0] + 1)}
        if len(ends) > MOST_PIECES + 1:
            raise Unsupported(
                f"merged dims of {list(held.sizes[d])} in more than {MOST_PIECES} slices"
            )
        inner = math.prod(held.sizes[d][1:])
        between = itertools.pairwise(sorted(ends))
        slices = [self.elements(held, d, range(a * inner, b * inner)) for a, b in between]
        return [v for one in slices for v in self.uncut(one, d)]

    def regrouped(self, held: Held, shape: Sequence[int]) -> Held:
        """The elements, in row-major order, along other dims."""
        if isinstance(held, Value):
            return self.view(held, shape)
        fine = refined(held.factors, [n for n in shape if n != 1])
        if fine is None:
            raise Unsupported(f"a view of {list(held.factors)}, in pieces, as {list(shape)}")
        groups = grouped(fine, fine, held.factors)
        found = []
        for box, value in held.boxes:

            def smaller(boxes: list[Box], value: Value = value, whole: Box = box) -> list[Box]:
                pairs = [zip(b, groups, strict=True) for b in boxes]
                split = [itertools.product(*(self.in_boxes(*p) for p in b)) for b in pairs]
                every = itertools.chain(*split)
                return [b for each in every for b in self.boxes_inside(value, each, whole)]

            for cut in smallest([box], smaller):
                boxes = [boxed(*pair) for pair in zip(cut, groups, strict=True)]
                assert None not in boxes, (cut, groups)
                into = tuple(r for ranges in boxes for r in ranges or ())
                inside = self.inside(value, cut, box)
                found.append((into, self.view(inside, [*map(len, into)])))
        return Pieces(tuple(grouped(fine, fine, shape)), tuple(found))

    def moved(self, held: Held, order: Sequence[int]) -> Held:
        """Dims in another order."""
        if isinstance(held, Value):
            return self.of_dims(held, order)
        numbers = iter(range(len(held.factors)))
        places = [[next(numbers) for _ in factors] for factors in held.sizes]
        flat = [k for d in order for k in places[d]]

        boxes = tuple((tuple(box[k] for k in flat), self.of_dims(v, flat)) for box, v in held.boxes)
        return Pieces(tuple(held.sizes[d] for d in order), boxes)

    def expanded(self, held: Held, shape: Sequence[int]) -> Held:
        """Repeated along dims of size 1 and new leading ones."""
        if isinstance(held, Value):
            return self.broadcast(held, shape)
        sizes = self.sizes_of(shape, [held])
        return self.put_together(sizes, self.spread(held, sizes))

    def mapped(self, held: Held, step: Callable[[Value], Value]) -> Held:
        """A step that takes nothing else."""
        if isinstance(held, Value):
            return step(held)
        return replace(held, boxes=tuple((box, step(value)) for box, value in held.boxes))

    def reduced_by_piece(
        self,
        held: Pieces,
        dims: Sequence[int],
        keepdim: bool,
        step: Callable[[Value], Value],
        join: Callable[[Value, Value], Value] | None,
    ) -> Held:
        """A reduction over some dims: `step` reduces all dims of that number of a piece, `join` is
        of two results, of pieces that are cut along such a dim."""
        assert join is not None or not held.are_cut(dims), dims
        sizes = [() if d in dims else factors for d, factors in enumerate(held.sizes)]
        found: list[BoxedValue] = []
        boxes: list[Box] = [tuple(range(n) for factors in sizes for n in factors)]
        for box, value in held.boxes:
            ranges = iter(box)
            own = [[next(ranges) for _ in factors] for factors in held.sizes]
            whole = self.view(value, [math.prod(map(len, each)) for each in own])
            left = tuple(r for d, each in enumerate(own) if d not in dims for r in each)
            found.append((left, self.view(step(whole), [*map(len, left)])))
            boxes = [box for each in boxes for box in apart(each, left)]
        joined = []
        for box in boxes:
            inside = [(v, left) for left, v in found if met(box, left) is not None]
            first, *rest = (self.inside(v, box, left) for v, left in inside)
            for value in rest:
                assert join is not None
                first = join(first, value)
            joined.append((box, first))
        kept = [f for d, f in enumerate(sizes) if keepdim or d not in dims]
        return self.put_together(kept, joined)

    def moments(
        self, held: Pieces, dims: Sequence[int], total: Callable[[Pieces], Held]
    ) -> tuple[Held, Held]:
        """Mean and m2 over dims that pieces are cut along, which are left as dims of 1, as they are
        by `total`. What was rounded of the mean is taken out, as in `expand_moments`."""
        count = math.prod(held.shape[d] for d in dims)
        eps = torch.finfo(DTYPES[self.arithmetic]).eps

        def averaged(value: Value) -> Value:
            return self.binary("div", value, self.number(float(count)))

        def squared(value: Value) -> Value:
            return self.binary("mul", value, value)

        def excess(rest: Value) -> Value:
            return self.binary("mul", averaged(rest), rest)

        def missed(squares: Value, rest: Value) -> Value:
            least = self.binary("mul", squares, self.number(eps**2))
            is_more = self.binary("lt", least, excess(rest))
            return self.combine("where", [is_more, rest, self.number(0.0)])

        def without(squares: Value, rest: Value) -> Value:
            left = self.binary("sub", squares, excess(rest))
            least = self.binary("mul", squares, self.number(ROUNDINGS * eps))
            is_rounding = self.binary("lt", left, least)
            return self.combine("where", [is_rounding, self.number(0.0), left])

        def of_both(step: Callable[[Value, Value], Value], a: Held, b: Held) -> Held:
            return self.of_each(lambda values: step(*values), [a, b], a.shape)

        first = self.mapped(total(held), averaged)
        apart = of_both(functools.partial(self.binary, "sub"), held, first)
        assert isinstance(apart, Pieces), apart
        squares = self.mapped(apart, squared)
        assert isinstance(squares, Pieces), squares
        over = total(squares)
        rest = of_both(missed, over, total(apart))
        mean = of_both(functools.partial(self.binary, "add"), first, self.mapped(rest, averaged))
        return mean, of_both(without, over, rest)

    # ---- pieces at factors ----

    def sizes_of(
        self, shape: Sequence[int], operands: Sequence[Held], whole: int | None = None
    ) -> list[tuple[int, ...]]:
        """The factors of each dim of a result that its operands' pieces are cut along; dim `whole`
        has to stay one."""
        found: list[tuple[int, ...]] = []
        for k in range(-len(shape), 0):
            n = shape[k]
            cuts = [
                held.sizes[k]
                for held in operands
                if isinstance(held, Pieces) and len(held.sizes) >= -k and held.sizes[k]
            ]
            if whole is not None and k == whole - len(shape):
                fine: tuple[int, ...] | None = None if any(len(f) > 1 for f in cuts) else (n,)
            else:
                fine = refined((n,), *cuts) if n != 1 else ()
            if fine is None:
                raise Unsupported("what was put together along dims that were merged differently")
            found.append(fine)
        return found

    def spread(self, held: Held, sizes: Sequence[tuple[int, ...]]) -> list[BoxedValue]:
        """Its pieces, with a dim for each factor of the last dims of a result; where it has a
        size of 1, of that size, and everywhere."""
        rank = len(held.shape)
        pairs = [*zip(held.shape, sizes[len(sizes) - rank :], strict=True)]
        shape = [m for n, factors in pairs for m in (factors if n != 1 else (1,) * len(factors))]
        missing = sum(len(factors) for factors in sizes[: len(sizes) - rank])
        flat = [n for factors in sizes for n in factors]
        if isinstance(held, Value):
            pieces: list[BoxedValue] = [((), self.view(held, shape))]
        else:
            split = self.regrouped(held, shape)
            assert isinstance(split, Pieces)
            pieces = list(split.boxes)
        found = []
        for box, value in pieces:
            ranges, dims = iter(box), iter(value.dims)
            whole = isinstance(held, Value)
            new = [range(n) for n in flat[:missing]]
            along = []
            for n, m in zip(shape, flat[missing:], strict=True):
                new.append(range(m) if whole or n == 1 else next(ranges))
                along.append(next(dims) if whole or n != 1 else ())
            found.append((tuple(new), Value(value.node, ((),) * missing + tuple(along))))
        return found

    def placed_in(
        self, held: Held, sizes: Sequence[tuple[int, ...]], d: int, elements: range
    ) -> list[BoxedValue]:
        """Its pieces as those of a result, of which it is some elements of a dim."""
        count = len(elements)
        own = [*sizes[:d], (count,), *sizes[d + 1 :]]
        at = sum(len(factors) for factors in sizes[:d])
        found = []
        for box, value in self.spread(held, own):
            inside = elements[box[at].start : box[at].stop : box[at].step]
            found.append(((*box[:at], inside, *box[at + 1 :]), value))
        return found

    def of_dims(self, value: Value, dims: Sequence[int]) -> Value:
        return Value(value.node, tuple(value.dims[d] for d in dims))

    def inside(self, value: Value, box: Box, whole: Box) -> Value:
        """What of a piece is in a smaller box; it is whole where it does not vary."""
        for d, (elements, of) in enumerate(zip(box, whole, strict=True)):
            if value.dims[d]:
                value = self.sliced(value, d, within(elements, of))
        return value

    def insides(self, value: Value, box: Box, whole: Box) -> list[BoxedValue]:
        """The same in as many boxes as it takes along dims that are several."""
        return [(b, self.inside(value, b, whole)) for b in self.boxes_inside(value, box, whole)]

    def boxes_inside(self, value: Value, box: Box, whole: Box) -> list[Box]:
        split = [[elements] for elements in box]
        for d, of in enumerate(whole):
            factors = self.merged(value, d) if value.dims[d] else ()
            if len(factors) > 1:
                ranges = self.in_boxes(within(box[d], of), factors)
                split[d] = [ordinary(of[r.start : r.stop : r.step]) for r in ranges]
        return list(itertools.product(*split))

    def put_together(self, sizes: Sequence[tuple[int, ...]], pieces: list[BoxedValue]) -> Held:
        """The pieces as one tensor, or as a value if there is but one."""
        if len(pieces) > MOST_PIECES:
            raise Unsupported(f"a tensor of more than {MOST_PIECES} pieces")
        kept = [k for k, n in enumerate(n for factors in sizes for n in factors) if n != 1]
        left = tuple(tuple(n for n in factors if n != 1) for factors in sizes)
        found = []
        for box, value in pieces:
            full = self.broadcast(value, [*map(len, box)])
            found.append((tuple(box[k] for k in kept), self.of_dims(full, kept)))
        if len(found) == 1:
            return self.view(found[0][1], [*map(math.prod, left)])
        return Pieces(left, tuple(found))


def smallest(boxes: list[Box], smaller: Callable[[list[Box]], list[Box]]) -> list[Box]:
    """Boxes cut until that is over: what one tensor cuts may be no box of another's factors."""
    known = 0
    while known < len(boxes):
        known, boxes = len(boxes), smaller(boxes)
        if len(boxes) > MOST_PIECES:
            raise Unsupported(f"a tensor of more than {MOST_PIECES} pieces")
    return boxes
