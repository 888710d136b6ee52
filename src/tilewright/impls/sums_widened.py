"""Sums of halves on a CPU by PyTorch's kernels for fp32, rounded once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewright.device import DeviceSpec
from tilewright.impl import Executable, Implementation
from tilewright.impls._rows import OPERATORS
from tilewright.op import Workload
from tilewright.ops._indexing import places_of_x, refuse_out_of_range
from tilewright.tensor_spec import HALVES


class SumsWidened(Implementation):
    """Takes every layout and compiles nothing, so that halves are not rounded at each addition
    where no kernel of ours is built, yet or at all. Moves fp32 copies of all tensors, in place the
    whole table, too."""

    name, backend, op = "sums_widened", "aten", OPERATORS
    stands_in = True

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        if device.kind != "cpu":
            return f"it runs on a CPU, not on {device.name}"
        if w.main.dtype not in HALVES:
            return f"{w.main.dtype} is no half, and aten sums it as it is"
        if not w.promises_more(device.kind):
            return "a maximum or minimum is no sum: aten has nothing to round"
        return None

    def build(self, config: Any, w: Workload, device: DeviceSpec) -> Executable:
        return WidenedExecutable(w)


class WidenedExecutable(Executable):
    def __init__(self, w: Workload):
        self._w, self._in_place = w, "x" in w.donated
        self._places = places_of_x(w) if "x" in w.tensors else w["num_weights"]

    def __call__(self, *tensors: Tensor) -> Tensor:
        w = self._w
        given = w.call(tensors)
        refuse_out_of_range(w.op, given["index"], self._places)
        wide = {
            n: v.float() if isinstance(v, Tensor) and v.is_floating_point() else v
            for n, v in given.items()
        }
        if mean := wide.get("scale_grad_by_freq", False):
            wide["scale_grad_by_freq"] = False
        out = w.operator.reference(**wide)
        if mean:  # divided once, as by rows_cpp: PyTorch divides each term
            terms = torch.bincount(given["index"].reshape(-1), minlength=self._places)
            out /= terms.clamp_min(1)[:, None]
        return given["x"].copy_(out) if self._in_place else out.to(w.main.torch_dtype)
