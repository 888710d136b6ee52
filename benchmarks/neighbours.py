"""Tokens and pixels with their neighbours: the first and the last have fewer.

    tilewright bench --import benchmarks/neighbours.py --suite neighbours

The names are those of the results which are kept.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

import tilewright as tw
from tilewright.suite import suite


@tw.fuse
def token_shift(x: Tensor, mix: Tensor) -> Tensor:
    """Each token [batch, tokens, channels] mixed with the one before it, as in RWKV."""
    return x + (F.pad(x, (0, 0, 1, -1)) - x) * mix


@tw.fuse
def shifted_norm(x: Tensor, weight: Tensor, mix: Tensor) -> Tensor:
    """Layer norm of tokens, each mixed with the one before it."""
    x = F.layer_norm(x, x.shape[-1:], weight)
    return x + (F.pad(x, (0, 0, 1, -1)) - x) * mix


@tw.fuse
def short_convolution(x: Tensor, weight: Tensor) -> Tensor:
    """SiLU of a causal convolution of four taps of each channel, as in Mamba."""
    padded = F.pad(x, (0, 0, 3, 0))
    return F.silu(sum(padded[:, i : i + x.shape[1]] * weight[i] for i in range(4)))


@tw.fuse
def rolled(x: Tensor) -> Tensor:
    """Each token and the one before it, of the first the last."""
    return x + torch.roll(x, 1, 1)


@tw.fuse
def variation(x: Tensor) -> Tensor:
    """Total variation of each row."""
    return (x[:, 1:] - x[:, :-1]).abs().sum()


@tw.fuse
def blurred(x: Tensor) -> Tensor:
    """The sum of each pixel [batch, height, width] and its eight neighbours."""
    padded = F.pad(x, (1, 1, 1, 1))
    n, m = x.shape[1:]
    return sum(padded[:, i : i + n, j : j + m] for i in range(3) for j in range(3))


NARROW, WIDE = ("bf16[4,512,1024]", "bf16[1024]"), ("bf16[8,2048,4096]", "bf16[4096]")
IMAGES = ("f32[16,512,512]", "f32[64,512,512]")


def _both(name: str, outputs: str, given: str) -> list[str]:
    return [f"{name}({given})", f"{name}_backward(grad_output={outputs}, {given})"]


def _of_tokens(tokens: str, channels: str) -> list[str]:
    taps = channels.replace("[", "[4,")
    return [
        *_both("token_shift", tokens, f"x={tokens}, mix={channels}"),
        *_both("shifted_norm", tokens, f"x={tokens}, weight={channels}, mix={channels}"),
        *_both("short_convolution", tokens, f"x={tokens}, weight={taps}"),
        *_both("rolled", tokens, f"x={tokens}"),
    ]


neighbours = suite(
    "neighbours",
    [
        *_of_tokens(*NARROW),
        *_of_tokens(*WIDE),
        *(
            text
            for x in ("f32[64,4096]", "f32[4096,4096]")
            for text in _both("variation", "f32[]", f"x={x}")
        ),
        *(text for x in IMAGES for text in _both("blurred", x, f"x={x}")),
    ],
)
