"""PyTorch's own kernels where it is to give the same bits in each run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.backends import cudnn

from tilewright.device import DeviceSpec
from tilewright.impl import Executable, Implementation
from tilewright.impls._vendor import vendor
from tilewright.op import Workload

CONVOLUTIONS = ("conv2d_weight_grad", "conv2d_weight_bias_grad")


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Under torch.use_deterministic_algorithms(True)."""
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)


@contextmanager
def deterministic_cudnn() -> Iterator[None]:
    """cuDNN takes algorithms that do not race, as under torch.use_deterministic_algorithms(True),
    but PyTorch neither refuses what other threads run meanwhile nor fills memory that it gives."""
    before = cudnn.deterministic
    cudnn.deterministic = True
    try:
        yield
    finally:
        cudnn.deterministic = before


class DeterministicExecutable(Executable):
    """The mode is the process's: calls from several threads at once may see each other's."""

    def __init__(self, w: Workload):
        self._run: Callable[..., Any] = vendor(w)
        self._mode: Callable[[], AbstractContextManager[None]] = (
            deterministic_cudnn if w.op in CONVOLUTIONS else deterministic_algorithms
        )

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        with self._mode():
            return self._run(*tensors)


class AtenDeterministic(Implementation):
    """For operators whose CUDA kernels race otherwise: the same bits in each run."""

    name = "aten_deterministic"
    backend = "aten"

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        races = w.operator.indexed is not None and w.operator.indexed.races
        if not races and w.op not in CONVOLUTIONS:
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
