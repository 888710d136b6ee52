"""PyTorch's own kernels under torch.use_deterministic_algorithms(True)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilewright.device import DeviceSpec
from tilewright.impl import Executable, Implementation
from tilewright.impls._vendor import vendor
from tilewright.op import Workload


class DeterministicExecutable(Executable):
    """The mode is the process's: calls from several threads at once may see each other's."""

    def __init__(self, w: Workload):
        self._run: Callable[..., Any] = vendor(w)

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        before = torch.are_deterministic_algorithms_enabled()
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(True)
        try:
            return self._run(*tensors)
        finally:
            torch.use_deterministic_algorithms(before, warn_only=warns)


class AtenDeterministic(Implementation):
    """For operators whose CUDA kernels race otherwise: the same bits in each run."""

    name = "aten_deterministic"
    backend = "aten"

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        if w.operator.indexed is None or not w.operator.indexed.races:
            return "PyTorch's kernels for this operator do not race; aten is the same"
        if device.kind == "cpu":
            return "PyTorch's CPU kernels do not race; aten is the same"
        if w.op == "index_reduce" or (w.op == "scatter_reduce" and w["reduce"] == "prod"):
            return f"PyTorch refuses {w.op} in its deterministic mode"
        if w.main.rank == 0:
            return "PyTorch's deterministic kernels fail on a tensor without dims"
        return None

    def build(self, config: Any, w: Workload, device: DeviceSpec) -> Executable:
        return DeterministicExecutable(w)
