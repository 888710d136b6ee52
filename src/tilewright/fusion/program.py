"""Kernels that a graph is cut into, in order, and what a target's kernels can do."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tilewright.fusion.ir import Graph
from tilewright.tensor_spec import TensorSpec


@dataclass(frozen=True)
class Segment:
    """One kernel.

    Attributes:
        graph: its steps, on axes of its own.
        reads, writes: the buffer of each of the graph's inputs and outputs.
        row: the axes of a row; None where all reductions of the graph run over the same axes.
        lane: the axis that vectors must run along; None where any will do.
        nested: reductions over some of a row's axes are completed in it, too: of rows that its row
            is made of, and of what those have been reduced to.
        partials: outputs that are reductions over other axes than the row's are written as so many
            partials, one after another in their buffer.
        reason: why it is a kernel of its own, for people; empty for the first.
    """

    graph: Graph
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    row: tuple[int, ...] | None = None
    lane: int | None = None
    nested: bool = False
    partials: int = 1
    reason: str = ""

    def added(self) -> dict[int, int]:
        """By position of the output: the reduction over other axes that it holds a partial of."""
        if self.row is None:
            return {}
        row, reductions = {*self.row}, self.graph.reductions
        others = {i for i in reductions if {*self.graph.axes(i)} != row}
        if self.nested:
            others = {i for i in others if not {*self.graph.axes(i)} < row}
        return {k: i for k, (i, _) in enumerate(self.graph.outputs) if i in others}

    @property
    def only_adds(self) -> bool:
        """Whether partials are all that it reduces to: blocks may divide its walk."""
        added = self.added()
        return bool(added) and {*added.values()} == {*self.graph.reductions}

    @property
    def adds_across(self) -> bool:
        """Whether it leaves partials beside what it completes of its rows."""
        return bool(self.added()) and not self.only_adds


@dataclass(frozen=True)
class Program:
    """Kernels in order. Buffers are the inputs, then the outputs, then temporaries."""

    segments: tuple[Segment, ...]
    inputs: int
    outputs: int
    temporaries: tuple[TensorSpec, ...]

    def largest(self) -> list[int]:
        """The kernels that walk the largest space."""
        sizes = {k: math.prod(self.segments[k].graph.space) for k in walking(self.segments)}
        return [k for k, size in sizes.items() if size == max(sizes.values())]

    def large(self) -> int:
        """How many those are: however many splits there are, the cut is the same."""
        return len(self.largest())

    def describe(self) -> list[str]:
        """One line for each kernel: what it reduces, what it writes, why it is one of its own."""
        lines = []
        for k, s in enumerate(self.segments):
            sets = [list(axes) for axes in s.graph.reduction_sets]
            reduced = f", reduces axes {', '.join(map(str, sets))}" if sets else ""
            partials = f", {s.partials} partials" if s.added() and s.partials > 1 else ""
            why = f"; cut: {s.reason}" if s.reason else ""
            lines.append(f"kernel {k}: space {list(s.graph.space)}{reduced}{partials}{why}")
        return lines


def walking(segments: Sequence[Segment]) -> list[int]:
    """The kernels that are passes over tensors: all but those that put partials together."""
    return [k for k, s in enumerate(segments) if k == 0 or s.row is not None]


def filled(program: Program) -> Program:
    """The same without temporaries that no kernel writes."""
    first = program.inputs + program.outputs
    written = {b for s in program.segments for b in s.writes}
    kept = [n for n in range(len(program.temporaries)) if first + n in written]
    if len(kept) == len(program.temporaries):
        return program
    places = {first + n: first + k for k, n in enumerate(kept)}

    def moved(buffers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(places.get(b, b) for b in buffers)

    segments = (replace(s, reads=moved(s.reads), writes=moved(s.writes)) for s in program.segments)
    temporaries = tuple(program.temporaries[n] for n in kept)
    return replace(program, segments=tuple(segments), temporaries=temporaries)


class Kernels:
    """What a target's kernels can do. This is the C++ target's: one work item walks many rows.

    Equal ones cut a graph in the same places: they may differ in how many splits there are.

    Attributes:
        across: whether rows may as well run across the order of memory.
        extra: how many passes over large tensors splitting rows may cost.
        row_partials: a kernel that walks rows completes what it adds up over all of them, and
            leaves a partial for each row of what is reduced over rows and more; else `divided` says
            how many splits there are.
        most_joined: partials of one number that are put together at once; of more, a kernel whose
            blocks share them makes fewer.
        set_rows: a kernel that walks so many rows at once completes what is reduced over all of
            them, too; 0 where none does.
        joins_apart: what follows from results of earlier kernels alone, and reduces them, is a
            kernel of its own, instead of a part of each block of the next one.
        adds_across: a kernel whose rows run across the order of memory also adds up along it: every
            block leaves a partial for each element of its rows.
        stores_sums: a kernel stores what it adds up to one partial, where that is an output.
        rounds_sums: or where an output is that, rounded to halves.
        corrects_halves: what was rounded of a mean is added to it where its m2 is found, too, also
            of widened halves.
    """

    across = False
    extra = 0
    row_partials = False
    most_joined = sys.maxsize
    joins_apart = False
    set_rows = 0
    adds_across = False
    stores_sums = True
    rounds_sums = False  # partials are added up where they are stored
    corrects_halves = True

    def __init__(self, splits: int = 1):
        self.splits = splits

    def kind(self) -> tuple[Any, ...]:
        """What decides where a graph is cut."""
        return (type(self),)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kernels) and self.kind() == other.kind()

    def __hash__(self) -> int:
        return hash(self.kind())

    def suits(self, space: tuple[int, ...], row: tuple[int, ...], lane: int) -> int:
        """How well rows of these axes, () if they are split, suit a graph whose rows may be split:
        of equal progress the most; below 0 where any other progress is better."""
        return not row

    def adds(self, graph: Graph, row: tuple[int, ...], lane: int, sums: Sequence[int]) -> bool:
        """Whether one kernel can add its partials to all of these reductions of `graph`."""
        return True

    def divided(self, segment: Segment) -> dict[int, int]:
        """By position of the output: how many splits the kernel has of that reduction."""
        return dict.fromkeys(segment.added(), self.splits)
