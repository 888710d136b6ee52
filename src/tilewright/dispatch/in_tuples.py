"""One result as the tuple that an operator's annotation promises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilewright.op import Workload

Run = Callable[..., Any]


def in_tuples(w: Workload, run: Run) -> Run:
    """Executables of one output return it alone; an operator of some gradients, of which one is
    asked for, returns a tuple of it, as PyTorch's does."""
    alone = len(w.outputs) == 1 and w.operator.returns_any_number
    return _InTuples(run) if alone else run


class _InTuples:
    """It is called as `run` may be called (see recent.py)."""

    def __init__(self, run: Run):
        self._run = run
        self.takes_pointers = getattr(run, "takes_pointers", False)

    def __call__(self, *tensors: Any, **given: Any) -> tuple[Any]:
        return (self._run(*tensors, **given),)

    def by_addresses(self, device: torch.device) -> Run | None:
        by_addresses = getattr(self._run, "by_addresses", None)
        run = by_addresses and by_addresses(device)
        return run and (lambda *addresses: (run(*addresses),))
