"""PyTorch's kernels where they race, and ours in their place under its deterministic mode.

They run where nothing of ours does: where settings waive what they break, say
(Workload.promises_more). `torch.use_deterministic_algorithms(True)` makes PyTorch's sums of rows up
to thousands of times slower. Kernels of this package give the same bits in every run anyway, so
under that mode they run where PyTorch would, even without a record: there is nothing to lose. So
they do where a record speaks for one that sums in any order, which such a setting allows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilewright.op import Workload

Run = Callable[..., Any]


def races(w: Workload, device: torch.device) -> bool:
    """Whether PyTorch's own kernel for the workload gives the same bits only under its
    deterministic mode."""
    indexed = w.operator.indexed
    return device.type == "cuda" and indexed is not None and indexed.races


class ByMode:
    """What sums in any order; under PyTorch's deterministic mode what keeps one, once a shape has
    come back.

    Args:
        run: outside that mode.
        cold: under it, as long as `build` was not called and where that gives None.
        build: gives a kernel of ours, or None if there is none for the workload; called once.
        cold_calls: so many calls under that mode are `cold`, since building takes time.
    """

    def __init__(
        self, run: Run, cold: Run, build: Callable[[], Run | None], cold_calls: int
    ) -> None:
        self._run, self._cold = run, cold
        self._build, self._cold_calls = build, cold_calls
        self._ours: Run | None = None

    def __call__(self, *tensors: Tensor) -> Any:
        if not torch._C._get_deterministic_algorithms():
            return self._run(*tensors)
        if self._ours is None and not torch.cuda.is_current_stream_capturing():
            self._cold_calls -= 1
            if self._cold_calls < 0:
                self._ours = self._build() or self._cold
        return (self._ours or self._cold)(*tensors)
