"""What is written in place may not be read through another argument, and autograd is told of it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from tilewright.errors import SharedMemory
from tilewright.op import Workload
from tilewright.tensor_spec import TensorSpec


class Written:
    """The tensors that a workload writes to, if any, and how far each of its tensors reaches.

    Args:
        specs: of its tensors, as they come.
    """

    def __init__(self, w: Workload, specs: Iterable[TensorSpec] | None = None):
        self._op, self._names = w.op, list(w.tensors)
        self._specs = list(specs or w.tensors.values())
        self._bytes = [*map(_bytes, self._specs)]
        self._written = [*map(self._names.index, w.operator.destinations(w))]
        others = range(len(self._names))
        self._pairs = [(i, j) for i in self._written for j in others if i != j]

    def __bool__(self) -> bool:
        return bool(self._pairs)

    def refuse_shared(self, starts: Sequence[int]) -> None:
        """Hold what is written against all others.

        Args:
            starts: the tensors' addresses.

        Raises:
            SharedMemory: it has memory of another one, too.
        """
        for i, j in self._pairs:
            if starts[i] < starts[j] + self._bytes[j] and starts[j] < starts[i] + self._bytes[i]:
                if _side_by_side(self._specs[i], self._specs[j], starts[j] - starts[i]):
                    continue
                raise _shared(self._op, self._names[i], self._names[j])

    def begin(self, tensors: Sequence[torch.Tensor], starts: Sequence[int]) -> None:
        """The same, and count it as a change, as PyTorch does: what autograd has saved of it is no
        longer what it was.

        Raises:
            SharedMemory: as above.
            RuntimeError: an inference tensor is written to outside inference mode.
        """
        self.refuse_shared(starts)
        written_to = [tensors[i] for i in self._written]
        if not torch.is_inference_mode_enabled() and any(t.is_inference() for t in written_to):
            raise RuntimeError(
                f"{self._op}: an inference tensor is written in place outside inference mode; "
                "clone it before the call"
            )
        torch.autograd.graph.increment_version(written_to)


def apart(w: Workload, run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, which does not look itself, behind a look at the memory that it writes to."""
    written = Written(w)
    if not written:
        return run

    def call(*tensors: torch.Tensor) -> Any:
        written.refuse_shared([t.data_ptr() for t in tensors])
        return run(*tensors)

    return call


def refuse_shared(op: str, name: str, written: torch.Tensor, **read: torch.Tensor) -> None:
    """The same for a call that copies what it reads before it writes, on some ways.

    Raises:
        SharedMemory: `written`, argument `name`, has memory of one that is read, too.
    """
    start, end = _bounds(written)
    for other, t in read.items():
        first, last = _bounds(t)
        if max(start, first) < min(end, last):
            a, b = TensorSpec.of(written), TensorSpec.of(t)
            if not _side_by_side(a, b, first - start):
                raise _shared(op, name, other)


def _bounds(t: torch.Tensor) -> tuple[int, int]:
    """Its first address and the one behind its last."""
    start = t.data_ptr()
    return start, start + _reach(t.shape, t.stride()) * t.itemsize


@functools.lru_cache(maxsize=4096)
def _reach(shape: torch.Size, strides: tuple[int, ...]) -> int:
    """Elements from the first to the last one addressed."""
    return 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if all(shape) else 0


def _bytes(s: TensorSpec) -> int:
    return s.storage_elements * s.itemsize


def _shared(op: str, written: str, other: str) -> SharedMemory:
    return SharedMemory(
        f"{op}: {written} is written in place and shares memory with {other}; "
        f"clone {other} before the call"
    )


def _side_by_side(a: TensorSpec, b: TensorSpec, apart_bytes: int) -> bool:
    """Whether two tensors have different columns of the same rows, blocks of columns or every other
    one, and so no element in common."""
    steps = [
        [(n, s * t.itemsize) for n, s in zip(t.shape, t.real_strides, strict=True) if n > 1 and s]
        for t in (a, b)
    ]
    every = {step for of_tensor in steps for _, step in of_tensor}
    for least in every:
        row = math.gcd(*(step for step in every if step >= least))
        widths = [
            t.itemsize + sum((n - 1) * step for n, step in of_tensor if step < least)
            for t, of_tensor in zip((a, b), steps, strict=True)
        ]
        start = apart_bytes % row
        if widths[0] <= start and start + widths[1] <= row:
            return True
    return False
