"""Functions of tokens and pixels with their neighbours, of which the first and the last have fewer:
small kernels beside a large one. And norms of two tensors."""

import torch
from torch.nn import functional as F


def token_shift(x, mix):
    before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
    return x + (before - x) * mix


def shift_of_norm(x, w, mix):
    x = F.layer_norm(x, x.shape[-1:], w)
    return x + (F.pad(x, (0, 0, 1, -1)) - x) * mix


def short_convolution(x, w):
    padded = F.pad(x, (0, 0, 3, 0))
    return F.silu(sum(padded[:, i : i + x.shape[1]] * w[i] for i in range(4)))


def rolled(x):
    return x + torch.roll(x, 1, 1)


def variation(x):
    return (x[:, 1:] - x[:, :-1]).abs().sum()


def two_norms(x, y, w, v):
    return F.rms_norm(x, x.shape[-1:], w), F.rms_norm(y, y.shape[-1:], v)


def blurred(x):
    padded = F.pad(x, (1, 1, 1, 1))
    n, m = x.shape[1:]
    return sum(padded[:, i : i + n, j : j + m] for i in range(3) for j in range(3))


TOKENS = "x=f16[8,1024,2048]"
LARGE = [
    (token_shift, f"{TOKENS}, mix=f16[2048]", 1, 2),
    (shift_of_norm, f"{TOKENS}, w=f16[2048], mix=f16[2048]", 1, 3),
    (short_convolution, f"{TOKENS}, w=f16[4,2048]", 1, 2),
    (rolled, TOKENS, 1, 1),
    (variation, "x=f32[64,4096]", 1, 1),
    (two_norms, "x=bf16[4,512,32,128], y=bf16[4,512,8,128], w=bf16[128], v=bf16[128]", 1, 4),
    (blurred, "x=f32[16,512,512]", 1, 1),
]
"""With the launches that they take, and their gradients."""
SMALL = {
    token_shift: "x=f16[3,6,24], mix=f16[24]",
    shift_of_norm: "x=bf16[3,6,40], w=bf16[40], mix=bf16[40]",
    short_convolution: "x=f32[3,9,20], w=f32[4,20]",
    rolled: "x=f16[3,5,33]",
    variation: "x=f64[3,30]",
    two_norms: "x=bf16[2,9,4,64], y=bf16[2,9,1,64], w=bf16[64], v=bf16[64]",
    blurred: "x=f32[2,7,9]",
}
