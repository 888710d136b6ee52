"""What is written in place may not be read through another argument."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tilewright.errors import InvalidArgument
from tilewright.op import Workload


def refuse_shared_memory(w: Workload, tensors: Sequence[Tensor]) -> None:
    """Hold the tensors that the workload writes to against all others.

    Raises:
        InvalidArgument: one of them has memory of another one, too.
    """
    places = {name: _place(t) for name, t in zip(w.tensors, tensors, strict=True)}
    for name in w.operator.destinations(w):
        start, end = places[name]
        for other, (its_start, its_end) in places.items():
            if other != name and start < its_end and its_start < end:
                raise InvalidArgument(
                    f"{w.op}: {name} is written in place and shares memory with {other}; "
                    f"clone {other} before the call"
                )


def _place(t: Tensor) -> tuple[int, int]:
    """Addresses of the first byte, and behind the last."""
    reach = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    start = t.data_ptr()
    return start, start + (1 + reach) * t.itemsize if t.numel() else start
