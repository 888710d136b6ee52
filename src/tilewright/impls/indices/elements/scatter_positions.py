"""Scatter in PyTorch's own operators, by the largest position of each place."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tilewright.device import DeviceSpec
from tilewright.impl import Executable, Implementation
from tilewright.impls._in_place import Written
from tilewright.impls.indices._any_index import beyond, outside, reported
from tilewright.op import Workload
from tilewright.ops._indexing import last_written, places_of_x


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
        self._w, self._in_place, self._written = w, "x" in w.donated, Written(w)
        self._places = places_of_x(w)
        self.workspace_bytes = _bytes(w)

    def __call__(self, *tensors: Tensor) -> Tensor:
        self._written.refuse_shared([t.data_ptr() for t in tensors])
        given = self._w.call(tensors)
        skipped = reported(outside(given["index"], self._places))
        given["index"] = beyond(given["index"], skipped, 0)
        out = last_written(**given, skipped=skipped)
        return tensors[0].copy_(out) if self._in_place else out


def _bytes(w: Workload) -> int:
    """Of what is made besides the result: the index moved into range, which of it was not, a
    position for each element of it, and for the part of x that can be named winners twice, and
    their values or x with them."""
    x, index = w["x"], w["index"]
    out = x.numel * x.itemsize if "x" in w.donated else 0
    if not index.numel:
        return out
    told = index.distinct_bytes // index.itemsize
    named = index.numel // index.shape[w["dim"]] * places_of_x(w) if index.rank else 1
    indices = told * (1 + index.itemsize) + 8 * index.numel
    widened = 8 * index.numel if index.dtype == "i32" else 0
    values = max(8 + x.itemsize, 1 + 2 * x.itemsize) * named
    return out + indices + 8 * named + max(widened, values)
