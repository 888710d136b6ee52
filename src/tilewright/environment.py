"""Where a measurement is made: the device's key in the store, its facts, and the versions."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import re
import subprocess
import time
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tilewright.errors import CompileError

if TYPE_CHECKING:  # the store is read without torch, as `tilewright records` does
    import torch

BASELINE_PACKAGES = ("quack-kernels",)
"""Neither PyTorch's nor ours: what a baseline of theirs is depends on their version."""


def environment(
    device: torch.device | str,
) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """The device's key, its facts and the versions that go into every record of it.

    The key names what makes two devices interchangeable for measured times: a GPU's name, number
    of SMs (a MIG slice has fewer) and memory; a CPU's model, instruction set and threads in use.

    Compilers are loaded or started to ask for their versions; `device_key` needs none.

    Returns:
        (key, info, versions): `info` has name, sms and memory_bytes, or name, isa and threads;
        `versions` has torch, tilewright and its commit, for a GPU cuda, driver, nvrtc, nvcc and
        triton, for a CPU compiler. A version is None where the thing is not there, or does not
        answer. Packages whose kernels are baselines on a GPU are named where they are installed.
    """
    import torch

    from tilewright.compile import cxx, nvcc, nvrtc

    device = torch.device(device)
    versions: dict[str, Any] = {
        "torch": torch.__version__,
        "tilewright": _own_version(),
        "commit": commit(),
    }
    info, key = _device(device)
    if device.type == "cpu":
        versions["compiler"] = _version_of(cxx)
        return key, dict(info), versions
    versions |= {"cuda": torch.version.cuda, "driver": driver_version()}
    versions |= {"nvrtc": _version_of(nvrtc), "nvcc": _version_of(nvcc)}
    versions |= {"triton": installed_version("triton"), **_baseline_versions()}
    return key, dict(info), versions


def device_key(device: torch.device) -> str:
    """The device's key alone: what dispatch asks for at calls."""
    return _device(device)[1]


def _device(device: torch.device) -> tuple[dict[str, Any], str]:
    import torch

    if device.type == "cpu":
        return _cpu(torch.get_num_threads())
    return _gpu(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _own_version() -> str:
    return importlib.metadata.version("tilewright")


@functools.cache
def commit() -> str | None:
    """The commit this package was run from, "-dirty" with local changes; None outside git."""
    here = Path(__file__)
    git = ["git", "-C", str(here.parent)]
    try:
        tracked = subprocess.run(
            [*git, "ls-files", "--error-unmatch", here.name], capture_output=True, timeout=10
        )
        if tracked.returncode:
            return None
        describe = [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(
            describe, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


@functools.cache
def _baseline_versions() -> dict[str, str]:
    return {name: found for name in BASELINE_PACKAGES if (found := installed_version(name))}


def installed_version(package: str) -> str | None:
    """The version of a Python package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def _cpu(threads: int) -> tuple[dict[str, Any], str]:
    import torch

    isa = torch.backends.cpu.get_cpu_capability()
    info = {"name": cpu_model(), "isa": isa, "threads": threads}
    return info, f"{info['name']}, {isa}, {threads} threads"


@functools.cache
def _gpu(index: int) -> tuple[dict[str, Any], str]:
    import torch

    p = torch.cuda.get_device_properties(index)
    info = {"name": p.name, "sms": p.multi_processor_count, "memory_bytes": p.total_memory}
    memory_gib = round(p.total_memory / 2**30)
    return info, f"{p.name}, {p.multi_processor_count} SMs, {memory_gib} GiB"


@functools.cache
def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The CPU's marketing name, or its architecture where the system does not say."""
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    found = re.search(r"^model name\s*:\s*(.+?)\s*$", text, re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def idle_cores(for_s: float = 0.25, stat: Path = Path("/proc/stat")) -> float | None:
    """How many cores nobody uses while this process waits; None where the system does not say."""

    def ticks() -> tuple[int, int]:
        user, nice, system, idle, waiting, *others = map(int, stat.read_text().split()[1:9])
        return idle + waiting, sum((user, nice, system, idle, waiting, *others))

    if not stat.exists():
        return None
    idle, total = ticks()
    time.sleep(for_s)
    later_idle, later_total = ticks()
    passed = later_total - total
    return (os.cpu_count() or 1) * (later_idle - idle) / passed if passed else None


@functools.cache
def driver_version(proc: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """The NVIDIA driver's version, such as "580.95.05"; needs no NVML."""
    text = proc.read_text() if proc.exists() else ""
    if found := re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text):
        return found[0]
    import torch

    if torch.version.cuda is None:
        return None
    return f"CUDA {torch._C._cuda_getDriverVersion()}"  # type: ignore[attr-defined]


def _version_of(compiler: ModuleType) -> str | None:
    try:
        return str(compiler.version())
    except CompileError:
        return None
