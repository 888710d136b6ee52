"""CUDA C++ to cubin through NVRTC. Needs no GPU and no driver."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilewright.errors import CompileError, CompilerMissing

_REMEDY = "pip install 'tilewright[cuda]', or in a clone pip install -e '.[cuda]'"


def missing() -> str | None:
    """Why NVRTC cannot be used here and how to get it, or None if it can."""
    try:
        _load()
    except CompilerMissing as error:
        return str(error)
    return None


def version() -> str:
    """Of the NVRTC library in use: "13.0".

    Raises:
        CompilerMissing: there is none.
    """
    return _load()[1]


def flags_for(arch: str) -> tuple[str, ...]:
    """What every kernel for an architecture such as sm_90a is compiled with."""
    return f"--gpu-architecture={arch}", "--std=c++17"


def compile_cubin(source: str, flags: Sequence[str], name: str) -> tuple[bytes, str]:
    """The cubin for the real architecture among `flags`, and the log with the ptxas report.

    Args:
        source: CUDA C++ that includes nothing, or whose include folders are among the flags.
        flags: NVRTC options, those of `flags_for` among them.
        name: of the kernel, for messages.

    Raises:
        CompilerMissing: NVRTC is not on this machine.
        CompileError: it rejected the source or a flag; its log is in the message.
    """
    binary, log = _compile(source, ("--ptxas-options=-v", *_of_release(), *flags), name, "CUBIN")
    assert binary, f"no real architecture (sm_...) in {flags}"
    return binary, log


def compile_ptx(source: str, flags: Sequence[str], name: str) -> str:
    """The PTX that `compile_cubin` would assemble. Same arguments and errors."""
    virtual = [re.sub(r"^(--gpu-architecture=|-arch=)sm_", r"\1compute_", flag) for flag in flags]
    text, _ = _compile(source, virtual, name, "PTX")
    return text.rstrip(b"\0").decode()


def capped(source: str, max_registers: int) -> str:
    """The source with a register cap in place of launch bounds: a kernel cannot have both."""
    bounds = re.compile(r"__(launch_bounds|maxnreg)__\([^()]*\)")
    return bounds.sub(f"__maxnreg__({max_registers})", source)


def _of_release() -> tuple[str, ...]:
    """Flags that came with NVRTC 13: `--no-cache` has ptxas run and report, where NVRTC would keep
    cubins without a log; `--minimal` leaves out declarations that no kernel here uses (textures,
    the device runtime), which spares 5 ms of 30 to 150, for the same cubins."""
    major = int(version().split(".")[0])
    return ("--no-cache", "--minimal") if major >= 13 else ()


def _compile(source: str, flags: Sequence[str], name: str, product: str) -> tuple[bytes, str]:
    nvrtc, _ = _load()
    status, program = nvrtc.nvrtcCreateProgram(
        source.encode(), f"{name}.cu".encode(), 0, None, None
    )
    _check(nvrtc, status, name)
    try:
        options = [flag.encode() for flag in flags]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = _fetch(nvrtc, program, "ProgramLog", name).rstrip(b"\0").decode().strip()
        _check(nvrtc, status, f"{name} ({' '.join(flags)})", log)
        return _fetch(nvrtc, program, product, name), log
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _fetch(nvrtc: Any, program: Any, product: str, name: str) -> bytes:
    status, size = getattr(nvrtc, f"nvrtcGet{product}Size")(program)
    _check(nvrtc, status, name)
    buffer = bytearray(size)
    (status,) = getattr(nvrtc, f"nvrtcGet{product}")(program, buffer)
    _check(nvrtc, status, name)
    return bytes(buffer)


def _check(nvrtc: Any, status: Any, subject: str, log: str = "") -> None:
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"NVRTC {version()} rejected {subject}: {status.name}\n{log}".rstrip())


@functools.cache
def _load() -> tuple[Any, str]:
    """The cuda.bindings.nvrtc module and the library's version."""
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise CompilerMissing(f"NVRTC needs cuda-bindings ({error}); {_REMEDY}") from error
    if library := _library_of_torch():
        ctypes.CDLL(str(library))  # cuda.bindings takes a library that is loaded already
    try:
        status, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:
        raise CompilerMissing(f"the NVRTC library was not found; {_REMEDY}") from error
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, status
    return nvrtc, f"{major}.{minor}"


def _library_of_torch() -> Path | None:
    """The NVRTC installed with a CUDA build of torch; torch itself stays unimported.

    It goes first because the driver was chosen for torch: a newer compiler's cubin may not load.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    package = Path(spec.origin).parent
    try:
        text = (package / "version.py").read_text()
    except OSError:
        return None
    cuda = re.search(r"^cuda\b[^=\n]*= *['\"](\d+)", text, re.M)
    if cuda is None:
        return None
    wheels = (f"cu{cuda[1]}", "cuda_nvrtc")
    libraries = [package.parent / f"nvidia/{w}/lib/libnvrtc.so.{cuda[1]}" for w in wheels]
    return next((library for library in libraries if library.is_file()), None)
