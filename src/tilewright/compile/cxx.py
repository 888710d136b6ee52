"""C++ to a shared library through the machine's own compiler."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tilewright.errors import CacheError, CompileError, CompilerMissing, CompileTimeout
from tilewright.settings import settings

DEFAULT_FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-std=c++17")
"""Flags for every generated library. Without -ffast-math: NaN, infinity and order of sums hold."""
WITHOUT_CXX_LIBRARY = "-nostdlib++"
"""Beside -fno-exceptions, for a source that uses nothing of C++'s own library: to link it takes
50 ms of a kernel's 170 (g++ 12.2, layer norm). The flag is clang's; `compile_shared` puts it in
other words for g++, which has it since release 13, and leaves it out for other compilers."""
_GNU = re.compile(r"\S*\+\+\S* \(")
"""What g++ says of its version begins with its name, whatever that is, and who built it."""


def missing() -> str | None:
    """Why no C++ compiler can be used here and how to get one, or None if one can."""
    try:
        _command()
    except CompilerMissing as error:
        return str(error)
    return None


def version() -> str:
    """First line of the compiler's `--version`: "g++ (Debian 12.2.0-14) 12.2.0".

    Raises:
        CompilerMissing: there is none.
        CompileError: it did not answer.
    """
    return _version(_command())


@functools.cache
def isa() -> str:
    """Digest of what `-march=native` goes by: a library built for one CPU may crash another."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        lines = [platform.machine(), platform.processor()]
    names = ("model", "flags", "Features", "CPU part", "CPU implementer")
    told = [line for line in lines if line.startswith(names)] or lines
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]


def compile_shared(source: str, flags: Sequence[str], name: str) -> tuple[bytes, str]:
    """The shared library and the compiler's log (warnings).

    Args:
        source: C++ text.
        flags: compiler flags; DEFAULT_FLAGS unless there is a reason.
        name: of the function, for messages.

    Raises:
        CompilerMissing: no C++ compiler is on this machine.
        CompileError: it rejected the source or a flag; its log is in the message.
        CompileTimeout: it ran longer than `settings().compile_timeout_s` and was killed.
        CacheError: the temporary folder is full or read-only.
    """
    command, libraries = _command(), tuple[str, ...]()
    if WITHOUT_CXX_LIBRARY in flags and "clang" not in _version(command):
        flags = [flag for flag in flags if flag != WITHOUT_CXX_LIBRARY]
        sanitized = any(flag.startswith("-fsanitize") for flag in (*command, *flags))
        if _GNU.match(_version(command)) and not sanitized:  # OpenMP's library stays linked
            flags, libraries = [*flags, "-nodefaultlibs"], ("-lm", "-lgcc", "-lc", "-lgcc")
    return build_library(command, source, ".cpp", flags, name, libraries)


def build_library(
    command: Sequence[str],
    source: str,
    suffix: str,
    flags: Sequence[str],
    name: str,
    libraries: Sequence[str] = (),
) -> tuple[bytes, str]:
    """What `compile_shared` does, by any compiler driver that takes the same arguments.

    Args:
        suffix: of the source file, by which the driver knows its language.
        libraries: flags of those to link, which follow the source.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="tilewright-") as folder:
            text, library = Path(folder, f"{name}{suffix}"), Path(folder, f"{name}.so")
            text.write_text(source)
            linked = [str(text), *libraries, "-o", str(library)]
            returncode, log = run([*command, *flags, *linked], name)
            if returncode == 0 and library.exists():
                return library.read_bytes(), log
    except OSError as error:
        raise CacheError(
            f"cannot compile in {tempfile.gettempdir()}: {error}; free space there or set TMPDIR"
        ) from error
    raise CompileError(
        f"{shlex.join(command)} rejected {name} ({shlex.join(flags)}), "
        f"exit code {returncode}:\n{log}"
    )


def _command() -> tuple[str, ...]:
    chosen = settings().cxx
    candidates = [chosen] if chosen else ["g++", "clang++"]
    for candidate in candidates:
        program, *arguments = shlex.split(candidate)
        if found := shutil.which(program):
            return (found, *arguments)
    if chosen:
        raise CompilerMissing(
            f"TILEWRIGHT_CXX={chosen} is not a program on this machine; "
            "set it to a C++ compiler or unset it"
        )
    raise CompilerMissing(
        "no C++ compiler: neither g++ nor clang++ is on PATH; "
        "apt install g++, or set TILEWRIGHT_CXX to a compiler"
    )


@functools.cache
def _version(command: tuple[str, ...]) -> str:
    returncode, output = run([*command, "--version"], "--version")
    if returncode:
        raise CompileError(f"{shlex.join(command)} --version failed:\n{output}")
    return output.partition("\n")[0]


def run(command: Sequence[str], name: str) -> tuple[int, str]:
    """Exit code and merged output. Nothing the compiler started outlives this call."""
    timeout_s = settings().compile_timeout_s
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # a driver such as g++ is killed together with its passes
        )
    except OSError as error:
        raise CompilerMissing(f"{command[0]} cannot be run: {error.strerror}") from error
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise CompileTimeout(
            f"{command[0]} was still compiling {name} after {timeout_s:g} s and was killed; "
            "TILEWRIGHT_COMPILE_TIMEOUT sets the limit in seconds"
        ) from error
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        assert process.stdout is not None
        process.stdout.close()
    return process.returncode, output.strip()
