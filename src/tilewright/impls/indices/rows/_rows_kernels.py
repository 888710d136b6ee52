"""Implementations by kernels for rows on a GPU: what they all refuse, compile and launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from tilewright.build import CompileTask
from tilewright.compile.cache import compiled
from tilewright.device import MAX_GRID_YZ, DeviceSpec
from tilewright.impl import Executable, Implementation
from tilewright.impls.indices._indexed import IndexedExecutable, Step, Workspace, cuda_task, no_cuda
from tilewright.impls.indices.rows._rows import RowProblem, row_problem
from tilewright.op import Workload


class RowKernels(Implementation):
    """The kernels of some files of kernels/indices/, launched one after the other.

    `files` are these (`sources`, where configs differ in them), and `entry` is the kernel whose
    resources stand for the whole. `batches` says that they take an index for each batch
    (kernels/indices/rows/batches.cuh), and `most_outer` how long the outer axis may be.
    """

    backend = "cuda"
    files: ClassVar[tuple[str, ...]]
    entry: ClassVar[str]
    batches: ClassVar[bool] = False
    most_outer: ClassVar[int] = MAX_GRID_YZ
    executable: ClassVar[type[IndexedExecutable]] = IndexedExecutable

    def problem(self, w: Workload) -> RowProblem | str:
        """The workload as rows, or in words why it is none."""
        return row_problem(w)

    def served(self, w: Workload) -> RowProblem:
        """The problem of a workload that `unsupported` has let through."""
        p = self.problem(w)
        assert isinstance(p, RowProblem), p
        return p

    def refused(self, p: RowProblem, w: Workload) -> str | None:
        """Why these kernels in particular cannot take the problem."""
        return None

    def macros(self, p: RowProblem, config: Any) -> dict[str, int | str]:
        """All that is baked into the binary, but the dtypes."""
        raise NotImplementedError

    def launches(
        self, w: Workload, p: RowProblem, config: Any, device: DeviceSpec
    ) -> tuple[Sequence[Step], Workspace]:
        """Of a call, and the workspace that they name buffers of."""
        raise NotImplementedError

    def sources(self, config: Any) -> tuple[str, ...]:
        """The files that a config's kernels are in."""
        return self.files

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        if reason := no_cuda(w, device):
            return reason
        p = self.problem(w)
        if isinstance(p, str):
            return p
        if p.batch and not self.batches:
            return f"each batch has an index of its own, of {p.batch.length} rows"
        if reason := self.refused(p, w):
            return reason
        if max(p.count, p.places) >= 2**31 - 1:
            return f"{p.count} indices of {p.places} places exceed 32 bits"
        if p.outer > self.most_outer or next(iter(self.space(w, device)), None) is None:
            return f"{p.outer} x {p.places} x {p.columns} exceed a grid, or a block's memory"
        return None

    def compile_key(self, config: Any, w: Workload) -> str:
        p = self.served(w)
        return f"{bool(p.batch)} {self.macros(p, config)} {p.dtype} {p.index}"

    def task(self, config: Any, w: Workload, device: DeviceSpec) -> CompileTask:
        p = self.served(w)
        macros, files = self.macros(p, config), self.sources(config)
        if p.batch:
            macros, files = {"BATCHED": True, **macros}, ("rows/batches.cuh", *files)
        return cuda_task(files, self.entry, p.dtype, p.index, macros, device)

    def build(self, config: Any, w: Workload, device: DeviceSpec) -> Executable:
        built = compiled(self.task(config, w, device))
        launches, workspace = self.launches(w, self.served(w), config, device)
        return self.executable(w, built, self.entry, launches, workspace)
