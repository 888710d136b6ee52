"""Graphs that reduce over different dims, or cut them in pieces: how often they walk memory.

    tilewright bench --import benchmarks/few_walks.py --suite few_walks

The names are those of the results which are kept.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

import tilewright as tw
from tilewright.suite import suite


@tw.fuse
def channel_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Layer norm over the channels of images [N, C, H, W], as in ConvNeXt."""
    u = x.float()
    centred = u - u.mean(1, keepdim=True)
    inverse = (centred.square().mean(1, keepdim=True) + 1e-6).rsqrt()
    return (centred * inverse * weight[:, None, None] + bias[:, None, None]).to(x.dtype)


@tw.fuse
def response_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Global response normalization of images [N, C, H, W], as in ConvNeXt V2."""
    norm = x.norm(dim=(2, 3), keepdim=True)
    share = norm / (norm.mean(1, keepdim=True) + 1e-6)
    return x * share * weight[:, None, None] + bias[:, None, None] + x


@tw.fuse
def dice_loss(x: Tensor, target: Tensor) -> Tensor:
    """Of logits and shares of classes, both [N, classes, H, W]."""
    shares = x.softmax(1)
    both = (shares * target).sum((2, 3))
    either = shares.sum((2, 3)) + target.sum((2, 3))
    return 1 - ((2 * both + 1) / (either + 1)).mean()


@tw.fuse
def mixed_tokens(x: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Each token [batch, tokens, channels] mixed with the one before it, twice, as in RWKV."""
    before = F.pad(x, (0, 0, 1, -1))
    return x * key + before * (1 - key), x * value + before * (1 - value)


@tw.fuse
def mixed_norm(x: Tensor, weight: Tensor, share: Tensor) -> Tensor:
    """RMS norm of tokens [batch, tokens, channels], mixed with those before."""
    x = F.rms_norm(x, x.shape[-1:], weight)
    return x * share + F.pad(x, (0, 0, 1, -1)) * (1 - share)


@tw.fuse
def partly_rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the first half of each head [batch, tokens, heads, 128]."""
    a, b, rest = x.split((32, 32, 64), -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], -1)


@tw.fuse
def biased_scores(x: Tensor, bias: Tensor) -> Tensor:
    """Softmax of attention scores [batch, heads, queries, keys] with a bias of positions."""
    return (x + bias).softmax(-1)


IMAGES = "bf16[32,{c},{size},{size}]"
TOKENS, PARAMETER, NUMBERS = "bf16[8,2048,4096]", "bf16[4096]", "f32[{c}]"
HEADS, ANGLES = "bf16[8,2048,32,128]", "bf16[2048,1,32]"
SCORES = ((8, "16,512,512"), (64, "8,256,256"))


def _channels(name: str, c: int, size: int, numbers: str) -> str:
    image, number = IMAGES.format(c=c, size=size), numbers.format(c=c)
    return f"{name}_backward(grad_output={image}, x={image}, weight={number}, bias={number})"


def _biased_scores(batch: int, rest: str) -> str:
    x = f"bf16[{batch},{rest}]"
    return f"biased_scores_backward(grad_output={x}, x={x}, bias=bf16[1,{rest}])"


few_walks = suite(
    "few_walks",
    [
        _channels("channel_norm", 96, 56, NUMBERS),
        _channels("channel_norm", 384, 28, NUMBERS),
        _channels("channel_norm", 768, 14, NUMBERS),
        _channels("response_norm", 384, 56, "bf16[{c}]"),
        "dice_loss(x=f32[16,21,256,256], target=f32[16,21,256,256])",
        "dice_loss_backward(grad_output=f32[], x=f32[16,21,256,256], "
        "target=f32[16,21,256,256], grads=[x])",
        f"mixed_tokens_backward(grad_output0={TOKENS}, grad_output1={TOKENS}, x={TOKENS}, "
        f"key={PARAMETER}, value={PARAMETER})",
        f"mixed_norm_backward(grad_output={TOKENS}, x={TOKENS}, weight={PARAMETER}, "
        f"share={PARAMETER})",
        f"partly_rotated(x={HEADS}, cos={ANGLES}, sin={ANGLES})",
        f"partly_rotated_backward(grad_output={HEADS}, x={HEADS}, cos={ANGLES}, sin={ANGLES}, "
        "grads=[x])",
        *(_biased_scores(batch, rest) for batch, rest in SCORES),
    ],
)
