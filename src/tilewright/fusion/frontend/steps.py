"""The steps of a graph that is being lowered, and how they are put in order at its end."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from tilewright.fusion.frontend.axes import AxisTable, Dim, Dims, Factor, Value, constant
from tilewright.fusion.frontend.pieces import Pieces, slice_of, split_of, view_of
from tilewright.fusion.ir import Access, Draw, Graph, Node, Positions
from tilewright.fusion.staged import Staged
from tilewright.op import Workload
from tilewright.tensor_spec import DEFAULT_ALIGN, HALVES, TensorSpec


class Unsupported(Exception):
    """The graph holds a step that the fusion compiler cannot take; the message names it."""


class TooManySteps(Unsupported):
    """What is computed anew takes more than is worthwhile; less, if some of it is stored."""


@dataclass(frozen=True)
class Step:
    """A node to be: `axes` are those along which it varies."""

    op: str
    args: tuple[int, ...]
    dtype: str
    axes: frozenset[int]
    attr: Any = None
    line: str | None = None


@dataclass(frozen=True)
class Load:
    """A tensor of the workload, by its place, or behind those one that is stored, or a slice of it
    from `offset` on, as a step reads it; or a mask, which a seed there decides, or positions,
    whatever is there."""

    place: int
    spec: TensorSpec
    dims: Dims
    generator: Draw | Positions | None = None
    offset: int = 0

    def sliced(self, d: int, elements: range, dim: Dim) -> Load:
        """Some elements of a dim, which run along another one."""
        if isinstance(self.generator, Draw) and len(elements) < self.spec.shape[d]:
            raise Unsupported("a slice of what holds a random mask")
        spec, offset = slice_of(self.spec, d, elements)
        dims = (*self.dims[:d], dim, *self.dims[d + 1 :])
        if isinstance(self.generator, Positions):
            later = Positions(self.generator.first + offset)
            return replace(self, spec=spec, dims=dims, generator=later)
        return replace(self, spec=spec, dims=dims, offset=self.offset + offset)

    def split(self) -> Load:
        """With a dim for each factor."""
        spec = split_of(self.spec, [[f.size for f in dim] for dim in self.dims])
        return replace(self, spec=spec, dims=tuple((f,) for dim in self.dims for f in dim))


@dataclass(frozen=True)
class Kept:
    """What is stored, to be read by later steps as a tensor is, and why."""

    held: Value | Pieces
    spec: TensorSpec
    reason: str


class Steps:
    """Those that are known so far. What runs along the same dim of a result is one axis.

    Attributes:
        runs: the different sets of axes along which they vary.
        kept: what is stored on the way.
        line: of the reference's source, in which steps stand that are added now.
        arithmetic: the dtype in which they are computed.
        scalar: that of the run-time scalars.
    """

    def __init__(self, w: Workload):
        self.w = w
        self.arithmetic = self.scalar = w.arithmetic
        self.steps: list[Step] = []
        self.runs: set[frozenset[int]] = set()
        self.loads: list[Load] = []
        self.kept: list[Kept] = []
        self.axes = AxisTable()
        self.line: str | None = None

    def add(
        self,
        op: str,
        args: tuple[int, ...],
        dtype: str,
        axes: Iterable[int | None],
        attr: Any = None,
    ) -> int:
        along = self.axes.roots(axes)
        self.steps.append(Step(op, args, dtype, along, attr, self.line))
        self.runs.add(along)
        return len(self.steps) - 1

    def load(
        self, place: int, spec: TensorSpec, generator: Draw | Positions | None = None
    ) -> Value:
        """An input, in the arithmetic type."""
        found = self.read(place, spec, generator)
        return Value(self.upcast(found.node), found.dims)

    def read(
        self, place: int, spec: TensorSpec, generator: Draw | Positions | None = None
    ) -> Value:
        """An input; it does not vary along dims that it was expanded along, of stride 0."""
        sizes_and_strides = zip(spec.shape, spec.real_strides, strict=True)
        dims = tuple(
            (Factor(n, self.axes.new(n, d - spec.rank) if stride else None),) if n != 1 else ()
            for d, (n, stride) in enumerate(sizes_and_strides)
        )
        self.loads.append(Load(place, spec, dims, generator))
        step = self.add("load", (), spec.dtype, self.axes.along(dims), len(self.loads) - 1)
        return Value(step, dims)

    def keep(self, held: Value | Pieces, reason: str) -> Value:
        """Store it; from now on it is a tensor, which is read at any elements in any order."""
        (dtype,) = self.dtypes(held)
        self.kept.append(Kept(held, TensorSpec(dtype, held.shape), reason))
        return self.read(len(self.w.tensors) + len(self.kept) - 1, self.kept[-1].spec)

    def upcast(self, i: int) -> int:
        step = self.steps[i]
        narrow = step.dtype in HALVES or (step.dtype, self.arithmetic) == ("f32", "f64")
        return self.add("cast", (i,), self.arithmetic, step.axes) if narrow else i

    def ancestors(self, of: Iterable[int]) -> list[int]:
        """The steps that `of` need, themselves included, in order."""
        needed = set[int]()
        left = [*of]
        while left:
            i = left.pop()
            if i not in needed:
                needed.add(i)
                left += self.steps[i].args
        return sorted(needed)

    def finish(self, outputs: list[Value | Pieces], scalars: int) -> Graph | Staged:
        """The graph, behind those of what is stored on the way: all that need nothing of one
        another are one."""
        first = len(self.w.tensors)
        reads = [self.kept_behind([kept.held]) for kept in self.kept]
        wanted = self.kept_behind(outputs)
        turns: dict[int, int] = {}
        for k in reversed(range(len(self.kept))):
            wanted |= reads[k] if k in wanted else set()
        for k in sorted(wanted):
            turns[k] = 1 + max((turns[other] for other in reads[k]), default=-1)
        places: dict[int, int] = {}
        graphs, reasons = list[Graph](), [""]
        for turn in range(max(turns.values(), default=-1) + 1):
            now = [k for k, each in turns.items() if each == turn]
            specs = tuple(self.kept[k].spec for k in now)
            held = [self.kept[k].held for k in now]
            graphs.append(self.apart().assembled(held, specs, scalars, places))
            graphs[-1] = replace(graphs[-1], stored=specs)
            reasons.append(self.kept[now[0]].reason)
            places |= {first + k: first + len(places) + n for n, k in enumerate(now)}
        last = self.apart().assembled(outputs, self.w.outputs, scalars, places)
        return Staged.of((*graphs, last), tuple(reasons)) if graphs else last

    def dtypes(self, held: Value | Pieces) -> set[str]:
        return {self.steps[value.node].dtype for value in values_of(held)}

    def kept_behind(self, held: Iterable[Value | Pieces]) -> set[int]:
        """What of that which is stored is read on the way to these."""
        every = (each for one in held for each in values_of(one))
        behind = map(self.steps.__getitem__, self.ancestors(value.node for value in every))
        places = (self.loads[step.attr].place for step in behind if step.op == "load")
        return {place - len(self.w.tensors) for place in places if place >= len(self.w.tensors)}

    def apart(self) -> Self:
        """The same steps, on axes of their own: those of one graph are joined and cut for it."""
        own = copy.copy(self)
        own.axes, own.steps = self.axes.copied(), [*self.steps]
        return own

    def assembled(
        self,
        outputs: Sequence[Value | Pieces],
        specs: Sequence[TensorSpec],
        scalars: int,
        places: Mapping[int, int],
    ) -> Graph:
        """The graph of these outputs.

        Args:
            places: those of tensors that are stored by then, as the graph has them.
        """
        given = [
            (k, *piece)
            for k, (out, spec) in enumerate(zip(outputs, specs, strict=True))
            for piece in _stored(out, spec)
        ]
        shared = self.share(self.ancestors(v.node for _, v, *_ in given))
        stores = [(*self.stored(v, spec, shared), spec, offset) for _, v, spec, offset in given]
        live = self.ancestors(out for out, *_ in stores)
        space = self.axes.ordered(a for i in live for a in self.steps[i].axes)
        accesses, again, slots = self.inputs(live, space, places)
        new = {i: k for k, i in enumerate(live)}
        nodes = []
        for step in map(self.steps.__getitem__, live):
            varies = self.axes.roots(step.axes)
            shape = tuple(self.axes.size(a) if a in varies else 1 for a in space)
            attr = slots[step.attr] if step.op == "load" else step.attr
            args = tuple(new[a] for a in step.args)
            nodes.append(Node(step.op, args, step.dtype, shape, attr, step.line))
        written = tuple(
            (new[out], replace(self.access(spec, dims, space), offset=offset))
            for out, dims, spec, offset in stores
        )
        tensors = tuple(k for k, *_ in given) if len(given) > len(outputs) else ()
        sizes = tuple(map(self.axes.size, space))
        numbers = (self.scalar,) * scalars
        found = Graph(tuple(nodes), sizes, tuple(accesses), written, numbers, again, tensors)
        return found.check()

    def share(self, live: list[int]) -> list[int]:
        """Make axes one that no step runs along both of, first those at one place: what reads
        different tensors may then be one sweep. Returns those that are left."""
        along = [self.steps[i].axes for i in live]
        every = list(itertools.chain(*along))
        for anywhere in (False, True):
            for a, b in itertools.combinations(self.axes.ordered(every), 2):
                near = anywhere or self.axes.home(a) == self.axes.home(b)
                if near and self.axes.size(a) == self.axes.size(b):
                    self.axes.join([(a, b)], (), along)
        return self.axes.ordered(every)

    def stored(self, value: Value, spec: TensorSpec, shared: list[int]) -> tuple[int, Dims]:
        """The output's last steps: to its dtype, and along dims on which it does not vary, for
        which it takes the axes of others."""
        out = value.node
        dims: list[Dim] = []
        taken = set(self.axes.along(value.dims))
        given = zip(value.dims or constant(spec.shape), spec.shape, spec.real_strides, strict=True)
        for d, (dim, n, stride) in enumerate(given):
            found = []
            for f in self.axes.factors(dim) or constant([n])[0]:
                if f.axis is None and stride:  # PyTorch too expands what holds one value
                    free = [a for a in shared if self.axes.size(a) == f.size and a not in taken]
                    free.sort(key=lambda a: self.axes.home(a) != d - spec.rank, reverse=True)
                    if not free:
                        free = [self.axes.new(f.size, d - spec.rank)]
                        shared += free
                    f = Factor(f.size, free[-1])
                    taken.add(free[-1])
                found.append(f)
            dims.append(tuple(found))
        if self.steps[out].dtype != spec.dtype:
            out = self.add("cast", (out,), spec.dtype, self.steps[out].axes)
        along = self.axes.along(tuple(dims))
        if along != self.axes.roots(self.steps[out].axes):
            out = self.add("broadcast", (out,), spec.dtype, along)
        return out, tuple(dims)

    def inputs(
        self, live: list[int], space: list[int], places: Mapping[int, int]
    ) -> tuple[list[Access], tuple[int, ...], dict[int, int]]:
        """How each tensor is read, then how some are read besides, of which tensors that is, and
        the place in the list of each of `self.loads`."""
        kept = {place: self.kept[k - len(self.w.tensors)].spec for k, place in places.items()}
        tensors = [*self.w.tensors.values(), *(kept[place] for place in sorted(kept))]
        accesses = [Access((0,) * len(space), s.dtype, s.align) for s in tensors]
        if self.w.seed is not None:
            accesses[self.w.seed] = Access((0,) * len(space), "bool", DEFAULT_ALIGN, Draw(0, 0))
        again: list[int] = []
        known: dict[tuple[int, Access], int] = {}
        slots: dict[int, int] = {}
        for number in (self.steps[i].attr for i in live if self.steps[i].op == "load"):
            load = self.loads[number]
            plain = self.access(load.spec, load.dims, space)
            access = replace(plain, generator=load.generator, offset=load.offset)
            slot = place = places.get(load.place, load.place)
            if (place, access) not in known:
                if slot in known.values():
                    slot = len(accesses)
                    again.append(place)
                accesses[slot : slot + 1] = [access]
                known[place, access] = slot
            slots[number] = known[place, access]
        return accesses, tuple(again), slots

    def access(self, spec: TensorSpec, dims: Dims, space: list[int]) -> Access:
        strides = dict.fromkeys(space, 0)
        for dim, stride in zip(dims, spec.real_strides, strict=True):
            for size, axis in reversed(self.axes.factors(dim)):
                if axis is not None and stride:
                    strides[axis] = stride
                stride *= size
        return Access(tuple(strides.values()), spec.dtype, spec.align)


def values_of(held: Value | Pieces) -> list[Value]:
    return [held] if isinstance(held, Value) else [value for _, value in held.boxes]


def _stored(out: Value | Pieces, spec: TensorSpec) -> list[tuple[Value, TensorSpec, int]]:
    """The values that a result holds, each along its own dims, and the offset of the first
    element."""
    if isinstance(out, Pieces):
        return [*out.of(spec)]
    if not out.dims or out.shape == spec.shape:
        return [(out, spec, 0)]
    found = view_of(spec, out.shape)
    if found is None:
        raise Unsupported(f"a result {spec} of what runs along dims of {list(out.shape)}")
    return [(out, found, 0)]
