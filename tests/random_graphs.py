"""Random functions of up to fifteen steps, on inputs of random broadcast shapes and layouts."""

import math
from dataclasses import dataclass

import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from tilewright.dispatch.fuse import fuse
from tilewright.op import OPS
from tilewright.tensor_spec import TensorSpec

SIZES = (1, 2, 3, 5, 17, 37)
UNARY = {
    "neg": torch.neg,
    "abs": torch.abs,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "gaussian": lambda a: torch.exp(-a * a),
    "root": lambda a: torch.sqrt(a.abs() + 0.5),
    "log": lambda a: torch.log(a.abs() + 1.5),
    "affine": lambda a: 0.75 * a - 0.25,
    "erf": torch.erf,
    "cube": lambda a: torch.tanh(a) ** 3,
    "positive": lambda a: (a > 0).to(a.dtype),
    "half": lambda a: a / 2,
}
BINARY = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": lambda a, b: torch.tanh(a) * b,
    "div": lambda a, b: a / (b * b + 1),
    "maximum": torch.maximum,
    "where": lambda a, b: torch.where(a > b, a, b),
    "lerp": lambda a, b: torch.lerp(a, b, 0.3),
}
REDUCTIONS = {
    "sum": lambda a, dims: a.sum(dims, keepdim=True) / 8,
    "mean": lambda a, dims: a.mean(dims, keepdim=True),
    "amax": lambda a, dims: a.amax(dims, keepdim=True),
    "amin": lambda a, dims: a.amin(dims, keepdim=True),
    "var": lambda a, dims: a.var(dims, keepdim=True, correction=0),
    "softmax": lambda a, dims: torch.softmax(a, dims[0]),
    "summed": lambda a, dims: a.sum(dims) / 8,
    "greatest": lambda a, dims: a.amax(dims),
    "any": lambda a, dims: ((a > 1).any(dims[0])).to(a.dtype),
}
MOVES = {
    "transpose": lambda a, dims: a.transpose(dims[0], dims[-1]),
    "unsqueeze": lambda a, dims: a.unsqueeze(dims[0]),
    "squeeze": lambda a, dims: a.squeeze(dims),
    "outer": lambda a, dims: a.unsqueeze(-1) - 0.5 * a.unsqueeze(-2),
    "expand": lambda a, dims: a.unsqueeze(0).expand(3, *a.shape),
}
MOST_ELEMENTS, MOST_DIMS = 20000, 5


def computed(name, args, dims):
    over_dims = {**REDUCTIONS, **MOVES}
    return over_dims[name](*args, dims) if name in over_dims else {**UNARY, **BINARY}[name](*args)


@dataclass(frozen=True)
class Program:
    """Steps (name, operands, dims) on inputs of broadcast shapes; some values are returned."""

    specs: tuple[TensorSpec, ...]
    steps: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    outputs: tuple[int, ...]

    def function(self):
        def run(values):
            values = list(values)
            for name, operands, dims in self.steps:
                args = [values[i] for i in operands]
                values.append(computed(name, args, dims))
            found = tuple(values[i] for i in self.outputs)
            return found if len(found) > 1 else found[0]

        by_count = {
            1: lambda a: run([a]),
            2: lambda a, b: run([a, b]),
            3: lambda a, b, c: run([a, b, c]),
        }
        return by_count[len(self.specs)]


DTYPES = ("f32", "bf16", "f64", "f16")
KINDS_OF_STEPS = ("unary", "binary", "binary", "reduce")
MANY_REDUCTIONS = ("unary", "binary", "reduce", "reduce")
MANY_MOVES = ("unary", "binary", "binary", "reduce", "move")


@st.composite
def programs(draw, dtypes=DTYPES, most_steps=15, kinds=KINDS_OF_STEPS, sizes=SIZES):
    rank = draw(st.integers(1, 4))
    full = [draw(st.sampled_from(sizes)) for _ in range(rank)]
    while math.prod(full) > MOST_ELEMENTS:
        full[draw(st.integers(0, rank - 1))] = 1
    dtype = draw(st.sampled_from(dtypes))
    beside = (
        [d for d in dtypes if d != "f64"] if dtype != "f64" and draw(st.booleans()) else [dtype]
    )
    kinds_of = st.sampled_from([dtype, *beside])
    specs = tuple(draw(tensors(full, draw(kinds_of))) for _ in range(draw(st.integers(1, 3))))
    values = [torch.empty(s.shape, dtype=s.torch_dtype, device="meta") for s in specs]
    steps = []
    for _ in range(draw(st.integers(1, most_steps))):
        step = draw(steps_on(values, draw(st.sampled_from(kinds))))
        name, operands, dims = step
        try:
            out = computed(name, [values[i] for i in operands], dims)
        except (IndexError, RuntimeError):  # the greatest of no elements
            continue
        if out.numel() <= MOST_ELEMENTS and out.dim() <= MOST_DIMS:
            steps.append(step)
            values.append(out)
    if not steps:
        steps.append(("neg", (0,), ()))
    last = len(specs) + len(steps) - 1
    others = draw(st.lists(st.integers(len(specs), last), max_size=3))
    return Program(specs, tuple(steps), tuple(dict.fromkeys([last, *others])))


@st.composite
def steps_on(draw, values, kind):
    """A step that these values allow."""
    first = draw(st.integers(0, len(values) - 1))
    rank = values[first].dim()
    if kind in ("reduce", "move") and rank:
        table = REDUCTIONS if kind == "reduce" else MOVES
        dims = draw(st.lists(st.integers(0, rank - 1), min_size=1, unique=True))
        return draw(st.sampled_from(sorted(table))), (first,), tuple(sorted(dims))
    if kind == "binary":
        beside = [i for i, v in enumerate(values) if _broadcast(v.shape, values[first].shape)]
        second = draw(st.sampled_from(beside))
        operands = (first, second) if draw(st.booleans()) else (second, first)
        return draw(st.sampled_from(sorted(BINARY))), operands, ()
    return draw(st.sampled_from(sorted(UNARY))), (first,), ()


def _broadcast(a, b):
    return all(m == n or 1 in (m, n) for m, n in zip(reversed(a), reversed(b), strict=False))


@st.composite
def tensors(draw, full, dtype):
    """A shape that broadcasts to `full`, in some layout."""
    shape = [n if draw(st.integers(0, 3)) else 1 for n in full]
    order = draw(st.permutations(range(len(shape))))
    layout = draw(st.sampled_from(["contiguous", "contiguous", "permuted", "gaps", "expanded"]))
    if layout == "contiguous":
        return TensorSpec(dtype, tuple(shape))
    strides, step = [0] * len(shape), 2 if layout == "gaps" else 1
    for a in order if layout == "permuted" else reversed(range(len(shape))):
        strides[a] = step
        step *= shape[a]
    if layout == "expanded":
        strides[draw(st.integers(0, len(shape) - 1))] = 0
    return TensorSpec(dtype, tuple(shape), tuple(strides))


def workload(program):
    """The program as the operator `random_graph`."""
    fuse(program.function(), name="random_graph")
    op = OPS["random_graph"]
    return op.workload(**dict(zip(op.parameters, program.specs, strict=False)))


def forget():
    for name in ("random_graph", "random_graph_backward"):
        OPS.remove(name)


def run_examples(check, count, derandomize=True, shrink=True):
    """The same `count` examples every time, of a check that has a seed if not derandomized.

    To `shrink` what fails takes many more; on a GPU, minutes.
    """
    settings(
        max_examples=count,
        deadline=None,
        derandomize=derandomize,
        database=None,
        phases=[Phase.generate, *([Phase.shrink] if shrink else [])],
        suppress_health_check=list(HealthCheck),
    )(check)()
