"""Tensors that a reference makes of sizes alone, in a trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_BESIDE = {
    torch.ops.aten.zeros.default: torch.ops.aten.new_zeros.default,
    torch.ops.aten.ones.default: torch.ops.aten.new_ones.default,
    torch.ops.aten.full.default: torch.ops.aten.new_full.default,
    torch.ops.aten.empty.memory_format: torch.ops.aten.new_empty.default,
}


class MadeBeside(TorchDispatchMode):
    """Inside, they are as fake as the argument `beside`: autograd replays the views through which a
    fake tensor is written to, and takes parts of others by their strides, which no kernel has."""

    def __init__(self, beside: Tensor):
        super().__init__()
        self.beside = beside

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if function in _BESIDE and args[0]:
            dtype = kwargs.get("dtype") or _dtype_of(*args[1:2])
            return _BESIDE[function](self.beside, *args, dtype=dtype, device=self.beside.device)
        return function(*args, **kwargs)


def _dtype_of(number: float = 0.0) -> torch.dtype:
    """What PyTorch makes of a number that no dtype is given for."""
    return {bool: torch.bool, int: torch.int64}.get(type(number), torch.get_default_dtype())
