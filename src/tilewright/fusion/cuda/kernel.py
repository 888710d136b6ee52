"""What every generated CUDA kernel shares: parameters, offsets, and one expression per step.

The prelude (kernels/prelude*.cuh) supplies the vectors, memory accesses and reductions that the
emitted lines call.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources

from tilewright.fusion.extents import Extent, divisor, extents_of
from tilewright.fusion.ir import Access, Draw, Graph, Node, Positions
from tilewright.fusion.literals import literal

ENTRY = "fused"
MOST_WAVES = 4
"""Of blocks that share out the rows of several samples."""
TYPES = {
    "f16": "f16", "bf16": "bf16", "f32": "float", "f64": "double", "bool": "bool", "i64": "i64",
    "i32": "int",
}  # fmt: skip
JOINS = {"sum": "Sum", "prod": "Prod", "amax": "Max", "amin": "Min"}
SEED = "i64"
"""The type of what the buffer of a mask holds."""
DIVISOR = ("factor", "shift")
"""What the names of those numbers end with that `divide` takes in place of a size."""
_CODES = {"f32": "f", "f64": "d"}
_EXTENT_CODES = {"u32": "I", "int": "i", "i64": "q", "u64": "Q"}
FUNCTIONS = {
    "pow": "power", "neg": "neg", "abs": "absolute", "sqrt": "square_root",
    "rsqrt": "reciprocal_root", "exp": "exponential", "exp2": "exponential2", "log": "logarithm",
    "log2": "logarithm2", "log1p": "logarithm1p", "expm1": "exponential_m1",
    "quick_exp": "quick_exponential", "raised_exp": "raised_exponential",
    "shifted_exp": "shifted_exponential",
    "tanh": "hyperbolic_tangent", "erf": "error_function", "sin": "sine", "cos": "cosine",
    "floor": "round_down", "ceil": "round_up", "round": "round_even", "trunc": "round_to_zero",
    "sign": "sign_of", "and": "logical_and", "or": "logical_or", "not": "logical_not",
    "isnan": "is_nan", "log10": "logarithm10", "erfc": "complementary_error_function",
    "tan": "tangent", "asin": "arc_sine", "acos": "arc_cosine", "atan": "arc_tangent",
    "sinh": "hyperbolic_sine", "cosh": "hyperbolic_cosine", "atan2": "arc_tangent_of",
    "asinh": "area_sine", "acosh": "area_cosine", "atanh": "area_tangent",
    "hypot": "hypotenuse", "copysign": "with_sign_of", "fmod": "remainder_of_truncated",
}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """How to launch an emitted kernel on any number of rows (or elements).

    Attributes:
        signature: struct codes of the arguments: pointers, the row count, `extents`, run-time
            scalars.
        per_block: rows, or elements of a pointwise kernel, that one block (or cluster) handles.
        samples: grids side by side, each for the rows of one.
        persistent: blocks walk on with the stride of the grid, which need only fill the device.
        most_per_sm: so many blocks of a persistent kernel on an SM, None for as many as fit.
        most_blocks: of a persistent kernel: there is room for what so many leave; None if for all.
        multiple: of which the number of a persistent kernel's clusters is one.
        counters: zeroed words whose address follows the row count; they are zero again afterwards.
        extents: the values of dynamic sizes and strides.
        blocks_per_row: blocks that share rows without being a cluster.
        outputs: positions in the graph's outputs of those that it writes, None for all in order.
        partials: results over rows that each cluster leaves in workspace; 0: there are none.
        partial_dtype: of those.
        meets: blocks wait for one another, and so must all run at once. They join the partial
            results, whose address follows the outputs.
        finish: how to launch the kernel that does so where they do not.
    """

    block_threads: int
    per_block: int
    shared_bytes: int
    cluster: int
    signature: str
    samples: int = 1
    persistent: bool = False
    most_per_sm: int | None = None
    most_blocks: int | None = None
    multiple: int = 1
    counters: int = 0
    extents: tuple[int, ...] = ()
    blocks_per_row: int = 1
    outputs: tuple[int, ...] | None = None
    partials: int = 0
    partial_dtype: str = "f32"
    meets: bool = False
    finish: Finish | None = None

    def blocks(self, count: int) -> int:
        """A block, or cluster, for every group of `count` rows or elements."""
        return math.ceil(count / self.per_block) * self.cluster * self.blocks_per_row

    def walking(self, count: int, resident: int) -> int:
        """The same of a persistent kernel, of which so many blocks run at once.

        The blocks of several samples need not be as many: each takes its rows, and about the time
        of one more to begin and to end, and of all ways to share the rows the fastest is chosen.
        """
        most = min(self.blocks(count), self.most_blocks or self.blocks(count))
        if self.samples == 1:
            step = self.multiple * self.cluster
            return min(math.ceil(most / step) * step, max(resident // step, 1) * step)
        at_once = max(resident // self.cluster, 1)

        def steps(clusters: int) -> int:
            waves = math.ceil(self.samples * clusters / at_once)
            return waves * (math.ceil(count / (clusters * self.per_block)) + 1)

        few = min(most // self.cluster, math.ceil(MOST_WAVES * at_once / self.samples))
        return min(range(1, max(few, 1) + 1), key=steps) * self.cluster


@dataclass(frozen=True)
class Finish:
    """How to launch the kernel that joins partial results.

    Its arguments are those results, the inputs and outputs at these positions, how many results
    there are for each column of a sample, and the run-time scalars; `blocks` are for one sample.
    """

    blocks: int
    block_threads: int
    signature: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def extent_type(graph: Graph) -> str:
    """What holds each extent, and with a bit to spare all that dynamic sizes number."""
    widest = max(extents_of(graph), default=0)
    numbered = math.prod(n for n in graph.space if isinstance(n, Extent))
    return "u32" if widest < 2**32 and numbered < 2**31 else "i64"


def divisor_names(size: Extent) -> tuple[str, str]:
    """Of what `divide` takes in place of a size."""
    return f"{size}_{DIVISOR[0]}", f"{size}_{DIVISOR[1]}"


def input_type(access: Access) -> str:
    """Of what points to an input's elements."""
    if isinstance(access.generator, Positions):
        return f"Positions<{TYPES[access.dtype]}>"
    return "Mask" if access.generator else f"const {TYPES[access.dtype]}*"


def input_parameter(i: int, access: Access) -> str:
    """Input `i` as a kernel gets it."""
    if access.generator:
        return f"const {SEED}* __restrict__ seed{i}"
    return f"{input_type(access)} __restrict__ in{i}"


@functools.cache
def prelude() -> str:
    return "\n".join(map(_read, ("prelude.cuh", "prelude_joining.cuh")))


@functools.cache
def tiles_prelude() -> str:
    return _read("prelude_tiles.cuh")


def prelude_of(source: str) -> str:
    """What a source has in common with those of other graphs."""
    tiles = "\n".join([prelude(), tiles_prelude()])
    return tiles if source.startswith(tiles) else prelude()


def _read(name: str) -> str:
    return resources.files("tilewright").joinpath("kernels", name).read_text()


class Kernel:
    """Collects the lines of one kernel; subclasses walk the graph.

    Attributes:
        extents: by name, the values of those that the lines mention.
        extent_type: of them all: 32-bit wherever that holds them.
    """

    def __init__(self, graph: Graph, entry: str = ENTRY):
        self.graph, self.entry = graph, entry
        self.lines: list[str] = []
        self.depth = 1
        self.extents: dict[str, int] = {}
        self.extent_type = extent_type(graph)

    def line(self, text: str) -> None:
        self.lines.append("  " * self.depth + text)

    def open(self, text: str) -> None:
        self.line(f"{text} {{".lstrip())
        self.depth += 1

    def close(self) -> None:
        self.depth -= 1
        self.line("}")

    def parameters_of_kernel(self) -> list[str]:
        named = [input_parameter(i, a) for i, a in enumerate(self.graph.inputs)]
        named += [
            f"{TYPES[a.dtype]}* __restrict__ out{k}" for k, (_, a) in enumerate(self.graph.outputs)
        ]
        named.append("i64 count")
        return [*named, *self.extent_parameters(), *self.scalar_parameters()]

    def scalar_parameters(self) -> list[str]:
        return [f"{TYPES[d]} scalar{i}" for i, d in enumerate(self.graph.scalars)]

    def extent_parameters(self) -> list[str]:
        return [f"{self.kind_of_extent(name)} {name}" for name in self.extents]

    def kind_of_extent(self, name: str) -> str:
        """What holds an extent, or a number that follows from one."""
        return self.index_type if name.endswith(DIVISOR) else self.extent_type

    def every_extent(self) -> dict[str, int]:
        """By name, what the kernel may be given."""
        every: dict[str, int] = {}
        for n in self.graph.space:
            if isinstance(n, Extent):
                every |= self.divisor_of(n)
        return every | {e.name: int(e) for e in extents_of(self.graph)}

    def divisor_of(self, size: Extent) -> dict[str, int]:
        """By name, what `divide` takes in place of a size."""
        bits = 32 if self.index_type == "u32" else 64
        return dict(zip(divisor_names(size), divisor(size, bits), strict=True))

    def find_extents(self) -> None:
        """Note which extents the lines mention: those are arguments."""
        mentioned = set(re.findall(r"\w+", "\n".join(self.lines)))
        every = self.every_extent()
        self.extents = {name: value for name, value in every.items() if name in mentioned}

    def declare_generated(self, inputs: Iterable[int]) -> None:
        """Give those their names that are computed where other inputs are read."""
        for i in inputs:
            access = self.graph.inputs[i]
            match access.generator:
                case Draw(call, threshold):
                    text = f"(u64)*seed{i}, {self.first_generated(i)}, {call}u, {threshold}u"
                case Positions(first):
                    text = f"(i64)({self.first_generated(i)}) + {first}"
                case _:
                    continue
            self.line(f"const {input_type(access)} in{i} = {{{text}}};")

    def first_generated(self, i: int) -> str:
        """The index in such an input of the first element that this kernel computes."""
        return "0"

    def signature(self) -> str:
        pointers = "P" * (len(self.graph.inputs) + len(self.graph.outputs))
        return pointers + "q" + self.extent_codes() + self.scalar_codes()

    def scalar_codes(self) -> str:
        return "".join(_CODES[d] for d in self.graph.scalars)

    def extent_codes(self) -> str:
        return "".join(_EXTENT_CODES[self.kind_of_extent(name)] for name in self.extents)

    def offset(self, access: Access, axes: Iterable[int], coordinates: dict[int, str]) -> str:
        """The element offset along `axes`, as a sum of coordinate times stride."""
        terms = [
            coordinates[a] if access.strides[a] == 1 else f"{coordinates[a]} * {access.strides[a]}"
            for a in axes
            if access.strides[a] != 0
        ]
        return " + ".join(terms) or "0"

    def coordinates(
        self, index: str, name: str, axes: tuple[int, ...], kind: str
    ) -> dict[int, str]:
        """Split a linear index over `axes` into one coordinate each; the outermost is unbounded."""
        if len(axes) == 1:
            return {axes[0]: index}
        names, rest = {}, index
        for a in reversed(axes[1:]):
            names[a] = f"{name}{a}"
            rest = self.split(rest, names[a], self.graph.space[a], kind)
        self.line(f"const {kind} {name}{axes[0]} = {rest};")
        names[axes[0]] = f"{name}{axes[0]}"
        return names

    def split(self, index: str, name: str, size: int, kind: str) -> str:
        """Declare `name`, what divides a linear index by `size` leaves; the quotient."""
        if isinstance(size, Extent):
            before, wide = f"before_{name}", self.index_type
            factor = ", ".join(divisor_names(size))
            self.line(f"const {wide} {before} = divide(({wide})({index}), {factor});")
            self.line(f"const {kind} {name} = ({wide})({index}) - {before} * {size};")
            return before
        self.line(f"const {kind} {name} = ({index}) % {size};")
        return f"({index}) / {size}"

    @property
    def index_type(self) -> str:
        """What holds a linear index that is divided, with a bit to spare."""
        return "u32" if self.extent_type == "u32" else "u64"

    def fetch(
        self, access: Access, pointer: str, vector: str, wide: int | str, stream: bool
    ) -> str:
        """Load `vector` elements that follow one another along the innermost axis."""
        innermost = access.strides[-1]
        if innermost == 1:
            return f"load<{vector}, {wide}, {str(stream).lower()}>({pointer})"
        if innermost == 0:
            return f"splat<{vector}>(load_one({pointer}))"
        return f"gather<{vector}>({pointer}, {innermost})"

    def expression(self, n: Node, operands: list[str], vector: str | None) -> str:
        """The step as an expression; `vector` is None where all operands are single values."""
        if n.op == "const":
            return self.constant(n)
        if n.op == "scalar":
            return f"scalar{n.attr}"
        if n.op == "cast":
            return f"cast<{TYPES[n.dtype]}>({operands[0]})"
        if n.op == "broadcast":
            return operands[0] if vector is None else f"spread<{vector}>({operands[0]})"
        if n.op == "average":
            kind = TYPES[n.dtype]
            return f"average({operands[0]}, ({kind}){n.attr}, ({kind})(1.0 / {n.attr}))"
        if n.op == "where":
            if vector is None:
                return f"({operands[0]} ? {operands[1]} : {operands[2]})"
            return f"where<{vector}>({', '.join(operands)})"
        return f"{FUNCTIONS.get(n.op, n.op)}({', '.join(operands)})"

    def constant(self, n: Node) -> str:
        if n.dtype == "bool":
            return "true" if n.attr else "false"
        if n.dtype in ("i32", "i64"):
            return f"({TYPES[n.dtype]}){n.attr:#x}"
        text = literal(float(n.attr), n.dtype, "__int_as_float(0x7fffffff)", "TW_INFINITY")
        return text if n.dtype in ("f32", "f64") else f"cast<{TYPES[n.dtype]}>({text})"

    def source(self, head: str) -> str:
        return "\n".join([prelude(), head, *self.lines, "}", ""])
