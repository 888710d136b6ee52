"""Functions of channels that also add up over all else: emulated, and on a GPU."""

import math

import torch

from random_graphs import gradients_of
from tilewright.dispatch.functions.fuse import fuse
from tilewright.fusion.cuda.tiles.schedule import TileSchedule
from tilewright.op import OPS, Workload


def channel_norm(x, weight, bias):
    u = x if x.dtype == torch.float64 else x.float()
    centred = u - u.mean(1, keepdim=True)
    inverse = (centred.square().mean(1, keepdim=True) + 1e-6).rsqrt()
    return (centred * inverse * weight[:, None, None] + bias[:, None, None]).to(x.dtype)


def response_norm(x, weight, bias):
    norm = x.norm(dim=(2, 3), keepdim=True)
    share = norm / (norm.mean(1, keepdim=True) + 1e-6)
    return x * share * weight[:, None, None] + bias[:, None, None] + x


def dice_loss(x, target):
    shares, target = x.softmax(1), target.abs()
    both = (shares * target).sum((2, 3))
    either = shares.sum((2, 3)) + target.sum((2, 3))
    return 1 - ((2 * both + 1) / (either + 1)).mean()


def shares_of_classes(x):
    """Sums and extremes over different dims, beside results of a step each and of a walk."""
    shares = x.softmax(1)
    return shares.sum((0, 2, 3)), shares.amax((2, 3)), shares, x.sum(1)


TENSORS = {
    channel_norm: "x={d}[{x}], weight={number}[{c}], bias={number}[{c}]",
    response_norm: "x={d}[{x}], weight={number}[{c}], bias={number}[{c}]",
    dice_loss: "x={d}[{x}], target={d}[{x}]",
    shares_of_classes: "x={d}[{x}]",
}
SIZES = [(3, 5, 3, 7), (2, 64, 5, 8), (1, 2, 4, 64), (2, 7, 16, 33)]
SCHEDULES = [
    TileSchedule(vector, lanes, shares, unroll=unroll, storage=storage, stream_loads=False)
    for vector, lanes, shares, unroll, storage in [
        (1, 32, 1, 1, "reread"),
        (1, 64, 2, 2, "reread"),
        (2, 4, 16, 1, "registers"),
        (1, 8, 8, 1, "registers"),
        (4, 2, 32, 1, "reread"),
        (1, 128, 1, 1, "registers"),
    ]
]
"""Lanes of several warps and of a part of one; steps that are kept, and read again."""
MANY_ELEMENTS = 10_000


def workload(function, dtype, sizes):
    if function.__name__ not in OPS:
        fuse(function)
    number = "f64" if dtype == "f64" else "f32"
    tensors = TENSORS[function].format(
        d=dtype, x=",".join(map(str, sizes)), number=number, c=sizes[1]
    )
    return Workload.parse(f"{function.__name__}({tensors})")


def workloads(dtype, sizes):
    """Every function and its gradients, but for those of many shares of classes: to which of two
    that are nearly the greatest a gradient goes is a rounding's choice."""
    forward = [workload(f, dtype, sizes) for f in TENSORS]
    many = math.prod(sizes) > MANY_ELEMENTS
    return [*forward, *(gradients_of(w) for w in (forward[:-1] if many else forward))]
