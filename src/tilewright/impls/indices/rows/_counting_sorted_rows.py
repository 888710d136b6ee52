"""Rows reduced by a counting sort of the indices, then sums over sorted runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tilewright.impls.indices._sort import CountingSort
from tilewright.impls.indices.rows._rows import RowProblem
from tilewright.impls.indices.rows._sorted_rows import SortedRows, Sums
from tilewright.op import Workload
from tilewright.space import param

MAX_DIGIT_BITS = 11
"""2048 counters of each of 8 warps are 64 KiB of shared memory."""


@dataclass(frozen=True)
class Counting:
    """Knobs of the sort."""

    passes: int = param(1, 2, 3)  # each reads and writes 8 bytes per index
    items: int = param(4, 8, 16)  # indices of a thread in one pass


class CountingSortedRows(SortedRows):
    """The sort needs 8 bytes more of an index where it has several passes, and counters."""

    batches = True
    files: ClassVar[tuple[str, ...]] = (
        *("entry.cuh", "rows/chunk.cuh", "sort.cuh"),
        *("rows/product.cuh", "rows/rows.cu"),
    )

    @dataclass(frozen=True)
    class Config(Sums, Counting):
        """The sort's knobs come first: a space is walked with the last one changing fastest."""

    def refused(self, p: RowProblem, w: Workload) -> str | None:
        if fewest_passes(p) > 3:
            return f"{p.places} places need more than three passes of {MAX_DIGIT_BITS} bits"
        return None

    def sort(self, p: RowProblem, c: Any) -> CountingSort:
        bits = digit_bits(p, c.passes)
        return CountingSort(
            p.count, p.places, bits, c.items, c.passes, skipped=p.skipped, more=p.batched
        )

    def sort_knobs(self, p: RowProblem) -> Sequence[dict[str, Any]]:
        # 65536 and 200000 positions take 4, 551200 and a million 8, six million 16 (rows_embedding,
        # scatter_partial, rows_gnn, H200).
        items = 16 if p.count >= 2**20 else 8 if p.count >= 2**18 else 4
        return [{"passes": fewest_passes(p), "items": n} for n in sorted({items, 16})]

    def sort_values(self, p: RowProblem) -> dict[str, list[Any]]:
        fewest = fewest_passes(p)
        return {"passes": [n for n in (fewest, fewest + 1) if n <= 3]}

    def sort_refused(self, p: RowProblem, c: Any) -> str | None:
        if digit_bits(p, c.passes) > MAX_DIGIT_BITS:
            return f"{c.passes} passes leave more than {MAX_DIGIT_BITS} bits for one"
        return None

    def sort_macros(self, p: RowProblem, c: Any) -> dict[str, int | str]:
        return {"DIGIT_BITS": digit_bits(p, c.passes), "ITEMS": c.items}


def fewest_passes(p: RowProblem) -> int:
    return math.ceil(p.places.bit_length() / MAX_DIGIT_BITS)


def digit_bits(p: RowProblem, passes: int) -> int:
    """Of each pass; one place more than there are stands for indices to leave out."""
    return math.ceil(p.places.bit_length() / passes)
