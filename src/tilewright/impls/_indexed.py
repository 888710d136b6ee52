"""What the CUDA kernels for indices share: their source, their workspace, how they are launched."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

import torch

from tilewright.build import CompileTask
from tilewright.compile.cache import Compiled
from tilewright.compile.faults import fault_address, raise_fault
from tilewright.compile.launch import CudaKernel, overlaps
from tilewright.device import DeviceSpec
from tilewright.errors import InvalidArgument
from tilewright.impl import Executable, allocator
from tilewright.op import Workload
from tilewright.settings import settings

MAX_GRID_YZ = 65535
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
NONE_SKIPPED = -(2**63)
"""No index has this value, so none is left out."""


def source_text(macros: Mapping[str, int | str], *files: str) -> str:
    """Files of kernels/scatter/ behind their configuration as macros."""
    defines = [f"#define {n} {v if isinstance(v, str) else int(v)}" for n, v in macros.items()]
    return "\n".join([*defines, *map(_text, files)])


@functools.cache
def _text(name: str) -> str:
    return resources.files("tilewright").joinpath(f"kernels/scatter/{name}").read_text()


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
    """Of files of kernels/scatter/ with their configuration as macros.

    Args:
        entry: the kernel whose resources stand for the whole.
        dtype, index: of the elements and of the index.
    """
    types = {"T": ELEMENT[dtype], "A": SUM[dtype], "INDEX": INDEX[index]}
    source = source_text({**types, **macros}, "common.cuh", *files)
    return CompileTask("nvrtc", source, (f"--gpu-architecture={device.arch}", "--std=c++17"), entry)


def no_cuda(w: Workload, device: DeviceSpec) -> str | None:
    """Why the CUDA kernels for indices cannot take part at all."""
    if device.kind != "cuda":
        return f"it runs on a GPU, not on {device.name}"
    if any(s.numel == 0 for s in (*w.tensors.values(), *w.outputs)):
        return "a tensor is empty: there is nothing to compute"
    return None


class Workspace:
    """Parts of one allocation, each at a multiple of 256 bytes.

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

    def allocate(self, device: torch.device) -> tuple[torch.Tensor, dict[str, int]]:
        """The memory, to be kept until the last kernel is enqueued, and addresses by name."""
        memory = allocator.empty_strided(
            (max(self.bytes, 1),), (1,), dtype=torch.uint8, device=device
        )
        base = memory.data_ptr()
        return memory, {name: base + offset for name, offset in self.offsets.items()}


class Launch(NamedTuple):
    """One kernel of a call; `args` in the order of its signature.

    `overlapping`: it may start while the kernel before it ends, for which it waits itself.
    """

    entry: str
    grid: tuple[int, int, int]
    block_threads: int
    shared_bytes: int
    args: Sequence[float]
    overlapping: bool = False


def refuse_shared_memory(w: Workload, tensors: Sequence[torch.Tensor]) -> None:
    """What is written in place may not be read through another argument.

    Raises:
        InvalidArgument: memory of the first tensor belongs to another one, too.
    """
    (first, *others), (name, *names) = tensors, w.tensors
    start, end = _span(first)
    for other, its_name in zip(others, names, strict=True):
        its_start, its_end = _span(other)
        if start < its_end and its_start < end:
            raise InvalidArgument(
                f"{w.op}: {name} is written in place and shares memory with {its_name}; "
                f"clone {its_name} before the call"
            )


def _span(t: torch.Tensor) -> tuple[int, int]:
    start = t.data_ptr()
    reach = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return start, start + (1 + reach) * t.element_size()


class IndexedExecutable(Executable):
    """Kernels of one cubin, launched one after the other."""

    def __init__(self, w: Workload, built: Compiled, signatures: Mapping[str, str]):
        self._w = w
        self.resources = built.resources
        self.in_place = bool(w.operator.inplace and next(iter(w.tensors)) in w.donated)
        self.out = w.outputs[0]
        self.kernels = {name: CudaKernel(built, name, s) for name, s in signatures.items()}
        self._checked = settings().check_indices

    def launches(self, tensors: Sequence[torch.Tensor], out: torch.Tensor, fault: int) -> Any:
        """The kernels of one call, as a generator of Launch; it holds the workspace."""
        raise NotImplementedError

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        raise_fault()
        if self.in_place:
            refuse_shared_memory(self._w, tensors)
        device = tensors[0].device
        index = device.index
        stream = torch._C._cuda_getCurrentRawStream(index)
        out = (
            tensors[0]
            if self.in_place
            else allocator.empty_strided(
                self.out.shape, self.out.real_strides, dtype=self.out.torch_dtype, device=device
            )
        )
        for launch in self.launches(tensors, out, fault_address()):
            self.kernels[launch.entry].launch(
                launch.grid,
                (launch.block_threads, 1, 1),
                launch.shared_bytes,
                stream,
                index,
                *launch.args,
                overlapping=launch.overlapping and overlaps(index),
            )
        if self._checked and not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize(device)
            raise_fault()
        return out
