"""Memory that shows what a kernel did to it: poisoned before use, guarded on both sides."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tilewright.impl import Empty, allocator
from tilewright.tensor_spec import DTYPE_NAMES

GUARD_BYTES = 4096
"""On each side of an allocation; a multiple of every alignment that PyTorch's memory has."""

GUARD = 0xA5
POISONS = (0xFF, 0x7B)
"""Repeated bytes: NaN, or -1; and a large number, for code that skips NaN."""


@dataclass(frozen=True)
class Allocation:
    """`size_bytes` of payload in `buffer`, a flat byte tensor, after GUARD_BYTES of guard."""

    buffer: Tensor
    size_bytes: int
    text: str

    @property
    def payload(self) -> Tensor:
        return self.buffer[GUARD_BYTES : GUARD_BYTES + self.size_bytes]

    @property
    def guards(self) -> tuple[Tensor, Tensor]:
        return self.buffer[:GUARD_BYTES], self.buffer[GUARD_BYTES + self.size_bytes :]


class GuardedMemory:
    """Takes the place of the allocator and remembers what it gave out.

    Args:
        poison: the byte that fills every payload.
    """

    def __init__(self, poison: int):
        self._poison = poison
        self._allocations: list[Allocation] = []

    def on(self, device: torch.device) -> Empty:
        return partial(self._empty_strided, device)

    def _empty_strided(
        self,
        device: torch.device,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: torch.dtype,
    ) -> Tensor:
        span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        size_bytes = 0 if 0 in shape else span * dtype.itemsize
        total = 2 * GUARD_BYTES + -(-size_bytes // 16) * 16
        buffer = torch.empty(total, dtype=torch.uint8, device=device)
        text = f"{DTYPE_NAMES.get(dtype, dtype)}[{','.join(map(str, shape))}]"
        allocation = Allocation(buffer, size_bytes, text)
        for guard in allocation.guards:
            guard.fill_(GUARD)
        allocation.payload.fill_(self._poison)
        self._allocations.append(allocation)
        offset = GUARD_BYTES // dtype.itemsize
        return buffer.view(dtype).as_strided(shape, strides, offset)

    def damage(self) -> str | None:
        """Where a guard was written, or None. Waits for the device."""
        for allocation in self._allocations:
            before, after = allocation.guards
            if not torch.cat((before, after)).ne(GUARD).any():
                continue
            if (wrong := after.ne(GUARD)).any():
                place = f"{int(wrong.to(torch.int8).argmax())} bytes past its end"
            else:
                last = int(before.ne(GUARD).nonzero()[-1])
                place = f"{GUARD_BYTES - last} bytes before its start"
            return f"wrote outside an allocation of {allocation.text}, {place}"
        return None


_current = threading.local()
_lock = threading.Lock()
_users = 0
_unguarded: Callable[[torch.device], Empty] = allocator.on


@contextlib.contextmanager
def guarded(poison: int) -> Iterator[GuardedMemory]:
    """Inside, what this thread's executables allocate is poisoned and guarded.

    Other threads go on allocating as before; several threads may be inside at once.
    """
    global _users, _unguarded
    outer = getattr(_current, "memory", None)
    with _lock:
        if _users == 0:
            _unguarded, allocator.on = allocator.on, _on
        _users += 1
    _current.memory = GuardedMemory(poison)
    try:
        yield _current.memory
    finally:
        _current.memory = outer
        with _lock:
            _users -= 1
            if _users == 0:
                allocator.on = _unguarded


def _on(device: torch.device) -> Empty:
    memory = getattr(_current, "memory", None)
    return (_unguarded if memory is None else memory.on)(device)
