"""Rows reduced into rows on a GPU: `torch.sort` of the indices, then sums over sorted runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewright.device import DeviceSpec
from tilewright.impls.indices._indexed import Launch, Step, TorchCall
from tilewright.impls.indices._sort import ENTRY_BYTES, THREADS
from tilewright.impls.indices.rows._rows import OPERATORS, RowProblem
from tilewright.impls.indices.rows._sorted_rows import SortedRows
from tilewright.op import Workload

KEYS = {torch.uint8: "u8", torch.int16: "short", torch.int32: "int"}
"""A key's type in PyTorch and in a kernel; a radix sort has a pass for each of its bytes."""
POSITION_BYTES = 8
COUNTERS_PER_INDEX, COUNTERS = 1, 2**14
"""Bytes that CUB's passes count in: 256 counters for each tile of a thousand keys and more, and for
each pass."""


class RowsSortedTorch(SortedRows):
    """For any indices; the sort is PyTorch's, which is CUB's radix sort.

    It needs a key of 1, 2 or 4 bytes twice and 8 bytes more for each index; `torch.sort` allocates
    up to 21 itself, so that little is left of the bound for partial rows and marks.
    """

    name, op = "rows_sorted_torch", OPERATORS
    files = ("entry.cuh", "rows/torch_sort.cuh", "rows/product.cuh", "rows/rows.cu")
    marked_per_index, spare_bytes = 2, COUNTERS

    def suits(self, w: Workload, device: DeviceSpec) -> bool:
        """rows_sorted has been faster wherever both were timed (docs/scatter_measured.md)."""
        return False

    def sort(self, p: RowProblem, c: Any) -> TorchSort:
        return TorchSort(p.count, p.places, p.skipped)

    def sort_macros(self, p: RowProblem, c: Any) -> dict[str, int | str]:
        key = key_type(p.places)
        return {"KEY": KEYS[key], "LEAST": f"({torch.iinfo(key).min}ll)"}


@dataclass(frozen=True)
class TorchSort:
    """A sort of `count` indices; `skipped` is one to leave out."""

    count: int
    places: int
    skipped: int

    result = "sorted"

    @property
    def workspace(self) -> dict[str, int]:
        key_bytes = key_type(self.places).itemsize
        return {
            "sorted": ENTRY_BYTES * self.count,
            "keys": key_bytes * self.count,
            "sorted_keys": key_bytes * self.count,
            "positions": POSITION_BYTES * self.count,
        }

    @property
    def allocated_bytes(self) -> int:
        """Of `torch.sort` itself, at most: the positions before the sort, and where keys have
        several bytes, keys and positions between two passes."""
        key_bytes = key_type(self.places).itemsize
        between = key_bytes + POSITION_BYTES if key_bytes > 1 else 0
        return (POSITION_BYTES + between + COUNTERS_PER_INDEX) * self.count + COUNTERS

    def launches(
        self, follows: bool, cleared: str | int, words: int, wanted: str | int
    ) -> Iterator[Step]:
        assert not wanted, "PyTorch sorts in any case"
        grid = -(-self.count // THREADS), 1, 1
        given = ("index", self.count, self.places, self.skipped, "fault", "keys", cleared, words)
        yield Launch("write_keys", "PiiqPPPi", grid, THREADS, 0, given, follows)
        memory = ("memory", "keys", "sorted_keys", "positions")
        yield TorchCall(self.run, memory, self.allocated_bytes)
        found = ("sorted_keys", "positions", self.count, self.result)
        yield Launch("write_entries", "PPiP", grid, THREADS, 0, found)

    def run(self, memory: Tensor, *addresses: int) -> None:
        """torch.sort of keys into sorted_keys and positions, which lie in `memory`."""
        key = key_type(self.places)

        def buffer(address: int, dtype: torch.dtype) -> Tensor:
            start = address - memory.data_ptr()
            return memory[start : start + dtype.itemsize * self.count].view(dtype)

        keys, sorted_keys = (buffer(a, key) for a in addresses[:2])
        positions = buffer(addresses[2], torch.int64)
        torch.sort(keys, stable=True, out=(sorted_keys, positions))


def key_type(places: int) -> torch.dtype:
    """The narrowest for all places, and one more for indices to leave out."""
    return next(t for t in KEYS if places < 256**t.itemsize)
