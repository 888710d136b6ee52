"""libcuda by ctypes: as much of the CUDA driver as loading and launching kernels needs."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tilewright.errors import LaunchError, OutOfMemory

_LIBRARY = "libcuda.so.1"

# cuda.h
SMS, MAX_SHARED_PER_BLOCK_OPTIN, CLUSTER_LAUNCH = 16, 97, 120  # CUdevice_attribute
STATIC_SHARED, MAX_DYNAMIC_SHARED, NON_PORTABLE_CLUSTER = 1, 8, 14  # CUfunction_attribute
COOPERATIVE, CLUSTER_DIMENSION, OVERLAPPING = 2, 4, 6  # CUlaunchAttributeID
INVALID_VALUE, OUT_OF_MEMORY, INVALID_IMAGE, INVALID_CONTEXT, NO_BINARY = 1, 2, 200, 201, 209
INVALID_HANDLE, CAPTURE_IMPLICIT = 400, 906  # CUresult
_RELAXED = 2  # CUstreamCaptureMode


@functools.cache
def driver() -> Any:
    """libcuda, initialised."""
    try:
        cuda = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise LaunchError(
            f"no NVIDIA driver on this machine ({error}); CUDA kernels compile here but do not run"
        ) from error
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    for name, *types in (
        ("cuInit", ctypes.c_uint),
        ("cuDeviceGetCount", pointer),
        ("cuDeviceGet", pointer, integer),
        ("cuDeviceGetAttribute", pointer, integer, integer),
        ("cuDevicePrimaryCtxRetain", pointer, integer),
        ("cuCtxGetCurrent", pointer),
        ("cuCtxSetCurrent", pointer),
        ("cuThreadExchangeStreamCaptureMode", pointer),
        ("cuStreamIsCapturing", pointer, pointer),
        ("cuStreamGetCaptureInfo_v2", *(pointer,) * 6),
        ("cuModuleLoadData", pointer, ctypes.c_char_p),
        ("cuModuleGetFunction", pointer, pointer, ctypes.c_char_p),
        ("cuFuncGetAttribute", pointer, integer, pointer),
        ("cuFuncSetAttribute", pointer, integer, integer),
        ("cuOccupancyMaxActiveBlocksPerMultiprocessor", pointer, pointer, integer, ctypes.c_size_t),
        ("cuOccupancyMaxActiveClusters", pointer, pointer, pointer),
        ("cuGetErrorName", integer, pointer),
        ("cuGetErrorString", integer, pointer),
    ):
        getattr(cuda, name).argtypes = types
    if status := cuda.cuInit(0):
        raise LaunchError(f"the NVIDIA driver does not start: CUresult {status}")
    return cuda


@functools.cache
def primary_context(device_index: int) -> int:
    """The context that torch uses on a device, kept for the life of the process."""
    context = ctypes.c_void_p()
    check(
        driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), _device(device_index)),
        f"opening cuda:{device_index}",
    )
    assert context.value is not None
    return context.value


@functools.cache
def device_count() -> int:
    count = ctypes.c_int()
    check(driver().cuDeviceGetCount(ctypes.byref(count)), "counting devices")
    return count.value


def current_device() -> Callable[[], int]:
    """What tells the index of the device that is current in the calling thread: torch's own
    function, at a tenth of the cost of cuCtxGetCurrent through ctypes."""
    import torch

    return torch._C._cuda_getDevice


def release_kept_memory() -> None:
    """Give back to the driver what torch keeps of tensors that are gone."""
    import torch

    torch.cuda.empty_cache()


@functools.cache
def _device(device_index: int) -> int:
    device = ctypes.c_int()
    check(driver().cuDeviceGet(ctypes.byref(device), device_index), f"opening cuda:{device_index}")
    return device.value


@functools.cache
def device_attribute(device_index: int, attribute: int) -> int:
    value = ctypes.c_int()
    status = driver().cuDeviceGetAttribute(ctypes.byref(value), attribute, _device(device_index))
    check(status, f"asking cuda:{device_index} for attribute {attribute}")
    return value.value


@contextmanager
def current(context: int) -> Iterator[None]:
    """Make a context current, then the one that was."""
    cuda, previous = driver(), ctypes.c_void_p()
    check(cuda.cuCtxGetCurrent(ctypes.byref(previous)), "reading the current context")
    check(cuda.cuCtxSetCurrent(context), "changing the current context")
    try:
        yield
    finally:
        cuda.cuCtxSetCurrent(previous)


@contextmanager
def capture_elsewhere_unharmed() -> Iterator[None]:
    """Let this thread load modules while another thread captures a graph."""
    cuda, mode = driver(), ctypes.c_int(_RELAXED)
    check(cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)), "relaxing capture")
    try:
        yield
    finally:
        cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def is_capturing(stream: int) -> bool:
    capturing = ctypes.c_int()
    status = driver().cuStreamIsCapturing(stream, ctypes.byref(capturing))
    if status == CAPTURE_IMPLICIT:  # the default stream, while another one captures
        return True
    check(status, "asking whether the stream is capturing")
    return capturing.value != 0


def capture_id(stream: int) -> int:
    """Of the capture that a stream takes part in; no other of the process has it."""
    capturing, number = ctypes.c_int(), ctypes.c_uint64()
    status = driver().cuStreamGetCaptureInfo_v2(
        stream, ctypes.byref(capturing), ctypes.byref(number), None, None, None
    )
    check(status, "asking which capture the stream takes part in")
    return number.value


def check(status: int, doing: str) -> None:
    if status == OUT_OF_MEMORY:
        raise OutOfMemory(
            f"{doing}: {describe(status)}; free some: delete tensors, or end other processes that "
            "`nvidia-smi` lists on this GPU"
        )
    if status:
        raise LaunchError(f"{doing}: {describe(status)}")


def describe(status: int) -> str:
    """CUDA_ERROR_INVALID_VALUE (invalid argument)"""
    cuda, name, text = driver(), ctypes.c_char_p(), ctypes.c_char_p()
    cuda.cuGetErrorName(status, ctypes.byref(name))
    cuda.cuGetErrorString(status, ctypes.byref(text))
    if name.value is None or text.value is None:
        return f"CUresult {status}"
    return f"{name.value.decode()} ({text.value.decode()})"
