"""Gradients of gradients are those of PyTorch's own functions, of every operator."""

import contextlib
import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import tilewright as tw
from tilewright.compile import cxx
from tilewright.errors import NoImplementation
from tilewright.impl import IMPLS
from tilewright.op import OPS

ROWS = torch.tensor([0, 2, 1, 1, 2])
INDEX = torch.stack([ROWS, ROWS.flip(0), ROWS.roll(1)], 1)
WHOLE = ROWS[:, None].expand(5, 3)


def drawn(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=GENERATOR, requires_grad=True)


GENERATOR = torch.Generator().manual_seed(0)
X, SRC, ROW = drawn(4, 3), drawn(5, 3), drawn(3)
IMAGE, MAPS = drawn(2, 4, 5, 5), drawn(2, 2, 3, 3)
MEAN, RSTD = torch.zeros(4, 1).double(), torch.full((4, 1), 1.5).double().requires_grad_()


def conv2d(x, weight, bias=None):
    return F.conv2d(x, weight, bias, stride=2, padding=1, groups=2)


def weight_and_bias_grads(x, grad_output, *geometry):
    weight, bias = torch.zeros(2, 2, 3, 3).double(), torch.zeros(2).double()
    pull = torch.func.vjp(lambda w, b: conv2d(x, w, b), weight, bias)[1]
    return pull(grad_output)


def norm(x, *parameters):
    return F.layer_norm(x, (3,), *parameters)


def rms(x, weight):
    return F.rms_norm(x, (3,), weight)


def total_and(norm):
    return lambda x, residual, *parameters: (norm(x + residual, *parameters), x + residual)


def table_gradient(grad, index, rows, *how):
    return torch.ops.aten.embedding_dense_backward(grad, index, rows, *how)


CASES = {
    "add_layer_norm": (total_and(norm), [(X, drawn(4, 3), ROW, drawn(3))]),
    "add_rms_norm": (total_and(rms), [(X, drawn(4, 3), ROW)]),
    "bias_layer_norm": (
        lambda x, b0, b1, *parameters: norm(x + b0 + b1, *parameters),
        [(X, *(drawn(3) for _ in range(4)))],
    ),
    "conv2d": (F.conv2d, [(IMAGE, drawn(2, 2, 3, 3), drawn(2), 2, 1, 1, 2)]),
    "conv2d_weight_grad": (
        lambda *args: weight_and_bias_grads(*args)[0],
        [(IMAGE, MAPS, (3, 3), (2, 2), (1, 1), (1, 1), 2)],
    ),
    "conv2d_weight_bias_grad": (
        weight_and_bias_grads,
        [(IMAGE, MAPS, (3, 3), (2, 2), (1, 1), (1, 1), 2)],
    ),
    "embedding": (F.embedding, [(INDEX, X), (INDEX, X, 1, None, 2.0, True)]),
    "embedding_backward": (table_gradient, [(SRC, ROWS, 4, -1, False), (SRC, ROWS, 4, 2, True)]),
    "gather": (torch.gather, [(X, 0, INDEX)]),
    "index_add": (
        lambda x, dim, index, source, alpha: torch.index_add(x, dim, index, source, alpha=alpha),
        [(X, 0, ROWS, SRC, 1.5)],
    ),
    "index_put": (torch.index_put, [(X, (ROWS,), SRC, True), (X, (ROWS[:3],), SRC[:3])]),
    "index_reduce": (
        lambda x, dim, index, source, reduce, kept: torch.index_reduce(
            x, dim, index, source, reduce, include_self=kept
        ),
        [
            (X, 0, ROWS, SRC, *how)
            for how in itertools.product(("prod", "mean", "amax", "amin"), (True, False))
        ],
    ),
    "layer_norm": (F.layer_norm, [(X, (3,), ROW, drawn(3))]),
    "lerp": (torch.lerp, [(X, drawn(4, 3), drawn(4, 3)), (X, drawn(4, 3), 0.3)]),
    "rms_norm": (F.rms_norm, [(X, (3,), ROW)]),
    "scatter": (torch.scatter, [(X, 0, INDEX[:1], SRC[:1]), (X, 0, INDEX, 2.0)]),
    "scatter_add": (torch.scatter_add, [(X, 0, index, SRC) for index in (INDEX, WHOLE)]),
    "scatter_reduce": (
        lambda x, dim, index, src, reduce, kept: torch.scatter_reduce(
            x, dim, index, src, reduce, include_self=kept
        ),
        [
            (X, 0, index, SRC, *how)
            for index in (INDEX, WHOLE)
            for how in itertools.product(("sum", "prod", "mean", "amax", "amin"), (True, False))
        ],
    ),
    "softmax": (torch.softmax, [(X, -1)]),
}
"""PyTorch's function and the arguments of some calls, by the operator's name."""
FORCED = [
    *((name, None) for name in CASES),
    *((name, "fused") for name in CASES if f"{name}_backward" in OPS and name in OPS),
    *((n, i) for n in CASES for i in ("rows_cpp", "gather_cpp") if IMPLS[i].serves(n)),
    ("embedding", "rows_cpp"),
    ("index_put", "rows_cpp"),
]
IN_PLACE = ["index_put", *(n for n in CASES if n in OPS and OPS[n].indexed and OPS[n].inplace)]


def test_every_operator_has_a_case():
    """What only serves another one, its forward or its backward with statistics, has none."""
    parts = {f"{n}{part}" for n in CASES for part in ("_forward", "_backward", "_training")}
    own = {name for name in OPS if not OPS[name].fused}
    assert own - (parts - {"embedding_backward"}) <= CASES.keys()


def derivatives(function, args):
    """Of the squares of its results: the first and the second ones."""
    leaves = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
    outs = function(*args)
    outs = outs if isinstance(outs, tuple) else (outs,)
    first = torch.autograd.grad(sum(o.square().sum() for o in outs), leaves, create_graph=True)
    again = sum((g * torch.linspace(1, 2, g.numel()).view(g.shape)).sum() for g in first)
    return *outs, *first, *torch.autograd.grad(again, leaves)


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize(("name", "forced"), FORCED)
def test_they_are_pytorchs(name, forced):
    if forced is not None and cxx.missing() is not None:
        pytest.skip(str(cxx.missing()))
    pytorchs, calls = CASES[name]
    ran = 0
    for args in calls:
        with contextlib.nullcontext() if forced is None else tw.use(forced):
            try:
                found = derivatives(getattr(tw, name), args)
            except NoImplementation:  # of indices that name no whole rows, and of copies
                continue
        torch.testing.assert_close(found, derivatives(pytorchs, args))
        ran += 1
    assert ran == len(calls) if forced != "rows_cpp" else ran


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_they_are_pytorchs(name):
    pytorchs, calls = CASES[name]
    in_place = getattr(tw, f"{name}_")
    for args in calls:
        found = derivatives(lambda x, *others: in_place(x * 1, *others), args)
        torch.testing.assert_close(found, derivatives(pytorchs, args))
