"""Elements of an index by buckets of neighbouring places, of which a block settles each in shared
memory: what kernels/indices/elements/buckets.cuh has to be given."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tilewright.build import CompileTask
from tilewright.compile.cache import compiled
from tilewright.device import MAX_GRID, DeviceSpec
from tilewright.impl import Executable, Implementation
from tilewright.impls.indices._indexed import (
    IndexedExecutable,
    Launch,
    Workspace,
    most_bytes,
    streamed_us,
)
from tilewright.impls.indices._integers import MOST_TERMS_UNTUNED, too_large
from tilewright.impls.indices.elements._scatter import (
    ScatterProblem,
    moved,
    scatter_problem,
    scatter_refusal,
    served_scatter,
)
from tilewright.impls.indices.rows._rows import sorts_positions
from tilewright.op import Workload
from tilewright.space import ConfigSpace, param
from tilewright.tensor_spec import DTYPES

RUNS_OF_THREAD = 8
"""Pieces that chunks have of a bucket, of which a thread of `settle` looks so many up at most."""
MIN_TILE = 8192
"""Elements that a tile has before it is split untuned: below, `scatter_tiled` holds all places."""
LARGE_SUM = 2**17
"""Elements of a sum that untuned is sorted in place alone: a guess."""
MIN_ELEMENTS = 2**15
"""Of a sum untuned: H200, commit 4f86109, uniform indices and the slowest of six distributions:
integer_sums takes 11.0 and 12.6 us for 4096 elements, 12.8 and 25.2 us for 32768, bucket_sums 11.1
and 14.0 us, 11.5 and 19.7 us; of 512 x 64 12.0 and 16.5 us, 11.6 and 11.8 us."""
MIN_REFUSED, MIN_LENGTH_REFUSED, MOST_PLACES_REFUSED = 2**12, 64, 16
"""Elements, positions of a column and places a position of a sum in small tiles that integer_sums
refuses. H200, commit 4f86109, uniform indices and the slowest: 4096 into 65536 12.5 and 13.5 us, by
scatter_sorted 34.6 and 37.0; 64 x 64 into 1024 x 64 13.5 and 13.5 us, by scatter_serial 13.2 and
38.5. In large tiles 32768 into 524288 take 13.8 us, by scatter_sorted 91 us."""
CELL_US, BUCKETED_US = 2.5e-6, 5e-5
SORT_IN_PLACE_US, SORT_OF_POSITIONS_US, SORTED_POSITION_US = 95.0, 40.0, 1.3e-4
"""What a sum in place takes by buckets, and by scatter_sorted, or rows_sorted where positions are
sorted, which go by positions alone.
Reckoned: H200, commit 4f86109, fp32, out of place, 2^21 positions of 2^25 places take 227 us and
426 us, 2^18 of 2^22 28 us and 140 us, of which a copy of x is 64 us and 8 us; scatter_buckets takes
154 us of the former, and in place of 134 million places 1.7e-6 us for each (3d3c0d0)."""
WORKSPACE_PER_INDEX = 24
"""Bytes, or three entries where these are longer: tiles that are much smaller than a chunk, or
chunks than the buckets, would take more."""
MIN_CHUNK = 1024
"""Elements."""
MAX_POSITION = 2**16
"""A position in a chunk, and a slot of a bucket, are 16 bits of an entry."""


def has_large_tiles(p: ScatterProblem) -> bool:
    return p.length * min(p.inner, 16) >= MIN_TILE


def worth_buckets(w: Workload, device: DeviceSpec) -> bool:
    """Whether untuned a sum is one for bucket_sums, where others do not take it first: it has too
    many positions for integer_sums, and in place not too few for all the places; or so few that
    integer_sums has no table of all places, but too many to sort them."""
    p = served_scatter(w)
    if not p.include:
        return False
    if has_large_tiles(p) and (p.positions >= MIN_ELEMENTS or p.length > MOST_TERMS_UNTUNED):
        return not ((p.in_place or p.positions < LARGE_SUM) and is_sparse(p, device))
    few = p.positions < MIN_REFUSED or p.length < MIN_LENGTH_REFUSED
    if not has_large_tiles(p) and (few or p.cells > MOST_PLACES_REFUSED * p.positions):
        return False
    return bool(too_large(w.main.numel, w["index"].numel, p.dtype)) and not is_sparse(p, device)


def is_sparse(p: ScatterProblem, device: DeviceSpec) -> bool:
    """Whether to sort a sum's positions takes less time than blocks for all places do."""
    copied = 0 if p.in_place else p.cells
    of_column = p.outer * p.inner == 1
    of_positions = of_column and sorts_positions(p.positions, copied, p.dtype, p.reduce)
    buckets_us = streamed_us(p.cells * CELL_US + p.positions * BUCKETED_US, device)
    sorted_us = streamed_us(p.positions * SORTED_POSITION_US, device)
    return buckets_us > (SORT_OF_POSITIONS_US if of_positions else SORT_IN_PLACE_US) + sorted_us


def is_short(dtype: str) -> bool:
    """Whether a value and where it goes make an entry of eight bytes."""
    return DTYPES[dtype].itemsize <= 4


class Buckets(Implementation):
    """Each access to memory is near its neighbours', however random the indices are.

    Workspace: an entry for each index, 4 bytes for each pair of a chunk and a bucket, and the slots
    of as many buckets as may be too large for one block; 24 bytes an index at most, or three
    entries of twelve bytes.
    """

    backend = "cuda"
    files: ClassVar[tuple[str, ...]]
    settle_registers: ClassVar[int] = 48
    """Of a thread, that blocks of `settle` are counted on."""
    joined_zeros: ClassVar[int] = 1
    """Keys of each slot that have to begin as zeros where blocks join what they have of it."""

    @dataclass(frozen=True)
    class Config:
        width: int = param(1, 4, 8, 16, 32)  # columns of a tile; 8 of 4 bytes are a sector
        shift: int = param(8, 9, 10, 11, 12, 13, 14)  # rows of a bucket, as a power of two
        split_threads: int = param(256, 512, 1024)
        items: int = param(2, 4, 8, 16, 24)  # indices of a thread, which make a chunk
        settle_threads: int = param(512, 1024)
        share: int = param(4, 16)  # a block settles so many entries for each slot at most

    def sizes(self, w: Workload, p: ScatterProblem, c: Any) -> Sizes:
        raise NotImplementedError

    def settle(self, p: ScatterProblem) -> tuple[str, tuple[float | str, ...]]:
        """The signature and the arguments of the kernel of that name."""
        raise NotImplementedError

    def before(self, p: ScatterProblem, c: Any) -> Sequence[Launch]:
        """Launches before the two of all buckets."""
        return []

    def refused(self, p: ScatterProblem, c: Any) -> str | None:
        """Why these kernels in particular cannot take a config."""
        return None

    def more_macros(self, p: ScatterProblem, c: Any) -> dict[str, int | str]:
        return {"ASCENDING": False}

    def unsupported(self, w: Workload, device: DeviceSpec) -> str | None:
        if reason := scatter_refusal(w, device):
            return reason
        if next(iter(self.space(w, device)), None) is None:
            p = served_scatter(w)
            return (
                f"{p.length} x {p.inner} elements to {p.places} places make no chunks and buckets "
                "that fit"
            )
        return None

    def suits(self, w: Workload, device: DeviceSpec) -> bool:
        """Tiles of less are scatter_tiled's: H200, 1-D, 7.9 us of 5000 elements; from 10000 on
        scatter_tiled has one block and these have many (2026-11-21)."""
        p = scatter_problem(w)
        return isinstance(p, ScatterProblem) and has_large_tiles(p)

    def space(self, w: Workload, device: DeviceSpec) -> ConfigSpace[Any]:
        p = served_scatter(w)
        limit = device.shared_bytes_per_block

        def fits(c: Any) -> str | None:
            s = self.sizes(w, p, c)
            if c.width > 1 and c.width >= 2 * p.inner:
                return f"width={c.width} is twice the {p.inner} columns"
            if reason := self.refused(p, c):
                return reason
            if s.elements >= 2**32 - 1 or s.heavy >= 2**16:
                return f"a tile of {s.elements} elements exceeds 32 bits"
            if max(s.chunk, s.slots) >= MAX_POSITION:
                return f"a chunk or a bucket exceeds {MAX_POSITION}"
            if s.split_bytes > limit or s.settle_bytes > limit:
                return f"{max(s.split_bytes, s.settle_bytes)} bytes, a block has {limit}"
            if s.chunk < MIN_CHUNK:
                return f"a chunk of {s.chunk} elements is too small"
            taken = s.workspace.bytes
            allowed = max(WORKSPACE_PER_INDEX, 3 * s.entry_bytes)
            if taken > most_bytes(allowed, w["index"].numel):
                return f"{taken} bytes exceed {allowed} for each index"
            if s.runs > RUNS_OF_THREAD:
                return f"a thread has {s.runs} of {s.chunks} runs, more than {RUNS_OF_THREAD}"
            if max(s.split_blocks, s.settle_blocks) > MAX_GRID:
                return f"{max(s.split_blocks, s.settle_blocks)} blocks exceed a grid"
            return None

        return ConfigSpace(self.Config, constraint=fits)

    def heuristic(self, w: Workload, device: DeviceSpec) -> Any:
        p = served_scatter(w)
        return max(self.space(w, device), key=lambda c: self.merit(c, p, w, device))

    def merit(
        self, c: Any, p: ScatterProblem, w: Workload, device: DeviceSpec
    ) -> tuple[float, ...]:
        # Every SM busy in both kernels, if there is a chunk for each: of 32768 positions into
        # 524288 places of 64 columns 13.2 us, in tiles of one column 27.5 us (fb7d0f8); rows of
        # two sectors; runs of a bucket in a chunk that are near a sector; then buckets of 8192
        # slots and chunks of 4096 elements: H200, 1e6 places 21.6 us, 100000 x 256 368 us, 1e8
        # 2145 us (torch 25.9, 1468, 6345; 2026-11-21).
        s = self.sizes(w, p, c)
        alone = s.tiles * s.buckets <= 2 * device.sms or self.resident(s, c, device) == 1
        threads = 1024 if alone and s.slots >= 8192 else 512
        return (
            min(s.split_blocks, s.settle_blocks, 0.7 * device.sms, p.positions / MIN_CHUNK),
            min(c.width * w.main.itemsize, 64),
            min(s.chunk * s.slots / s.elements, 2.5),
            -abs(math.log2(s.slots / 8192)),
            -abs(math.log2(s.chunk / 4096)),
            -c.width,
            c.settle_threads == threads,
            -abs(c.split_threads - 512),
            -c.share,
        )

    def resident(self, s: Sizes, c: Any, device: DeviceSpec) -> int:
        """Blocks of `settle` on an SM."""
        fit = device.blocks_by_shared(s.settle_bytes)
        threads = device.registers_per_sm // self.settle_registers
        return max(1, min(fit, threads // c.settle_threads))

    def compile_key(self, config: Any, w: Workload) -> str:
        return f"{config} {scatter_problem(w)}"

    def task(self, config: Any, w: Workload, device: DeviceSpec) -> CompileTask:
        p = served_scatter(w)
        s = self.sizes(w, p, config)
        macros = {
            "REDUCE": 0,
            "WIDTH": config.width,
            "SHIFT": config.shift,
            "SPLIT_THREADS": config.split_threads,
            "ITEMS": config.items,
            "SETTLE_THREADS": config.settle_threads,
            "SETTLE_BLOCKS": self.resident(s, config, device),
            "SHARE": s.share,
            "CARRIED": s.carried,
            "SLOT_WORDS": s.slot_words,
            "JOINED_ZEROS": self.joined_zeros,
            **self.more_macros(p, config),
        }
        before = ["elements/ascending.cuh"] * bool(macros["ASCENDING"])
        files = [*before, "elements/buckets.cuh", *self.files]
        return p.task(files, "settle", macros, device)

    def build(self, config: Any, w: Workload, device: DeviceSpec) -> Executable:
        p = served_scatter(w)
        built, s = compiled(self.task(config, w, device)), self.sizes(w, p, config)
        source, _ = moved(p)
        buffers = ("index", source, "entries", "runs", "common", "done", "fault", "state")
        given = (*buffers, p.counted * config.width)
        code, args = self.settle(p)
        splits, settles = (s.split_blocks, 1, 1), (s.settle_blocks, 1, 1)
        launches = [
            *self.before(p, config),
            Launch("split", "PPPPPPPPq", splits, config.split_threads, s.split_bytes, given),
            Launch("settle", code, settles, config.settle_threads, s.settle_bytes, args, True),
        ]
        return IndexedExecutable(w, built, "settle", p.with_beyond(launches, device), s.workspace)


class ReducedBuckets(Buckets):
    """Those that kernels/indices/elements/bucket_reduced.cu settles; `files` before it say what a
    slot holds and how two are joined."""

    settle_registers, joined_zeros = 64, 2

    def sizes(self, w: Workload, p: ScatterProblem, c: Any) -> Sizes:
        return sizes(p, c, carried=True, slot_words=3, joined_bytes=16)

    def more_macros(self, p: ScatterProblem, c: Any) -> dict[str, int | str]:
        return {**super().more_macros(p, c), "INCLUDE": p.include}

    def settle(self, p: ScatterProblem) -> tuple[str, tuple[float | str, ...]]:
        return "PPPPPP", ("x", "out", "entries", "runs", "common", "done")


@dataclass(frozen=True)
class Sizes:
    """What kernels/indices/elements/buckets.cuh derives from its macros, by the same names.

    Attributes:
        entry_bytes: 4, and more where entries hold the elements' values.
        slot_words: words of shared memory that a block has for each slot.
        joined_bytes: of each slot of a bucket that several blocks settle, for each block beside the
            first.
    """

    tiles: int
    elements: int
    chunk: int
    buckets: int
    slots: int
    share: int
    entry_bytes: int
    runs: int
    slot_words: int
    joined_bytes: int
    split_bytes: int
    settle_bytes: int

    @property
    def carried(self) -> bool:
        return self.entry_bytes > 4

    @property
    def chunks(self) -> int:
        return math.ceil(self.elements / self.chunk)

    @property
    def heavy(self) -> int:
        return self.chunks * self.chunk // self.share

    @property
    def split_blocks(self) -> int:
        return self.tiles * self.chunks

    @property
    def settle_blocks(self) -> int:
        return self.tiles * (self.buckets + self.heavy)

    @property
    def workspace(self) -> Workspace:
        heavy = self.tiles * self.heavy
        return Workspace(
            entries=self.entry_bytes * self.split_blocks * self.chunk,
            runs=4 * self.split_blocks * self.buckets,
            common=self.joined_bytes * heavy * self.slots,
            done=4 * heavy,
            state=4,
        )


def sizes(p: ScatterProblem, c: Any, carried: bool, slot_words: int, joined_bytes: int) -> Sizes:
    chunk, slots = c.split_threads * c.items, c.width << c.shift
    buckets = -(-p.places >> c.shift)
    runs = math.ceil(math.ceil(p.length * c.width / chunk) / c.settle_threads)
    entry_bytes = 4 + max(DTYPES[p.dtype].itemsize, 4) * carried
    return Sizes(
        tiles=p.outer * math.ceil(p.inner / c.width),
        elements=p.length * c.width,
        chunk=chunk,
        buckets=buckets,
        slots=slots,
        share=c.share * slots,
        entry_bytes=entry_bytes,
        runs=runs,
        slot_words=slot_words,
        joined_bytes=joined_bytes,
        split_bytes=4 * (32 + (buckets + 2) // 2 * 2) + entry_bytes * chunk,
        settle_bytes=4 * (slot_words * slots + 64 + 2 * (runs + 1) * c.settle_threads),
    )
