"""Scatter by buckets of neighbouring places, for more places than fit in shared memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.device import DeviceSpec
from tilewright.impl import IMPLS
from tilewright.impls.indices._indexed import Launch
from tilewright.impls.indices.elements._buckets import Buckets, Sizes, is_short, sizes
from tilewright.impls.indices.elements._scatter import ScatterProblem, moved, served_scatter
from tilewright.impls.indices.elements._updates import comes_first, holds_small_tiles, streams
from tilewright.op import Workload
from tilewright.space import param

MIN_ASCENDING = 2048
LONG = 2**24
"""Indices beside which the two launches that find out whether they rise take little: of 100 million
a sorted index takes 928 us so and 1763 without, a uniform one 2337 and 2129 (H200, scatter_large,
28c2c95)."""
DIRECT_THREADS, DIRECT_ITEMS = 256, 4
PLACES_IN_PLACE = 48
"""A position, from which on scatter_strided is asked before in place, which looks only at places
that are named. H200: it takes 1.2e-4 us a position (4f86109, 2^21 of 2^25 places, less the copy of
x) to 1.5e-4 us (3d3c0d0, 2^18 of 2^27 in place, 39 us), and buckets 1.7e-6 us a place in the latter
case, 227 us. So they meet at 44 to 86 places a position, if a position costs buckets from 5e-5 us
down to nothing beside that; where either will do, binaries of the other are for any shape."""
SAMPLED = 1024
"""Positions, a thread each, that a guess is made from."""


class ScatterBuckets(Buckets):
    """An entry takes 8 bytes, or 4 where values are not carried."""

    name, op = "scatter_buckets", "scatter"
    files = ("elements/buckets.cu",)

    @dataclass(frozen=True)
    class Config(Buckets.Config):
        ascending: bool = param(False, True)  # try first whether indices rise

    def suits(self, w: Workload, device: DeviceSpec) -> bool:
        p = served_scatter(w)
        few = p.in_place and p.places >= PLACES_IN_PLACE * p.length
        if few and IMPLS["scatter_strided"].claims(w, device):
            return False
        if comes_first(w) or not super().suits(w, device):
            return False
        return not (holds_small_tiles(w, device) or streams(w, device))

    def sizes(self, w: Workload, p: ScatterProblem, c: Any) -> Sizes:
        carried = p.number is None and is_short(p.dtype)
        return sizes(p, c, carried, 1 + carried, 8 if carried else 4)

    def refused(self, p: ScatterProblem, c: Any) -> str | None:
        if c.ascending and (p.outer > 1 or p.inner > 1 or p.length < MIN_ASCENDING):
            return f"rising indices are looked for in one dim of {MIN_ASCENDING} or more"
        if c.ascending and not (p.x.dense and p.src.dense):
            return "rising indices are looked for where places are neighbours"
        return None

    def merit(
        self, c: Any, p: ScatterProblem, w: Workload, device: DeviceSpec
    ) -> tuple[float, ...]:
        tried = p.outer == p.inner == 1 and p.x.dense and p.src.dense and p.length >= LONG
        return c.ascending == tried, *super().merit(c, p, w, device)

    def more_macros(self, p: ScatterProblem, c: Any) -> dict[str, int | str]:
        return {
            "ASCENDING": c.ascending,
            "DIRECT_THREADS": DIRECT_THREADS,
            "DIRECT_ITEMS": DIRECT_ITEMS,
            "SAMPLED_POSITIONS": SAMPLED,
        }

    def before(self, p: ScatterProblem, c: Any) -> Sequence[Launch]:
        if not c.ascending:
            return []
        source, number = moved(p)
        blocks = math.ceil(p.length / (DIRECT_THREADS * DIRECT_ITEMS))
        args = ("x", "index", source, "out", "state", number)
        return [
            Launch("guess", "PP", (1, 1, 1), SAMPLED, 0, ("index", "state")),
            Launch("direct", "PPPPPd", (blocks, 1, 1), DIRECT_THREADS, 0, args),
        ]

    def settle(self, p: ScatterProblem) -> tuple[str, tuple[float | str, ...]]:
        source, number = moved(p)
        return "PPPPPPPdP", (
            "x", source, "out", "entries", "runs", "common", "done", number, "state",
        )  # fmt: skip
