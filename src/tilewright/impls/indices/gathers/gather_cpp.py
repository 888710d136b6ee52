"""Gather of any strides on a CPU: C++ and OpenMP, runs of elements under one index copied whole."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.build import CompileTask
from tilewright.compile import cxx
from tilewright.compile.cache import Compiled, compiled
from tilewright.compile.launch import CppFunction
from tilewright.device import DeviceSpec
from tilewright.errors import IndexOutOfRange
from tilewright.impl import Executable, Implementation, allocate
from tilewright.impls.indices._any_index import outside
from tilewright.impls.indices._indexed import no_cpp, source_text
from tilewright.impls.indices.gathers._gather import GatherProblem, gather_problem, served_gather
from tilewright.op import Workload
from tilewright.space import ConfigSpace, param

WORDS = {2: "std::uint16_t", 4: "std::uint32_t", 8: "std::uint64_t"}
SHARED_FROM = 2**14
"""Elements from which on threads pay for themselves."""


class GatherCpp(Implementation):
    """Indices are checked on the way; where one is out of range, no result is returned."""

    name, backend, op = "gather_cpp", "cpp", "gather"

    @dataclass(frozen=True)
    class Config:
        threads: str = param("all", "one")

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        if reason := no_cpp(w, device):
            return reason
        p = gather_problem(w)
        return p if isinstance(p, str) else None

    def heuristic(self, w: Workload, device: DeviceSpec) -> Any:
        return self.Config("all" if served_gather(w).numel >= SHARED_FROM else "one")

    def space(self, w: Workload, device: DeviceSpec) -> ConfigSpace[Any]:
        return ConfigSpace(self.Config)

    def compile_key(self, config: Any, w: Workload) -> str:
        return _source(served_gather(w), w.main.itemsize)

    def task(self, config: Any, w: Workload, device: DeviceSpec) -> CompileTask:
        source = _source(served_gather(w), w.main.itemsize)
        return CompileTask("cxx", source, cxx.DEFAULT_FLAGS, "collect")

    def build(self, config: Any, w: Workload, device: DeviceSpec) -> Executable:
        return GatherLoops(w, config, compiled(self.task(config, w, device)))


def _source(p: GatherProblem, itemsize: int) -> str:
    *outer, last = p.axes
    macros: dict[str, int | str] = {
        "T": WORDS[itemsize],  # elements are only copied
        "INDEX": {"i32": "std::int32_t", "i64": "std::int64_t"}[p.index],
        "AXES": " ".join(f"AXIS({a.size}, {a.x}, {a.index})" for a in reversed(outer)),
        "SIZE": last.size,
        "STEP": last.x,
        "INDEX_STEP": last.index,
        "PLACES": f"{p.places}u",
        "STRIDE": p.stride,
        "RUNS": p.copies_runs,
    }
    return source_text(macros, "gathers/gather.hpp")


class GatherLoops(Executable):
    def __init__(self, w: Workload, config: Any, built: Compiled):
        self._function = CppFunction(built, "collect", "PPPqiP")
        p = served_gather(w)
        self._lines, self._places = p.numel // p.axes[-1].size, p.places
        self._out, self._all = w.outputs[0], config.threads == "all"

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        x, index = tensors
        out = allocate(self._out, x.device)
        fault = ctypes.c_int64(0)
        self._function(
            x.data_ptr(),
            index.data_ptr(),
            out.data_ptr(),
            self._lines,
            torch.get_num_threads() if self._all else 1,
            ctypes.addressof(fault),
        )
        if fault.value:
            at = torch.nonzero(outside(index, self._places))[0].tolist()
            raise IndexOutOfRange(
                f"gather: index {int(index[tuple(at)])} at {at} is out of range for "
                f"{self._places} places"
            )
        return out
