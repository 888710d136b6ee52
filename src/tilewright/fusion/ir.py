"""The fusion compiler's graph: steps over one iteration space, in the order they are computed.

Every value lives on the axes of one iteration space (the broadcast of all shapes); where it does
not vary its size is 1, and a reduction keeps its axes with size 1. Views that only insert, drop
or expand size-1 dims therefore vanish, and both targets emit from the same few kinds of step:

    load     attr = index of the input; dtype = as stored in memory, or as generated
    scalar   attr = index of the run-time scalar (a kernel argument)
    const    attr = its value
    cast     to the node's dtype, rounding to nearest even
    broadcast  the operand, repeated along further axes, as an output has it
    POINTWISE operators, on operands of one dtype (`where` and comparisons: bool beside it)
    REDUCTIONS over the axes along which the operand varies and the result does not, in the
                 arithmetic type; reductions of one graph may run over different axes
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import is_
from typing import TYPE_CHECKING, Any

from tilewright.tensor_spec import DTYPES, TensorSpec

if TYPE_CHECKING:
    from tilewright.fusion.numbers import Numbers

COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
POINTWISE = (
    *("add", "sub", "mul", "div", "pow", "maximum", "minimum", *COMPARISONS, "and", "or"),
    *("fmod", "atan2", "hypot", "copysign"),
    *("neg", "abs", "sqrt", "rsqrt", "reciprocal", "exp", "exp2", "log", "log2", "log1p", "expm1"),
    *("quick_exp", "raised_exp", "shifted_exp"),
    *("tanh", "erf", "sin", "cos", "floor", "ceil", "round", "trunc", "sign", "not", "isnan"),
    *("tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "erfc", "log10"),
    *("where", "average"),
)
"""`average` divides a sum by the number of its elements (attr), and rounds once."""
CONTINUOUS = (
    *("add", "sub", "mul", "div", "neg", "abs", "maximum", "minimum", "where", "cast", "broadcast"),
    *("exp", "quick_exp", "raised_exp", "shifted_exp", "tanh"),
)
"""Steps that make no more of a difference by a rounding than such a difference."""
REDUCTIONS = ("sum", "mean", "m2", "amax", "amin", "prod", "sum_exp")
"""m2 is the sum of squared deviations from the mean, sum_exp that of exponentials of what the
greatest element leaves (attr: by which operator); NaN wins in amax and amin, as in torch."""


@dataclass(frozen=True)
class Node:
    """One step. `args` are indices of earlier nodes; `shape` is over the iteration axes; `line` is
    where in the source of the reference it stands."""

    op: str
    args: tuple[int, ...]
    dtype: str
    shape: tuple[int, ...]
    attr: Any = None
    line: str | None = field(default=None, compare=False)

    def moved(self, args: tuple[int, ...], shape: tuple[int, ...]) -> Node:
        """The same step in another graph, in a third of the time that `replace` takes."""
        return Node(self.op, args, self.dtype, shape, self.attr, self.line)

    def __str__(self) -> str:
        inside = ", ".join(f"%{a}" for a in self.args)
        attr = "" if self.attr is None else f" {self.attr}"
        return f"{self.op}({inside}){attr} : {self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Graph:
    """Steps in order, and the memory they read and write.

    Attributes:
        space: sizes of the iteration axes.
        inputs: per input, element strides over the axes (0: does not vary) and dtype.
        outputs: per output, (node, strides over the axes, dtype).
    """

    nodes: tuple[Node, ...]
    space: tuple[int, ...]
    inputs: tuple[Access, ...]
    outputs: tuple[tuple[int, Access], ...]
    scalars: tuple[str, ...] = ()
    """dtypes of the run-time scalars."""
    again: tuple[int, ...] = ()
    """Inputs behind those of the tensors: which tensor each reads, or which seed decides it."""
    tensors: tuple[int, ...] = ()
    """Of each output the tensor that it is a slice of; () where each is a tensor."""
    joined: frozenset[int] = frozenset()
    """Axes that are several dims, which every tensor walks as one: no dim has such a size."""
    stored: tuple[TensorSpec, ...] = ()
    """What the outputs are of a graph that leaves no results, but what later ones read; see
    staged.py."""
    as_written: bool = False
    """Whether sums must be the same as those of other graphs, to the bit."""
    numbers: Numbers | None = None
    """How the scalars follow from the numbers of a call; None where they are those."""

    @functools.cached_property
    def offsets_bytes(self) -> tuple[int, ...]:
        """Where in its tensor each input begins."""
        return tuple(a.offset * a.itemsize for a in self.inputs)

    @functools.cached_property
    def written(self) -> tuple[tuple[int, int], ...] | None:
        """Of each output its tensor, and where in that it begins, in bytes; None where each is a
        tensor."""
        if not self.tensors:
            return None
        accesses = [a for _, a in self.outputs]
        offsets = [a.offset * a.itemsize for a in accesses]
        return tuple(zip(self.tensors, offsets, strict=True))

    @functools.cached_property
    def memory(self) -> list[Access]:
        """The inputs that are read."""
        return [a for a in self.inputs if a.generator is None]

    def generated(self, i: int) -> bool:
        """Whether node `i` is an input that is computed, not read."""
        n = self.nodes[i]
        return n.op == "load" and self.inputs[n.attr].generator is not None

    @functools.cached_property
    def reductions(self) -> list[int]:
        return [i for i, n in enumerate(self.nodes) if n.op in REDUCTIONS]

    def axes(self, i: int) -> tuple[int, ...]:
        """The axes that reduction `i` runs over, outermost first."""
        return self._axes[i]

    @functools.cached_property
    def _axes(self) -> dict[int, tuple[int, ...]]:
        found = {}
        for i in self.reductions:
            sizes = zip(self.nodes[self.nodes[i].args[0]].shape, self.nodes[i].shape, strict=True)
            found[i] = tuple(a for a, (before, after) in enumerate(sizes) if before != after)
        return found

    def count(self, i: int) -> int:
        """How many elements reduction `i` makes one of."""
        return math.prod(self.space[a] for a in self.axes(i))

    @functools.cached_property
    def reduction_sets(self) -> tuple[tuple[int, ...], ...]:
        """The different sets of axes that reductions run over, in the order of the steps.

        layer norm: one, the row. Its backward: the row, and all axes but the row. An inner set
        ends with the innermost axis, an outer set does not; sets may overlap: lerp's backward
        with x [16,1,1,1], end [16,3,244,244] and weight [3,1,244] reduces {1,2,3} for x and
        {0,2} for weight.
        """
        return tuple(dict.fromkeys(self.axes(i) for i in self.reductions))

    @functools.cached_property
    def reduced(self) -> tuple[int, ...]:
        """The axes that any reduction runs over: the one set of a graph that has one set."""
        return tuple(sorted({a for axes in self.reduction_sets for a in axes}))

    @functools.cached_property
    def kept(self) -> tuple[int, ...]:
        """The axes that no reduction runs over: rows."""
        return tuple(a for a in range(len(self.space)) if a not in self.reduced)

    @functools.cached_property
    def reduced_size(self) -> int:
        return math.prod(self.space[a] for a in self.reduced)

    @functools.cached_property
    def is_total(self) -> bool:
        """Whether single numbers are all that comes of the elements: a loss, say."""
        return bool(self.reductions) and not any(any(a.strides) for _, a in self.outputs)

    @functools.cached_property
    def meets_extremes(self) -> bool:
        """Whether sums meet the greatest or least of them where a rounding decides: are compared
        with it, say, as its gradient goes to what equals it. They are computed anew there, and
        compilers must not contract products into some of these sums and not into others."""
        if self.as_written:
            return True
        computed, extreme = set[int](), set[int]()
        for i, n in enumerate(self.nodes):
            if n.op in ("amax", "amin"):
                if not (computed | extreme).isdisjoint(n.args):
                    extreme.add(i)
            elif n.op not in REDUCTIONS:
                of_both = not (computed.isdisjoint(n.args) or extreme.isdisjoint(n.args))
                if of_both and n.op not in CONTINUOUS:
                    return True
                if n.op in ("add", "sub") or not computed.isdisjoint(n.args):
                    computed.add(i)
                if not extreme.isdisjoint(n.args):
                    extreme.add(i)
        return False

    @functools.cached_property
    def largest_step(self) -> int:
        """Elements of the largest value; a kernel of the whole space has more to go through where
        steps have different dims."""
        return max(math.prod(n.shape) for n in self.nodes)

    def users(self, i: int) -> list[int]:
        """The steps that have `i` as an operand."""
        return self._users[i]

    @functools.cached_property
    def _users(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in self.nodes]
        for j, n in enumerate(self.nodes):
            for i in dict.fromkeys(n.args):
                found[i].append(j)
        return found

    def check(self) -> Graph:
        """Assert what every pass must keep true, and return the graph."""
        within = {
            shape: len(shape) == len(self.space)
            and all(s in (1, full) for s, full in zip(shape, self.space, strict=True))
            for shape in {n.shape for n in self.nodes}
        }
        for i, n in enumerate(self.nodes):
            assert max(n.args, default=-1) < i, f"%{i} {n} uses a later value"
            assert within[n.shape], f"%{i} {n} outside {self.space}"
            given = [self.nodes[a].shape for a in n.args]
            if n.op in REDUCTIONS:
                pairs = zip(given[0], n.shape, strict=True)
                assert all(after in (1, before) for before, after in pairs), f"%{i} {n} grows"
            elif n.op in POINTWISE or n.op == "cast":
                joined = tuple(max(sizes) for sizes in zip(*given, strict=True))
                assert joined == n.shape, f"%{i} {n} of {given}"
        return self

    def rewritten(self, rule: Callable[[Rewriter, int, Node], int | None]) -> Graph:
        """A graph in which `rule` replaced nodes: it returns the new index, or None to keep. Where
        it kept all of them, the graph itself."""
        rewriter = Rewriter(self)
        for i, n in enumerate(self.nodes):
            args = tuple([rewriter.map[a] for a in n.args])
            mapped = n if args == n.args else n.moved(args, n.shape)
            rewriter.line = n.line
            new = rule(rewriter, i, mapped)
            rewriter.map[i] = rewriter.add(mapped) if new is None else new
        nodes = tuple(rewriter.nodes)
        outputs = tuple((rewriter.map[i], access) for i, access in self.outputs)
        same = len(nodes) == len(self.nodes) and all(map(is_, nodes, self.nodes))
        if same and outputs == self.outputs:
            return self
        return replace(self, nodes=nodes, outputs=outputs)

    def __str__(self) -> str:
        lines = [f"space {list(self.space)} reduced {[list(axes) for axes in self.reduction_sets]}"]
        lines += [f"  %{i} = {n}" for i, n in enumerate(self.nodes)]
        lines += [f"  store %{i} {access}" for i, access in self.outputs]
        return "\n".join(lines)


@dataclass(frozen=True)
class Draw:
    """A random mask, computed where another input is read; see philox.py.

    Attributes:
        call: which of a function's masks.
        threshold: numbers below it, of 2^32, are True.
    """

    call: int
    threshold: int


@dataclass(frozen=True)
class Positions:
    """Whole numbers that count, computed where another input is read: `first`, and further."""

    first: int


@dataclass(frozen=True)
class Access:
    """How one tensor is addressed: element strides over the iteration axes, dtype, alignment.

    With a `generator` it is no memory: the strides give the flat index of an element, by which it
    is computed. The buffer of a mask holds the seed, that of positions nothing that is read.
    `offset` is that of the first element, of a slice of a tensor: kernels are given its address.
    """

    strides: tuple[int, ...]
    dtype: str
    align: int
    generator: Draw | Positions | None = None
    offset: int = 0

    def along(self, strides: tuple[int, ...]) -> Access:
        """The same tensor over other axes."""
        return Access(strides, self.dtype, self.align, self.generator, self.offset)

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize


@dataclass
class Rewriter:
    """Builds the new node list of a pass; `map` takes an old index to the new one, and new steps
    stand in the `line` of the one that they replace."""

    old: Graph
    nodes: list[Node] = field(default_factory=list)
    map: dict[int, int] = field(default_factory=dict)
    line: str | None = None

    def add(self, node: Node) -> int:
        known = node.line or not self.line
        self.nodes.append(node if known else replace(node, line=self.line))
        return len(self.nodes) - 1

    def __getitem__(self, i: int) -> Node:
        return self.nodes[i]


def broadcast(shapes: Iterable[Sequence[int]]) -> tuple[int, ...]:
    return tuple(max(sizes) if 0 not in sizes else 0 for sizes in zip(*shapes, strict=True))
