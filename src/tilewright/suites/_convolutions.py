"""Texts of weight gradients of convolutions, as convolutional networks have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilewright.suite import Suite, suite


@dataclass(frozen=True)
class Conv:
    """One layer: square input of `size` pixels, square filter, `padding` None keeping the size."""

    channels: int
    features: int
    kernel: int
    size: int
    stride: int = 1
    groups: int = 1
    padding: int | None = None


def weight_grad(
    layer: Conv,
    batch: int,
    dtype: str = "f16",
    layout: str = "@channels_last",
    options: str = "",
) -> str:
    """The workload's text; without a layout, tensors are contiguous. `options` are arguments."""
    padding = layer.kernel // 2 if layer.padding is None else layer.padding
    out = (layer.size + 2 * padding - layer.kernel) // layer.stride + 1
    text = (
        f"x={dtype}[{batch},{layer.channels},{layer.size},{layer.size}]{layout}, "
        f"grad_output={dtype}[{batch},{layer.features},{out},{out}]{layout}, "
        f"kernel_size=[{layer.kernel},{layer.kernel}]"
    )
    for name, value, usual in (("stride", layer.stride, 1), ("padding", padding, 0)):
        if value != usual:
            text += f", {name}=[{value},{value}]"
    if layer.groups != 1:
        text += f", groups={layer.groups}"
    if options:
        text += f", {options}"
    return f"conv2d_weight_grad({text})"


def weight_grad_suite(
    name: str,
    layers: Sequence[Conv] | Mapping[Conv, int],
    batches: tuple[int, ...],
    **more: str,
) -> Suite:
    """A suite of all layers at all batch sizes, and one for each batch size by itself.

    Args:
        layers: with how often a network has each, or without.
    """
    by_batch = {n: [weight_grad(layer, n, **more) for layer in layers] for n in batches}
    counts = tuple(layers.values()) if isinstance(layers, Mapping) else ()
    for n, texts in by_batch.items():
        suite(f"{name}_n{n}", texts, method="graph", counts=counts)
    texts = [text for texts in by_batch.values() for text in texts]
    return suite(name, texts, method="graph", by=("x[0]",), counts=counts * len(batches))
