"""One flat index of several index tensors, by one launch on a GPU (kernels/indices/flat_index.cu).

Sizes and strides are arguments: a binary serves as many tensors of the same dtypes, whose positions
as many axes number.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.build import CompileTask
from tilewright.compile.cache import compiled
from tilewright.compile.launch import CudaKernel, Launcher
from tilewright.device import DeviceSpec
from tilewright.impl import allocator
from tilewright.impls.indices._indexed import INDEX, cuda_task
from tilewright.tensor_spec import DTYPE_NAMES, TensorSpec

ENTRY, THREADS = "flatten", 256
MOST_AXES = 15
"""Beside a size in a structure of 128 bytes."""
MOST_TENSORS = 29
"""An address and a structure each, beside another of both, in 4096 bytes of arguments."""


class FlatIndex:
    """What makes one index of tensors such as these, which point into dims of these sizes.

    It is int64, of one tensor what that is, if numbers of places fit in there. Positions in the
    flattened dims, counted from the front; -1 where one is out of range.

    Raises:
        CompileError: the kernel does not compile.
    """

    def __init__(self, indices: Sequence[TensorSpec], sizes: Sequence[int], device: DeviceSpec):
        axes = _axes(indices)
        self.count = math.prod(axis.size for axis in axes)
        alone = len(sizes) == 1 and sizes[0] <= torch.iinfo(torch.int32).max
        self.dtype = indices[0].torch_dtype if alone else torch.int64
        self.task = _task(indices, self.dtype, len(axes), self.count >= 2**31, device)
        self.kernel = _kernel(self.task, len(indices))
        self._dims = [
            _structure(size, *(axis.strides[n] for axis in axes)) for n, size in enumerate(sizes)
        ]
        self._axes = _structure(self.count, *(axis.size for axis in axes))
        self.grid = math.ceil(self.count / THREADS), 1, 1
        self._launchers: dict[int, Launcher] = {}

    def load(self, device_index: int) -> None:
        """Have the kernel there.

        Raises:
            LaunchError: the driver refused, or the current stream is captured.
        """
        self.kernel.load(device_index, torch._C._cuda_getCurrentRawStream(device_index))

    def arguments(self, indices: Sequence[Tensor], out: Tensor) -> list[Any]:
        """Of the kernel."""
        found: list[Any] = []
        for index, dim in zip(indices, self._dims, strict=True):
            found += index.data_ptr(), dim
        return [*found, self._axes, out.data_ptr()]

    def __call__(self, indices: Sequence[Tensor]) -> Tensor:
        """The flat index, of one dim, of such tensors; on their device and the current stream.

        Raises:
            LaunchError: the driver refused.
        """
        device = indices[0].device
        out = allocator.on(device)((self.count,), (1,), self.dtype)
        if self.count:
            on = device.index
            stream = torch._C._cuda_getCurrentRawStream(on)
            launch = self._launchers.get(on) or self._launcher(on, stream)
            launch(stream, self.arguments(indices, out))
        return out

    def _launcher(self, device_index: int, stream: int) -> Launcher:
        block = THREADS, 1, 1
        found = self.kernel.launcher(device_index, self.grid, block, 0, 1, stream)
        self._launchers[device_index] = found
        return found


def serves(dims: int, tensors: int) -> bool:
    """Whether launches have room for so many tensors that broadcast to so many dims."""
    return dims <= MOST_AXES and tensors <= MOST_TENSORS


class _Axis(NamedTuple):
    """`size` positions; from one to the next the tensors are so many elements on."""

    size: int
    strides: tuple[int, ...]


def _axes(indices: Sequence[TensorSpec]) -> list[_Axis]:
    """Of the shape that the tensors broadcast to, innermost first, as few as do."""
    shape = torch.broadcast_shapes(*(i.shape for i in indices))
    strides = [_expanded(i, len(shape)) for i in indices]
    found: list[_Axis] = []
    for size, *steps in reversed([*zip(shape, *strides, strict=True)]):
        if size == 1:
            continue
        last = found[-1] if found else None
        if last and all(s == last.size * t for s, t in zip(steps, last.strides, strict=True)):
            found[-1] = _Axis(last.size * size, last.strides)
        else:
            found.append(_Axis(size, tuple(steps)))
    return found or [_Axis(1, (0,) * len(indices))]


def _expanded(index: TensorSpec, rank: int) -> list[int]:
    """Strides along as many dims."""
    own = [0 if n == 1 else s for n, s in zip(index.shape, index.real_strides, strict=True)]
    return [0] * (rank - len(own)) + own


def _structure(*numbers: int) -> bytes:
    return struct.pack(f"{len(numbers)}q", *numbers).ljust(8 * (1 + MOST_AXES), b"\0")


def _task(
    indices: Sequence[TensorSpec], out: torch.dtype, axes: int, wide: bool, device: DeviceSpec
) -> CompileTask:
    listed = (f"TENSOR({n}, {INDEX[i.dtype]})" for n, i in enumerate(indices))
    macros: dict[str, int | str] = {
        "REDUCE": 0,
        "THREADS": THREADS,
        "AXES": axes,
        "POSITION": "u64" if wide else "u32",
        "TENSORS": " ".join(listed),
    }
    name = DTYPE_NAMES[out]
    return cuda_task(["flat_index.cu"], ENTRY, name, name, macros, device)


@functools.cache
def _kernel(task: CompileTask, tensors: int) -> CudaKernel:
    """Loaded once, whatever the shapes."""
    return CudaKernel(compiled(task), ENTRY, "PT" * tensors + "TP")
