"""Tiles of contiguous tensors (outer, rows, inner): some columns of a slice, or whole slices."""

from __future__ import annotations

import math
from typing import Protocol

from tilewright.device import MAX_GRID, DeviceSpec

ALL = 0
"""As a width: all columns of an outer slice."""


class Extents(Protocol):
    @property
    def outer(self) -> int: ...
    @property
    def inner(self) -> int: ...
    @property
    def places(self) -> int: ...
    @property
    def length(self) -> int: ...


class Tile(Protocol):
    @property
    def width(self) -> int: ...
    @property
    def slabs(self) -> int: ...
    @property
    def block_threads(self) -> int: ...
    @property
    def batch(self) -> int: ...


def width(p: Extents, c: Tile) -> int:
    """Columns of inner in a tile."""
    return p.inner if c.width == ALL else c.width


def columns(p: Extents, c: Tile) -> int:
    """Of all slices of a tile together."""
    return width(p, c) * c.slabs


def tiles(p: Extents, c: Tile) -> int:
    return math.ceil(p.inner / width(p, c)) * math.ceil(p.outer / c.slabs)


def why_not(p: Extents, c: Tile, size_bytes: int, device: DeviceSpec) -> str | None:
    """Why a tile of so many bytes fits no block, or None."""
    if c.width > p.inner:
        return f"width={c.width} exceeds {p.inner} columns"
    if c.width != ALL and c.slabs > 1:
        return f"{c.slabs} slices need all columns"
    if c.slabs >= 2 * p.outer:
        return f"{c.slabs} slices are twice the {p.outer} there are"
    if size_bytes > device.shared_bytes_per_block:
        return f"a tile takes {size_bytes} bytes, a block has {device.shared_bytes_per_block}"
    if columns(p, c) * max(p.length, p.places) >= 2**30 or tiles(p, c) > MAX_GRID:
        return "a tile or the grid exceeds 32 bits"
    if c.batch == 8 and c.block_threads == 1024:
        return "1024 threads with 8 accesses in flight spill"
    return None


def none_fits(places: int, device: DeviceSpec) -> str:
    """That there is no tile at all."""
    limit = device.shared_bytes_per_block
    return f"the narrowest tile of {places} places exceeds {limit} bytes of shared memory or a grid"
