"""Indices looked at before PyTorch's kernels run: on a CPU those find out on the way, on a GPU they
end the process's use of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilewright.errors import IndexOutOfRange
from tilewright.op import Workload
from tilewright.ops._indexing import told_once


def in_range_first(w: Workload, run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` of a scatter or the like, which raises IndexOutOfRange before it writes anything; on a
    GPU it waits to know, so not while its stream is captured."""
    at = [*w.tensors].index("index")
    size = 1 if "x" in w.tensors else w["num_weights"]
    if "x" in w.tensors and w["x"].rank:
        size = w["x"].shape[w["dim"]]

    def call(*tensors: Tensor) -> Any:
        index = told_once(tensors[at])
        if index.numel() and not (index.is_cuda and torch.cuda.is_current_stream_capturing()):
            least, most = (int(value) for value in torch.aminmax(index))
            if least < 0 or most >= size:
                raise IndexOutOfRange(
                    f"{w.op}: index {least if least < 0 else most} is out of range for {size} "
                    "places; nothing was written"
                )
        return run(*tensors)

    return call
