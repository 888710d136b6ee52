"""PyTorch's own kernels: the vendor, and what runs where nothing is known to be better."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.device import DeviceSpec
from tilewright.impl import Executable, Implementation
from tilewright.impls._vendor import unseeded, vendor, without_seed
from tilewright.op import Workload


class AtenExecutable(Executable):
    def __init__(self, w: Workload):
        self._run = without_seed(w, vendor(unseeded(w)))

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        return self._run(*tensors)


class Aten(Implementation):
    """The operator's reference, eagerly, in the dtypes of the workload.

    What it draws comes from PyTorch's own generator, as it would for a user: its masks are others
    than those of kernels that take a seed.
    """

    name = "aten"
    backend = "aten"

    def build(self, config: Any, w: Workload, device: DeviceSpec) -> Executable:
        return AtenExecutable(w)
