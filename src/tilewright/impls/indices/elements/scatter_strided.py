"""Scatter of elements of any strides, or that name few of many places, by each place's last
position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.device import DeviceSpec
from tilewright.impl import IMPLS
from tilewright.impls.indices._indexed import (
    WORKSPACE_PER_INDEX,
    Launch,
    Step,
    Workspace,
    most_bytes,
)
from tilewright.impls.indices.elements._elements import (
    PLACES_BY_NAME,
    ElementProblem,
    element_problem,
)
from tilewright.impls.indices.elements._updates import writes_alone
from tilewright.impls.indices.rows._rows import RowProblem
from tilewright.impls.indices.rows._rows_kernels import RowKernels
from tilewright.op import Workload
from tilewright.space import ConfigSpace, param
from tilewright.tensor_spec import TensorSpec

BLOCKS_OF_CLEAR = 8
"""Per SM, of the kernel that strides over all places."""
PLACES_UNTUNED, CELLS_UNTUNED = 16, 2**20
"""Places a position, and places of all columns, from which on what looks only at places that are
named is taken before what goes over all. H200, 262144 of 134 million places, in place: 39 us, by a
table of keys, 47 us by keys of all places (9b8614d), scatter_winner 401 us, scatter_buckets 227 us
(3d3c0d0, 2026-11-23); where the two meet is reckoned."""
MOST_HASHED = 2**28
"""Positions, for which slots are numbered by 32 bits."""


class ScatterStrided(RowKernels):
    """For any number of places, index and src of any strides, smaller than x or not.

    Workspace: 4 bytes for each place of each column of the index, or 16 to 32 for each position in
    a table; none where a column has one position: that wins.
    """

    name, op = "scatter_strided", "scatter"
    files, entry = ("elements/elements.cuh", "elements/scatter_strided.cu"), "write"
    yields_to = ("scatter_buckets",)

    @dataclass(frozen=True)
    class Config:
        items: int = param(1, 2, 4)  # elements of a thread
        block_threads: int = param(128, 256, 512)
        named: bool = param(False, True)  # only places that the index names are looked at
        hashed: bool = param(False, True)  # and only they have keys, in a table

    def problem(self, w: Workload) -> ElementProblem | str:
        return element_problem(w)

    def suits(self, w: Workload, device: DeviceSpec) -> bool:
        p = self.served(w)
        assert isinstance(p, ElementProblem)
        if any(t.strides is not None for t in w.tensors.values()):
            if writes_alone(w):
                return True
            return covers_box(w)  # contiguous copies are what was measured of a whole
        if p.along < PLACES_UNTUNED * p.length or cells(p) < CELLS_UNTUNED:
            return False
        alone = p.fill is None and p.length == 1  # and no workspace, as scatter_tiled
        return alone or IMPLS["scatter_tiled"].unsupported(w, device) is not None

    def space(self, w: Workload, device: DeviceSpec) -> ConfigSpace[Any]:
        p = self.served(w)
        assert isinstance(p, ElementProblem)
        alone = p.length == 1

        def fits(c: ScatterStrided.Config) -> str | None:
            if c.hashed and not c.named:
                return "a table has keys of places that are named alone"
            return f"{p.count} positions exceed {MOST_HASHED}" if c.hashed and too_many else None

        too_many = p.count > MOST_HASHED
        ways = {
            "named": [True] if alone else [False, True],
            "hashed": [False] if alone else [False, True],
        }
        return ConfigSpace(self.Config, ways, constraint=fits)

    def heuristic(self, w: Workload, device: DeviceSpec) -> Any:
        p = self.served(w)
        assert isinstance(p, ElementProblem)
        # Accesses on the way, once there are enough of them for all threads that run at once.
        items = 4 if p.count >= 2 * device.sms * device.threads_per_sm else 1
        named = p.length == 1 or p.along >= PLACES_BY_NAME * p.length
        # Keys of all places would take more than what sums behind a sort may.
        large = 4 * cells(p) > most_bytes(WORKSPACE_PER_INDEX, p.count) and p.length > 1
        return self.Config(items, 256, named, named and large and p.count <= MOST_HASHED)

    def macros(self, p: RowProblem, c: Any) -> dict[str, int | str]:
        assert isinstance(p, ElementProblem)
        return {
            "REDUCE": 0,
            "NUMBER": p.number is not None,
            "THREADS": c.block_threads,
            "ITEMS": c.items,
            "NAMED": c.named,
            "HASHED": c.hashed,
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
        size = slots(p) if c.hashed else cells(p)
        words = 2 * size if c.hashed else size
        cleared = (min(math.ceil(words / (4 * threads)), BLOCKS_OF_CLEAR * device.sms), 1, 1)
        clears = elements if c.named and not c.hashed else cleared
        column, rest, code = (p.length, inner), ("fault", *p.arguments), f"P{p.signature}"
        steps = [p.copied(device)] if p.fill else []
        keys: str | int = 0
        if p.length > 1:
            keys = "keys"
            steps += [
                Launch("clear", f"PPiiii{code}", clears, threads, 0,
                       ("index", keys, p.count, size, *column, *rest), overlapping=bool(steps)),
                Launch("elect", f"PPiiii{code}", elements, threads, 0,
                       ("index", keys, p.count, size, *column, *rest), overlapping=True),
            ]  # fmt: skip
        number = 0.0 if p.number is None else p.number
        args = ("index", "out", keys, number, p.count, size, *column, *rest)
        written, follows = elements if c.named else over, bool(steps)
        steps.append(
            Launch(self.entry, f"PPPdiiii{code}", written, threads, 0, args, overlapping=follows)
        )
        return steps, Workspace(keys=4 * words) if keys else Workspace()


def covers_box(w: Workload) -> bool:
    """Whether an index of x's rank is narrower than x or smaller than src."""
    x, index, src = w["x"], w["index"], w["src"]
    if isinstance(src, TensorSpec) and src.shape != index.shape:
        return True
    return any(index.shape[d] != n for d, n in enumerate(x.shape) if d != w["dim"])


def slots(p: ElementProblem) -> int:
    """Of a table that is at most half full."""
    return 1 << (2 * p.count - 1).bit_length()


def cells(p: ElementProblem) -> int:
    """Places of all columns that the index has."""
    return p.count // p.length * p.along
