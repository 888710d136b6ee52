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
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from tilewright.compile import cuda
from tilewright.compile.cache import Compiled
from tilewright.errors import LaunchError, OutOfMemory

Dim3 = tuple[int, int, int]
Shape = tuple[Dim3, Dim3, int, int, int, bool, bool]
"""grid, block, shared bytes, stream, cluster, cooperative, overlapping"""
Launcher = Callable[[int, Iterable[Any]], None]
"""of a stream and the arguments"""
Loaded = tuple[Any, int, Any, Callable[[], int] | None]
"""CUfunction, CUcontext, cuLaunchKernelEx and, where there are several devices, which is current"""

_passed: Callable[[int], Any] = ctypes.c_void_p.from_param
"""An address as ctypes passes it on: to convert its own pointers, or integers, takes longer."""

_CONFIG = struct.Struct("@7IQQI")  # grid, block, shared bytes, stream, attributes, their number
_ATTRIBUTE = struct.Struct("@I4x3I52x")  # identifier, value of up to 64 bytes: cluster x y z
_CONFIG_AT, _ATTRIBUTES_AT, _ARGUMENTS_AT = 0, 56, 384

_C_TYPES: dict[str, Any] = {
    "P": ctypes.c_void_p,
    "q": ctypes.c_int64,
    "Q": ctypes.c_uint64,
    "i": ctypes.c_int32,
    "I": ctypes.c_uint32,
    "f": ctypes.c_float,
    "d": ctypes.c_double,
}
_STRUCTURE = "128s"


class CudaKernel:
    """A kernel of a cubin, loaded into a device's primary context when first launched there.

    Args:
        compiled: of a task with compiler "nvrtc".
        entry: its `extern "C"` name in the task's source.
        signature: one struct code per argument: P pointer, q int64, Q uint64, i int32, I uint32,
            f float, d double, T a structure of 128 bytes, passed by value, such as a tensor map.
    """

    def __init__(self, compiled: Compiled, entry: str, signature: str) -> None:
        assert set(signature) <= {*_C_TYPES, "T"}, signature
        self.compiled, self.entry, self.signature = compiled, entry, signature
        arguments = struct.Struct(f"@{signature.replace('T', _STRUCTURE)}")
        self._layout = arguments, _offsets(signature)
        self._local = _Local(*self._layout)
        self._loaded: dict[int, Loaded] = {}
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
        loaded = self._loaded.get(device_index) or self._load(device_index, stream)
        frame = self._local.frame
        shape = (grid, block, shared_bytes, stream, cluster, cooperative, overlapping)
        if frame.shape != shape:
            self._set_shape(frame, shape, device_index)
        frame.pack(*args)
        self._start(frame, loaded, shape, device_index)

    def launcher(
        self,
        device_index: int,
        grid: Dim3,
        block: Dim3,
        shared_bytes: int,
        cluster: int,
        stream: int,
        *,
        cooperative: bool = False,
        overlapping: bool = False,
    ) -> Launcher:
        """What launches the kernel in one shape again and again, with less to do than `launch`.

        Args:
            stream: where it is first launched.

        Returns:
            A function of the stream and the arguments, as those of `launch`.

        Raises:
            LaunchError: as `launch`.
        """
        loaded = self._loaded.get(device_index) or self._load(device_index, stream)
        function, _, start, current_device = loaded
        local = _Local(*self._layout)  # of its own: only the stream ever changes

        def launch(stream: int, args: Iterable[Any]) -> None:
            frame = local.frame
            if frame.stream != stream:
                self._set_shape(frame, shape_on(stream), device_index)
            frame.pack(*args)
            if (current_device is not None and current_device() != device_index) or start(
                frame.config, function, frame.arguments, None
            ):
                self._start(frame, loaded, shape_on(stream), device_index)

        def shape_on(stream: int) -> Shape:
            return grid, block, shared_bytes, stream, cluster, cooperative, overlapping

        return launch

    def _set_shape(self, frame: _Frame, shape: Shape, device_index: int) -> None:
        try:
            frame.set_shape(*shape)
        except struct.error:
            self._refused(cuda.INVALID_VALUE, shape, device_index)
        frame.shape, frame.stream = shape, shape[3]

    def _start(self, frame: _Frame, loaded: Loaded, shape: Shape, device_index: int) -> None:
        """Launch what the frame holds in the device's context, whichever is current."""
        function, context, start, current_device = loaded
        status = cuda.INVALID_CONTEXT
        if current_device is None or current_device() == device_index:
            status = start(frame.config, function, frame.arguments, None)
        if status in (cuda.INVALID_CONTEXT, cuda.INVALID_HANDLE):
            with cuda.current(context):
                status = start(frame.config, function, frame.arguments, None)
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
        library, number = cuda.driver(), ctypes.c_int()
        asking = f"asking how many blocks of {self.entry} fit on cuda:{device_index}"
        sms = cuda.device_attribute(device_index, cuda.SMS)
        with cuda.current(context):
            if cluster == 1:
                status = library.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                    ctypes.byref(number), function, block_threads, shared_bytes
                )
                each = sms
            else:
                frame = self._local.frame
                frame.set_shape(
                    (cluster, 1, 1), (block_threads, 1, 1), shared_bytes, 0, cluster, False, False
                )
                status = library.cuOccupancyMaxActiveClusters(
                    ctypes.byref(number), function, frame.address
                )
                each = cluster
            cuda.check(status, asking)
        found = number.value * each
        return found if most_per_sm is None else min(found, most_per_sm * sms // cluster * cluster)

    def _load(self, device_index: int, stream: int) -> Loaded:
        library = cuda.driver()
        context = cuda.primary_context(device_index)
        with self._lock, cuda.current(context):
            if found := self._loaded.get(device_index):
                return found
            if cuda.is_capturing(stream):
                raise LaunchError(
                    f"{self.entry} cannot be loaded on cuda:{device_index} while its stream is "
                    "being captured; call the operator once before the capture"
                )
            with cuda.capture_elsewhere_unharmed():
                try:
                    function = self._function(device_index)
                except OutOfMemory:  # PyTorch keeps what tensors left free, often all there is
                    cuda.release_kept_memory()
                    function = self._function(device_index)
            # The driver itself tells when a context of the current device is not current.
            current_device = cuda.current_device() if cuda.device_count() > 1 else None
            # Without argtypes: what it is given is as ctypes passes it on.
            loaded = _passed(function), context, library["cuLaunchKernelEx"], current_device
            self._loaded[device_index] = loaded
            return loaded

    def _function(self, device_index: int) -> int:
        """The CUfunction in the current context, allowed all the shared memory of a block."""
        library = cuda.driver()
        try:
            image = self.compiled.path.read_bytes()
        except OSError as error:
            raise LaunchError(
                f"{self.entry}: {self.compiled.path} left the cache ({error.strerror}); build again"
            ) from error
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        symbol = self.compiled.symbols.get(self.entry, self.entry).encode()
        subject = f"{self.entry} on cuda:{device_index}"
        status = library.cuModuleLoadData(ctypes.byref(module), image)
        if status in (cuda.INVALID_IMAGE, cuda.NO_BINARY):
            subject += " (compiled for another architecture, or by a newer NVRTC than the driver)"
        cuda.check(status, f"loading {subject}")
        cuda.check(
            library.cuModuleGetFunction(ctypes.byref(function), module, symbol),
            f"finding {subject}",
        )
        static = ctypes.c_int()
        cuda.check(
            library.cuFuncGetAttribute(ctypes.byref(static), cuda.STATIC_SHARED, function),
            f"asking {subject} for its static shared memory",
        )
        dynamic = (
            cuda.device_attribute(device_index, cuda.MAX_SHARED_PER_BLOCK_OPTIN) - static.value
        )
        # Setting an attribute also makes the driver load the code now rather than at first launch.
        cuda.check(
            library.cuFuncSetAttribute(function, cuda.MAX_DYNAMIC_SHARED, dynamic),
            f"allowing {dynamic} bytes of dynamic shared memory for {subject}",
        )
        if cuda.device_attribute(device_index, cuda.CLUSTER_LAUNCH):
            cuda.check(
                library.cuFuncSetAttribute(function, cuda.NON_PORTABLE_CLUSTER, 1),
                f"allowing clusters of more than 8 blocks for {subject}",
            )
        assert function.value is not None
        return function.value

    def _refused(self, status: int, shape: Shape, device_index: int) -> NoReturn:
        grid, block, shared_bytes, stream, cluster, cooperative, _ = shape
        limits = (
            "; limits are grid 2147483647 x 65535 x 65535, 1024 threads a block, "
            f"{cuda.device_attribute(device_index, cuda.MAX_SHARED_PER_BLOCK_OPTIN)} bytes shared"
            if status == cuda.INVALID_VALUE
            else ""
        )
        raise LaunchError(
            f"{self.entry} on cuda:{device_index}: {cuda.describe(status)}: grid={grid} "
            f"block={block} shared_bytes={shared_bytes} cluster={cluster} "
            f"cooperative={cooperative} stream={stream:#x}{limits}"
        )


def overlaps(device_index: int) -> bool:
    """Whether a kernel may start there while the one before it ends (sm_90 and later)."""
    return bool(cuda.device_attribute(device_index, cuda.CLUSTER_LAUNCH))


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
            cuda.check(status, f"launching {self.entry}")


class PackedCppFunction(CppFunction):
    """One that takes a pointer to a structure of its arguments: the way of least host time. It
    returns the bytes that one of its threads found no memory for, or 0."""

    def __init__(self, compiled: Compiled, entry: str, signature: str) -> None:
        super().__init__(compiled, entry, "")
        self._function.argtypes, self._function.restype = [ctypes.c_char_p], ctypes.c_int64
        self._pack = struct.Struct(f"@{signature}").pack

    def __call__(self, *args: float) -> None:
        """Raises OutOfMemory."""
        if lacking := self._function(self._pack(*args)):
            raise OutOfMemory(
                f"{self.entry}: a thread found no memory for the {lacking} bytes that it keeps "
                "between its sweeps; fewer threads (torch.set_num_threads) take less at once"
            )


class _Frame:
    """The memory of one thread's launches of one kernel."""

    def __init__(self, arguments: struct.Struct, offsets: tuple[int, ...]) -> None:
        self.memory = bytearray(_ARGUMENTS_AT + arguments.size)
        self.pack = functools.partial(arguments.pack_into, self.memory, _ARGUMENTS_AT)
        self._pinned = (ctypes.c_char * len(self.memory)).from_buffer(self.memory)
        self.address = ctypes.addressof(self._pinned)
        pointers = [self.address + _ARGUMENTS_AT + offset for offset in offsets]
        self._arguments = (ctypes.c_void_p * len(pointers))(*pointers)
        self.config = _passed(self.address)
        self.arguments = _passed(ctypes.addressof(self._arguments))
        self.shape: Shape | None = None
        self.stream: int | None = None  # that of the shape

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
        self.shape = self.stream = None
        attributes = []
        if cluster > 1:
            attributes.append((cuda.CLUSTER_DIMENSION, cluster, 1, 1))
        if cooperative:
            attributes.append((cuda.COOPERATIVE, 1, 0, 0))
        if overlapping:
            attributes.append((cuda.OVERLAPPING, 1, 0, 0))
        _CONFIG.pack_into(
            self.memory, _CONFIG_AT, *grid, *block, shared_bytes, stream,
            self.address + _ATTRIBUTES_AT, len(attributes),
        )  # fmt: skip
        for i, attribute in enumerate(attributes):
            _ATTRIBUTE.pack_into(self.memory, _ATTRIBUTES_AT + i * _ATTRIBUTE.size, *attribute)


class _Local(threading.local):
    def __init__(self, arguments: struct.Struct, offsets: tuple[int, ...]) -> None:
        self.frame = _Frame(arguments, offsets)


def _offsets(signature: str) -> tuple[int, ...]:
    """Of each argument, aligned as C aligns the members of a struct."""
    found = []
    for n, code in enumerate(signature):
        before = signature[:n].replace("T", _STRUCTURE)
        found.append(struct.calcsize(f"@{before}0{'s' if code == 'T' else code}"))
    return tuple(found)
