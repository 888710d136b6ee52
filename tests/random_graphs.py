"""Random functions of up to fifteen steps, on inputs of random broadcast shapes and layouts."""

import math
import re
from dataclasses import dataclass

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from tilewright.dispatch.functions.fuse import fuse
from tilewright.dispatch.functions.operator import backward_operator
from tilewright.op import OPS
from tilewright.tensor_spec import HALVES, TensorSpec

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
RARE_UNARY = {
    "dropout": lambda a: F.dropout(a, 0.25),
    "exponent": lambda a: (a.abs() + 0.5) ** 1.7 / 4,
    "base": lambda a: 1.5 ** torch.tanh(a),
    "arcs": lambda a: torch.asin(torch.tanh(a) / 2) + torch.atan(a),
    "areas": lambda a: torch.asinh(a) - torch.atanh(torch.tanh(a) / 2),
    "hyperbolic": lambda a: torch.sinh(torch.tanh(a)) + torch.cosh(torch.tanh(a)),
    "tail": lambda a: torch.erfc(a) + torch.tan(torch.tanh(a)),
    "decade": lambda a: torch.log10(a.abs() + 1.5),
    "angle": lambda a: a % 0.75,
    "doubles": lambda a: a.double() / 3,
    "singles": lambda a: a.float() / 3,
}
RARE_BINARY = {
    "power": lambda a, b: torch.pow(a.abs() + 0.5, torch.tanh(b)),
    "atan2": lambda a, b: torch.atan2(a, b.abs() + 0.5),
    "hypot": lambda a, b: torch.hypot(a, b.abs() + 0.5),
    "copysign": torch.copysign,
    "fmod": lambda a, b: torch.fmod(a, b.abs() + 0.5),
    "remainder": lambda a, b: a % (b.abs() + 0.5),
    "quotient": lambda a, b: torch.div(a, b.abs() + 0.5, rounding_mode="floor"),
}
RARE_REDUCTIONS = {
    "prod": lambda a, dims: (1 + torch.tanh(a) / 8).prod(dims[0], keepdim=True),
    "product": lambda a, dims: (1 - torch.tanh(a) / 8).prod(dims[-1]),
    "var_mean": lambda a, dims: sum(torch.var_mean(a, dims, correction=0, keepdim=True)),
    "std": lambda a, dims: a.std(dims, correction=0.5, keepdim=True),
}
VIEWS = {
    "flatten": lambda a, dims: a.flatten(dims[0], dims[-1]),
    "unflatten": lambda a, dims: a.unflatten(dims[0], (-1, 3 if a.shape[dims[0]] % 3 == 0 else 2)),
    "pixels": lambda a, dims: a.transpose(0, dims[0]).flatten(),
    "shifted": lambda a, dims: a.narrow(dims[0], 1, 1) + a,
    "differences": lambda a, dims: a.diff(dim=dims[0]),
    "every other": lambda a, dims: a.movedim(dims[0], 0)[::2],
    "but the last": lambda a, dims: a.movedim(dims[0], -1)[..., :-1],
    "last": lambda a, dims: a.select(dims[0], -1),
}
TOTALS = {
    "total": lambda a: a.sum() / 64,
    "average": lambda a: a.mean(),
    "greatest of all": lambda a: a.amax(),
    "least of all": lambda a: a.amin(),
    "rows": lambda a: torch.softmax(a, -1),
    "columns": lambda a: a.sum(0) / 8 if a.dim() else -a,
}
TABLES = {
    "unary": UNARY,
    "binary": BINARY,
    "reduce": REDUCTIONS,
    "move": MOVES,
    "view": VIEWS,
    "total": TOTALS,
    "rare unary": RARE_UNARY,
    "rare binary": RARE_BINARY,
    "rare reduce": RARE_REDUCTIONS,
}
"""Steps by kind; the rare ones are tables of their own, and so leave the draws of others alone."""
MOST_ELEMENTS, MOST_DIMS = 20000, 5


def computed(name, args, dims):
    over_dims = {**REDUCTIONS, **MOVES, **VIEWS, **RARE_REDUCTIONS}
    if name in over_dims:
        return over_dims[name](*args, dims)
    return {**UNARY, **BINARY, **TOTALS, **RARE_UNARY, **RARE_BINARY}[name](*args)


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
MANY_VIEWS = ("unary", "binary", "reduce", "view", "view")
MANY_TOTALS = ("unary", "binary", "total", "total")
RARE_STEPS = (*MANY_MOVES, "rare unary", "rare binary", "rare reduce")


SMOOTH = (
    "add",
    "sub",
    "mul",
    "div",
    "lerp",
    "neg",
    "tanh",
    "sigmoid",
    "gaussian",
    "affine",
    "erf",
    "cube",
    "half",
    "sum",
    "mean",
    "var",
    "softmax",
    "summed",
    *MOVES,
)
"""Steps whose gradients do not jump, whatever the rounding of what they are of."""


@st.composite
def programs(draw, dtypes=DTYPES, most_steps=15, kinds=KINDS_OF_STEPS, sizes=SIZES, steps=None):
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
    allowed, steps = steps, []
    for _ in range(draw(st.integers(1, most_steps))):
        step = draw(steps_on(values, draw(st.sampled_from(kinds))))
        name, operands, dims = step
        if allowed is not None and name not in allowed:
            continue
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
    table, takes = TABLES[kind], kind.removeprefix("rare ")
    if takes in ("reduce", "move", "view") and rank:
        dims = draw(st.lists(st.integers(0, rank - 1), min_size=1, unique=True))
        return draw(st.sampled_from(sorted(table))), (first,), tuple(sorted(dims))
    if takes == "binary":
        beside = [i for i, v in enumerate(values) if _broadcast(v.shape, values[first].shape)]
        second = draw(st.sampled_from(beside))
        operands = (first, second) if draw(st.booleans()) else (second, first)
        return draw(st.sampled_from(sorted(table))), operands, ()
    return (
        draw(st.sampled_from(sorted(table if takes in ("unary", "total") else UNARY))),
        (first,),
        (),
    )


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


MISFIT = (
    "sizes (that )?do not fit|dims of .* that are merged|merged dims of|were merged differently"
)
"""What random views of random sizes are refused for."""


def is_misfit(reason):
    """Whether a refusal, if it is one, names what random views of random sizes may run into."""
    return reason is not None and bool(re.search(f"{MISFIT}|is empty", reason))


def workload(program):
    """The program as the operator `random_graph`, with a seed if it drops something out."""
    fuse(program.function(), name="random_graph")
    op = OPS["random_graph"]
    drawn = any(name == "dropout" for name, *_ in program.steps)
    seed = {"seed": TensorSpec("i64", ())} if drawn else {}
    return op.workload(**dict(zip(op.parameters, program.specs, strict=False)), **seed)


def gradient_workload(program):
    """The gradients of a program, all that it has, as a workload of their operator."""
    return gradients_of(workload(program))


def gradients_of(w):
    floating = [o for o in w.outputs if o.torch_dtype.is_floating_point]
    op = backward_operator(w.operator, len(floating))
    return op.workload(**dict(zip(op.gradients, floating, strict=True)), **dict(w.args))


def both(program, tensors):
    """What the fused function gives, and PyTorch."""
    function = program.function()
    for f in (fuse(function, name="random_graph"), function):
        out = f(*tensors)
        yield out if isinstance(out, tuple) else (out,)


def gradients(own, right, tensors):
    """Of both, where PyTorch's results have any; what does not depend on a tensor has zeros."""
    pairs = [(mine, o) for mine, o in zip(own, right, strict=True) if o.requires_grad]
    weights = [torch.randn_like(o) for _, o in pairs]
    for outs in zip(*pairs, strict=True):
        found = torch.autograd.grad(outs, tensors, weights, allow_unused=True)
        yield [torch.zeros_like(t) if g is None else g for g, t in zip(found, tensors, strict=True)]


def assert_empty_ones_right(kinds, device, count):
    """Of `count` programs on tensors that may have no elements, with their gradients, but for
    programs of products, whose gradients are scans. Where tensors of halves have elements, PyTorch
    rounds each step of them: those are verified elsewhere."""
    empty = 0

    @given(programs(most_steps=8, kinds=kinds, sizes=(0, 1, 3)))
    def check(program):
        nonlocal empty
        halves = any(spec.dtype in HALVES for spec in program.specs)
        if halves and any(spec.numel for spec in program.specs):
            return
        near = {} if halves else {"rtol": 1e-4, "atol": 1e-5}
        empty += any(spec.numel == 0 for spec in program.specs)
        learnt = not any(name in ("prod", "product") for name, *_ in program.steps)
        tensors = [apart(spec, device).requires_grad_(learnt) for spec in program.specs]
        own, right = both(program, tensors)
        torch.testing.assert_close(own, right, equal_nan=True)
        for mine, theirs in zip(*gradients(own, right, tensors), strict=True):
            torch.testing.assert_close(mine, theirs, equal_nan=True, **near)

    run_examples(check, count)
    assert empty > count // 6


def apart(spec, device):
    """From 0.25 to 0.75: of equal elements the gradient of std is anything, amax's is split."""
    tensor = spec.empty(device)
    tensor._base.copy_(torch.linspace(0.25, 0.75, tensor._base.numel()))
    return tensor.detach()


def forget():
    for name in ("random_graph", "random_graph_backward"):
        OPS.remove(name)


def run_examples(check, count, derandomize=True, shrink=True):
    """The same `count` examples every time, of a check that has a seed if not derandomized.

    To `shrink` what fails takes many more; on a GPU, minutes.
    """
    settings(
        max_examples=count,
        derandomize=derandomize,
        phases=[Phase.generate, *([Phase.shrink] if shrink else [])],
    )(check)()
