"""Scatter in PyTorch's own operators, by the largest position of each place."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tilewright.device import DeviceSpec
from tilewright.impl import Executable, Implementation
from tilewright.impls._any_index import beyond, outside, reported
from tilewright.op import Workload
from tilewright.ops._indexing import last_written


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

    def __call__(self, *tensors: Tensor) -> Tensor:
        given = self._w.call(tensors)
        skipped = reported(outside(given["index"], self._places))
        given["index"] = beyond(given["index"], skipped, 0)
        out = last_written(**given, skipped=skipped)
        return tensors[0].copy_(out) if self._in_place else out
