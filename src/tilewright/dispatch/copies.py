"""Kernels of ours on contiguous copies, where PyTorch's would take tensors as they lie and break a
promise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tilewright.impl import allocate
from tilewright.op import Workload


def of_copies(w: Workload, copied: Workload, run: Callable[..., Any]) -> Callable[..., Any]:
    """For tensors of `w`, what `run` does of `copied`, the same workload on contiguous ones. What
    is written in place gets its new values at the end; a result has the layout of PyTorch's."""
    pairs = zip(w.tensors.values(), copied.tensors.values(), strict=True)
    strided = [i for i, (mine, other) in enumerate(pairs) if mine != other]
    written = next(iter(map([*w.tensors].index, w.operator.destinations(w))), None)
    (out,), (made,) = w.outputs, copied.outputs

    def call(*tensors: Tensor) -> Tensor:
        given = [*tensors]
        for i in strided:
            given[i] = tensors[i].contiguous()
        found: Tensor = run(*given)
        if written is not None:
            return tensors[written].copy_(found) if written in strided else found
        return found if out.strides == made.strides else allocate(out, found.device).copy_(found)

    return call
