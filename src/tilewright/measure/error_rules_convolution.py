"""How convolutions carry rounding errors on: sums of products, over pixels and channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.measure.error_rules import (
    RULES,
    Arithmetic,
    Pair,
    magnitude,
    plus,
    rule,
)
from tilewright.measure.error_rules_reductions import sum_growth

TENSOR_CORE_STEP, TF32_STEP = 16, 8
"""Products of halves, and of TF32, that a tensor core adds at once; it then truncates the sum to
fp32."""
TF32_EPS = 2.0**-10
"""Relative step of TF32: at most so much of an operand is lost where it is truncated."""
TF32_SPREAD = 2.0
"""Standard deviations of a truncation, 0.29 steps, of both operands: five of these."""


def growth(arithmetic: Arithmetic, value: Tensor, size: Tensor, terms: int) -> Tensor:
    """Error of sums of so many terms, in units of u.

    Truncation is a rounding of up to two units, always toward zero. In a sum whose terms have one
    sign it adds up: over n equal steps, to n units of the result.

    Args:
        value: the sums.
        size: the sums of |terms|.
    """
    error = sum_growth(terms) * magnitude(size)
    if arithmetic.storage.itemsize < arithmetic.dtype.itemsize:
        error += terms / TENSOR_CORE_STEP / 2 * magnitude(value)
    if arithmetic.tf32:
        error += terms / TF32_STEP / 2 * magnitude(value)
    return error


def rounded_to_tf32(t: Tensor) -> Tensor:
    """fp32 whose last 13 bits were rounded away, ties away from zero, as cvt.rna.tf32 does."""
    bits = t.view(torch.int32)
    return torch.where(t.isfinite(), (bits + 0x1000) & ~0x1FFF, bits).view(torch.float32)


def rounded_operands(arithmetic: Arithmetic, value: Tensor, squares: Tensor) -> Tensor:
    """Error of sums of products whose operands were rounded to TF32, in units of u.

    A tensor core ignores the bits that TF32 lacks. Who does not round before loses up to a step of
    each operand, half of one on average: that makes all terms smaller alike, and so their sum. What
    is left varies from term to term, and adds up as the root of the sum of squares.

    Args:
        value: the sums.
        squares: the sums of the squared terms.
    """
    lost = magnitude(value) + TF32_SPREAD * magnitude(squares).sqrt()
    return TF32_EPS / arithmetic.u * lost


def is_exact(arithmetic: Arithmetic, pairs: Sequence[Pair], size: Tensor) -> bool:
    """Whether all operands are integers so small that every partial sum is exact."""
    integers = all(p.error is None and bool((p.value == p.value.round()).all()) for p in pairs)
    if integers and arithmetic.tf32:
        integers = all(float(magnitude(p.value).max()) * TF32_EPS <= 2 for p in pairs)
    return integers and float(magnitude(size).max()) * arithmetic.u < 1


@rule("convolution_backward")
def _convolution_backward(
    arithmetic: Arithmetic, grad: Pair, x: Pair, weight: Pair, *rest: Any, **_: Any
) -> list[Pair | None]:
    """Gradients of the weight and of the bias: operators ask for no other."""
    *sizes, (of_input, of_weight, of_bias) = rest
    assert of_weight, rest
    assert not of_input, rest
    bias = RULES["sum"](arithmetic, grad, (0, 2, 3)) if of_bias else None
    rest = (None, *sizes[1:], (False, True, False))

    def weight_grad(g: Tensor, t: Tensor) -> Tensor:
        like = t.new_empty(1).expand(weight.value.shape)
        return torch.ops.aten.convolution_backward(g, t, like, *rest)[1]

    value = weight_grad(grad.value, x.value)
    size = weight_grad(grad.value.abs(), x.value.abs())
    if value.numel() == 0 or is_exact(arithmetic, (grad, x), size):
        return [None, Pair(value), bias]
    terms = grad.value.numel() // max(grad.value.shape[1], 1)
    carried = [
        None if grad.error is None else weight_grad(grad.error, x.value.abs()),
        None if x.error is None else weight_grad(grad.value.abs(), x.error),
    ]
    if arithmetic.tf32:
        squares = weight_grad(grad.value.square(), x.value.square())
        carried.append(rounded_operands(arithmetic, value, squares))
    error = plus(growth(arithmetic, value, size, max(terms, 1)), *carried)
    return [None, Pair(value, error, exact=False), bias]


@rule("empty", "new_empty")
def _empty(arithmetic: Arithmetic, *args: Any, **_: Any) -> Pair:
    """Memory that only lends its shape."""
    shape = next(a for a in args if isinstance(a, (list, tuple)))
    return Pair(torch.zeros(tuple(shape), dtype=torch.float64, device=arithmetic.device))


@rule("getitem")
def _getitem(arithmetic: Arithmetic, values: Sequence[Pair], index: int) -> Pair:
    return values[index]
