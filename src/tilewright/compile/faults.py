"""What kernels found wrong in their data, told without waiting for the device, and once.

A kernel that meets an index out of range skips it and writes 1 to an int in host memory, which both
sides can address; PyTorch's operators count in device memory which of their calls met one, and copy
the count. The next call that looks finds it; nothing on the device is broken. What was enqueued
before that may write and copy later still, which must not be told again: from then on calls are
given another int, and a count is told as far as it has grown.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tilewright.compile import cuda
from tilewright.errors import IndexOutOfRange

WORDS = 256
"""Ints of host memory: the first is for captured launches, whose address is theirs for good; each
of the others for calls until a fault is told. So many faults later no call is on its way."""

_lock = threading.Lock()
_memory: torch.Tensor | None = None
_words: ctypes.Array[ctypes.c_int] | None = None
_turn = 1
_captured = _called = ctypes.c_int()
"""The first of the words, and the one whose turn it is."""
_reported: dict[torch.device, _Reported] = {}


@dataclass
class _Reported:
    """What PyTorch's operators found on a device: how many calls, there and in host memory, and as
    the host reads it; how many of them were told; and the place of the number, as an index."""

    there: torch.Tensor
    here: torch.Tensor
    count: ctypes.c_longlong
    place: torch.Tensor
    told: int = 0


def fault_address() -> int:
    """Where a kernel that is launched now, on any device, writes 1; pinned host memory, made at the
    first call."""
    if _words is None:
        _make_words()
    captured = torch.cuda.is_current_stream_capturing()
    return ctypes.addressof(_captured if captured else _called)


def _make_words() -> None:
    global _memory, _words, _captured
    with _lock, _beside_capture():
        if _words is None:
            _memory = torch.zeros(WORDS, dtype=torch.int32).pin_memory()
            words = (ctypes.c_int * WORDS).from_address(_memory.data_ptr())
            _captured = ctypes.c_int.from_buffer(words)
            _take_turn(words, 1)
            _words = words


def _take_turn(words: ctypes.Array[ctypes.c_int], turn: int) -> None:
    global _turn, _called
    _turn = turn
    _called = ctypes.c_int.from_buffer(words, turn * ctypes.sizeof(ctypes.c_int))
    _called.value = 0


@contextlib.contextmanager
def _beside_capture() -> Iterator[None]:
    """Where the current stream is captured: memory may be made meanwhile, on another one."""
    if torch.cuda.is_current_stream_capturing():
        with cuda.capture_elsewhere_unharmed():
            yield
    else:
        yield


def report(outside: torch.Tensor) -> None:
    """Let later calls know, without a wait, if an element of `outside`, a bool each, is true."""
    found = _reported.get(outside.device) or _made_for(outside.device)
    # One more than there are: atomic, so whatever other streams do, it grows if this one found any.
    grown = (found.there + 1) * outside.any()
    found.there.scatter_reduce_(0, found.place, grown, "amax")
    found.here.copy_(found.there, non_blocking=True)


def _made_for(device: torch.device) -> _Reported:
    on_gpu = device.type == "cuda"
    with _lock, torch.inference_mode(False):  # whichever mode the next call is in
        if device not in _reported:
            with _beside_capture() if on_gpu else contextlib.nullcontext():
                side = torch.cuda.Stream(device) if on_gpu else None
                with torch.cuda.stream(side):
                    here = torch.zeros(1, dtype=torch.int64, pin_memory=on_gpu)
                    there, place = torch.zeros(2, 1, dtype=torch.int64, device=device)
                if side is not None:
                    side.synchronize()  # any stream may use them from now on
            count = ctypes.c_longlong.from_address(here.data_ptr())
            _reported[device] = _Reported(there, here, count, place)
        return _reported[device]


def raise_fault() -> None:
    """Raise what kernels have reported since the last look, once.

    Raises:
        IndexOutOfRange: an index was out of range in a call that was enqueued earlier.
    """
    if (
        _called.value
        or _captured.value
        or (_reported and any(r.count.value > r.told for r in _reported.values()))
    ) and _taken():
        raise IndexOutOfRange(
            "an index of an earlier call was out of range; its write was skipped. "
            "TILEWRIGHT_CHECK_INDICES=1 makes each call wait and raise at once"
        )


def _taken() -> bool:
    """Whether there is anything to tell, which is told with that."""
    with _lock:
        found = bool(_called.value or _captured.value)
        _captured.value = 0
        if _called.value and _words is not None:
            _take_turn(_words, _turn % (WORDS - 1) + 1)
        for r in _reported.values():
            count = r.count.value
            found = found or count > r.told
            r.told = max(r.told, count)
        return found


def check() -> None:
    """Wait for all GPUs, then raise what their kernels have reported (`tw.check()`).

    Raises:
        IndexOutOfRange: an index was out of range.
    """
    if torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            torch.cuda.synchronize(index)
        for r in _reported.values():
            r.here.copy_(r.there)  # of two streams' copies the older one may have come last
    raise_fault()
