"""Where a graph's kernels write their results."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from tilewright.impl import Executable


class Stored(Executable):
    """What runs the kernels of a graph.

    Attributes:
        written: as the graph's; kernels are the same for any place in a tensor.
    """

    written: tuple[tuple[int, int], ...] | None = None

    def __call__(
        self,
        *tensors: torch.Tensor,
        scalars: tuple[float, ...] | None = None,
        pointers: list[int] | None = None,
    ) -> Any:
        """Outputs for the tensors; `pointers` are the addresses of the graph's inputs."""
        raise NotImplementedError

    def addresses(self, outs: Iterable[torch.Tensor]) -> list[int]:
        """Of each output of the graph, which is a tensor or a slice of one."""
        found = [t.data_ptr() for t in outs]
        if self.written is None:
            return found
        return [found[k] + offset for k, offset in self.written]
