"""CUDA C++ as a library for the CPU, and its launches; see cuda_on_cpu.hpp, fibers_on_cpu.cpp."""

import contextlib
import ctypes
import functools
import re
from dataclasses import replace
from pathlib import Path
from unittest import mock

from tilewright.build import CompileTask
from tilewright.compile import cache
from tilewright.compile.cache import compiled
from tilewright.compile.cxx import WITHOUT_CXX_LIBRARY

HEADER = Path(__file__).with_name("cuda_on_cpu.hpp").read_text()
FIBERS = Path(__file__).with_name("fibers_on_cpu.cpp").read_text()
PER_BLOCK = "#define PER_BLOCK thread_local\n"
"""What sources begin with whose blocks run side by side."""
FLAGS = (
    *("-O1", "-std=c++17", "-w", "-shared", "-fPIC", "-fno-strict-aliasing"),
    *("-march=native", "-ffp-contract=off"),  # converts halves at once, with the same bits
    "-U_FORTIFY_SOURCE",  # jumps between stacks
    "-fno-gnu-unique",  # libraries with functions of equal names each have their own shared memory
    "-fstack-reuse=none",  # what a thread forgot to wait for changes no other variable
    "-fno-exceptions",
)
SPIN = re.compile(r"(while \(\*\((?:const )?volatile u32\*\).*\)) \{\}")
"""A loop that waits for another block."""


class GivenUp(AssertionError):
    """An emulated kernel did what a GPU might not survive: it would wait for ever, say."""


def library(text, doors, start=HEADER, defined=FIBERS):
    """The library of a source whose functions `doors` launch kernels, and raise GivenUp.

    Args:
        start: what the source begins with: compiled once for all sources that share it.
        defined: what is declared there: compiled once too, and every library has a copy.
    """
    own = _object(start, defined)
    ctypes.CDLL("libstdc++.so.6", ctypes.RTLD_GLOBAL)  # not linked to each, which takes 50 ms
    flags = (*FLAGS, WITHOUT_CXX_LIBRARY, str(own), "-include", str(_precompiled(start)))
    task = CompileTask("cxx", _patient(text), flags, doors[0])
    found = ctypes.CDLL(str(compiled(task).path))
    for door in doors:
        function = getattr(found, door)
        function.restype, function.errcheck = ctypes.c_char_p, _raised
    return found


@functools.cache
def _precompiled(start):
    """A header that has its compiled form beside it, where compilers look for one."""
    start = _patient(start)
    built = compiled(CompileTask("cxx", start, (*FLAGS, "-x", "c++-header"), "start")).path
    header = built.with_suffix(".hpp")
    header.write_text(start)
    with contextlib.suppress(FileExistsError):
        Path(f"{header}.gch").symlink_to(built)
    return header


@functools.cache
def _object(start, text):
    flags = (*FLAGS, "-c", "-include", str(_precompiled(start)))
    return compiled(CompileTask("cxx", text, flags, "defined")).path


def _patient(text):
    return SPIN.sub(r"\1 give_way();", text)


def _raised(trouble, function, args):
    if trouble:
        raise GivenUp(trouble.decode())


def built_for_a_cpu(impl, config, w, device):
    """An implementation's executable with no binary for a GPU: its kernels' source runs here."""
    nvrtc = cache._COMPILERS["nvrtc"]
    none = replace(nvrtc, identity=tuple, compile=lambda *_: (b"", ""), resources=None)
    with mock.patch.dict(cache._COMPILERS, nvrtc=none):
        return impl.build(config, w, device)


def fails(check):
    """Whether a check of a kernel with a fault returns False, or the kernel is given up."""
    try:
        return not check()
    except GivenUp:
        return True
