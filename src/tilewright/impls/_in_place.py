"""What is written in place may not be read through another argument."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tilewright.errors import InvalidArgument
from tilewright.op import Workload
from tilewright.tensor_spec import TensorSpec


class Written:
    """The tensors that a workload writes to, if any, and how far each of its tensors reaches.

    Args:
        specs: of its tensors, as they come.
    """

    def __init__(self, w: Workload, specs: Iterable[TensorSpec] | None = None):
        self._op, self._names = w.op, list(w.tensors)
        self._bytes = [s.storage_elements * s.itemsize for s in specs or w.tensors.values()]
        self._pairs = [
            (i, j)
            for i in map(self._names.index, w.operator.destinations(w))
            for j in range(len(self._names))
            if i != j
        ]

    def __bool__(self) -> bool:
        return bool(self._pairs)

    def refuse_shared_memory(self, starts: Sequence[int]) -> None:
        """Hold what is written against all others.

        Args:
            starts: the tensors' addresses.

        Raises:
            InvalidArgument: it has memory of another one, too.
        """
        for i, j in self._pairs:
            if starts[i] < starts[j] + self._bytes[j] and starts[j] < starts[i] + self._bytes[i]:
                written, other = self._names[i], self._names[j]
                raise InvalidArgument(
                    f"{self._op}: {written} is written in place and shares memory with {other}; "
                    f"clone {other} before the call"
                )
