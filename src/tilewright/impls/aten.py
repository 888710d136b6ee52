"""PyTorch's own kernels: the vendor, and what runs where nothing is known to be better."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.device import DeviceSpec
from tilewright.impl import Executable, Implementation
from tilewright.impls._vendor import vendor
from tilewright.op import Workload


class AtenExecutable(Executable):
    def __init__(self, w: Workload):
        self._run = vendor(w)

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        return self._run(*tensors)


class Aten(Implementation):
    """The operator's reference, eagerly, in the dtypes of the workload."""

    name = "aten"
    backend = "aten"

    def build(self, config: Any, w: Workload, device: DeviceSpec) -> Executable:
        return AtenExecutable(w)
