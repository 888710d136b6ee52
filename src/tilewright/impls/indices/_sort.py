"""The counting sort of kernels/indices/sort.cuh: its launches and what it needs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tilewright.impls.indices._indexed import NONE_SKIPPED, Launch

THREADS = 256
WARPS = THREADS // 32
ENTRY_BYTES = 8
SORT = "PPiiqPiP"
"""wanted, in, count, places, skipped, fault, shift, counts."""


def chunk_bytes(digit_bits: int, items: int) -> int:
    """Shared memory of a block that sorts a chunk."""
    bins = 1 << digit_bits
    return ENTRY_BYTES * THREADS * items + 4 * (bins + WARPS) + 2 * WARPS * bins


def place_bytes(digit_bits: int, items: int) -> int:
    """Shared memory of a block that places its entries."""
    return chunk_bytes(digit_bits, items) + (4 << digit_bits)


@dataclass(frozen=True)
class CountingSort:
    """A sort of `count` indices, by `digit_bits` bits in each of `passes` from bit `shift` on.

    Attributes:
        items: indices of a thread.
        skipped: an index to leave out; what is left out, or out of range, comes last.
        more: further arguments of the kernels that read the index.
    """

    count: int
    places: int
    digit_bits: int
    items: int
    passes: int = 1
    shift: int = 0
    skipped: int = NONE_SKIPPED
    more: tuple[int | str, ...] = ()

    @property
    def blocks(self) -> int:
        return math.ceil(self.count / (THREADS * self.items))

    @property
    def workspace(self) -> dict[str, int]:
        """Bytes of each buffer; the first is 8 per index, and so is the second if it is there."""
        return {
            "sorted": ENTRY_BYTES * self.count,
            "other": ENTRY_BYTES * self.count if self.passes > 1 else 0,
            "counts": 4 * self.blocks << self.digit_bits,
            "totals": 4 << self.digit_bits,
        }

    @property
    def allocated_bytes(self) -> int:
        return 0

    @property
    def result(self) -> str:
        """The buffer that holds the sorted entries in the end."""
        return "sorted" if self.passes % 2 else "other"

    def launches(
        self, follows: bool, cleared: str | int, words: int, wanted: str | int = 0
    ) -> Iterator[Launch]:
        """The kernels of all passes.

        Args:
            follows: they come after another kernel of the same call.
            cleared: a buffer of which the first kernel makes `words` zero.
            wanted: the address of a word that says by a zero that nothing is to be done, or null.
        """
        bins, grid, given = 1 << self.digit_bits, (self.blocks, 1, 1), "index"
        for turn in range(self.passes):
            which = "next" if turn else "first"
            out = "other" if turn % 2 else "sorted"
            shift = self.shift + turn * self.digit_bits
            args: tuple[int | str, ...] = (wanted, given, self.count, self.places, self.skipped)
            args = (*args, "fault", shift, "counts")
            more: tuple[int | str, ...] = () if turn else self.more
            given_first = () if turn else (cleared, words)
            code, counting = SORT + "Pi"[: len(given_first)], (*args, *given_first)
            more_code = "".join("P" if isinstance(arg, str) else "i" for arg in more)
            counted = f"histogram_{which}", code + more_code, grid, THREADS, 4 * bins
            yield Launch(*counted, (*counting, *more), follows)
            digits = (math.ceil(bins / 32), 1, 1)
            joined = (wanted, "counts", "totals", self.blocks)
            yield Launch("scan", "PPPi", digits, 1024, 4 * 32 * 33, joined, overlapping=True)
            size, args = place_bytes(self.digit_bits, self.items), (*args, "totals", out, *more)
            code = SORT + "PP" + more_code
            yield Launch(f"place_{which}", code, grid, THREADS, size, args, overlapping=True)
            given, follows = out, True
