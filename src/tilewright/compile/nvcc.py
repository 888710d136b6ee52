"""CUDA C++ with its host code to a shared library through nvcc: for CUTLASS templates.

Their launch parameters are computed by host code that NVRTC does not compile. Needs no GPU.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from tilewright.compile import cxx
from tilewright.compile.resources import find_tool
from tilewright.errors import CompileError, CompilerMissing
from tilewright.settings import settings

UTILITIES = "tools/util/include"
"""Beside the include folder, in CUTLASS's checkout and wheel."""
DEFAULT_FLAGS = (
    "-std=c++17", "-O3", "-DNDEBUG", "-shared", "-cudart=static", "--expt-relaxed-constexpr",
    "-Xptxas=-v", "-Xcompiler=-fPIC", "-Xcompiler=-fno-gnu-unique",
)  # fmt: skip
"""Flags for every library. CUTLASS's assertions are left out, as in releases of it. The CUDA
runtime is linked in, so that any machine can load it; no name is unique in the process, since
several libraries are made of the same templates."""


def missing() -> str | None:
    """Why nvcc cannot be used here and how to get it, or None if it can."""
    try:
        _command()
    except CompilerMissing as error:
        return str(error)
    return cxx.missing()


def version() -> str:
    """Of the nvcc in use: "13.0.88".

    Raises:
        CompilerMissing: there is none.
        CompileError: it did not answer.
    """
    return _version(_command())


def compile_library(source: str, flags: Sequence[str], name: str) -> tuple[bytes, str]:
    """The shared library and the log with the ptxas report of each kernel.

    Args:
        source: CUDA C++ text.
        flags: DEFAULT_FLAGS, the architecture and include folders.
        name: for messages.

    Raises:
        CompilerMissing, CompileError, CompileTimeout, CacheError: as for `cxx.compile_shared`.
    """
    return cxx.build_library(_command(), source, ".cu", flags, name)


def architecture(arch: str) -> str:
    """The flag for one real architecture: sm_90a."""
    return f"-gencode=arch=compute_{arch.removeprefix('sm_')},code={arch}"


def cutlass_missing(utilities: bool = False) -> str | None:
    """Why CUTLASS's headers cannot be used here and how to get them, or None if they can.

    Args:
        utilities: also those of its tools, which 3.x's convolutions need.
    """
    folder = _headers()
    if folder and (not utilities or any((f / "cutlass/util").is_dir() for f in _tools(folder))):
        return None
    lacking = f"cutlass/util is not beside {folder}" if folder else "they are not on this machine"
    return (
        f"CUTLASS's headers: {lacking}; pip install --no-deps nvidia-cutlass==4.2.0.0, "
        "or set TILEWRIGHT_CUTLASS to the include folder of a CUTLASS checkout"
    )


def cutlass_flags(utilities: bool = False) -> tuple[str, ...]:
    """The include folder of CUTLASS's headers, and their version for the cache's sake.

    Args:
        utilities: as above.

    Raises:
        CompilerMissing: they are not on this machine.
    """
    if (folder := _headers()) is None:
        raise CompilerMissing(str(cutlass_missing()))
    folders = _tools(folder) if utilities else (folder,)
    return (*(f"-I{f}" for f in folders), f"-DTW_CUTLASS_VERSION={_header_version(folder)}")


def _tools(folder: Path) -> tuple[Path, Path]:
    """Where the tools' headers may be: installed with the others, or in a folder of their own."""
    return folder, folder.parent / UTILITIES


def _headers() -> Path | None:
    chosen = settings().cutlass
    if chosen is None:
        spec = importlib.util.find_spec("cutlass_library")  # of the nvidia-cutlass wheel
        if spec is None or spec.origin is None:
            return None
        chosen = Path(spec.origin).parent / "source/include"
    return chosen if (chosen / "cutlass/cutlass.h").is_file() else None


@functools.cache
def _header_version(folder: Path) -> int:
    """40200 for 4.2.0."""
    text = (folder / "cutlass/version.h").read_text()
    found = (re.search(rf"define CUTLASS_{n} (\d+)", text) for n in ("MAJOR", "MINOR", "PATCH"))
    major, minor, patch = (int(m[1]) if m else 0 for m in found)
    return major * 10000 + minor * 100 + patch


def _command() -> tuple[str, ...]:
    if chosen := settings().nvcc:
        program, *arguments = shlex.split(chosen)
        if found := find_tool(program):
            return (found, *arguments)
        raise CompilerMissing(
            f"TILEWRIGHT_NVCC={chosen} is not a program on this machine; set it to nvcc or unset it"
        )
    if found := find_tool("nvcc"):
        return (found,)
    raise CompilerMissing(
        "nvcc is neither on PATH nor in this environment; install the CUDA toolkit, or "
        "pip install nvidia-cuda-nvcc, or set TILEWRIGHT_NVCC to it"
    )


@functools.cache
def _version(command: tuple[str, ...]) -> str:
    returncode, output = cxx.run([*command, "--version"], "--version")
    if returncode:
        raise CompileError(f"{shlex.join(command)} --version failed:\n{output}")
    found = re.search(r"\bV(\d+\.\d+\.\d+)", output)
    return found[1] if found else output
