"""Functions that reduce rows, and sets of rows, and numbers that rows were reduced to."""

import torch
from torch.nn import functional as F

from tilewright.dispatch.functions.fuse import fuse
from tilewright.op import Workload


def normed_groups(x, weight, bias):
    """Wu & He, Group Normalization, arXiv 1803.08494."""
    return F.silu(F.group_norm(x, 4, weight, bias))


def group_share(x):
    """Of each channel in its group [N, G, C, W]: its softmax, weighed by how much of the group's
    sum the channel has."""
    total = x.exp().sum((2, 3), keepdim=True)
    return torch.softmax(x, -1) * (x.exp().sum(-1, keepdim=True) / total)


def group_peaks(x):
    """The greatest of each channel, of those of a group, and what is left below it."""
    peak = x.amax(-1, keepdim=True)
    most = peak.amax(2, keepdim=True)
    return x - most, peak[..., 0], (x - x.amin((2, 3), keepdim=True)).sum(-1)


def group_products(x):
    one = x.prod(-1, keepdim=True)
    return x * one.prod(2, keepdim=True) / x.mean((2, 3), keepdim=True)


def two_scales(x):
    """Eight bits with a scale for each block of a row, and one for them all. arXiv 2509.25149."""
    block = x.abs().amax(-1, keepdim=True)
    all_of_them = block.amax(2, keepdim=True)
    scale = torch.round(block / all_of_them * 127.0) / 127.0 * all_of_them
    return torch.round(x / scale * 127.0), scale[..., 0]


def many_sums(x):
    """Eight numbers of each row, joined over those of its set."""
    rows = [(x * n).exp().sum(-1, keepdim=True) for n in range(1, 9)]
    return x + sum(row / row.sum(2, keepdim=True) for row in rows)


def sums_of_columns(x):
    """Sums over the rows of a set of what varies along them: no number for each row."""
    y = x - x.sum(-1, keepdim=True) - x.mean((2, 3), keepdim=True)
    return y, y.sum(2)


def normed_gradients(dtype: str, images: str, channels: int) -> Workload:
    fuse(normed_groups)
    return Workload.parse(
        f"normed_groups_backward(grad_output={dtype}[{images}], x={dtype}[{images}], "
        f"weight={dtype}[{channels}], bias={dtype}[{channels}])"
    )


def of_groups(function, dtype: str, shape: str) -> Workload:
    fuse(function)
    return Workload.parse(f"{function.__name__}(x={dtype}[{shape}])")
