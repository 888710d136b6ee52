"""Functions with constants and casts of every dtype in the middle, and what they are given."""

import math

import torch
import torch.nn.functional as F

X = torch.tensor([[-1.5, 0.0, 2.25, 70000.0, 1e-8], [3.0, -0.0, math.inf, math.nan, 1.0]])


def halves_to_halves(x):
    h, b = x.half(), x.bfloat16()
    return h.bfloat16(), b.half(), b.double().half(), h + b.to(h.dtype), torch.where(b > 0, h, x)


def halves_to_booleans(x):
    h, b = x.half(), x.bfloat16()
    return h.bool(), b.logical_not(), h.any(-1), b.all(0), h.logical_and(b)


def whole_numbers(x):
    counts = (x > 0).sum(0)
    return (
        torch.full_like(x, 2.7, dtype=torch.int64) * x,
        torch.full_like(x, -2.7, dtype=torch.int32).float() + x,
        torch.full_like(x, 2.7, dtype=torch.int64) > 2.5,
        torch.full_like(x, -(2**63), dtype=torch.int64),
        torch.full_like(x, 2**31 - 1, dtype=torch.int32),
        torch.cat([F.pad(counts, (1, 1)), torch.zeros(3, dtype=torch.int64, device=x.device)]),
        torch.where(x > 0, 2**24, 0),
    )


def halves_that_are_no_numbers(x):
    h = x.half()
    return (
        h.masked_fill(x > 0, -math.inf).amax(-1),
        h.masked_fill(x > 0, math.nan),
        torch.full_like(x, math.inf, dtype=torch.bfloat16),
        h + 1e39,
    )


def beyond_fp32(x):
    return x + 1e-50, x + 1e-41, x < 1e300, x * 1e39, x * -1e39


def rounded_to_halves(x):
    tenths = torch.full_like(x, 0.1, dtype=torch.bfloat16).float()
    return tenths, F.pad(x.half(), (1, 1), value=0.1).float()


def signs_of_booleans(x):
    return (x > 0).sign(), (x > 0).sgn() * x


def nothing_reduced(x):
    m = x > 0
    return m.any(dim=()), m.all(dim=()), x.any(dim=()), m.sum(dim=())


FUNCTIONS = [
    halves_to_halves,
    halves_to_booleans,
    whole_numbers,
    halves_that_are_no_numbers,
    beyond_fp32,
    rounded_to_halves,
    signs_of_booleans,
    nothing_reduced,
]
