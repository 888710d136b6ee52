"""Elementwise reductions on a GPU where few positions share a column: each looks at all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.device import DeviceSpec
from tilewright.impl import IMPLS
from tilewright.impls.indices._indexed import Launch, Step, Workspace
from tilewright.impls.indices._integers import few_in_long_columns
from tilewright.impls.indices.elements._elements import OPERATORS, ElementProblem, element_problem
from tilewright.impls.indices.rows._rows import RowProblem
from tilewright.impls.indices.rows._rows_kernels import RowKernels
from tilewright.op import Workload
from tilewright.space import ConfigSpace, param

MOST_POSITIONS = 128
"""Of a column, all of which each of its elements reads."""
MOST_LOOKS_UNTUNED = 2**26
"""Of all elements together, each at its column. 64 positions of each of 16384 columns, 2^26 looks,
into 4096 places take 333 us, scatter_sorted 387; of 1024 columns 24 and 118 (H100,
scatter_thresholds, 1d8565a)."""


class ScatterSerial(RowKernels):
    """One launch, or out of place two, and no workspace; any number of places, and index and src of
    any strides, smaller than x or not. Where a column has one position there is nothing to look at.
    """

    name, op = "scatter_serial", OPERATORS
    files, entry = ("elements/elements.cuh", "elements/scatter_serial.cu"), "reduce_elements"
    yields_to = ("scatter_tiled", "bucket_sums")

    @dataclass(frozen=True)
    class Config:
        block_threads: int = param(128, 256, 512)
        ahead: int = param(4, 8, 16)  # positions read at once

    def problem(self, w: Workload) -> ElementProblem | str:
        return element_problem(w)

    def refused(self, p: RowProblem, w: Workload) -> str | None:
        assert isinstance(p, ElementProblem)
        if p.length > MOST_POSITIONS:
            return f"each of {p.length} positions would look at all, more than {MOST_POSITIONS}"
        return None

    def suits(self, w: Workload, device: DeviceSpec) -> bool:
        p = self.served(w)
        assert isinstance(p, ElementProblem)
        if few_in_long_columns(p.count, p.length) and IMPLS["integer_sums"].claims(w, device):
            return False
        return p.count * p.length <= MOST_LOOKS_UNTUNED

    def space(self, w: Workload, device: DeviceSpec) -> ConfigSpace[Any]:
        p = self.served(w)
        assert isinstance(p, ElementProblem)
        return ConfigSpace(self.Config, {"ahead": [4] if p.length <= 4 else [4, 8, 16]})

    def heuristic(self, w: Workload, device: DeviceSpec) -> Any:
        return self.Config(256, max(n for n in self.space(w, device).values["ahead"] if n <= 8))

    def macros(self, p: RowProblem, c: Any) -> dict[str, int | str]:
        assert isinstance(p, ElementProblem)
        return {
            **p.meaning,
            "THREADS": c.block_threads,
            "AHEAD": c.ahead,
            **p.macros,
        }

    def launches(
        self, w: Workload, p: RowProblem, c: Any, device: DeviceSpec
    ) -> tuple[Sequence[Step], Workspace]:
        assert isinstance(p, ElementProblem)
        given = ("x", "index", "out", p.count, p.length, p.index_step, p.src_step, p.alpha, "fault")
        code = f"PPPiiiidP{p.signature}"
        grid = math.ceil(p.count / c.block_threads), 1, 1
        args = (*given, *p.arguments)
        steps = [Launch(self.entry, code, grid, c.block_threads, 0, args, bool(p.fill))]
        return [p.copied(device), *steps] if p.fill else steps, Workspace()
