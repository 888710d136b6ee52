"""The geometry that the convolution operators share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilewright.errors import InvalidArgument

GEOMETRY = ("kernel_size", "stride", "padding", "dilation")
_LEAST = {"kernel_size": 1, "stride": 1, "padding": 0, "dilation": 1}


def pair(value: int | Sequence[int]) -> tuple[int, int]:
    """(height, width) from either, one number for both, or a list of one."""
    sizes = (value,) if isinstance(value, int) else tuple(value)
    height, width = sizes * 2 if len(sizes) == 1 else sizes
    return height, width


def check_geometry(name: str, args: dict[str, Any]) -> None:
    """Make pairs of `kernel_size`, `stride`, `padding` and `dilation`; hold each to its range."""
    for argument, least in _LEAST.items():
        given = args[argument]
        sizes = (given,) if isinstance(given, int) else tuple(given)
        if len(sizes) not in (1, 2) or min(sizes) < least:
            raise InvalidArgument(
                f"{name}: {argument}={given} should be one or two whole numbers of at least {least}"
            )
        args[argument] = pair(sizes)
    if args["groups"] < 1:
        raise InvalidArgument(f"{name}: groups={args['groups']} should be at least 1")


def output_size(
    size: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> tuple[int, int]:
    """Height and width of a convolution's output; below 1 where the filter does not fit."""
    height, width = (
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(size, kernel_size, stride, padding, dilation, strict=True)
    )
    return height, width


def touched_share(
    size: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> float:
    """The part of the input's pixels that some output depends on."""
    outputs = output_size(size, kernel_size, stride, padding, dilation)
    share = 1.0
    for n, out, k, s, p, d in zip(
        size, outputs, kernel_size, stride, padding, dilation, strict=True
    ):
        touched = {i * s - p + tap * d for i in range(out) for tap in range(k)}
        share *= len(touched & set(range(n))) / max(n, 1)
    return share
