"""What is written in place may not be read through another argument, and autograd is told of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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

    def begin(self, tensors: Sequence[torch.Tensor], starts: Sequence[int]) -> None:
        """Hold what is written against all others, and count it as a change, as PyTorch does: what
        autograd has saved of it is no longer what it was.

        Args:
            starts: the tensors' addresses.

        Raises:
            SharedMemory: it has memory of another one, too.
            RuntimeError: an inference tensor is written to outside inference mode.
        """
        for i, j in self._pairs:
            if starts[i] < starts[j] + self._bytes[j] and starts[j] < starts[i] + self._bytes[i]:
                if _side_by_side(self._specs[i], self._specs[j], starts[j] - starts[i]):
                    continue
                raise _shared(self._op, self._names[i], self._names[j])
        written_to = [tensors[i] for i in self._written]
        if not torch.is_inference_mode_enabled() and any(t.is_inference() for t in written_to):
            raise RuntimeError(
                f"{self._op}: an inference tensor is written in place outside inference mode; "
                "clone it before the call"
            )
        torch.autograd.graph.increment_version(written_to)


def refuse_shared(op: str, name: str, written: torch.Tensor, **read: torch.Tensor) -> None:
    """The same for a call that copies what it reads before it writes, on some ways.

    Raises:
        SharedMemory: `written`, argument `name`, has memory of one that is read, too.
    """
    a = TensorSpec.of(written)
    for other, t in read.items():
        b, apart = TensorSpec.of(t), t.data_ptr() - written.data_ptr()
        meet = a.numel and b.numel and -_bytes(b) < apart < _bytes(a)
        if meet and not _side_by_side(a, b, apart):
            raise _shared(op, name, other)


def _bytes(s: TensorSpec) -> int:
    return s.storage_elements * s.itemsize


def _shared(op: str, written: str, other: str) -> SharedMemory:
    return SharedMemory(
        f"{op}: {written} is written in place and shares memory with {other}; "
        f"clone {other} before the call"
    )


def _side_by_side(a: TensorSpec, b: TensorSpec, apart_bytes: int) -> bool:
    """Whether two matrices are columns of one, and have none in common."""
    if not (a.rank == b.rank == 2 and a.itemsize == b.itemsize):
        return False
    if a.real_strides != b.real_strides or a.real_strides[1] != 1:
        return False
    row = a.real_strides[0]
    apart = apart_bytes // a.itemsize % row
    return apart >= a.shape[1] and apart + b.shape[1] <= row
