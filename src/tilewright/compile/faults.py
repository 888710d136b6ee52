"""What kernels found wrong in their data, told without waiting for the device.

A kernel that meets an index out of range skips it and sets one int in host memory, which both
sides can address. The next call that looks finds it; nothing on the device is broken.
"""

from __future__ import annotations

import ctypes
import threading
from typing import NamedTuple

import torch

from tilewright.errors import IndexOutOfRange

_lock = threading.Lock()
_memory: torch.Tensor | None = None
_flag: ctypes.c_int | None = None
_reported: dict[torch.device, _Reported] = {}


class _Reported(NamedTuple):
    """What PyTorch's operators found on a device: one int there, its copy in host memory, and the
    same as the host reads it; and the place of the int, as an index."""

    there: torch.Tensor
    here: torch.Tensor
    flag: ctypes.c_int
    place: torch.Tensor


def fault_address() -> int:
    """Where kernels on any device write 1; pinned host memory, made at the first call."""
    global _memory, _flag
    if _flag is None:
        with _lock:
            if _flag is None:
                _memory = torch.zeros(1, dtype=torch.int32).pin_memory()
                _flag = ctypes.c_int.from_address(_memory.data_ptr())
    return ctypes.addressof(_flag)


def report(outside: torch.Tensor) -> None:
    """Let later calls know, without a wait, if an element of `outside`, a bool each, is true."""
    device = outside.device
    if device not in _reported:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return  # no host memory can be pinned meanwhile
        side = torch.cuda.Stream(device) if device.type == "cuda" else None
        # Whichever mode the next call is in.
        with _lock, torch.inference_mode(False), torch.cuda.stream(side):
            here = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
            flag = ctypes.c_int.from_address(here.data_ptr())
            place = torch.zeros(1, dtype=torch.int64, device=device)
            there = place.int()
            if side is not None:
                side.synchronize()  # any stream may use them from now on
            _reported.setdefault(device, _Reported(there, here, flag, place))
    there, here, _, place = _reported[device]
    there.scatter_reduce_(
        0, place, outside.any().int().view(1), "amax"
    )  # whatever other streams do
    here.copy_(there, non_blocking=True)


def raise_fault() -> None:
    """Raise what kernels have reported since the last look, once.

    Raises:
        IndexOutOfRange: an index was out of range in a call that was enqueued earlier.
    """
    told = [r for r in _reported.values() if r.flag.value] if _reported else []
    if told or (_flag is not None and _flag.value):
        if _flag is not None:
            _flag.value = 0
        for found in told:
            found.there.zero_()
            found.flag.value = 0
        raise IndexOutOfRange(
            "an index of an earlier call was out of range; its write was skipped. "
            "TILEWRIGHT_CHECK_INDICES=1 makes each call wait and raise at once"
        )


def check() -> None:
    """Wait for all GPUs, then raise what their kernels have reported (`tw.check()`).

    Raises:
        IndexOutOfRange: an index was out of range.
    """
    if torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            torch.cuda.synchronize(index)
    raise_fault()
