"""Gradients of losses of logits, of each row one number: much is known of a row at once.

    tilewright bench --import benchmarks/losses.py --suite losses

The names are those of the results which are kept.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

import tilewright as tw
from tilewright.suite import suite


@tw.fuse
def jensen_shannon(p: Tensor, q: Tensor) -> Tensor:
    """How far two softmaxes are from what lies between them."""
    p, q = p.log_softmax(-1), q.log_softmax(-1)
    between = torch.logaddexp(p, q) - math.log(2)
    return 0.5 * ((p.exp() * (p - between)).sum(-1) + (q.exp() * (q - between)).sum(-1))


@tw.fuse
def kl_divergence(p: Tensor, q: Tensor) -> Tensor:
    """Of distillation: how far one softmax is from another."""
    p, q = p.log_softmax(-1), q.log_softmax(-1)
    return F.kl_div(p, q, reduction="none", log_target=True).sum(-1)


@tw.fuse
def smoothed_cross_entropy(x: Tensor, target: Tensor) -> Tensor:
    """Of probabilities in place of classes, with label smoothing."""
    x = x.log_softmax(-1)
    return -(0.9 * (x * target).sum(-1) + 0.1 * x.mean(-1))


@tw.fuse
def standardized(x: Tensor) -> Tensor:
    """Features of a batch, each with a mean of zero and a deviation of one."""
    return (x - x.mean(0)) / x.std(0)


BY_ROW = "{d}[{rows}]"
TWO = "p={d}[{rows},{columns}], q={d}[{rows},{columns}]"
KINDS = {
    "jensen_shannon": TWO,
    "kl_divergence": TWO,
    "smoothed_cross_entropy": "x={d}[{rows},{columns}], target={d}[{rows},{columns}]",
}
SIZES = {"bf16": ((4096, 32000), (8192, 4096)), "f32": ((8192, 4096),)}


def _gradients(d: str, rows: int, columns: int) -> list[str]:
    of_row = BY_ROW.format(d=d, rows=rows)
    given = {
        name: tensors.format(d=d, rows=rows, columns=columns) for name, tensors in KINDS.items()
    }
    return [f"{name}_backward(grad_output={of_row}, {given[name]})" for name in KINDS]


losses = suite(
    "losses",
    [
        *(row for d, sizes in SIZES.items() for size in sizes for row in _gradients(d, *size)),
        *(f"standardized_backward(grad_output={d}[32768,1024], x={d}[32768,1024])" for d in SIZES),
    ],
)
