"""Rows reduced into rows on a CPU: C++ and OpenMP, the positions always in their order."""

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
from tilewright.impls._in_place import Written
from tilewright.impls.indices._indexed import REDUCE, no_cpp, source_text
from tilewright.impls.indices.rows._rows import OPERATORS, RowProblem, row_problem, served_rows
from tilewright.op import Workload
from tilewright.space import ConfigSpace, param
from tilewright.tensor_spec import HALVES

METHODS = ("columns", "owners", "private", "sorted")
FILL = {None: 0, "old": 1, "zero": 2}
FEW_THREADS = 8
"""Up to which columns, which balance under any skew, are not tried: a guess, see `heuristic`."""
PRIVATE_BYTES = 2**26
"""Tables of all threads together; larger ones leave every cache: a guess."""
SPARSE = 8
"""Places for each position above which nothing is counted for each place. Into halves, 100000
positions take 1.4 ms so for any number of places, and by counting 1.5 ms for 800000 places, 2.2 for
1.6 million; a million take 38 ms for 30 million places, and 185 by counting (AMD EPYC, 2 threads,
2026-11-24)."""
TYPES = {"f32": "float", "f64": "double", "i32": "std::int32_t", "i64": "std::int64_t"}
FLAGS = (*cxx.DEFAULT_FLAGS, "-fno-math-errno", "-fno-trapping-math", "-fwrapv")


class RowsCpp(Implementation):
    """Four ways to share rows among threads; kernels/indices/rows/rows.hpp says how each goes.

    Indices are checked before anything is written.
    """

    name, backend, op = "rows_cpp", "cpp", OPERATORS

    @dataclass(frozen=True)
    class Config:
        method: str = param(*METHODS)
        threads: str = param("all", "one")

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        if reason := no_cpp(w, device):
            return reason
        p = row_problem(w)
        if isinstance(p, str):
            return p
        return "each batch has an index of its own" if p.batch else None

    def space(self, w: Workload, device: DeviceSpec) -> ConfigSpace[Any]:
        p = served_rows(w)
        in_place_only = p.dtype in HALVES or p.reduce == "mean" or not self._neutral(p)

        def fits(c: RowsCpp.Config) -> str | None:
            if c.method != "sorted" and in_place_only:
                return "only sorted positions let a row be summed apart and written once"
            if c.method in ("owners", "private") and c.threads == "one":
                return f"{c.method} is for several threads"
            if c.method == "private" and p.reduce == "prod":
                return "a product of partial products may overflow where the whole does not"
            if c.method == "private":
                size = p.places * p.columns * w.main.itemsize * device.threads
                if size > PRIVATE_BYTES:
                    return f"tables of {size} bytes exceed {PRIVATE_BYTES}"
            return None

        return ConfigSpace(self.Config, constraint=fits)

    @staticmethod
    def _neutral(p: RowProblem) -> bool:
        """Whether terms can be added to the table one by one: zeros to start from do for a sum."""
        return p.include or (p.fill == "zero" and p.reduce == "sum")

    def heuristic(self, w: Workload, device: DeviceSpec) -> Any:
        p, space = row_problem(w), self.space(w, device)
        assert isinstance(p, RowProblem), p
        # Tables in cache take rows one after the other. Columns balance under any skew, which pays
        # for many threads at most: 20000 rows of 256 to 5000 places take owners 982 us, columns
        # 2458 us (AMD EPYC, 2 threads, 2026-11-21, benchmarks/results/cpu at ec32ed2).
        small = p.count * p.columns * p.outer < 2**14
        many = device.threads > FEW_THREADS
        wide = p.columns * w.main.itemsize >= 512 * device.threads
        wanted = [
            self.Config("columns", "one") if small else None,
            self.Config("private", "all") if p.places * 8 <= p.count else None,
            self.Config("columns", "all") if many and wide else None,
            self.Config("owners", "all"),
            self.Config("sorted", "all"),
        ]
        return next(c for c in wanted if c is not None and c in space)

    def compile_key(self, config: Any, w: Workload) -> str:
        p = served_rows(w)
        return self._source(config, p)

    def task(self, config: Any, w: Workload, device: DeviceSpec) -> CompileTask:
        p = served_rows(w)
        return CompileTask("cxx", self._source(config, p), FLAGS, "rows")

    def _source(self, config: Any, p: RowProblem) -> str:
        macros: dict[str, str | int] = {
            "T": TYPES.get(p.dtype, p.dtype),
            "A": TYPES.get(p.dtype, "float"),
            "INDEX": TYPES[p.index],
            "REDUCE": REDUCE[p.reduce],
            "METHOD": METHODS.index(config.method),
            "INCLUDE": p.include,
            "MEAN": p.reduce == "mean",
            "FILL": FILL[p.fill],
            "SPARSE": SPARSE,
        }
        return source_text(macros, "rows/rows.hpp")

    def build(self, config: Any, w: Workload, device: DeviceSpec) -> Executable:
        p = served_rows(w)
        return RowsLoops(w, p, config, compiled(self.task(config, w, device)))


class RowsLoops(Executable):
    def __init__(self, w: Workload, p: RowProblem, config: Any, built: Compiled):
        self._function = CppFunction(built, "rows", "PPPPqqqqqqqqqqqdiP")
        self._w, self._p, self._all = w, p, config.threads == "all"
        self._names, self._written = list(w.tensors), Written(w)
        self.workspace_bytes = _workspace_bytes(p, config, w.main.itemsize)

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        p, given = self._p, dict(zip(self._names, tensors, strict=True))
        x, index = given.get("x"), given["index"]
        source = next(given[n] for n in ("source", "src", "grad") if n in given)
        if p.fill is None:
            self._written.begin(tensors, [t.data_ptr() for t in tensors])
        out = x if p.fill is None and x is not None else allocate(self._w.outputs[0], index.device)
        fault = ctypes.c_int64(-1)
        self._function(
            source.data_ptr(),
            0 if x is None else x.data_ptr(),
            out.data_ptr(),
            index.data_ptr(),
            *(p.count, p.places, p.columns, p.outer),
            *(*p.source, *(p.old or (0, 0)), *p.out, p.skipped, p.alpha),
            torch.get_num_threads() if self._all else 1,
            ctypes.addressof(fault),
        )
        if fault.value >= 0:
            found = index.as_strided((p.count,), (1,))[fault.value]
            raise IndexOutOfRange(
                f"{self._w.op}: index {int(found)} at position {fault.value} is out of range for "
                f"{p.places} places; nothing was written"
            )
        return out


def _workspace_bytes(p: RowProblem, config: Any, itemsize: int) -> int:
    """What rows.hpp allocates, at most."""
    counts = 8 * (p.count if p.places > SPARSE * p.count else p.places + 1)
    if config.method == "private":
        return p.places * p.columns * max(itemsize, 4) * torch.get_num_threads()
    if config.method == "sorted":
        return counts + 8 * (p.count + min(p.places, p.count) + 1)
    return counts if config.method == "owners" else 0
