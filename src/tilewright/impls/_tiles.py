"""Tiles of contiguous tensors (outer, rows, inner): some columns of a slice, or whole slices."""

from __future__ import annotations

import math
from typing import Protocol

MAX_GRID = 2**31 - 1
ALL = 0
"""As a width: all columns of an outer slice."""


class Extents(Protocol):
    @property
    def outer(self) -> int: ...
    @property
    def inner(self) -> int: ...


class Tile(Protocol):
    @property
    def width(self) -> int: ...
    @property
    def slabs(self) -> int: ...


def width(p: Extents, c: Tile) -> int:
    """Columns of inner in a tile."""
    return p.inner if c.width == ALL else c.width


def columns(p: Extents, c: Tile) -> int:
    """Of all slices of a tile together."""
    return width(p, c) * c.slabs


def tiles(p: Extents, c: Tile) -> int:
    return math.ceil(p.inner / width(p, c)) * math.ceil(p.outer / c.slabs)
