"""Functions of tensors of whole numbers, beside floats and alone."""

import torch
from torch.nn import functional as F

EDGES = [0, 1, -1, 7, -100, 2**24, 2**24 + 1, -(2**24) - 1, 2**31 - 1, -(2**31)]
WIDE_EDGES = [*EDGES, 2**31, 2**53, 2**53 + 1, -(2**62), 2**63 - 1]


def edges(dtype, count, seed=0):
    found = torch.tensor(WIDE_EDGES if dtype == torch.int64 else EDGES, dtype=dtype)
    order = torch.randint(len(found), (count,), generator=torch.Generator().manual_seed(seed))
    return found[order]


def assert_equal(found, expected):
    expected = expected if isinstance(expected, tuple) else (expected,)
    found = found if isinstance(found, tuple) else (found,)
    for one, other in zip(found, expected, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one, other)


def _with_rows(a, *numbers):
    filled = a.clone()
    for row, number in enumerate(numbers):
        filled[row] = number
    return filled


EXACT = {
    "with a number": lambda a, b, x: (a == 2**24, a != 7, a < -1, a >= 2**24 + 1),
    "with another": lambda a, b, x: (a == b, a < b, a <= b, a > b, b >= a),
    "where": lambda a, b, x: (torch.where(a > b, a, b), a.masked_fill(a < 0, -100)),
    "extremes": lambda a, b, x: (torch.maximum(a, b), torch.minimum(a, b), a.clamp(-1, 7)),
    "that wrap": lambda a, b, x: (a + 1 > a, a - 1 < a, a + b, a - b, a * b, -a, a.abs() < 0),
    "remainders": lambda a, b, x: (a % 7, a % 1, a % (2**31 - 1), torch.remainder(a + b, 1000)),
    "one bound": lambda a, b, x: (a.clamp(min=7), a.clamp(max=7)),
    "casts": lambda a, b, x: (a.float(), a.double(), a.bool(), a.long(), torch.logical_not(a)),
    "of a float": lambda a, b, x: (a > x, a * 0.5, a / 8, a + x),
    "written into": lambda a, b, x: (
        _with_rows(a, 2**24 + 1, 2**31 - 1),
        _with_rows((b > 0).to(a.dtype), 2**24 + 1) + a,
        torch.cat([a.view(-1), torch.tensor([2**24 + 3], dtype=a.dtype, device=a.device)]),
    ),
    "any": lambda a, b, x: ((a > 7).any(-1), (a == b).all(-1), (a > 0).sum(-1)),
}
SMALL = {
    "beside counts": lambda a, b: (
        a > (a > 0).sum(),
        a + (b > 0).long(),
        (b > 0).sum(-1) - a[:, 0],
    ),
    "beside casts": lambda a, b: (
        a > (b.float() * 0.3).to(torch.int32),
        a * torch.where(b > 0, 3, 5),
    ),
    "shifted": lambda a, b: (F.pad(a, (1, 1))[:, :-2] + 1).masked_fill(b == 1, 0),
    "sums": lambda a, b: (a + 2 * b - 3, a - b, torch.add(a, b, alpha=3), 5 - a),
    "signs": lambda a, b: (-a, (a - b).abs(), a * b),
    "halves": lambda a, b: (a.half(), b.to(torch.bfloat16)),
    "as floats": lambda a, b: a.sum(-1, dtype=torch.float32) + b.float().mean(-1),
    "put together": lambda a, b: torch.cat([a, b], -1),
    "slices": lambda a, b: a[:, 1:] - b[:, :-1],
    "booleans": lambda a, b: (a > 0) + b,
}


MASKS = {
    "softmax of a mask": lambda m, x: torch.softmax(x.masked_fill(m == 0, -1e9), -1),
    "labels that are ignored": lambda m, x: (
        -(x.log_softmax(-1)[:, 0] * (m[:, 0] != -1)).sum() / (m[:, 0] != -1).sum()
    ),
    "a norm of tokens": lambda m, x: F.layer_norm(x * m[:, :1], x.shape[-1:]),
    "sums over rows": lambda m, x: (x * (m > 0)).sum(0),
    "distances": lambda m, x: torch.softmax(x - 0.1 * (m[:, :1] - m[:1]).abs(), -1),
    "labels of columns": lambda m, x: torch.where(m[:, :1] == m[:1], x, 0.0).sum(-1),
    "over channels": lambda m, x: torch.softmax(x * (m != 2), 0),
}
