"""What the CUDA kernels for indices share: their source, their workspace, how they are launched."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

import torch

from tilewright.build import CompileTask
from tilewright.compile import cxx, nvrtc
from tilewright.compile.cache import Compiled
from tilewright.compile.counters import counters
from tilewright.compile.faults import fault_address, raise_fault
from tilewright.compile.launch import CudaKernel, Launcher, overlaps
from tilewright.device import DeviceSpec
from tilewright.impl import Executable, allocator
from tilewright.impls._in_place import Written
from tilewright.op import Workload
from tilewright.settings import settings

ELEMENT = {
    "f16": "f16",
    "bf16": "bf16",
    "f32": "float",
    "f64": "double",
    "i32": "int",
    "i64": "i64",
}
SUM = {**ELEMENT, "f16": "float", "bf16": "float"}
INDEX = {"i32": "int", "i64": "i64"}
REDUCE = {"sum": 0, "mean": 0, "prod": 1, "amax": 2, "amin": 3}
WORKSPACE_PER_INDEX = 48
"""Bytes of workspace that a sum behind a sort, or by partial rows, may take, of every shape."""
LEAST_BOUND = 2**16
"""Bytes of workspace that any number of indices may take: counters of a sort have a least size."""
MEASURED_BYTES_PER_S = 4.8e12
"""Of the memory beside which heuristics' times of elements were measured."""
NONE_SKIPPED = -(2**63)
"""No index has this value, so none is left out."""
Pick = Callable[[Sequence[Any]], tuple[Any, ...]]
_data_ptr = torch.Tensor.data_ptr


def source_text(macros: Mapping[str, int | str], *files: str) -> str:
    """Files of kernels/indices/ behind their configuration as macros."""
    defines = [f"#define {n} {v if isinstance(v, str) else int(v)}" for n, v in macros.items()]
    return "\n".join([*defines, *map(_text, files)])


@functools.cache
def _text(name: str) -> str:
    return resources.files("tilewright").joinpath(f"kernels/indices/{name}").read_text()


def sum_bytes(dtype: str) -> int:
    """Bytes of the type that elements of `dtype` are summed in."""
    return {"f64": 8, "i64": 8}.get(dtype, 4)


def cuda_task(
    files: Sequence[str],
    entry: str,
    dtype: str,
    index: str,
    macros: Mapping[str, int | str],
    device: DeviceSpec,
) -> CompileTask:
    """Of files of kernels/indices/ with their configuration as macros.

    Args:
        entry: the kernel whose resources stand for the whole.
        dtype, index: of the elements and of the index.
    """
    types = {"T": ELEMENT[dtype], "A": SUM[dtype], "INDEX": INDEX[index]}
    source = source_text({**types, **macros}, "common.cuh", *files)
    return CompileTask("nvrtc", source, nvrtc.flags_for(device.arch), entry)


def streamed_us(measured_us: float, device: DeviceSpec) -> float:
    """What memory takes on a device for what it took so long for on an H200: times of elements and
    places by the million, which go by its bandwidth. Launches and chains of steps do not."""
    return measured_us * (MEASURED_BYTES_PER_S / device.dram_bytes_per_s)


def no_cuda(w: Workload, device: DeviceSpec) -> str | None:
    """Why the CUDA kernels for indices cannot take part at all."""
    if device.kind != "cuda":
        return f"it runs on a GPU, not on {device.name}"
    return _empty(w)


def no_cpp(w: Workload, device: DeviceSpec) -> str | None:
    """Why the C++ kernels for indices cannot take part at all."""
    if device.kind != "cpu":
        return f"it runs on a CPU, not on {device.name}"
    return _empty(w) or cxx.missing()


def _empty(w: Workload) -> str | None:
    if any(s.numel == 0 for s in (*w.tensors.values(), *w.outputs)):
        return "a tensor is empty: there is nothing to compute"
    return None


def most_bytes(per_index: int, count: int) -> int:
    """What implementations whose scratch memory has a bound for each index take of it at most."""
    return max(per_index * count, LEAST_BOUND)


class Workspace:
    """Buffers of one allocation, each at a multiple of 256 bytes.

    Args:
        in_turn: workspaces of which one is done with before the next is written: they share memory.
    """

    def __init__(self, *in_turn: Workspace, **sizes_bytes: int):
        self.offsets: dict[str, int] = {}
        start = 0
        for name, size in sizes_bytes.items():
            self.offsets[name] = start
            start += -(-size // 256) * 256
        for other in in_turn:
            self.offsets |= {name: start + offset for name, offset in other.offsets.items()}
        self.bytes: int = start + max((other.bytes for other in in_turn), default=0)

    def allocate(self, device: torch.device) -> torch.Tensor:
        return allocator.on(device)((max(self.bytes, 1),), (1,), torch.uint8)


AT_ONCE = 1024
"""Threads of an SM in one launch whose blocks wait for one another: it has registers for them."""


def fit_at_once(count: int, device: DeviceSpec) -> bool:
    """Whether so many elements take one launch untuned: one for each thread that runs at once.

    On an H200 sums of 5000 and of 128000 integers take 1 us longer so than in four launches, and 13
    us less of the host's time (commit 1ad094a, 2026-11-22).
    """
    return count <= device.sms * AT_ONCE


class Launch(NamedTuple):
    """One kernel of a call.

    Attributes:
        signature: of its arguments, as for CudaKernel.
        args: in that order; a name stands for an address: of a tensor of the workload, of its
            "out", of a buffer of the workspace, of the "fault" flag, or of a "counter", the first
            of zeros that it leaves zeros.
        overlapping: it may start while the kernel before it ends, for which it waits itself.
        meets: its blocks wait for one another, so all of them have to run at once.
        counters: how many zeros lie at "counter", where `args` name it.
    """

    entry: str
    signature: str
    grid: tuple[int, int, int]
    block_threads: int
    shared_bytes: int
    args: tuple[float | str, ...]
    overlapping: bool = False
    meets: bool = False
    counters: int = 1


class TorchCall(NamedTuple):
    """What PyTorch does between two launches of a call, on the current stream.

    Attributes:
        run: is given `args`.
        args: as a Launch has them; "memory" stands for the workspace, a tensor of bytes.
        bytes: that it allocates meanwhile, at most.
    """

    run: Callable[..., None]
    args: tuple[float | str, ...]
    bytes: int


Step = Launch | TorchCall


class IndexedExecutable(Executable):
    """Kernels of one cubin, launched one after the other.

    Args:
        entry: the kernel whose resources stand for the whole.
        launches: of a call, in order, and what PyTorch does between them.
    """

    takes_pointers = True

    def __init__(
        self,
        w: Workload,
        built: Compiled,
        entry: str,
        launches: Sequence[Step],
        workspace: Workspace,
    ):
        self._w, self._workspace, self._written = w, workspace, Written(w)
        meanwhile = max((step.bytes for step in launches if isinstance(step, TorchCall)), default=0)
        self.resources, self.workspace_bytes = built.resources, workspace.bytes + meanwhile
        self.in_place = bool(self._written)
        out = w.outputs[0]
        self._out = out.shape, out.real_strides, out.torch_dtype
        self.launches = launches
        kernels = [launch for launch in launches if isinstance(launch, Launch)]
        main = next(launch for launch in kernels if launch.entry == entry)
        self.block_threads, self.shared_bytes = main.block_threads, main.shared_bytes
        self._checked = settings().check_indices
        self.counters = max((k.counters for k in kernels if "counter" in k.args), default=0)
        names = [*w.tensors, "out", "fault", "counter", *workspace.offsets, "memory"]
        self._offsets = tuple(workspace.offsets.values())
        self.picks, self._constants = _pickers(launches, names)
        self._kernels = {n: CudaKernel(built, n, code) for n, code, *_ in kernels}
        self._steps: dict[int, list[tuple[Launcher, Pick]]] = {}

    def values(
        self, pointers: Sequence[int], out: torch.Tensor, fault: int, counter: int
    ) -> list[Any]:
        """What `picks` pick each launch's arguments from. It holds the workspace, too: to be kept
        until the last kernel is enqueued.

        Args:
            pointers: the addresses of the workload's tensors.
            fault, counter: those of the flag and of `counters` zeros.
        """
        values: list[Any] = [*pointers, out.data_ptr(), fault, counter]
        memory = None
        if self._offsets:
            memory = self._workspace.allocate(out.device)
            base = memory.data_ptr()
            values += [base + offset for offset in self._offsets]
        values.append(memory)
        values += self._constants
        return values

    def __call__(
        self, *tensors: torch.Tensor, pointers: Sequence[int] | None = None
    ) -> torch.Tensor:
        raise_fault()
        pointers = pointers or [*map(_data_ptr, tensors)]
        if self.in_place:
            self._written.begin(tensors, pointers)
        device = tensors[0].device
        index = device.index
        stream = torch._C._cuda_getCurrentRawStream(index)
        out = tensors[0] if self.in_place else allocator.on(device)(*self._out)
        counter = counters.address(index, stream, self.counters) if self.counters else 0
        values = self.values(pointers, out, fault_address(), counter)
        for launch, pick in self._steps.get(index) or self._steps_on(index, stream):
            launch(stream, pick(values))
        if self._checked and not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize(device)
            raise_fault()
        return out

    def _steps_on(self, device_index: int, stream: int) -> list[tuple[Launcher, Pick]]:
        may_overlap = overlaps(device_index)

        def launcher(step: Step) -> Launcher:
            if isinstance(step, TorchCall):
                return lambda _stream, args: step.run(*args)
            entry, _, grid, threads, shared_bytes, _, follows, meets, _ = step
            return self._kernels[entry].launcher(
                device_index, grid, (threads, 1, 1), shared_bytes, 1, stream,
                cooperative=meets, overlapping=follows and may_overlap,
            )  # fmt: skip

        launchers = map(launcher, self.launches)
        self._steps[device_index] = [*zip(launchers, self.picks, strict=True)]
        return self._steps[device_index]


def _pickers(launches: Sequence[Step], names: Sequence[str]) -> tuple[list[Pick], list[float]]:
    """For each launch what picks its arguments from the addresses of `names` and, behind those, the
    constants of all launches; and these constants."""
    constants: list[float] = []

    def place_of(arg: float | str) -> int:
        if isinstance(arg, str):
            return names.index(arg)
        constants.append(arg)
        return len(names) + len(constants) - 1

    def picker(launch: Step) -> Pick:
        places = [place_of(arg) for arg in launch.args]
        if len(places) == 1:
            return lambda values: (values[places[0]],)
        return operator.itemgetter(*places)

    return [picker(launch) for launch in launches], constants
