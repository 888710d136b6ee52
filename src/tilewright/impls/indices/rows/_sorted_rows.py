"""Rows reduced by a sort of the indices, then sums over sorted runs, whatever sorts them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from tilewright.device import MAX_GRID, MAX_GRID_YZ, DeviceSpec
from tilewright.impls.indices._indexed import (
    SUM,
    WORKSPACE_PER_INDEX,
    Launch,
    Step,
    Workspace,
    most_bytes,
    sum_bytes,
)
from tilewright.impls.indices._sort import THREADS
from tilewright.impls.indices.rows._rows import (
    RowProblem,
    across,
    misfit,
    named_old,
    named_source,
    vectors,
)
from tilewright.impls.indices.rows._rows_kernels import RowKernels
from tilewright.op import Workload
from tilewright.space import ConfigSpace, param
from tilewright.tensor_spec import HALVES

UNITS = (8, 16, 32, 64, 96, 128, 192, 256)
THREADS_OF_FILL = 2048
"""Per SM, that stride over the whole table."""
MOST_IN_FLIGHT, MOST_PRODUCTS = 32, 16
WIDEST, WIDEST_PRODUCT = 8, 4
"""Elements of a thread, and of one access; less of products, which keep exponents as well."""
LONGEST_CHAIN = 16
"""Terms that are added one after the other, where none are in flight together to be added as a
tree: more round worse than PyTorch's kernels do."""
ARGUMENTS = "PPPPPPPiiiiiqqqqqqd"
"""Of the kernels of rows.cu."""


@dataclass(frozen=True)
class Sums:
    """Knobs of the sums over sorted runs."""

    rows: int = param(*UNITS)  # of source, in a unit
    lanes: int = param(1, 4, 8, 16, 32)  # threads of a unit
    vec: int = param(1, 2, 4, 8)  # elements of one access
    unrolled: int = param(1, 4, 8)  # rows in flight of one unit
    block_threads: int = param(256, 512)  # whose units are a span
    blocks: int = param(2, 3, 4)  # of 256 threads on an SM, which bounds a thread's registers
    ahead: int = param(0, 1, 2, 3)  # read a run's old row before its end; 2: prefetch it, too;
    # 3: read those of all runs that begin among the rows in flight at once


class Sort(Protocol):
    """What sorts indices by their places, stably; those to leave out or out of range come last."""

    @property
    def workspace(self) -> dict[str, int]:
        """Bytes of each buffer."""

    @property
    def allocated_bytes(self) -> int:
        """Of what it calls, at most, beside these buffers."""

    @property
    def result(self) -> str:
        """The buffer that holds the sorted entries in the end: 8 bytes of each index."""

    def launches(
        self, follows: bool, cleared: str | int, words: int, wanted: str | int
    ) -> Iterable[Step]:
        """What sorts.

        Args:
            follows: it comes after another kernel of the same call.
            cleared: a buffer of which the first kernel makes `words` zero.
            wanted: the address of a word that says by a zero that nothing is to be done, or null.
        """


class SortedRows(RowKernels):
    """The same bits in every run: the order of a sum depends on the indices alone.

    Workspace: 8 bytes per index for its place and position, and either what else the sort needs or
    a partial row for each span of the units of a block, two for halves, which are summed in fp32;
    and a byte for each place out of place, of up to eight an index.
    """

    entry, most_outer = "accumulate", MAX_GRID
    Config: ClassVar[type[Sums]] = Sums
    marked_per_index: ClassVar[int] = 8
    """Places for each index up to which those that are named are marked, so that others are filled;
    of more places most are none, so all are filled before."""
    spare_bytes: ClassVar[int] = 0
    """Beside the bound for each index, for however few."""

    def sort(self, p: RowProblem, c: Any) -> Sort:
        """Of all indices of the problem."""
        raise NotImplementedError

    def sort_knobs(self, p: RowProblem) -> Sequence[dict[str, Any]]:
        """What a config may say of the sort: the best first, that of the least workspace last."""
        return ({},)

    def sort_macros(self, p: RowProblem, c: Any) -> dict[str, int | str]:
        """What of it is baked into the binary."""
        raise NotImplementedError

    def sort_values(self, p: RowProblem) -> dict[str, list[Any]]:
        """What is tried of the sort's knobs, where that is not all of them."""
        return {}

    def carries(self, p: RowProblem) -> bool:
        """Whether what is sorted holds elements of the source in place of their positions."""
        return False

    def marks(self, p: RowProblem) -> bool:
        """Whether places that are named are marked, for others to be filled in the end."""
        return p.fill is not None and p.places <= self.marked_per_index * p.count

    def filled(self, w: Workload, p: RowProblem, rows: Launch, device: DeviceSpec) -> Launch:
        """What fills all places where none is marked; `rows` does, row by row."""
        return rows

    def sort_refused(self, p: RowProblem, c: Any) -> str | None:
        """Why a config's sort is none."""
        return None

    def space(self, w: Workload, device: DeviceSpec) -> ConfigSpace[Any]:
        p = self.served(w)

        def fits(c: Any) -> str | None:
            if reason := self.sort_refused(p, c):
                return reason
            if reason := misfit(p, c, most=MAX_GRID):
                return reason
            if c.ahead and not p.include:
                return "there is no old row to read ahead"
            if c.ahead == 3 and (c.blocks > 2 or c.unrolled * c.vec * w.main.itemsize > 64):
                return "old rows beside more than 64 bytes of rows in flight spill"
            if c.block_threads == 512 and c.blocks == 3:
                return "blocks=3 of 256 threads are no whole blocks of 512"
            if c.lanes == 1 and (p.columns > 1 or c.rows > LONGEST_CHAIN):
                return f"one thread is for {LONGEST_CHAIN} rows of one element, one after the other"
            if c.unrolled > c.lanes or (c.unrolled == 1) != (c.lanes == 1):
                return f"unrolled={c.unrolled} does not fit lanes={c.lanes}"
            if c.unrolled * c.vec > (MOST_PRODUCTS if is_wide(p) else MOST_IN_FLIGHT):
                return f"{c.unrolled} x {c.vec} elements in flight spill"
            if not self.within_bounds(w, c):
                return f"rows={c.rows} takes more than {WORKSPACE_PER_INDEX} bytes for each index"
            if (blocks := spans_of(p, c) * across(p, c)) > MAX_GRID:
                return f"{blocks} pieces of spans exceed a grid of {MAX_GRID}"
            return None

        values = {
            **self.sort_values(p),
            "vec": vectors(p, w.main.itemsize, WIDEST_PRODUCT if is_wide(p) else WIDEST),
            "rows": self.rows_of_units(w, p),
        }
        return ConfigSpace(self.Config, values, fits)

    def heuristic(self, w: Workload, device: DeviceSpec) -> Any:
        p, space = self.served(w), self.space(w, device)
        vec = max(v for v in space.values["vec"])
        wide = [n for n in (4, 8, 16, 32) if n == 4 or n * vec < 2 * p.columns]
        lanes = max(wide)
        # Units for half of an SM's threads keep the memory busy; longer ones leave fewer partial
        # rows, which one SM has to join where a row is a single piece.
        pieces = math.ceil(p.columns / (lanes * vec)) * p.outer
        wanted = max(p.count * pieces * lanes // (device.sms * device.threads_per_sm // 2), 1)
        wanted = 1 << (wanted.bit_length() - 1 + 2 * (pieces == 1))
        # Old rows are awaited where runs are short: H200, 65536 rows of 768 floats into 30522, in
        # place: 153 us without, 133 us with ahead=2 (2026-11-21, tune --suite rows_embedding).
        ahead = 2 if p.include and p.count < 16 * p.places else 0
        in_flight = MOST_PRODUCTS if is_wide(p) else MOST_IN_FLIGHT
        sums = {"lanes": lanes, "vec": vec, "unrolled": min(lanes, in_flight // vec, 8)}
        if self.carries(p):
            # Elements that lie in order: a thread's own few. H200, products of 100000 rows of 64
            # into 30000: 375 us, by four lanes and 192 elements 616 us; of one place 409 us and
            # 394 us (9b8614d, 2026-11-23, tune --suite scatter_sums).
            sums, wanted = {"lanes": 1, "vec": 1, "unrolled": 1}, 16
            ahead = int(p.include)

        def merit(c: Sums) -> tuple[float, ...]:
            at_once = device.sms * c.blocks * THREADS / c.block_threads
            turns = spans_of(p, c) * pieces / at_once
            idle = turns / math.ceil(turns) < 0.75  # of SMs, while the last blocks run
            return idle, abs(math.log2(c.rows / wanted)), c.block_threads

        for knobs in self.sort_knobs(p):
            configs = [
                self.Config(**knobs, **sums, rows=rows, block_threads=threads, ahead=ahead)
                for rows in space.values["rows"]
                for threads in (256, 512)
            ]
            if fit := [c for c in configs if space.why_not(c) is None]:
                return min(fit, key=merit)
        raise AssertionError(w)

    def macros(self, p: RowProblem, c: Any) -> dict[str, int | str]:
        return {
            "A": f"Product<{SUM[p.dtype]}>" if is_wide(p) else SUM[p.dtype],
            **p.meaning,
            "FIRST_IN_OUT": first_in_out(p),
            "CARRIED": self.carries(p),
            **self.sort_macros(p, c),
            "ROWS": c.rows,
            "LANES": c.lanes,
            "VEC": c.vec,
            "UNROLLED": c.unrolled,
            "SUM_THREADS": c.block_threads,
            "SUM_BLOCKS": c.blocks * THREADS // c.block_threads,
            "AHEAD": c.ahead,
            "COMBINE_THREADS": combine_threads(p, c),
        }

    def arguments(
        self, w: Workload, p: RowProblem, c: Any, wanted: str | int = 0
    ) -> tuple[float | str, ...]:
        """Of the kernels of rows.cu."""
        return (
            *(wanted, named_source(w), named_old(p), "out", self.sort(p, c).result, "partials"),
            *("touched" if self.marks(p) else 0, p.outer, p.count, p.places, p.columns),
            *(spans_of(p, c), *p.source, *(p.old or (0, 0)), *p.out, p.alpha),
        )

    def launches(
        self, w: Workload, p: RowProblem, c: Any, device: DeviceSpec, wanted: str | int = 0
    ) -> tuple[list[Step], Workspace]:
        """Of a call; with `wanted`, they do nothing where kernels before them leave a zero there.

        Args:
            wanted: a word of the workspace.
        """
        marks, spans = self.marks(p), spans_of(p, c)
        args = self.arguments(w, p, c, wanted)

        def rows(entry: str, blocks: int, threads: int, follows: bool = True) -> Launch:
            """With shared memory for a piece of a row of each group of threads, and a word."""
            size = threads * c.vec * partial_bytes(p) + 4 * threads // c.lanes
            return Launch(entry, ARGUMENTS, (blocks, *slices(p)), threads, size, args, follows)

        def filling(threads: int) -> int:
            """Blocks that stride over the whole table of a slice together."""
            wanted = math.ceil(p.places * c.lanes / threads)
            return min(wanted, THREADS_OF_FILL * device.sms // threads) if p.fill else 0

        launches: list[Step] = []
        if p.fill and not marks:
            filled = rows("fill", filling(THREADS), THREADS, follows=bool(wanted))
            launches.append(self.filled(w, p, filled, device))
        cleared, words = ("touched", -(-p.places // 4)) if marks else (0, 0)
        follows = bool(launches or wanted)
        launches += self.sort(p, c).launches(follows, cleared, words, wanted)
        launches.append(rows("accumulate", spans * across(p, c), c.block_threads))
        threads = combine_threads(p, c)
        combining = math.ceil(spans * c.lanes / threads) * across(p, c) if spans > 1 else 0
        if last := combining + filling(threads) * marks:
            launches.append(rows("combine", last, threads))
        return launches, self.workspace(w, c)

    def workspace(self, w: Workload, c: Any) -> Workspace:
        """The buffers of one call's scratch memory."""
        p = self.served(w)
        sort, spans = self.sort(p, c), spans_of(p, c)
        to_sort = sort.workspace
        result = to_sort.pop(sort.result)
        rows = spans * (1 if first_in_out(p) else 2) if spans > 1 else 0
        partials = rows * p.columns * p.outer * partial_bytes(p)
        return Workspace(
            Workspace(**to_sort),
            Workspace(partials=partials),
            **{sort.result: result},
            touched=-(-p.places // 4) * 4 if self.marks(p) else 0,
        )

    def within_bounds(self, w: Workload, c: Any) -> bool:
        p = self.served(w)
        taken = self.workspace(w, c).bytes + self.sort(p, c).allocated_bytes
        return taken <= most_bytes(WORKSPACE_PER_INDEX, p.count) + self.spare_bytes

    def rows_of_units(self, w: Workload, p: RowProblem) -> list[int]:
        """The usual ones, or where rows are too wide for them the shortest that are in bounds."""
        longest = max(UNITS)

        def shortest(rows: int) -> Any:
            return self.Config(**self.sort_knobs(p)[-1], rows=rows, lanes=32, block_threads=512)

        while not self.within_bounds(w, shortest(longest)) and spans_of(p, shortest(longest)) > 1:
            longest *= 2
        return [*UNITS, longest] if longest > max(UNITS) else list(UNITS)


def first_in_out(p: RowProblem) -> bool:
    """Whether a row of the result can hold a partial sum: it is no narrower."""
    return p.dtype not in HALVES and not is_wide(p)


def is_wide(p: RowProblem) -> bool:
    """Whether the reduction keeps an exponent beside each number, as products of floats do."""
    return p.reduce == "prod" and p.dtype[0] != "i"


def partial_bytes(p: RowProblem) -> int:
    """Of an element of a partial row."""
    return sum_bytes(p.dtype) * (2 if is_wide(p) else 1)


def combine_threads(p: RowProblem, c: Sums) -> int:
    return 1024 if c.vec * partial_bytes(p) <= 16 and not is_wide(p) else 512


def slices(p: RowProblem) -> tuple[int, int]:
    """Of the outer axis, by two axes of a grid: few more than there are."""
    groups = math.ceil(p.outer / MAX_GRID_YZ)
    return math.ceil(p.outer / groups), groups


def spans_of(p: RowProblem, c: Sums) -> int:
    """Blocks of sorted positions, each of `rows` for every `lanes` threads."""
    return math.ceil(p.count * c.lanes / (c.rows * c.block_threads))
