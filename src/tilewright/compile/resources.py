"""What a kernel costs and what it became: ptxas reports, PTX and SASS."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import astuple
from pathlib import Path

from tilewright.build import CompileTask, Resources
from tilewright.compile import nvrtc
from tilewright.errors import CompileError, CompilerMissing

_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


def parse_ptxas(log: str, entry: str) -> Resources:
    """Resources of kernel `entry` from the log of `--ptxas-options=-v`.

    Spills and stack of functions that were not inlined into the kernel count as its own.

    Raises:
        CompileError: the log reports no such kernel.
    """
    kernels = _reports(log)
    if entry not in kernels:
        found = ", ".join(kernels) or "none"
        raise CompileError(
            f'the source defines no kernel {entry} (it has: {found}); declare it extern "C"'
        )
    report = kernels[entry]

    def number(pattern: str) -> int:
        match = re.search(pattern, report)
        return int(match[1]) if match else 0

    frames = [tuple(map(int, found)) for found in _SPILLS.findall(report)]
    return Resources(
        registers=number(r"Used (\d+) registers"),
        spill_bytes=sum(stores + loads for _, stores, loads in frames),
        stack_bytes=max(
            number(r"(\d+) bytes cumulative stack"), *(stack for stack, _, _ in frames), 0
        ),
        shared_bytes=number(r"(\d+) bytes smem"),
    )


def call_resources(log: str, entry: str) -> Resources:
    """The same where a call launches all kernels of the log: of each resource, what any takes most.

    Raises:
        CompileError: the log reports no such kernel.
    """
    return most(parse_ptxas(log, k) for k in (entry, *_reports(log)))


def most(found: Iterable[Resources]) -> Resources:
    """Of each resource, what any takes most."""
    return Resources(*map(max, zip(*map(astuple, found), strict=True)))


def _reports(log: str) -> dict[str, str]:
    """By kernel."""
    parts = r"Compiling entry function '([^']+)'(.*?)(?=Compiling entry|\Z)"
    return dict(re.findall(parts, log, re.S))


def ptx(task: CompileTask) -> str:
    """The PTX of an NVRTC task, compiled now.

    Raises:
        CompileError: the compiler refused, or is missing.
    """
    assert task.compiler == "nvrtc", task.compiler
    return nvrtc.compile_ptx(task.source, task.flags, task.entry)


def sass(task: CompileTask) -> str:
    """The machine code of an NVRTC task as text, compiled now: in the cache there may be others'
    kernels beside it.

    Raises:
        CompilerMissing: neither nvdisasm nor cuobjdump is on this machine.
        CompileError: the compiler refused, or the tool cannot read what it made.
    """
    assert task.compiler == "nvrtc", task.compiler
    if tool := find_tool("nvdisasm"):
        command = [tool, "--print-code"]
    elif tool := find_tool("cuobjdump"):
        command = [tool, "--dump-sass"]
    else:
        raise CompilerMissing(
            "SASS needs nvdisasm or cuobjdump, and neither is on PATH or in this environment; "
            "pip install triton brings both"
        )
    binary, _ = nvrtc.compile_cubin(task.source, task.flags, task.entry)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        done = subprocess.run([*command, file.name], capture_output=True, text=True, check=False)
    if done.returncode:
        name = Path(tool).name
        raise CompileError(f"{name} cannot read the cubin of {task.entry}: {done.stderr.strip()}")
    return done.stdout


def find_tool(name: str) -> str | None:
    """A program of the CUDA toolkit: on PATH, where wheels put it, or in the usual folder."""
    wheels = ("triton/backends/nvidia/bin", "nvidia/cu13/bin", "nvidia/cuda_nvcc/bin")
    folders = [Path(root, wheel) for root in sys.path if root for wheel in wheels]
    candidates = [
        shutil.which(name),
        *(str(f / name) for f in folders),
        f"/usr/local/cuda/bin/{name}",
    ]
    return next((c for c in candidates if c and Path(c).is_file()), None)
