"""What a build takes and gives. Free of torch, so that compiler processes start fast."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CompileTask:
    """One unit of compiler work.

    Attributes:
        compiler: "nvrtc", "cxx", or "nvcc" for a library with kernels in it.
        source: the complete source text.
        flags: the complete flags, architecture included.
        entry: name of the kernel or function.
        shared: characters at the start of a source for NVRTC which others may begin with as well;
            what follows defines kernels and no macros, so that it may stand in a namespace beside
            theirs. 0 if it is compiled alone.
    """

    compiler: str
    source: str
    flags: tuple[str, ...]
    entry: str
    shared: int = 0


@dataclass(frozen=True)
class Resources:
    """What the compiler really gave a kernel; bytes per thread or per block as named."""

    registers: int
    spill_bytes: int
    """Bytes per thread that spill code stores and loads."""
    stack_bytes: int
    shared_bytes: int
    """Static shared memory of a block; the dynamic part is the schedule's."""


@dataclass
class Effort:
    """What one compiler made, and the seconds that a core was busy with it; the cache's hits, and
    what it rejected, count as nothing made."""

    kernels: int = 0
    cpu_s: float = 0.0
