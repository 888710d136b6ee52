"""Scatter in PyTorch's own operators, by the largest position of each place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewright.compile.faults import raise_fault, report
from tilewright.device import DeviceSpec
from tilewright.impl import Executable, Implementation
from tilewright.op import Workload
from tilewright.ops._indexing import last_written, told_once
from tilewright.settings import settings


class ScatterPositions(Implementation):
    """Takes every tensor and compiles nothing, so that the last of several writes wins on a GPU
    where no kernel of ours is built, yet or at all. Several passes over the data."""

    name, backend, op = "scatter_positions", "aten", "scatter"
    stands_in = True

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        return "on a CPU aten keeps the order of writes" if device.kind == "cpu" else None

    def build(self, config: Any, w: Workload, device: DeviceSpec) -> Executable:
        return PositionsExecutable(w)


class PositionsExecutable(Executable):
    def __init__(self, w: Workload):
        self._w, self._in_place = w, "x" in w.donated
        self._places = w["x"].shape[w["dim"]] if w["x"].rank else 1
        self._checked = settings().check_indices

    def __call__(self, *tensors: Tensor) -> Tensor:
        raise_fault()
        given = self._w.call(tensors)
        shape, once = given["index"].shape, told_once(given["index"])
        outside = (once < 0) | (once >= self._places)
        report(outside)
        given["index"] = once.masked_fill(outside, 0).expand(shape)
        out = last_written(**given, skipped=outside.expand(shape))
        if self._checked and out.is_cuda and not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize(out.device)
            raise_fault()
        return tensors[0].copy_(out) if self._in_place else out
