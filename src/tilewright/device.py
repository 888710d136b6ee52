"""Devices: datasheet numbers, which one is here, and how many blocks fit on it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tilewright.errors import InvalidArgument
from tilewright.registry import Registry

REGISTER_STEP = 8
"""A thread has registers by eights."""

WARP = 32
"""Threads of a GPU that run together."""

SECTOR_BYTES = 32
"""What a GPU's memory moves at once: a piece that begins anywhere shares half of one with its
neighbours."""

MAX_GRID, MAX_GRID_YZ = 2**31 - 1, 65535
"""Blocks of a CUDA grid along x, and along y or z."""


@dataclass(frozen=True)
class DeviceSpec:
    """Datasheet numbers of one device. Rates are per second, sizes in bytes.

    Attributes:
        name: short, as in file names: "h200", "cpu".
        kind: "cuda" or "cpu".
        arch: what the compiler is told: "sm_90a"; "native" for a CPU.
        matches: parts of the driver's device name, the longest match wins: ("H200",).
        flops: peak rate of the unit that does the work, by dtype; "f16_tensor" and the like for
            tensor cores.

    Raises:
        InvalidArgument: the kind is another, or a GPU is told without its memories.
    """

    name: str
    kind: str
    arch: str
    matches: tuple[str, ...] = ()
    sms: int = 1
    registers_per_sm: int = 65536
    registers_per_thread: int = 255
    shared_bytes_per_sm: int = 0
    shared_bytes_per_block: int = 0
    shared_bytes_reserved: int = 1024
    """That every block costs besides its own (CUDA occupancy calculator, 8.0 to 10.0)."""
    threads_per_sm: int = 2048
    blocks_per_sm: int = 32
    schedulers_per_sm: int = 4
    """Each has an equal part of the registers, for its own warps."""
    warp: int = WARP
    max_cluster: int = 1
    cluster_sms: Mapping[int, int] = field(default_factory=dict, hash=False)
    """SMs that clusters of so many blocks fill, where that is not all: a cluster lies in one group
    of SMs, and groups have uneven sizes."""
    l2_bytes: int = 0
    dram_bytes_per_s: float = 0.0
    clock_hz: float = 0.0
    flops: Mapping[str, float] = field(default_factory=dict, hash=False)
    threads: int = 1
    """Worker threads of a CPU."""

    def __post_init__(self) -> None:
        if self.kind not in ("cuda", "cpu"):
            raise InvalidArgument(f"device {self.name}: kind={self.kind!r} is neither cuda nor cpu")
        needed = ("shared_bytes_per_sm", "shared_bytes_per_block", "dram_bytes_per_s")
        missing = [n for n in needed if self.kind == "cuda" and not getattr(self, n)]
        if missing:
            raise InvalidArgument(f"device {self.name}: a GPU's spec needs {', '.join(missing)}")

    @property
    def capability(self) -> int:
        """Compute capability times ten: 90 for sm_90a; 0 for a CPU. Architectures compare by it."""
        return int("".join(filter(str.isdigit, self.arch)) or 0)

    def blocks_by_shared(self, shared_bytes: int) -> int:
        """Blocks whose shared memory an SM has room for."""
        return self.shared_bytes_per_sm // (shared_bytes + self.shared_bytes_reserved)

    def shared_bytes_with(self, blocks: int) -> int:
        """Shared memory that a block may have where so many share an SM."""
        room = self.shared_bytes_per_sm // max(blocks, 1) - self.shared_bytes_reserved
        return min(self.shared_bytes_per_block, room)

    def registers_left(self, block_threads: int, blocks: int) -> int:
        """Of a thread, where so many blocks share an SM, whose schedulers have their own each."""
        warps = blocks * max(block_threads // self.warp, 1)
        of_one = math.ceil(warps / self.schedulers_per_sm)
        left = self.registers_per_sm // (self.schedulers_per_sm * of_one * self.warp)
        return min(self.registers_per_thread, left // REGISTER_STEP * REGISTER_STEP)

    def occupancy(self, block_threads: int, registers: int, shared_bytes: int) -> tuple[int, str]:
        """Resident blocks per SM and what limits them.

        Registers are handed out per warp in units of 256, and each scheduler has its own (CUDA
        occupancy calculator, compute capability 8.0 to 10.0).
        """
        warps = math.ceil(block_threads / self.warp)
        per_warp = math.ceil(max(registers, 1) * self.warp / 256) * 256
        of_scheduler = self.registers_per_sm // self.schedulers_per_sm
        held = of_scheduler // per_warp * self.schedulers_per_sm
        limits = {
            "threads": self.threads_per_sm // (warps * self.warp),
            "blocks": self.blocks_per_sm,
            "registers": held // warps,
            "shared memory": self.blocks_by_shared(shared_bytes),
        }
        limiter = min(limits, key=lambda name: limits[name])
        return limits[limiter], limiter


DEVICES: Registry[DeviceSpec] = Registry("devices", "device")


def device_spec(spec: DeviceSpec) -> DeviceSpec:
    """Register a device; called once in each file of devices/."""
    return DEVICES.add(spec.name, spec)


def spec_of(index: int | None) -> DeviceSpec:
    """The spec of CUDA device `index`, or for None of the CPU with the threads it has now.

    An unknown GPU is described by what its driver reports, with the memory rate of the nearest
    known device of the same architecture.
    """
    if index is not None:
        return _spec_of_gpu(index)
    import torch

    return _spec_of_cpu(torch.get_num_threads())


@functools.cache
def _spec_of_cpu(threads: int) -> DeviceSpec:
    return dataclasses.replace(DEVICES["cpu"], threads=threads)


@functools.cache
def _spec_of_gpu(index: int) -> DeviceSpec:
    import torch

    p: Any = torch.cuda.get_device_properties(index)
    known = [d for d in DEVICES.values() if any(m in p.name for m in d.matches)]
    if known:
        return max(known, key=lambda d: max(len(m) for m in d.matches if m in p.name))
    arch = f"sm_{p.major}{p.minor}" + ("a" if p.major >= 9 else "")
    alike = [d for d in DEVICES.values() if d.kind == "cuda" and d.arch == arch]
    base = alike[0] if alike else DEVICES["a100"]
    return dataclasses.replace(
        base,
        name=p.name.lower().replace("nvidia ", "").replace(" ", "_"),
        arch=arch,
        sms=p.multi_processor_count,
        threads_per_sm=p.max_threads_per_multi_processor,
        l2_bytes=p.L2_cache_size,
        shared_bytes_per_sm=p.shared_memory_per_multiprocessor,
        shared_bytes_per_block=p.shared_memory_per_block_optin,
    )


def current_device(name: str | None = None) -> tuple[str, DeviceSpec]:
    """The torch device string and the spec to work on: the GPU if torch sees one, else the CPU.

    Args:
        name: "cpu", "cuda", "cuda:1", or None for whatever is there.

    Raises:
        InvalidArgument: the named device is not on this machine.
    """
    import torch

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name is None:
        name = "cuda" if found else "cpu"
    kind, _, digits = name.partition(":")
    if name == "cpu":
        return "cpu", spec_of(None)
    here = ", ".join(["cpu", *(f"cuda:{i}" for i in range(found))])
    away = "kernels for other devices are compiled by tilewright explain --device-spec"
    if name in DEVICES:
        raise InvalidArgument(f"{name!r} is a kind of device; use one of {here}; {away} {name}")
    if kind != "cuda" or (digits and not digits.isdigit()):
        raise InvalidArgument(f"unknown device {name!r}; use cpu, cuda or cuda:<index>")
    index = int(digits or 0)
    if index >= found:
        raise InvalidArgument(f"device {name!r} is not here; use one of {here}; {away} NAME")
    return f"cuda:{index}", spec_of(index)
