"""Compiled binaries, kept by what went into them.

An entry is a description, `<key>.json`, that names its binary by content. Both are written under
a temporary name and moved into place, the description last: whoever looks sees a whole entry or
none, however many processes write and whenever one is killed. A binary that no longer matches its
description is compiled again.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright.build import CompileTask, Resources
from tilewright.compile import cxx, nvcc, nvrtc
from tilewright.compile.resources import call_resources
from tilewright.errors import CacheError, CompileError, CompilerMissing
from tilewright.settings import settings


@dataclass(frozen=True)
class Compiled:
    """A binary in the cache.

    Attributes:
        key: digest of compiler, version, source, flags and entry (and the CPU's ISA for cxx).
        path: the .cubin or .so.
        resources: from the compiler's log; None for a library.
        log: what the compiler said.
        compile_s: what it cost when it was compiled.
    """

    key: str
    path: Path
    resources: Resources | None
    log: str
    compile_s: float


@dataclass(frozen=True)
class _Compiler:
    suffix: str
    identity: Callable[[], tuple[str, ...]]
    """Version, and whatever else outside source and flags decides the binary."""
    compile: Callable[[str, Sequence[str], str], tuple[bytes, str]]
    resources: Callable[[str, str], Resources] | None


_COMPILERS: Mapping[str, _Compiler] = {
    "nvrtc": _Compiler(".cubin", lambda: (nvrtc.version(),), nvrtc.compile_cubin, call_resources),
    "nvcc": _Compiler(".so", lambda: (nvcc.version(),), nvcc.compile_library, None),
    "cxx": _Compiler(".so", lambda: (cxx.version(), cxx.isa()), cxx.compile_shared, None),
}


def compiled(task: CompileTask) -> Compiled:
    """From the cache, or by compiling now.

    Safe to call from many threads and processes at once. NVRTC runs inside the calling process, so
    only a `CompilePool` can stop it when it takes too long.

    Raises:
        CompileError: the compiler rejected the task; its log is in the message.
        CompilerMissing: the compiler is not on this machine.
        CompileTimeout: it ran longer than `settings().compile_timeout_s`.
        CacheError: the cache folder cannot be written.
    """
    compiler = _COMPILERS[task.compiler]
    key = _key(task, compiler)
    if found := _read(key, compiler):
        return found
    started = time.perf_counter()
    binary, log = compiler.compile(task.source, task.flags, task.entry)
    compile_s = time.perf_counter() - started
    resources = compiler.resources(log, task.entry) if compiler.resources else None
    return _write(key, task, compiler, binary, resources, log, compile_s)


def cached(task: CompileTask) -> Compiled | None:
    """From the cache, or None; never compiles. None as well where the compiler is missing."""
    compiler = _COMPILERS[task.compiler]
    try:
        return _read(_key(task, compiler), compiler)
    except CompilerMissing:
        return None


def _key(task: CompileTask, compiler: _Compiler) -> str:
    parts = [task.compiler, *compiler.identity(), task.entry, list(task.flags), task.source]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _description(key: str) -> Path:
    return settings().cache_dir / key[:2] / f"{key}.json"


def _read(key: str, compiler: _Compiler) -> Compiled | None:
    description = _description(key)
    try:
        entry = json.loads(description.read_bytes())
        path = description.with_name(entry["binary"])
        if hashlib.sha256(path.read_bytes()).hexdigest() != entry["sha256"]:
            return None
        log = entry["log"]
        resources = compiler.resources(log, entry["entry"]) if compiler.resources else None
        return Compiled(key, path, resources, log, entry["compile_s"])
    except (OSError, ValueError, KeyError, TypeError, CompileError):
        return None  # absent or damaged: either way it is compiled again


def _write(
    key: str,
    task: CompileTask,
    compiler: _Compiler,
    binary: bytes,
    resources: Resources | None,
    log: str,
    compile_s: float,
) -> Compiled:
    description = _description(key)
    digest = hashlib.sha256(binary).hexdigest()
    path = description.with_name(f"{key[:32]}-{digest[:16]}{compiler.suffix}")
    entry: dict[str, Any] = {
        "binary": path.name,
        "sha256": digest,
        "compiler": [task.compiler, *compiler.identity()],
        "flags": task.flags,
        "entry": task.entry,
        "log": log,
        "compile_s": compile_s,
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, binary)
        _replace(description, json.dumps(entry, indent=1).encode())
    except OSError as error:
        raise CacheError(
            f"cannot keep compiled code in {settings().cache_dir}: {error.strerror}; free space "
            "there, or set TILEWRIGHT_CACHE_DIR to a folder that can be written"
        ) from error
    return Compiled(key, path, resources, log, compile_s)


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
