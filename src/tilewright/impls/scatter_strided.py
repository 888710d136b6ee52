"""Scatter of elements whose index covers a part of x or of src, or names few of many places, by
each place's last position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.device import DeviceSpec
from tilewright.impls._elements import PLACES_BY_NAME, ElementProblem, element_problem
from tilewright.impls._indexed import Launch, Step, Workspace
from tilewright.impls._rows import RowProblem
from tilewright.impls._rows_kernels import RowKernels
from tilewright.impls._scatter import partial
from tilewright.impls.scatter_tiled import ScatterTiled
from tilewright.op import Workload
from tilewright.space import ConfigSpace, param

BLOCKS_OF_CLEAR = 8
"""Per SM, of the kernel that strides over all places."""
PLACES_UNTUNED, CELLS_UNTUNED = 16, 2**20
"""Places a position, and places of all columns, from which on what looks only at places that are
named is taken before what goes over all: scatter_winner moves 8 bytes of each, and this kernel
makes four accesses for each element of the index. Reckoned, not measured."""
TILED = ScatterTiled()


class ScatterStrided(RowKernels):
    """For any number of places, index and src of any strides, smaller than x or not.

    Workspace: 4 bytes for each place of each column of the index, none where a column has one
    position: that wins.
    """

    name, op = "scatter_strided", "scatter"
    files, entry = ("elements.cuh", "scatter_strided.cu"), "write"

    @dataclass(frozen=True)
    class Config:
        items: int = param(1, 2, 4)  # elements of a thread
        block_threads: int = param(128, 256, 512)
        named: bool = param(False, True)  # only places that the index names are looked at

    def problem(self, w: Workload) -> ElementProblem | str:
        return element_problem(w)

    def suits(self, w: Workload, device: DeviceSpec) -> bool:
        p = self.served(w)
        assert isinstance(p, ElementProblem)
        if partial(w) is not None:
            return True
        if any(t.strides is not None for t in w.tensors.values()):
            return False  # contiguous copies are what was measured
        if p.along < PLACES_UNTUNED * p.length or cells(p) < CELLS_UNTUNED:
            return False
        alone = p.fill is None and p.length == 1  # and no workspace, as scatter_tiled
        return alone or TILED.unsupported(w, device) is not None

    def space(self, w: Workload, device: DeviceSpec) -> ConfigSpace[Any]:
        p = self.served(w)
        assert isinstance(p, ElementProblem)
        return ConfigSpace(self.Config, {"named": [True] if p.length == 1 else [False, True]})

    def heuristic(self, w: Workload, device: DeviceSpec) -> Any:
        p = self.served(w)
        assert isinstance(p, ElementProblem)
        # Accesses on the way, once there are enough of them for all threads that run at once.
        items = 4 if p.count >= 2 * device.sms * device.threads_per_sm else 1
        return self.Config(items, 256, p.length == 1 or p.along >= PLACES_BY_NAME * p.length)

    def macros(self, p: RowProblem, c: Any) -> dict[str, int | str]:
        assert isinstance(p, ElementProblem)
        return {
            "REDUCE": 0,
            "NUMBER": p.number is not None,
            "THREADS": c.block_threads,
            "ITEMS": c.items,
            "NAMED": c.named,
            "ALONE": p.length == 1,
            **p.macros,
        }

    def launches(
        self, w: Workload, p: RowProblem, c: Any, device: DeviceSpec
    ) -> tuple[Sequence[Step], Workspace]:
        assert isinstance(p, ElementProblem)
        inner = math.prod(w["index"].shape[w["dim"] + 1 :])
        threads = c.block_threads
        elements = (math.ceil(p.count / (threads * c.items)), 1, 1)
        over = (math.ceil(cells(p) / (threads * c.items)), 1, 1)
        cleared = (min(math.ceil(cells(p) / (4 * threads)), BLOCKS_OF_CLEAR * device.sms), 1, 1)
        column, rest, code = (p.length, inner), ("fault", *p.arguments), f"P{p.signature}"
        steps = [p.copied(device)] if p.fill else []
        keys: str | int = 0
        if p.length > 1:
            keys = "keys"
            steps += [
                Launch("clear", f"PPiiii{code}", elements if c.named else cleared, threads, 0,
                       ("index", keys, p.count, cells(p), *column, *rest), overlapping=bool(steps)),
                Launch("elect", f"PPiii{code}", elements, threads, 0,
                       ("index", keys, p.count, *column, *rest), overlapping=True),
            ]  # fmt: skip
        number = 0.0 if p.number is None else p.number
        args = ("index", "out", keys, number, p.count, cells(p), *column, *rest)
        written, follows = elements if c.named else over, bool(steps)
        steps.append(
            Launch(self.entry, f"PPPdiiii{code}", written, threads, 0, args, overlapping=follows)
        )
        return steps, Workspace(keys=4 * cells(p)) if keys else Workspace()


def cells(p: ElementProblem) -> int:
    """Places of all columns that the index has."""
    return p.count // p.length * p.along
