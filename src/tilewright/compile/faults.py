"""What kernels found wrong in their data, told without waiting for the device.

A kernel that meets an index out of range skips it and sets one int in host memory, which both
sides can address. The next call that looks finds it; nothing on the device is broken.
"""

from __future__ import annotations

import ctypes
import threading

import torch

from tilewright.errors import IndexOutOfRange

_lock = threading.Lock()
_memory: torch.Tensor | None = None
_flag: ctypes.c_int | None = None


def fault_address() -> int:
    """Where kernels on any device write 1; pinned host memory, made at the first call."""
    global _memory, _flag
    if _flag is None:
        with _lock:
            if _flag is None:
                _memory = torch.zeros(1, dtype=torch.int32).pin_memory()
                _flag = ctypes.c_int.from_address(_memory.data_ptr())
    return ctypes.addressof(_flag)


def raise_fault() -> None:
    """Raise what kernels have reported since the last look, once.

    Raises:
        IndexOutOfRange: an index was out of range in a call that was enqueued earlier.
    """
    if _flag is not None and _flag.value:
        _flag.value = 0
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
