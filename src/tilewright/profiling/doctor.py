"""What is on this machine: devices, compilers, versions, ceilings, records; and what is missing."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from tilewright.compile import cxx, nvcc, nvrtc
from tilewright.device import DeviceSpec, current_device, spec_of
from tilewright.environment import BASELINE_PACKAGES, cpu_model, environment, installed_version
from tilewright.errors import StoreError
from tilewright.files import check_writable
from tilewright.measure.ceilings import Ceilings, measure_ceilings
from tilewright.settings import settings
from tilewright.store import Store
from tilewright.text import counted
from tilewright.tune.progress import Progress


@dataclass(frozen=True)
class Finding:
    """One line: what was looked for, what was found, and how to get it if it is missing.

    Attributes:
        found: None if it is missing, or cannot be used.
        remedy: empty unless it is.
        fault: how it is told that it is.
    """

    subject: str
    found: str | None
    remedy: str = ""
    fault: str = "missing"


@dataclass(frozen=True)
class Diagnosis:
    """Findings by section; `device` is the one that work would run on."""

    device: str
    sections: dict[str, list[Finding]]
    ceilings: dict[str, Any] | None

    @property
    def missing(self) -> list[Finding]:
        return [f for findings in self.sections.values() for f in findings if f.found is None]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def diagnose(
    device: str | None = None,
    store_url: str | None = None,
    measure: bool = True,
    quick: bool = True,
    progress: Progress | None = None,
) -> Diagnosis:
    """Look around.

    Args:
        device: as for `current_device`.
        store_url: records to count; by default those of the settings.
        measure: whether to measure the device's ceilings (seconds).
        quick: measure them coarsely.
        progress: told when they are measured.

    Raises:
        InvalidArgument: the named device is not here.
    """
    name, spec = current_device(device)
    ceilings = None
    if measure:
        method = "cpu" if spec.kind == "cpu" else "events"
        (progress or Progress()).phase("ceilings")
        ceilings = measure_ceilings(torch.device(name), method, quick=quick)
    sections = {
        "devices": list(_devices()),
        "compilers": list(_compilers()),
        "versions": list(_versions(torch.device(name))),
        "records": [_records(store_url), _cache()],
    }
    if ceilings is not None:
        sections["ceilings"] = list(_ceilings(spec, ceilings))
    return Diagnosis(name, sections, ceilings.as_dict() if ceilings else None)


def _devices() -> Iterator[Finding]:
    spec = spec_of(None)
    model = cpu_model()
    yield Finding(
        "cpu", f"{model}, {spec.threads} threads, {torch.backends.cpu.get_cpu_capability()}"
    )
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(found):
        p, spec = torch.cuda.get_device_properties(index), spec_of(index)
        yield Finding(
            f"cuda:{index}",
            f"{p.name}, {spec.sms} SMs, {p.total_memory / 2**30:.0f} GiB, {spec.arch}",
        )
    if not found:
        yield Finding(
            "cuda",
            None,
            "torch sees no NVIDIA GPU: kernels for one can be compiled and shown here, not run"
            if torch.version.cuda is None
            else "torch was built for CUDA but sees no GPU: check nvidia-smi",
        )


def _compilers() -> Iterator[Finding]:
    for subject, module in (("C++", cxx), ("NVRTC", nvrtc)):
        reason = module.missing()
        yield Finding(subject, None, reason) if reason else Finding(subject, module.version())
    reason = nvcc.missing()
    yield Finding("nvcc", f"none, for CUTLASS alone: {reason}" if reason else nvcc.version())
    reason = nvcc.cutlass_missing()
    yield Finding("CUTLASS", f"none: {reason}" if reason else " ".join(nvcc.cutlass_flags()))


def _versions(device: torch.device) -> Iterator[Finding]:
    _, _, versions = environment(device)
    for name, version in {"python": platform.python_version(), **versions}.items():
        if version:
            yield Finding(name, str(version))
    for package in ("triton", "cuda-bindings", "nvidia-ml-py", *BASELINE_PACKAGES):
        if not versions.get(package):
            yield Finding(package, installed_version(package) or "not installed")


def _records(store_url: str | None) -> Finding:
    try:
        with Store(store_url) as store:
            return Finding("store", f"{store}, {counted(len(store.query()), 'record')}")
    except StoreError as error:
        return Finding("store", None, str(error), fault="not usable")


def _cache() -> Finding:
    folder = settings().cache_dir
    try:
        check_writable(folder / "probe")
    except OSError as error:
        remedy = "set TILEWRIGHT_CACHE_DIR to a folder that can be written"
        return Finding("cache", None, f"{folder}: {error.strerror}; {remedy}", fault="not usable")
    files = [p.stat().st_size for p in folder.rglob("*") if p.is_file()] if folder.exists() else []
    return Finding("cache", f"{folder}, {counted(len(files), 'file')}, {sum(files) / 1e6:.1f} MB")


def _ceilings(spec: DeviceSpec, ceilings: Ceilings) -> Iterator[Finding]:
    sheet = spec.dram_bytes_per_s
    copy = ceilings.copy_bytes_per_s
    of_sheet = f", {copy / sheet:.0%} of the datasheet's {sheet / 1e12:.2f} TB/s" if sheet else ""
    yield Finding("copy", f"{copy / 1e9:.1f} GB/s read + written{of_sheet}")
    for dtype, rate in ceilings.matmul_flops_per_s.items():
        yield Finding(f"matmul {dtype}", f"{rate / 1e9:.1f} GFLOP/s")
    if ceilings.empty_kernel_us:
        yield Finding("empty kernel", f"{ceilings.empty_kernel_us:.2f} us")
    if ceilings.clock_mhz:
        yield Finding("clock", f"{ceilings.clock_mhz} MHz")
