"""Graphs that CUDA kernels for aligned rows alone cannot do, one of each kind."""

import itertools
import random

import torch
from torch.nn import functional as F

from tilewright.dispatch.functions.fuse import fuse
from tilewright.op import OPS
from tilewright.tensor_spec import TensorSpec

PADDLE_C = "lerp_backward(grad_output=f32[16,3,244,244], x=f32[16,1,1,1], end=f32[16,3,244,244], weight=f32[3,1,244])"  # noqa: E501
LERP = "lerp_backward(grad_output={d}[{g}], x={d}[{x}], end={d}[{e}], weight={d}[{w}])"
KINDS = [
    PADDLE_C,
    "lerp_backward(grad_output=bf16[16,3,64,64], x=bf16[16,1,1,1], end=bf16[1,3,64,64], weight=bf16[3,1,64])",  # noqa: E501
    "lerp_backward(grad_output=f32[4000000], x=f32[1], end=f32[4000000], weight=f32[4000000])",
    "softmax(x=f16[64,1000,49], dim=1)",
    "softmax(x=f64[8,100,4096], dim=1)",
    "softmax(x=f32[200000,8], dim=0)",
    "softmax(x=bf16[300,50257])",
    "layer_norm(x=f16[1000,1001], weight=f16[1001], bias=f16[1001], eps=1e-05)",
    "layer_norm(x=f16[2,4000000], weight=f16[4000000], bias=f16[4000000], eps=1e-05)",
]


def standardised(x):
    """Batch norm, which PyTorch's own refuses to do with one row."""
    variance, mean = torch.var_mean(x, 0, correction=0)
    return (x - mean) * torch.rsqrt(variance + 1e-5)


MIXED = {
    "softmax of centred": lambda x: torch.softmax(x - x.mean(0), -1),
    "norm of softmax": lambda x: F.layer_norm(torch.softmax(x, 0), x.shape[-1:]),
    "norm of norm": lambda x: F.layer_norm(standardised(x), x.shape[-1:]),
    "full and reduced": lambda x: (torch.softmax(x, -1) - x.amax(0), x.var(0), x.sum(-1)),
    "a row's end": lambda x: (x - x.mean(0)).amax(-1),
    "rows first": lambda x: torch.softmax(torch.softmax(x, -1), 0),
    "apart": lambda x: (torch.softmax(x, -1), torch.softmax(x, 0)),
}
"""Of one matrix x: reductions along its rows and across them, some of which need others."""


def _norm_and_peak(x):
    y = F.layer_norm(x, x.shape[-1:])
    return y, y.abs().amax()


def _twice(x):
    y = torch.softmax(x, -1) - x.amax()
    return y.square().mean(), x.sum(0), y


WITH_TOTALS = {
    "loss": lambda x: -(x.log_softmax(-1)).mean(),
    "total of softmax": lambda x: torch.softmax(x, -1).sum(),
    "softmax and total": lambda x: (torch.softmax(x, -1), x.sum()),
    "divergence": lambda x: F.kl_div(
        x.log_softmax(-1), torch.softmax(-x, -1), reduction="batchmean"
    ),
    "norm and peak": _norm_and_peak,
    "gradient of a number": lambda x: torch.func.vjp(
        lambda s: torch.softmax(x, -1) * s, torch.ones((), dtype=x.dtype, device=x.device)
    )[1](x),
    "products": lambda x: (torch.softmax(x, -1), (1 + torch.tanh(x) / 64).prod(), x.amin()),
    "columns, too": lambda x: (torch.softmax(x, -1), x.sum(0), x.sum()),
    "three of columns": lambda x: (
        torch.softmax(x, -1), 2 * x.sum(0), x.amax(0) - x.sum(0), x.abs().mean(),
    ),
    "columns of columns": lambda x: (torch.softmax(x, -1), x.amax(0).sum(), x.amax()),
    "divided by its peak": lambda x: torch.softmax(x, -1) / torch.softmax(x, -1).amax(),
    "variance": lambda x: (torch.softmax(x, -1), x.var()),
    "twice": _twice,
    "over two of three": lambda x: (
        torch.softmax(x, -1), x.unflatten(0, (-1, 3 if x.shape[0] % 3 == 0 else 2)).sum((1, 2)),
    ),
}  # fmt: skip
"""Of one matrix x: what is reduced along its rows, and over rows and columns together."""


def mixed(name, dtype, shape):
    """One of `MIXED` or `WITH_TOTALS` as the operator `random_graph`."""
    fuse({**MIXED, **WITH_TOTALS}[name], name="random_graph")
    return OPS["random_graph"].workload(x=TensorSpec(dtype, shape))


def broadcasts(full, count):
    """Some of the ways that three operands broadcast to `full` or a part of it: sizes by name."""
    kept = itertools.product((True, False), repeat=len(full))
    shapes = [tuple(n if k else 1 for n, k in zip(full, keep, strict=True)) for keep in kept]
    shapes += [full[1:], full[-1:], (1,) * (len(full) - 1)]
    patterns = list(itertools.product(shapes, repeat=3))
    for x, e, w in random.Random(0).sample(patterns, count):
        named = {"g": torch.broadcast_shapes(x, e, w), "x": x, "e": e, "w": w}
        yield {k: ",".join(map(str, v)) for k, v in named.items()}
