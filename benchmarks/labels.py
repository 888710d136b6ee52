"""Losses by labels, and masks of positions: neither is read from memory.

    tilewright bench --import benchmarks/labels.py --suite labels

The names are those of the results which are kept. Sizes are those of language models: tokens of a
micro-batch by a vocabulary (GPT-2, Llama 2, Llama 3), and heads times queries by keys.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

import tilewright as tw
from tilewright.suite import suite


@tw.fuse
def label_cross_entropy(x: Tensor, labels: Tensor) -> Tensor:
    """The mean over tokens, as training takes it."""
    return F.cross_entropy(x, labels)


@tw.fuse
def label_smoothed(x: Tensor, labels: Tensor) -> Tensor:
    """Of each token, with label smoothing."""
    return F.cross_entropy(x, labels, label_smoothing=0.1, reduction="none")


@tw.fuse
def causal_softmax(scores: Tensor) -> Tensor:
    """Of attention to earlier tokens alone."""
    later = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
    return torch.softmax(scores.masked_fill(later, float("-inf")), -1)


@tw.fuse
def sloped_softmax(scores: Tensor, slopes: Tensor) -> Tensor:
    """Of attention that falls with distance (Press et al., ALiBi, 2022)."""
    at = torch.arange(scores.shape[-1], device=scores.device)
    distance = (at[:, None] - at).abs()
    return torch.softmax(scores - slopes[:, None, None] * distance, -1)


LOGITS = {"bf16": ((8192, 50257), (8192, 32000), (4096, 128256)), "f32": ((8192, 32000),)}


def _losses(d: str, rows: int, columns: int) -> list[str]:
    given = f"x={d}[{rows},{columns}], labels=i64[{rows}]"
    return [
        f"label_cross_entropy({given})",
        f"label_cross_entropy_backward(grad_output={d}[], {given})",
        f"label_smoothed({given})",
        f"label_smoothed_backward(grad_output={d}[{rows}], {given})",
    ]


labels = suite(
    "labels",
    [
        *(row for d, sizes in LOGITS.items() for size in sizes for row in _losses(d, *size)),
        "causal_softmax(scores=bf16[64,2048,2048])",
        "sloped_softmax(scores=bf16[64,2048,2048], slopes=bf16[64])",
    ],
)
