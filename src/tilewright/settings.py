"""The process's environment: what a person sets there. No other module uses os.environ."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from tilewright.errors import InvalidArgument

SHOWN = ("source", "ptx", "sass", "resources", "schedule")
"""What `explain --show` and TILEWRIGHT_SHOW give of a candidate."""


@dataclass(frozen=True)
class Settings:
    """A snapshot of the environment; `settings()` reads it afresh at each call.

    Attributes:
        cache_dir: compiled binaries, content-addressed (TILEWRIGHT_CACHE_DIR).
        store_url: SQLAlchemy URL of the records (TILEWRIGHT_STORE); None is SQLite in
            `records_file`.
        records_file: below the data folder.
        plugin_dirs: further folders shaped like the package, each with any of ops/, impls/,
            devices/, strategies/ and suites/ in it (TILEWRIGHT_PLUGINS, separated like PATH).
        cxx: C++ compiler to use instead of g++ or clang++ (TILEWRIGHT_CXX).
        nvcc: to use instead of the one found (TILEWRIGHT_NVCC).
        cutlass: include folder of a CUTLASS checkout, to use instead of the nvidia-cutlass wheel's
            (TILEWRIGHT_CUTLASS).
        compile_timeout_s: a compiler running longer is killed (TILEWRIGHT_COMPILE_TIMEOUT).
        workspace_limit_bytes: of partial sums of one weight gradient; a config of those that needs
            more is neither tried nor chosen (TILEWRIGHT_WORKSPACE_BYTES).
        enabled: False makes every operator call PyTorch's own kernels (TILEWRIGHT_ENABLED=0).
        check_indices: calls on a GPU wait, and raise at once where an index is out of range
            (TILEWRIGHT_CHECK_INDICES=1).
        trusts_indices: no index is out of range on a GPU, so PyTorch's kernels, which end the
            process's use of it there, may run (TILEWRIGHT_CHECK_INDICES=0).
        nondeterministic: sums of floats on a GPU may have other bits in each run: records of
            workloads with `!nondeterministic` serve calls, and PyTorch's atomic sums run where
            records or nothing speak for them and `trusts_indices`
            (TILEWRIGHT_NONDETERMINISTIC=1).
        show: some of SHOWN, logged of each kernel that is built for a call (TILEWRIGHT_SHOW,
            separated by commas).
    """

    cache_dir: Path
    store_url: str | None
    records_file: Path
    plugin_dirs: tuple[Path, ...]
    cxx: str | None
    nvcc: str | None
    cutlass: Path | None
    compile_timeout_s: float
    workspace_limit_bytes: int
    enabled: bool
    check_indices: bool
    trusts_indices: bool
    nondeterministic: bool
    show: tuple[str, ...]


def settings() -> Settings:
    """Raises InvalidArgument, naming the variable, for a value that cannot be read."""
    env = os.environ
    cache_dir, cutlass = env.get("TILEWRIGHT_CACHE_DIR"), env.get("TILEWRIGHT_CUTLASS")
    return Settings(
        cache_dir=Path(cache_dir) if cache_dir else _user_dir("cache"),
        store_url=env.get("TILEWRIGHT_STORE") or None,
        records_file=_user_dir("data") / "records.db",
        plugin_dirs=plugin_dirs(),
        cxx=env.get("TILEWRIGHT_CXX") or None,
        nvcc=env.get("TILEWRIGHT_NVCC") or None,
        cutlass=Path(cutlass) if cutlass else None,
        compile_timeout_s=_number("TILEWRIGHT_COMPILE_TIMEOUT", 120, "seconds"),
        workspace_limit_bytes=workspace_limit_bytes(),
        enabled=_switch("TILEWRIGHT_ENABLED") is not False,
        check_indices=_switch("TILEWRIGHT_CHECK_INDICES") is True,
        trusts_indices=trusts_indices(),
        nondeterministic=nondeterministic(),
        show=tuple(s.strip() for s in env.get("TILEWRIGHT_SHOW", "").split(",") if s.strip()),
    )


def plugin_dirs() -> tuple[Path, ...]:
    """`settings().plugin_dirs` alone, which registries ask for at each look-up."""
    listed = os.environ.get("TILEWRIGHT_PLUGINS")
    return tuple(Path(p) for p in listed.split(os.pathsep) if p) if listed else ()


def workspace_limit_bytes() -> int:
    """`settings().workspace_limit_bytes` alone, which choosing a config asks for."""
    return int(_number("TILEWRIGHT_WORKSPACE_BYTES", 1 << 29, "bytes"))


def nondeterministic() -> bool:
    """`settings().nondeterministic` alone, which choosing what runs asks for."""
    return _switch("TILEWRIGHT_NONDETERMINISTIC") is True


def trusts_indices() -> bool:
    """`settings().trusts_indices` alone, which choosing what runs asks for."""
    return _switch("TILEWRIGHT_CHECK_INDICES") is False


def _switch(name: str) -> bool | None:
    """None where it is not set."""
    text = os.environ.get(name)
    if not text:
        return None
    if text not in ("0", "1"):
        raise InvalidArgument(f"{name}={text} should be 0 or 1")
    return text == "1"


def _number(name: str, default: float, unit: str) -> float:
    text = os.environ.get(name)
    if not text:
        return default
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise InvalidArgument(f"{name}={text} should be a number of {unit}, such as {default}")
    return number


def _user_dir(kind: str) -> Path:
    import platformdirs

    base = platformdirs.user_cache_dir if kind == "cache" else platformdirs.user_data_dir
    return Path(base("tilewright"))


def let_profiler_leave() -> None:
    """Have PyTorch's profiler end with each profile. Else it stays in the process, and every later
    launch costs the host 1.5 us more."""
    os.environ.setdefault("TEARDOWN_CUPTI", "1")
