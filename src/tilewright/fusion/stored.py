"""What a graph's kernels are given: where they write their results, and numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from tilewright.fusion.frontend.families import outputs_of
from tilewright.fusion.ir import Graph
from tilewright.impl import Executable
from tilewright.op import Workload


class Stored(Executable):
    """What runs the kernels of a graph.

    Attributes:
        outputs: shape, strides and dtype of each tensor that they write.
        written: as the graph's; kernels are the same for any place in a tensor.
        numbers: as the graph's.
        scalars: what kernels are given for the numbers of the workload.
    """

    def __init__(self, graph: Graph, w: Workload):
        self.written, self.numbers = graph.written, graph.numbers
        self.scalars = self.scalars_of(tuple(w.scalars.values()))
        outputs = graph.stored or outputs_of(w)
        self.outputs = [(o.shape, o.real_strides, o.torch_dtype) for o in outputs]

    def scalars_of(self, numbers: tuple[float, ...]) -> tuple[float, ...]:
        """What kernels are given for those of a call."""
        return numbers if self.numbers is None else self.numbers(numbers)

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
