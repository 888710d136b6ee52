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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilewright.build import CompileTask, Resources
from tilewright.compile import cxx, nvcc, nvrtc, together
from tilewright.compile.resources import call_resources
from tilewright.errors import CacheError, CompileError, CompilerMissing
from tilewright.files import write_whole
from tilewright.settings import settings


@dataclass(frozen=True)
class Compiled:
    """A binary in the cache.

    Attributes:
        key: digest of compiler, version, source, flags and entry (and the CPU's ISA for cxx).
        path: the .cubin or .so; several tasks' kernels may be in one.
        resources: from the compiler's log; None for a library.
        log: what the compiler said.
        compile_s: what it cost when it was compiled.
        symbols: what its kernels are called in the binary, by their names, where that differs.
    """

    key: str
    path: Path
    resources: Resources | None
    log: str
    compile_s: float
    symbols: Mapping[str, str] = field(default_factory=dict)


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
    (found,) = _written([task], [key], compiler, binary, [log], [{}], compile_s)
    return found


def compiled_together(tasks: Sequence[CompileTask]) -> list[Compiled | CompileError]:
    """The same of tasks that `together.may_join` allows to be made in one go, or the error of each.

    Raises:
        CacheError: as above.
    """
    if len(tasks) > 1:
        try:
            return _joined(tasks)
        except CompileError:
            pass  # one of them is rejected; the others are not
    return [_or_error(task) for task in tasks]


def _joined(tasks: Sequence[CompileTask]) -> list[Compiled | CompileError]:
    compiler = _COMPILERS[tasks[0].compiler]
    keys = [_key(task, compiler) for task in tasks]
    source, symbols = together.joined(tasks)
    started = time.perf_counter()
    binary, log = compiler.compile(source, tasks[0].flags, tasks[0].entry)
    compile_s = (time.perf_counter() - started) / len(tasks)
    logs = [together.log_of(own, log) for own in symbols]
    return [*_written(tasks, keys, compiler, binary, logs, symbols, compile_s)]


def _or_error(task: CompileTask) -> Compiled | CompileError:
    try:
        return compiled(task)
    except CompileError as error:
        return error


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
        path = Path(os.path.normpath(description.parent / entry["binary"]))
        if hashlib.sha256(path.read_bytes()).hexdigest() != entry["sha256"]:
            return None
        log = entry["log"]
        resources = compiler.resources(log, entry["entry"]) if compiler.resources else None
        symbols = entry.get("symbols", {})
        return Compiled(key, path, resources, log, entry["compile_s"], symbols)
    except (OSError, ValueError, KeyError, TypeError, CompileError):
        return None  # absent or damaged: either way it is compiled again


def _written(
    tasks: Sequence[CompileTask],
    keys: Sequence[str],
    compiler: _Compiler,
    binary: bytes,
    logs: Sequence[str],
    symbols: Sequence[Mapping[str, str]],
    compile_s: float,
) -> list[Compiled]:
    """An entry for each task; the binary lies beside the first one's."""
    of = compiler.resources
    resources = [of(log, t.entry) if of else None for t, log in zip(tasks, logs, strict=True)]
    digest = hashlib.sha256(binary).hexdigest()
    path = _description(keys[0]).with_name(f"{keys[0][:32]}-{digest[:16]}{compiler.suffix}")
    _keep(path, binary)
    entries = []
    for task, key, log, own, found in zip(tasks, keys, logs, symbols, resources, strict=True):
        description = _description(key)
        entry: dict[str, Any] = {
            "binary": os.path.relpath(path, description.parent),
            "sha256": digest,
            "compiler": [task.compiler, *compiler.identity()],
            "flags": task.flags,
            "entry": task.entry,
            "log": log,
            "compile_s": compile_s,
            "symbols": dict(own),
        }
        _keep(description, json.dumps(entry, indent=1).encode())
        entries.append(Compiled(key, path, found, log, compile_s, own))
    return entries


def _keep(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    except OSError as error:
        raise CacheError(
            f"cannot keep compiled code in {settings().cache_dir}: {error.strerror}; free space "
            "there, or set TILEWRIGHT_CACHE_DIR to a folder that can be written"
        ) from error
