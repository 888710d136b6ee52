"""Which schedules fit a graph whose rows are reduced, and why another does not."""

from __future__ import annotations

import math
from itertools import product

from tilewright.compile.counters import COUNTERS
from tilewright.device import DeviceSpec
from tilewright.fusion.cuda import registers
from tilewright.fusion.cuda.partials import words_of_row
from tilewright.fusion.cuda.rows.footprint import Footprint, estimated_registers
from tilewright.fusion.cuda.rows.schedule import ON_CHIP, ROW_THREADS, UNROLL, RowSchedule
from tilewright.fusion.cuda.rows.shifting import shifted_alike, vectors_of
from tilewright.fusion.cuda.vectors import MOST_COLUMNS, access_bytes, side_by_side, widest_vectors
from tilewright.fusion.exponentials import exponentials_of_greatest
from tilewright.fusion.ir import Access, Graph
from tilewright.fusion.plan import halves_of_moments
from tilewright.space import ConfigSpace
from tilewright.tensor_spec import HALVES

LEAST_COPY = 4
"""Bytes of the narrowest copy into shared memory of one thread."""
PERSISTENT_THREADS = 256
"""On an SM, at least: the next rows are on their way, but the arithmetic hides its own latency."""
COLUMN_GROUPS = tuple(range(1, 17))
"""Groups of a block that sum over rows: any number, so that rows can be dealt out evenly."""
GROUP_BARRIERS = 15
"""Of a block, besides the one of all its threads."""
SEARCHED = 1.15
"""Of the registers that a thread may have, as estimated, that a search tries: the compiler's own
count decides. Of 84 configs drawn from six norms and gradients that are estimated beyond that room
by up to this much 48 did not spill, of 84 within it 74, and of 168 beyond by up to 60 % 38 (sm_90,
NVRTC 13.0)."""


def row_space(graph: Graph, device: DeviceSpec, over: float = 1.0) -> ConfigSpace[RowSchedule]:
    """The row schedules that fit `graph` on `device`.

    Args:
        over: how much of a thread's registers the estimate may take.

    A vector crosses the end of a row only if it is shifted; the values a thread keeps leave
    registers for the arithmetic; no more than half of the lanes idle; a persistent block has rows
    to walk, and is not offered for a few rows that blocks may share.
    """
    inner = graph.space[graph.reduced[-1]]
    moments = ["two_pass"]
    footprint = Footprint(graph)
    if footprint.has_moments or exponentials_of_greatest(graph):
        moments.append("merge")
    if footprint.has_moments:
        moments.append("lanes")
    if halves_of_moments(graph) is not None:
        moments.append("tensor_cores")
    vectors = widest_vectors(graph, inner)
    shifted = [v for v in widest_vectors(graph, 0) if v > vectors[0] and shifted_alike(graph, v)]

    def constraint(c: RowSchedule) -> str | None:
        return (
            _misplaced(c, graph, device)
            or _spread_wrongly(c, footprint)
            or _kept_wrongly(c)
            or _queued_wrongly(c, footprint)
            or _capped_in_vain(c, footprint, device)
            or _too_many_registers(c, footprint, device, over)
            or _too_much_shared(c, footprint, device)
        )

    clusters = tuple(c for c in (1, 2, 4, 8) if c <= device.max_cluster)
    storages = ("registers",) if footprint.columns else ("registers", "shared", "reread")

    def holds_a_row(threads: int) -> bool:
        rows = max(32 // threads, 1)
        return any(
            _misplaced(c, graph, device) is None
            and _too_many_registers(c, footprint, device) is None
            for vector, cluster in product((*shifted, *vectors), clusters)
            for c in [
                RowSchedule(
                    vector,
                    threads,
                    rows,
                    1,
                    storages[-1],  # which asks for least
                    cluster=cluster,
                    min_blocks=1,
                    shifted=vector in shifted,
                )
            ]
        )

    threads = tuple(t for t in ROW_THREADS if holds_a_row(t))
    groups = COLUMN_GROUPS if footprint.columns else (1, 2, 4, 8)
    meets = bool(footprint.columns) and footprint.samples == 1
    walks = not footprint.row_partials or footprint.rows > device.sms
    return ConfigSpace(
        RowSchedule,
        {
            "vector": (*shifted, *vectors),
            "stages": (0, 1, 2, 3) if walks else (0,),
            "row_threads": threads,
            "storage": storages,
            "shifted": (False, True) if shifted else (False,),
            "moments": tuple(moments),
            "cluster": clusters,
            "in_turn": (False, True) if walks and not footprint.columns else (False,),
            "combine": ("kernel", "grid") if meets else ("kernel",),
            "early": (False, True) if footprint.columns else (False,),
            "rows_per_block": tuple(r for r in groups if r * min(threads, default=1) <= 1024),
            "blocks_per_row": _blocks_per_row(footprint),
            "parameters": _ways_of_parameters(footprint, walks),
            "widened": (False, True)
            if walks and any(a.dtype in HALVES for a in footprint.parameters)
            else (False,),
            "bulk": (False, True) if walks and footprint.comes_in_bulk(device) else (False,),
            "rematerialize": (False, True) if footprint.itemsize == 2 else (False,),
            "unroll": (UNROLL,) if footprint.columns else (1, 2, 3, 4),
            "recompute": (True, False) if footprint.keeps_costly_steps else (True,),
        },
        constraint,
    )


def _ways_of_parameters(footprint: Footprint, walks: bool) -> tuple[str, ...]:
    if not (footprint.parameters and walks):
        return ("reload",)
    return ("reload", *(() if footprint.columns else ("ahead",)), *ON_CHIP)


def _blocks_per_row(footprint: Footprint) -> tuple[int, ...]:
    """How many blocks may share a row: each leaves a word for every sum, beside two for tickets."""
    declared = RowSchedule.__dataclass_fields__["blocks_per_row"].metadata["values"]
    if not footprint.row_partials:
        return (1,)
    room = COUNTERS // footprint.rows
    return tuple(n for n in declared if n == 1 or words_of_row(n, footprint.row_partials) <= room)


def _misplaced(c: RowSchedule, graph: Graph, device: DeviceSpec) -> str | None:
    if graph.reduced_size > MOST_COLUMNS:
        return f"a row of {graph.reduced_size} elements: columns are numbered by 32 bits"
    vectors = vectors_of(graph.reduced_size, c.vector, c.shifted)
    lanes = c.row_threads * c.row_blocks
    turns = math.ceil(vectors / lanes)
    if c.shifted == (graph.space[graph.reduced[-1]] % c.vector == 0):
        return f"vector={c.vector} of rows of {graph.space[graph.reduced[-1]]}: shifted={c.shifted}"
    if c.row_threads > 32 and c.row_threads % 32:
        return f"row_threads={c.row_threads} is no whole number of warps"
    if c.block_threads > 1024 or c.block_threads % 32:
        return f"a block of {c.block_threads} threads"
    if c.row_threads > 32 and c.rows_per_block > GROUP_BARRIERS:
        return f"{c.rows_per_block} groups of several warps: a block has barriers for fewer"
    if c.blocks_per_row > 1 and c.row_threads < 32:
        return "a row that several blocks share takes whole warps of each"
    if c.cluster > 1 and c.row_threads < 64:
        return "a cluster shares a row among at least 64 threads of each block"
    if 2 * vectors <= turns * lanes and lanes > 4:
        return f"{vectors} vectors leave more than half of {lanes} threads idle"
    if c.min_blocks * c.block_threads > device.threads_per_sm:
        return f"{c.min_blocks} blocks of {c.block_threads} threads exceed an SM"
    if turns > 64 and c.storage == "registers":
        return f"{turns} unrolled turns"
    if c.unroll != UNROLL and c.storage == "registers":
        return f"all turns over a row in registers are unrolled: unroll={c.unroll} says nothing"
    if c.unroll != UNROLL and c.unroll >= turns:
        return f"unroll={c.unroll} of {turns} turns"
    return None


def _spread_wrongly(c: RowSchedule, footprint: Footprint) -> str | None:
    """Whose a row is, and how its vectors lie among them."""
    if c.early and c.combine != "kernel":
        return "there is no second kernel to let in early"
    if c.blocks_per_row > 1 and (c.cluster > 1 or c.rows_per_block > 1 or c.rows_per_thread > 1):
        return "blocks that share a row without being a cluster take that row only"
    if c.blocks_per_row > 1 and (c.persistent or c.storage == "shared" or c.contiguous):
        return "a row that blocks anywhere share is read once, by vectors of all blocks in turn"
    if c.shifted and (c.rows_per_thread > 1 or c.moments != "two_pass"):
        return "shifted rows are walked one by one, in two passes"
    if c.shifted and footprint.columns and c.row_threads < 32:
        return "columns of shifted rows are added up by whole warps, which walk rows that are there"
    if c.shifted and c.persistent and not footprint.columns:
        return "a persistent kernel walks shifted rows where it adds up columns only"
    if c.contiguous and c.row_threads * c.cluster <= 32:
        return "the only warp has the whole row to itself anyway"
    if c.tail == "predicated" and (c.contiguous or footprint.fills(c)):
        return "there is no tail to predicate"
    return None


def _kept_wrongly(c: RowSchedule) -> str | None:
    """Where a row and its parameters are kept, and what is computed of them again."""
    if c.storage != "registers" and c.rows_per_thread > 1:
        return f"storage={c.storage} walks rows one by one"
    if c.storage == "reread" and c.moments != "two_pass":
        return "re-reading goes with two_pass"
    if c.moments == "lanes" and c.storage != "registers":
        return "lanes join vectors whose turns are unrolled"
    if c.moments == "tensor_cores" and (c.row_threads < 32 or c.vector < 2):
        return "tensor cores add up whole warps of pairs"
    if c.widened and c.parameters not in ON_CHIP:
        return "what is loaded for each row is widened for each row"
    if c.parameters == "ahead" and (c.persistent or c.shifted or c.storage != "registers"):
        return "parameters come ahead beside an aligned row in registers, once for a kernel"
    if c.parameters == "ahead" and c.blocks_per_row > 1:
        return "blocks that share a row load what rows have in common first anyway"
    if not c.recompute and (c.storage != "registers" or c.moments != "two_pass" or c.shifted):
        return "what is used is kept by registers, between two passes over aligned rows"
    if c.rematerialize and c.storage != "registers":
        return "what is read again from memory is widened again"
    return None


def _queued_wrongly(c: RowSchedule, footprint: Footprint) -> str | None:
    """How a persistent kernel takes its rows."""
    if c.bulk and (not c.stages or c.contiguous or c.row_threads < 32):
        return "rows come in bulk where warps take the vectors of a queued row side by side"
    if c.in_turn and (not c.persistent or footprint.columns or c.row_threads < 32):
        return "rows are taken in turn by warps of a persistent kernel that adds up no columns"
    if not (c.persistent or footprint.columns):
        return None
    if c.storage != "registers":
        return "a persistent kernel keeps its row in registers"
    bounded = footprint.columns or not c.max_registers  # any cap lets as many threads run
    if bounded and c.min_blocks * c.block_threads < PERSISTENT_THREADS:
        return f"fewer than {PERSISTENT_THREADS} threads on an SM"
    narrowest = min((_copied_bytes(a, c) for a in footprint.queued), default=LEAST_COPY)
    if c.stages and narrowest < LEAST_COPY:
        return f"rows are copied ahead in pieces of at least {LEAST_COPY} bytes"
    if c.stages and c.vector > 1 and not all(map(side_by_side, footprint.queued)):
        return "rows are copied ahead in vectors of elements that lie side by side"
    return None


def _copied_bytes(access: Access, c: RowSchedule) -> int:
    """At once, into the queue."""
    return c.vector * access.itemsize if c.shifted else access_bytes(access, c.vector)


def _capped_in_vain(c: RowSchedule, footprint: Footprint, device: DeviceSpec) -> str | None:
    if not c.max_registers:
        return None
    left = device.registers_left(c.block_threads, c.min_blocks)
    if reason := registers.capped_in_vain(c.max_registers, left):
        return reason
    if c.min_blocks > 1 and not footprint.columns:  # whose grid has as many blocks for each SM
        return f"a cap takes the place of launch bounds: min_blocks={c.min_blocks} says nothing"
    return None


def _too_many_registers(
    c: RowSchedule, footprint: Footprint, device: DeviceSpec, over: float = 1.0
) -> str | None:
    if c.storage != "registers":
        return None
    needed = estimated_registers(c, footprint)
    room = device.registers_left(c.block_threads, c.min_blocks)  # of a cap the compiler tells
    if needed > over * room:
        return f"about {needed} registers a thread exceed {room}"
    return None


def _too_much_shared(c: RowSchedule, footprint: Footprint, device: DeviceSpec) -> str | None:
    needed = footprint.shared_bytes(c)
    limit = device.shared_bytes_with(c.min_blocks)
    if needed and needed + footprint.exchanged_bytes(c) > limit:
        return f"{needed} bytes of rows and parameters exceed {limit} bytes of shared memory"
    return None
