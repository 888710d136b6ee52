"""PyTorch's own gradients of weight and bias on a CPU, by the detours that pay for some layers.

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
from tilewright.op import Workload
from tilewright.tensor_spec import HALVES

Gradients = Tensor | tuple[Tensor, ...]
Run = Callable[[Tensor, Tensor], Gradients]
OPS = ("conv2d_weight_grad", "conv2d_weight_bias_grad")


class Detour(Executable):
    """Inputs converted, gradients computed, results brought to the workload's layout and dtype.

    The gradients to which they are added, where the workload has such, come last: they are written
    to if donated.
    """

    def __init__(self, w: Workload, run: Run):
        self._outputs, self._run = w.outputs, run
        self._in_place = bool(w.operator.destinations(w))

    def __call__(self, *tensors: Tensor) -> Gradients:
        x, grad_output, *into = tensors
        found = self._run(x, grad_output)
        outs = (found,) if isinstance(found, Tensor) else found
        if into and self._in_place:
            outs = tuple(t.add_(more) for t, more in zip(into, outs, strict=True))
        else:
            if into:
                outs = tuple(t + more for t, more in zip(into, outs, strict=True))
            outs = tuple(self._given(t, i) for i, t in enumerate(outs))
        return outs[0] if isinstance(found, Tensor) else outs

    def _given(self, found: Tensor, i: int) -> Tensor:
        spec = self._outputs[i]
        if found.dtype == spec.torch_dtype and found.stride() == spec.real_strides:
            return found
        return allocate(spec, found.device).copy_(found)


class _OnCpu(Implementation):
    backend, op = "aten", OPS

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        if device.kind != "cpu":
            return f"it is a detour through a CPU's kernels, and {device.name} is none"
        return None

    def run(self, w: Workload) -> Run:
        raise NotImplementedError

    def build(self, config: Any, w: Workload, device: DeviceSpec) -> Executable:
        return Detour(w, self.run(w))


class _InFormat(_OnCpu):
    layout: torch.memory_format

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        if "into" in w.tensors and w.outputs[0].dtype in HALVES:
            return f"the sum would be rounded to {w.outputs[0].dtype} twice"
        return super().unsupported(w, device)

    def run(self, w: Workload) -> Run:
        run = _vendor(w)
        return lambda x, grad: run(*(t.contiguous(memory_format=self.layout) for t in (x, grad)))


class ChannelsLast(_InFormat):
    """Both tensors in channels_last, which depthwise filters gain most from."""

    name, layout = "conv2d_weight_grad_channels_last", torch.channels_last


class Contiguous(_InFormat):
    """Both tensors contiguous."""

    name, layout = "conv2d_weight_grad_contiguous", torch.contiguous_format


class ThroughFp32(_OnCpu):
    """Halves widened to fp32: not every CPU multiplies them."""

    name = "conv2d_weight_grad_f32"

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        if w.main.dtype not in HALVES:
            return f"x is {w.main.dtype}; f16 and bf16 can be widened"
        return super().unsupported(w, device)

    def run(self, w: Workload) -> Run:
        run = _vendor(w)
        return lambda x, grad: run(x.float(), grad.float())


class PerImage(_OnCpu):
    """One matrix product for each image: its patches by its output gradient.

    PyTorch's fp64 gradient has no kernel of its own; this one keeps an image's patches in cache.
    """

    name = "conv2d_weight_grad_per_image"

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        if w.main.dtype in HALVES:
            return f"x is {w.main.dtype}: images are summed in the dtype of x"
        return super().unsupported(w, device)

    def run(self, w: Workload) -> Run:
        groups, shape = w["groups"], w.outputs[0].shape
        geometry = {name: w[name] for name in ("kernel_size", "dilation", "padding", "stride")}

        def products(x: Tensor, grad: Tensor) -> Gradients:
            total = x.new_zeros(groups, shape[0] // groups, shape[1] * shape[2] * shape[3])
            for image, g in zip(x, grad, strict=True):
                patches = F.unfold(image[None], **geometry)[0]
                pixels = patches.shape[-1]
                patches = patches.view(groups, -1, pixels).transpose(1, 2)
                total.baddbmm_(g.reshape(groups, -1, pixels), patches)
            weight = total.view(shape)
            return weight if len(w.outputs) == 1 else (weight, grad.sum((0, 2, 3)))

        return products


def _vendor(w: Workload) -> Run:
    """PyTorch's gradients alone, as wide as the results; `Detour` adds them to others."""
    if "into" not in w.tensors:
        return vendor(w)
    alone: dict[str, Any] = dict.fromkeys(w.operator.writes)
    wide = w.outputs[0].dtype if w.outputs[0].dtype != w.main.dtype else None
    return vendor(w.operator.workload(**{**dict(w.args), **alone, "out_dtype": wide}))
