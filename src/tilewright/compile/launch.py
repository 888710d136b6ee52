"""Calling what was compiled: CUDA kernels through the driver, C++ functions through ctypes.

A launch is one driver call with memory that was laid out beforehand. Per thread and kernel there is
one buffer: CUlaunchConfig, its attributes, then the arguments at the offsets the compiler
gave them. A call rewrites the arguments, and the configuration only where it differs from the last.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from tilewright.compile.cache import Compiled
from tilewright.errors import LaunchError

_LIBRARY = "libcuda.so.1"

Dim3 = tuple[int, int, int]

# cuda.h
_SMS, _MAX_SHARED_PER_BLOCK_OPTIN, _CLUSTER_LAUNCH = 16, 97, 120  # CUdevice_attribute
_STATIC_SHARED, _MAX_DYNAMIC_SHARED, _NON_PORTABLE_CLUSTER = 1, 8, 14  # CUfunction_attribute
_COOPERATIVE, _CLUSTER_DIMENSION, _OVERLAPPING = 2, 4, 6  # CUlaunchAttributeID
_RELAXED = 2  # CUstreamCaptureMode
_INVALID_VALUE, _INVALID_IMAGE, _NO_BINARY, _CAPTURE_IMPLICIT = 1, 200, 209, 906  # CUresult
_INVALID_CONTEXT, _INVALID_HANDLE = 201, 400
_CONFIG = struct.Struct("@7IQQI")  # grid, block, shared bytes, stream, attributes, their number
_ATTRIBUTE = struct.Struct("@I4x3I52x")  # identifier, value of up to 64 bytes: cluster x y z
_CONFIG_AT, _ATTRIBUTES_AT, _ARGUMENTS_AT = 0, 56, 384

_C_TYPES: dict[str, Any] = {
    "P": ctypes.c_void_p,
    "q": ctypes.c_int64,
    "i": ctypes.c_int32,
    "f": ctypes.c_float,
    "d": ctypes.c_double,
}
_STRUCTURE = "128s"


class CudaKernel:
    """A kernel of a cubin, loaded into a device's primary context when first launched there.

    Args:
        compiled: of a task with compiler "nvrtc".
        entry: its `extern "C"` name.
        signature: one struct code per argument: P pointer, q int64, i int32, f float, d double,
            T a structure of 128 bytes, passed by value, such as a tensor map.
    """

    def __init__(self, compiled: Compiled, entry: str, signature: str) -> None:
        assert set(signature) <= {*_C_TYPES, "T"}, signature
        self.compiled, self.entry, self.signature = compiled, entry, signature
        arguments = struct.Struct(f"@{signature.replace('T', _STRUCTURE)}")
        self._pack = arguments.pack_into
        self._local = _Local(arguments.size, _offsets(signature))
        self._loaded: dict[int, tuple[int, int, Any, Any]] = {}
        self._lock = threading.Lock()

    def launch(
        self,
        grid: Dim3,
        block: Dim3,
        shared_bytes: int,
        stream: int,
        device_index: int,
        *args: float | bytes,
        cluster: int = 1,
        cooperative: bool = False,
        overlapping: bool = False,
    ) -> None:
        """Enqueue the kernel. Thread-safe; may be captured into a CUDA graph once it is loaded.

        Args:
            grid: blocks in x, y, z, none of them 0; multiples of `cluster` in x.
            block: threads in x, y, z.
            shared_bytes: dynamic shared memory of a block.
            stream: the CUstream as an integer; 0 is the default stream.
            device_index: where the arguments and the stream live; any device may be current.
            args: one per code of the signature; pointers as integers.
            cluster: blocks per thread block cluster, along x (sm_90 and later).
            cooperative: start only when all blocks run at once, so that they may wait for one
                another; the grid must fit on the device.
            overlapping: start while the kernel before it in the stream ends; this one waits for it
                by griddepcontrol.wait. Only where `overlaps(device_index)`.

        Raises:
            LaunchError: the driver refused, or the kernel would have to be loaded while `stream`
                is capturing.
        """
        loaded = self._loaded.get(device_index)
        if loaded is None:
            loaded = self._load(device_index, stream)
        function, context, launch, get_current = loaded
        frame = self._local.frame
        shape = (grid, block, shared_bytes, stream, cluster, cooperative, overlapping)
        if frame.shape != shape:
            try:
                frame.set_shape(*shape)
            except struct.error:
                self._refused(_INVALID_VALUE, shape, device_index)
        self._pack(frame.memory, _ARGUMENTS_AT, *args)
        if get_current is None or _is_current(context, get_current, frame):
            status = launch(frame.address, function, frame.arguments_address, None)
        else:
            status = _INVALID_CONTEXT
        if status in (_INVALID_CONTEXT, _INVALID_HANDLE):
            with _current(context):
                status = launch(frame.address, function, frame.arguments_address, None)
        if status:
            self._refused(status, shape, device_index)

    def load(self, device_index: int, stream: int = 0) -> None:
        """Load now what the first launch would load.

        Raises:
            LaunchError: the driver refused, or `stream` is capturing.
        """
        if device_index not in self._loaded:
            self._load(device_index, stream)

    def resident_blocks(
        self,
        device_index: int,
        block_threads: int,
        shared_bytes: int,
        cluster: int = 1,
        most_per_sm: int | None = None,
    ) -> int:
        """Blocks that run at once on the whole device: what a persistent grid is sized by.

        Args:
            shared_bytes: dynamic shared memory of a block.
            cluster: blocks per cluster; the result is a multiple of it.
            most_per_sm: no more than so many for each SM; None for as many as fit.

        Raises:
            LaunchError: the driver refused; it also does where not one block fits.
        """
        self.load(device_index)
        function, context, *_ = self._loaded[device_index]
        cuda, number = driver(), ctypes.c_int()
        asking = f"asking how many blocks of {self.entry} fit on cuda:{device_index}"
        sms = _device_attribute(device_index, _SMS)
        with _current(context):
            if cluster == 1:
                status = cuda.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                    ctypes.byref(number), function, block_threads, shared_bytes
                )
                each = sms
            else:
                frame = self._local.frame
                frame.set_shape(
                    (cluster, 1, 1), (block_threads, 1, 1), shared_bytes, 0, cluster, False, False
                )
                status = cuda.cuOccupancyMaxActiveClusters(
                    ctypes.byref(number), function, frame.address
                )
                each = cluster
            check(status, asking)
        found = number.value * each
        return found if most_per_sm is None else min(found, most_per_sm * sms // cluster * cluster)

    def _load(self, device_index: int, stream: int) -> tuple[int, int, Any, Any]:
        cuda = driver()
        context = _primary_context(device_index)
        with self._lock, _current(context):
            if found := self._loaded.get(device_index):
                return found
            if _is_capturing(stream):
                raise LaunchError(
                    f"{self.entry} cannot be loaded on cuda:{device_index} while its stream is "
                    "being captured; call the operator once before the capture"
                )
            with _capture_elsewhere_unharmed():
                function = self._function(device_index)
            # Of a single device the driver itself tells when its context is not current.
            get_current = cuda.cuCtxGetCurrent if _device_count() > 1 else None
            loaded = function, context, cuda.cuLaunchKernelEx, get_current
            self._loaded[device_index] = loaded
            return loaded

    def _function(self, device_index: int) -> int:
        """The CUfunction in the current context, allowed all the shared memory of a block."""
        cuda = driver()
        try:
            image = self.compiled.path.read_bytes()
        except OSError as error:
            raise LaunchError(
                f"{self.entry}: {self.compiled.path} left the cache ({error.strerror}); build again"
            ) from error
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        subject = f"{self.entry} on cuda:{device_index}"
        status = cuda.cuModuleLoadData(ctypes.byref(module), image)
        if status in (_INVALID_IMAGE, _NO_BINARY):
            subject += " (compiled for another architecture, or by a newer NVRTC than the driver)"
        check(status, f"loading {subject}")
        check(
            cuda.cuModuleGetFunction(ctypes.byref(function), module, self.entry.encode()),
            f"finding {subject}",
        )
        static = ctypes.c_int()
        check(
            cuda.cuFuncGetAttribute(ctypes.byref(static), _STATIC_SHARED, function),
            f"asking {subject} for its static shared memory",
        )
        dynamic = _device_attribute(device_index, _MAX_SHARED_PER_BLOCK_OPTIN) - static.value
        # Setting an attribute also makes the driver load the code now rather than at first launch.
        check(
            cuda.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, dynamic),
            f"allowing {dynamic} bytes of dynamic shared memory for {subject}",
        )
        if _device_attribute(device_index, _CLUSTER_LAUNCH):
            check(
                cuda.cuFuncSetAttribute(function, _NON_PORTABLE_CLUSTER, 1),
                f"allowing clusters of more than 8 blocks for {subject}",
            )
        assert function.value is not None
        return function.value

    def _refused(self, status: int, shape: tuple[Any, ...], device_index: int) -> NoReturn:
        grid, block, shared_bytes, stream, cluster, cooperative, _ = shape
        limits = (
            "; limits are grid 2147483647 x 65535 x 65535, 1024 threads a block, "
            f"{_device_attribute(device_index, _MAX_SHARED_PER_BLOCK_OPTIN)} bytes shared"
            if status == _INVALID_VALUE
            else ""
        )
        raise LaunchError(
            f"{self.entry} on cuda:{device_index}: {_describe(status)}: grid={grid} block={block} "
            f"shared_bytes={shared_bytes} cluster={cluster} cooperative={cooperative} "
            f"stream={stream:#x}{limits}"
        )


def overlaps(device_index: int) -> bool:
    """Whether a kernel may start there while the one before it ends (sm_90 and later)."""
    return bool(_device_attribute(device_index, _CLUSTER_LAUNCH))


class CppFunction:
    """A function of a shared library; calling it releases the GIL.

    Args:
        compiled: of a task with compiler "cxx" or "nvcc".
        entry: its `extern "C"` name; it returns nothing, or with `checked` a CUDA status.
        signature: as for CudaKernel.

    Raises:
        LaunchError: the library cannot be loaded or has no such function.
    """

    def __init__(
        self, compiled: Compiled, entry: str, signature: str, *, checked: bool = False
    ) -> None:
        self.entry, self._checked = entry, checked
        try:
            self._function = getattr(ctypes.CDLL(str(compiled.path)), entry)
        except (OSError, AttributeError) as error:
            raise LaunchError(f"{entry} cannot be loaded from {compiled.path}: {error}") from error
        self._function.argtypes = [_C_TYPES[code] for code in signature]
        self._function.restype = ctypes.c_int if checked else None

    def __call__(self, *args: float) -> None:
        """Raises LaunchError where the function returns a status other than 0."""
        status = self._function(*args)
        if self._checked and status:
            check(status, f"launching {self.entry}")


class _Frame:
    """The memory of one thread's launches of one kernel."""

    def __init__(self, size: int, offsets: tuple[int, ...]) -> None:
        self.memory = bytearray(_ARGUMENTS_AT + size)
        self._pinned = (ctypes.c_char * len(self.memory)).from_buffer(self.memory)
        self.address = ctypes.addressof(self._pinned)
        pointers = [self.address + _ARGUMENTS_AT + offset for offset in offsets]
        self._arguments = (ctypes.c_void_p * len(pointers))(*pointers)
        self.arguments_address = ctypes.addressof(self._arguments)
        self.current = ctypes.c_void_p()
        self.current_address = ctypes.addressof(self.current)
        self.shape: tuple[Any, ...] = ()

    def set_shape(
        self,
        grid: Dim3,
        block: Dim3,
        shared_bytes: int,
        stream: int,
        cluster: int,
        cooperative: bool,
        overlapping: bool,
    ) -> None:
        self.shape = ()
        attributes = []
        if cluster > 1:
            attributes.append((_CLUSTER_DIMENSION, cluster, 1, 1))
        if cooperative:
            attributes.append((_COOPERATIVE, 1, 0, 0))
        if overlapping:
            attributes.append((_OVERLAPPING, 1, 0, 0))
        _CONFIG.pack_into(
            self.memory, _CONFIG_AT, *grid, *block, shared_bytes, stream,
            self.address + _ATTRIBUTES_AT, len(attributes),
        )  # fmt: skip
        for i, attribute in enumerate(attributes):
            _ATTRIBUTE.pack_into(self.memory, _ATTRIBUTES_AT + i * _ATTRIBUTE.size, *attribute)
        self.shape = (grid, block, shared_bytes, stream, cluster, cooperative, overlapping)


class _Local(threading.local):
    def __init__(self, size: int, offsets: tuple[int, ...]) -> None:
        self.frame = _Frame(size, offsets)


def _offsets(signature: str) -> tuple[int, ...]:
    """Of each argument, aligned as C aligns the members of a struct."""
    found = []
    for n, code in enumerate(signature):
        before = signature[:n].replace("T", _STRUCTURE)
        found.append(struct.calcsize(f"@{before}0{'s' if code == 'T' else code}"))
    return tuple(found)


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
        ("cuModuleLoadData", pointer, ctypes.c_char_p),
        ("cuModuleGetFunction", pointer, pointer, ctypes.c_char_p),
        ("cuFuncGetAttribute", pointer, integer, pointer),
        ("cuFuncSetAttribute", pointer, integer, integer),
        ("cuOccupancyMaxActiveBlocksPerMultiprocessor", pointer, pointer, integer, ctypes.c_size_t),
        ("cuOccupancyMaxActiveClusters", pointer, pointer, pointer),
        ("cuLaunchKernelEx", pointer, pointer, pointer, pointer),
        ("cuGetErrorName", integer, pointer),
        ("cuGetErrorString", integer, pointer),
    ):
        getattr(cuda, name).argtypes = types
    if status := cuda.cuInit(0):
        raise LaunchError(f"the NVIDIA driver does not start: CUresult {status}")
    return cuda


@functools.cache
def _primary_context(device_index: int) -> int:
    """The context that torch uses on a device, kept for the life of the process."""
    context = ctypes.c_void_p()
    check(
        driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), _device(device_index)),
        f"opening cuda:{device_index}",
    )
    assert context.value is not None
    return context.value


@functools.cache
def _device_count() -> int:
    count = ctypes.c_int()
    check(driver().cuDeviceGetCount(ctypes.byref(count)), "counting devices")
    return count.value


@functools.cache
def _device(device_index: int) -> int:
    device = ctypes.c_int()
    check(driver().cuDeviceGet(ctypes.byref(device), device_index), f"opening cuda:{device_index}")
    return device.value


@functools.cache
def _device_attribute(device_index: int, attribute: int) -> int:
    value = ctypes.c_int()
    status = driver().cuDeviceGetAttribute(ctypes.byref(value), attribute, _device(device_index))
    check(status, f"asking cuda:{device_index} for attribute {attribute}")
    return value.value


def _is_current(context: int, get_current: Any, frame: _Frame) -> bool:
    get_current(frame.current_address)
    return frame.current.value == context


@contextmanager
def _current(context: int) -> Iterator[None]:
    """Make a context current, then the one that was."""
    cuda, previous = driver(), ctypes.c_void_p()
    check(cuda.cuCtxGetCurrent(ctypes.byref(previous)), "reading the current context")
    check(cuda.cuCtxSetCurrent(context), "changing the current context")
    try:
        yield
    finally:
        cuda.cuCtxSetCurrent(previous)


@contextmanager
def _capture_elsewhere_unharmed() -> Iterator[None]:
    """Let this thread load modules while another thread captures a graph."""
    cuda, mode = driver(), ctypes.c_int(_RELAXED)
    check(cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)), "relaxing capture")
    try:
        yield
    finally:
        cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def _is_capturing(stream: int) -> bool:
    capturing = ctypes.c_int()
    status = driver().cuStreamIsCapturing(stream, ctypes.byref(capturing))
    if status == _CAPTURE_IMPLICIT:  # the default stream, while another one captures
        return True
    check(status, "asking whether the stream is capturing")
    return capturing.value != 0


def check(status: int, doing: str) -> None:
    if status:
        raise LaunchError(f"{doing}: {_describe(status)}")


def _describe(status: int) -> str:
    """CUDA_ERROR_INVALID_VALUE (invalid argument)"""
    cuda, name, text = driver(), ctypes.c_char_p(), ctypes.c_char_p()
    cuda.cuGetErrorName(status, ctypes.byref(name))
    cuda.cuGetErrorString(status, ctypes.byref(text))
    if name.value is None or text.value is None:
        return f"CUresult {status}"
    return f"{name.value.decode()} ({text.value.decode()})"
