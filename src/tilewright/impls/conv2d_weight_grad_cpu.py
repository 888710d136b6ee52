"""PyTorch's own weight gradient on a CPU, by the detours that pay for some layers.

Which one pays depends on layout, dtype and shape: the tuner finds out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tilewright.device import DeviceSpec
from tilewright.impl import Executable, Implementation, allocate
from tilewright.impls._vendor import vendor
from tilewright.op import HALVES, Workload


class Detour(Executable):
    """Inputs converted, the gradient computed, the result brought to the workload's layout."""

    def __init__(self, w: Workload, run: Callable[[Tensor, Tensor], Tensor]):
        self._output, self._run = w.outputs[0], run

    def __call__(self, *tensors: Tensor) -> Tensor:
        x, grad_output = tensors
        found = self._run(x, grad_output)
        strides = self._output.real_strides
        if found.dtype == self._output.torch_dtype and found.stride() == strides:
            return found
        return allocate(self._output, x.device).copy_(found)


class _OnCpu(Implementation):
    backend, op = "aten", "conv2d_weight_grad"

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        if device.kind != "cpu":
            return f"it is a detour through a CPU's kernels, and {device.name} is none"
        return None

    def run(self, w: Workload) -> Callable[[Tensor, Tensor], Tensor]:
        raise NotImplementedError

    def build(self, config: Any, w: Workload, device: DeviceSpec) -> Executable:
        return Detour(w, self.run(w))


class ChannelsLast(_OnCpu):
    """Both tensors in channels_last, which depthwise filters gain most from."""

    name = "conv2d_weight_grad_channels_last"

    def run(self, w: Workload) -> Callable[[Tensor, Tensor], Tensor]:
        return _in_format(w, torch.channels_last)


class Contiguous(_OnCpu):
    """Both tensors contiguous."""

    name = "conv2d_weight_grad_contiguous"

    def run(self, w: Workload) -> Callable[[Tensor, Tensor], Tensor]:
        return _in_format(w, torch.contiguous_format)


class ThroughFp32(_OnCpu):
    """Halves widened to fp32: not every CPU multiplies them."""

    name = "conv2d_weight_grad_f32"

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        if w.main.dtype not in HALVES:
            return f"x is {w.main.dtype}; f16 and bf16 can be widened"
        return super().unsupported(w, device)

    def run(self, w: Workload) -> Callable[[Tensor, Tensor], Tensor]:
        gradient = vendor(w)
        return lambda x, grad: gradient(x.float(), grad.float())  # type: ignore[return-value]


class PerImage(_OnCpu):
    """One matrix product for each image: its patches by its output gradient.

    PyTorch's fp64 gradient has no kernel of its own; this one keeps an image's patches in cache.
    """

    name = "conv2d_weight_grad_per_image"

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        if w.main.dtype in HALVES:
            return f"x is {w.main.dtype}: images are summed in the dtype of x"
        return super().unsupported(w, device)

    def run(self, w: Workload) -> Callable[[Tensor, Tensor], Tensor]:
        groups, shape = w["groups"], w.outputs[0].shape
        geometry = {name: w[name] for name in ("kernel_size", "dilation", "padding", "stride")}

        def products(x: Tensor, grad: Tensor) -> Tensor:
            total = x.new_zeros(groups, shape[0] // groups, shape[1] * shape[2] * shape[3])
            for image, g in zip(x, grad, strict=True):
                patches = F.unfold(image[None], **geometry)[0]
                pixels = patches.shape[-1]
                patches = patches.view(groups, -1, pixels).transpose(1, 2)
                total.baddbmm_(g.reshape(groups, -1, pixels), patches)
            return total.view(shape)

        return products


def _in_format(w: Workload, layout: torch.memory_format) -> Callable[[Tensor, Tensor], Tensor]:
    gradient = vendor(w)

    def converted(x: Tensor, grad: Tensor) -> Tensor:
        x, grad = (t.contiguous(memory_format=layout) for t in (x, grad))
        return gradient(x, grad)  # type: ignore[return-value]

    return converted
