"""Functions that count positions, and that pick an element of each row by an index."""

import torch
from torch.nn import functional as F


def _counted(x):
    return torch.arange(x.shape[-1], device=x.device)


WITH_POSITIONS = {
    "tril": lambda x, labels: x.tril(),
    "triu": lambda x, labels: x.triu(3),
    "eye": lambda x, labels: x * torch.eye(*x.shape, device=x.device),
    "one_hot": lambda x, labels: F.one_hot(labels, x.shape[-1]) * x,
    "causal": lambda x, labels: torch.softmax(
        x.masked_fill(torch.ones_like(x, dtype=torch.bool).triu(1), float("-inf")), -1
    ),
    "lengths": lambda x, labels: torch.softmax(
        x.masked_fill(_counted(x) > labels[:, None], -1e4), -1
    ),
    "by twos": lambda x, labels: x + torch.arange(3, 3 + 2 * x.shape[-1], 2, device=x.device),
    "down the rows": lambda x, labels: x.softmax(0) * _counted(x[:, 0])[:, None],
    "as floats": lambda x, labels: x * torch.arange(float(x.shape[-1]), device=x.device),
    "distances": lambda x, labels: torch.softmax(
        x - 0.1 * (_counted(x[:, 0])[:, None] - _counted(x)).abs(), -1
    ),
    "evenly": lambda x, labels: x * torch.linspace(0, 1, x.shape[-1], device=x.device),
    "from a later one": lambda x, labels: x[:, 1:] * _counted(x)[1:],
    "alone": lambda x, labels: (x.sum(0), _counted(x) + 1),
    "columns": lambda x, labels: (x * _counted(x)).sum(0),
}
BY_LABELS = {
    "cross_entropy": lambda x, labels: F.cross_entropy(x, labels),
    "smoothed": lambda x, labels: F.cross_entropy(x, labels, label_smoothing=0.1),
    "each": lambda x, labels: F.cross_entropy(x, labels, reduction="none"),
    "ignored": lambda x, labels: F.cross_entropy(x, labels, ignore_index=1),
    "summed": lambda x, labels: F.nll_loss(x.log_softmax(-1), labels, reduction="sum"),
    "gather": lambda x, labels: x.tanh().gather(-1, labels[:, None]),
    "take_along_dim": lambda x, labels: torch.take_along_dim(x.tanh(), labels[:, None], -1),
    "scatter": lambda x, labels: x.softmax(-1).scatter(-1, labels[:, None], -1.0),
    "scatter_add": lambda x, labels: (2 * x).scatter_add(-1, labels[:, None], x[:, :1]),
    "margin": lambda x, labels: F.cross_entropy(
        30 * (x - 0.2 * F.one_hot(labels, x.shape[-1])), labels
    ),
    "of masks": lambda x, labels: (x.relu() * (x > 0.5)).gather(-1, labels[:, None]),
    "of positions": lambda x, labels: (x * _counted(x) / 99).gather(-1, labels[:, None]),
    "of columns": lambda x, labels: (x * x.sum(0)).gather(-1, labels[:, None]),
    "down the columns": lambda x, labels: x.exp().gather(0, labels[:1].expand(1, x.shape[1])),
    "greatest": lambda x, labels: x.max(-1).values,
    "least of columns": lambda x, labels: torch.min(x, 0).values,
    "hardest": lambda x, labels: (
        x.scatter(-1, labels[:, None], -1e4).max(-1).values - x.gather(-1, labels[:, None])[:, 0]
    ).relu(),
    "greatest of pieces": lambda x, labels: torch.cat([x[:, 9:], 2 * x[:, :9]], 1).max(0).values,
    "of pieces": lambda x, labels: F.cross_entropy(torch.cat([x[:, 9:], 2 * x[:, :9]], 1), labels),
    "down the pieces": lambda x, labels: (x.roll(1, 0) + 1).gather(
        0, labels[:1].expand(1, x.shape[1])
    ),
    "into pieces": lambda x, labels: torch.cat([x[:, 9:], 2 * x[:, :9]], 1).scatter(
        -1, labels[:, None], x[:, :1]
    ),
    "of one row": lambda x, labels: x * x[0].tanh().gather(0, labels)[:, None],
    "index of one row": lambda x, labels: (1 - x[0].sigmoid()[labels])[:, None] * x,
    "index_select of one row": lambda x, labels: x * x[0].index_select(0, labels)[:, None],
    "into one row": lambda x, labels: (2 * x[0]).index_add(0, labels, x[:, 0]),
    "weighted and smoothed": lambda x, labels: F.cross_entropy(
        x, labels, x[0].detach().sigmoid(), label_smoothing=0.1
    ),
    "focal": lambda x, labels: (
        (1 - x.softmax(-1).gather(-1, labels[:, None])) ** 2
        * F.cross_entropy(x, labels, reduction="none")[:, None]
    ).mean(),
}
