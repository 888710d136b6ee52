"""Zeroed words in device memory that kernels count with, and leave zero again."""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch

from tilewright.compile import cuda
from tilewright.errors import LaunchError

COUNTERS = 1 << 16
"""Words that one launch may use."""


class _Captured(NamedTuple):
    """Words of the launches that one capture has on one stream."""

    capture: int
    address: int
    words: int


class Counters:
    """Words of zeros by which blocks take turns, or find out who is last.

    Calls on one stream follow one another and share theirs. So do launches that one capture has on
    one stream, whose graph runs once at a time. They keep them for good, since the graph may run
    beside anything, and who frees it tells no one; these words are zeroed ahead, outside of it.
    """

    SLAB = 1 << 20

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_stream: dict[tuple[int, int], int] = {}
        self._captured: dict[tuple[int, int], _Captured] = {}
        """Of the latest capture that each stream took part in."""
        self._slabs: dict[int, torch.Tensor] = {}
        """By device: words that nobody has yet."""
        self._kept: list[torch.Tensor] = []
        """All slabs: kernels and graphs hold addresses in them."""
        self._short: set[int] = set()
        """Devices that have given so many words away that a call outside of capture gets more."""

    def address(self, device_index: int, stream: int, count: int) -> int:
        """Of `count` words, at most COUNTERS, for a launch on the current stream.

        Raises:
            LaunchError: the stream is being captured, and the words zeroed before are used up.
        """
        assert count <= COUNTERS, count
        count += -count % 8  # kernels may count in words of up to sixteen bytes, or lay out sectors
        if torch._C._cuda_isCurrentStreamCapturing():
            with self._lock:
                return self._captured_on(device_index, stream, count)
        found = self._by_stream.get((device_index, stream))
        if found is None or device_index in self._short:
            with self._lock:
                self._refill(device_index)
                key = (device_index, stream)
                if key not in self._by_stream:
                    self._by_stream[key] = self._take(device_index, COUNTERS)
                found = self._by_stream[key]
        return found

    def _refill(self, device_index: int) -> None:
        if device_index in self._slabs and device_index not in self._short:
            return
        device = torch.device("cuda", device_index)
        side = torch.cuda.Stream(device)
        with torch.cuda.stream(side):
            words = torch.zeros(self.SLAB, dtype=torch.int32, device=device)
        side.synchronize()  # any stream may use them from now on
        self._slabs[device_index] = words
        self._kept.append(words)
        self._short.discard(device_index)

    def _captured_on(self, device_index: int, stream: int, count: int) -> int:
        capture, key = cuda.capture_id(stream), (device_index, stream)
        known = self._captured.get(key)
        if known is None or known.capture != capture or known.words < count:
            address = self._take(device_index, count)
            known = self._captured[key] = _Captured(capture, address, count)
        return known.address

    def _take(self, device_index: int, count: int) -> int:
        left = self._slabs.get(device_index)
        if left is None or left.numel() < count:
            raise LaunchError(
                "no zeroed counters are left for a captured launch; call the operator once outside "
                "of capture"
            )
        self._slabs[device_index] = left[count:]
        if left.numel() - count < self.SLAB // 2:
            self._short.add(device_index)
        return left.data_ptr()


counters = Counters()
