"""PyTorch's other ways to add rows: baselines, since programs use whichever is fastest today."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewright.device import DeviceSpec
from tilewright.impl import Executable, Implementation, allocate
from tilewright.op import Workload


class _Rows(Executable):
    def __init__(self, w: Workload):
        self._dim, self._alpha = w["dim"], w["alpha"]
        self._out = None if "x" in w.donated else w.outputs[0]

    def __call__(self, *tensors: Tensor) -> Tensor:
        x, index, source = tensors
        out = x if self._out is None else allocate(self._out, x.device).copy_(x)
        scaled = source if self._alpha == 1 else source * self._alpha
        return self._add(out, index, scaled)

    def _add(self, out: Tensor, index: Tensor, source: Tensor) -> Tensor:
        raise NotImplementedError


class ScatterAdd(_Rows):
    def _add(self, out: Tensor, index: Tensor, source: Tensor) -> Tensor:
        line = [1] * source.dim()
        line[self._dim] = -1
        return out.scatter_add_(self._dim, index.view(line).expand(source.shape), source)


class IndexPut(_Rows):
    def _add(self, out: Tensor, index: Tensor, source: Tensor) -> Tensor:
        leading = (None,) * self._dim
        torch.ops.aten.index_put_(out, [*leading, index], source, True)
        return out


class _RowsOfAten(Implementation):
    backend = "aten"
    op = "index_add"
    executable: type[_Rows]

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        if w["x"].rank == 0 or w["index"].rank == 0:
            return "it needs tensors with dims"
        if w["alpha"] != 1 and w["x"].dtype not in ("f32", "f64"):
            return f"source times alpha={w['alpha']} would be rounded to {w['x'].dtype}"
        return None

    def build(self, config: Any, w: Workload, device: DeviceSpec) -> Executable:
        return self.executable(w)


class IndexAddScatterAdd(_RowsOfAten):
    """torch.scatter_add with the index expanded over the rows."""

    name = "index_add_scatter_add"
    executable = ScatterAdd


class IndexAddIndexPut(_RowsOfAten):
    """torch.index_put with accumulate=True."""

    name = "index_add_index_put"
    executable = IndexPut
