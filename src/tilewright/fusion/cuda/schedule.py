"""Schedules of generated CUDA kernels: the knobs, and which of their values fit a graph."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from itertools import product

from tilewright.compile.counters import COUNTERS
from tilewright.device import DeviceSpec
from tilewright.fusion.cuda.finishing import finish_bytes
from tilewright.fusion.cuda.parts import parts_of_row, words_of_row
from tilewright.fusion.cuda.shifting import shifted_alike, vectors_of
from tilewright.fusion.exponentials import exponentials_of_greatest
from tilewright.fusion.ir import Access, Graph
from tilewright.fusion.plan import halves_of_moments, plan_rows
from tilewright.fusion.remembered import remembered
from tilewright.space import ConfigSpace, param
from tilewright.tensor_spec import HALVES, TensorSpec

LEAST_COPY, WIDEST_ACCESS = 4, 16
"""Bytes of the narrowest copy into shared memory, and of the widest access, of one thread."""
NARROW_BYTES = 8
"""Accesses narrower than this leave bandwidth unused."""
BULK_BYTES = 16
"""The copy engine moves whole ones, from and to multiples of it."""
ARITHMETIC_REGISTERS = 40
"""What a row kernel needs besides the values it keeps: addresses, counters, a step's operands."""
KEEPING_REGISTERS = 16
"""The same where sweeps compute nothing again: 80 suffice beside 64 kept values."""
SHARING_REGISTERS = 20
"""The same of a kernel whose rows are shared by blocks: it reads a row once, in one sweep."""
REGISTER_STEP, LEAST_CAP = 8, 24
"""A thread has registers by eights; compilers take no cap below what calls of functions need."""
COLUMN_ITEMSIZE = 4
"""Bytes of what is added up over rows: fp32 for halves and fp32."""
PERSISTENT_THREADS = 256
"""On an SM, at least: the next rows are on their way, but the arithmetic hides its own latency."""
ROW_THREADS = (
    *(4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 1024),
)
COLUMN_GROUPS = tuple(range(1, 17))
"""Groups of a block that sum over rows: any number, so that rows can be dealt out evenly."""
ON_CHIP = ("registers", "shared")
"""Where a persistent kernel keeps parameters."""
GROUP_BARRIERS = 15
"""Of a block, besides the one of all its threads."""
COSTLY = (
    *("exp", "quick_exp", "shifted_exp", "tanh", "erf", "erfc", "pow", "sin", "cos", "tan"),
    *("asin", "acos", "atan", "atan2", "sinh", "cosh", "asinh", "acosh", "atanh", "fmod"),
)
"""Steps that take the units for special functions, a quarter as wide as those for arithmetic."""
EXCHANGE_BYTES = 24
"""Shared memory for what a warp tells the other warps of its row: two buffers of three floats."""


@dataclass(frozen=True)
class RowSchedule:
    """How a kernel walks rows that it reduces.

    A row is cut into vectors of `vector` elements; `row_threads` threads of each of `cluster`
    blocks take them in turn: neighbouring threads take neighbouring vectors, and the vectors of
    one turn follow those of the turn before, or, if `contiguous`, each warp has one piece of the
    row to itself. `rows_per_thread` rows are walked together, so that a parameter vector loaded
    once serves all of them; `rows_per_block` such groups share a block.

    A persistent kernel, one block for each place on the device, takes row after row. It copies
    `stages` rows ahead into shared memory while it works on one: each thread what it will read, or
    in `bulk` the copy engine. It may keep the `parameters`, vectors that do not vary over rows, on
    chip: as they are, or `widened` to what is used of them. Any other kernel loads them where they
    are used, or `ahead`, beside the row itself, so that a row costs one wait for memory only.

    Where the vectors are no multiple of the threads, the `tail` is peeled, so that only the last
    turn asks whether it is within the row, or every turn is predicated.

    Sums over rows are joined by a second `kernel`, or by the first one itself once all blocks of
    the `grid` have met, which then must all run at once: see columns. The second kernel is let in
    as blocks come to the end of their rows, or `early`, to wait beside them.

    Its groups walk rows with the stride of the grid, or `in_turn`: each takes its next rows from a
    counter.

    With `rematerialize` halves that are kept over sweeps stay packed, and every sweep widens them
    again; otherwise the compiler may keep the fp32 values, in twice the registers.

    What later sweeps need is kept as narrow as it was read, and they `recompute` the rest; or it is
    kept as they use it: softmax's exponentials, in twice the registers.

    Vectors of `shifted` rows lie where memory is aligned, though rows begin anywhere: see shifting.

    Instead of a cluster, `blocks_per_row` blocks anywhere on the device may share a row: see
    sharing.

    Registers are what launch bounds leave to each thread where `min_blocks` blocks share an SM; or
    no more than `max_registers`, if that is not 0. A search tries the caps that it is told to,
    those that make the compiler spill among them.
    """

    vector: int = param(8, 4, 2, 1)
    row_threads: int = param(*ROW_THREADS, default=256)
    rows_per_block: int = param(1, 2, 4, 8)
    rows_per_thread: int = param(1, 2, 4)
    storage: str = param("registers", "shared", "reread")
    moments: str = param("two_pass", "merge", "lanes", "tensor_cores")
    cluster: int = param(1, 2, 4, 8)
    min_blocks: int = param(1, 2, 3, 4, 6, 8)
    stream_loads: bool = param(True, False)
    stages: int = param(0, 1, 2, 3)
    bulk: bool = param(False, True)
    parameters: str = param("reload", "ahead", "registers", "shared")
    widened: bool = param(False, True)
    rematerialize: bool = param(False, True)
    contiguous: bool = param(False, True)
    shifted: bool = param(False, True)
    in_turn: bool = param(False, True)
    combine: str = param("kernel", "grid")
    tail: str = param("peeled", "predicated")
    recompute: bool = param(True, False)
    blocks_per_row: int = param(1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
    early: bool = param(False, True)
    max_registers: int = param(0, counts=True)

    @property
    def block_threads(self) -> int:
        return self.row_threads * self.rows_per_block

    @property
    def row_blocks(self) -> int:
        """Blocks that share a row, as a cluster or without being one."""
        return self.cluster * self.blocks_per_row

    @property
    def persistent(self) -> bool:
        return self.stages > 0 or self.parameters in ON_CHIP


def access_bytes(access: Access, vector: int) -> int:
    """The widest aligned access to `vector` consecutive elements, wherever a row starts."""
    steps = [s * access.itemsize for s in access.strides if s > 1]
    whole = vector * access.itemsize
    return max(math.gcd(whole, access.align, WIDEST_ACCESS, *steps), access.itemsize)


def side_by_side(access: Access) -> bool:
    """Whether a vector's elements follow one another in memory, so that a copy can move them."""
    return access.strides[-1] == 1


def row_space(graph: Graph, device: DeviceSpec) -> ConfigSpace[RowSchedule]:
    """The row schedules that fit `graph` on `device`.

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
    if footprint.columns:
        shifted = []

    def constraint(c: RowSchedule) -> str | None:
        return (
            _misplaced(c, graph, device)
            or _combined_wrongly(c, footprint)
            or _capped_in_vain(c, footprint, device)
            or _too_many_registers(c, footprint, device)
            or _too_much_shared(c, footprint, device)
        )

    clusters = tuple(c for c in (1, 2, 4, 8) if c <= device.max_cluster)
    storages = ("registers",) if footprint.columns else ("registers", "shared", "reread")

    def holds_a_row(threads: int) -> bool:
        return any(
            _misplaced(c, graph, device) is None
            and _too_many_registers(c, footprint, device) is None
            for vector, cluster, storage in product((*shifted, *vectors), clusters, storages)
            for rows in [max(32 // threads, 1)]
            for c in [
                RowSchedule(
                    vector,
                    threads,
                    rows,
                    1,
                    storage,
                    cluster=cluster,
                    min_blocks=1,
                    shifted=vector in shifted,
                )
            ]
        )

    threads = tuple(t for t in ROW_THREADS if holds_a_row(t))
    groups = COLUMN_GROUPS if footprint.columns else (1, 2, 4, 8)
    walks = not footprint.parts or footprint.rows > device.sms
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
            "combine": ("kernel", "grid") if footprint.columns else ("kernel",),
            "early": (False, True) if footprint.columns else (False,),
            "rows_per_block": tuple(r for r in groups if r * min(threads, default=1) <= 1024),
            "blocks_per_row": _blocks_per_row(footprint),
            "parameters": _ways_of_parameters(footprint, walks),
            "widened": (False, True)
            if walks and any(a.dtype in HALVES for a in footprint.parameters)
            else (False,),
            "bulk": (False, True) if walks and footprint.comes_in_bulk(device) else (False,),
            "rematerialize": (False, True) if footprint.itemsize == 2 else (False,),
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
    if not footprint.parts:
        return (1,)
    room = COUNTERS // footprint.rows
    return tuple(n for n in declared if n == 1 or words_of_row(n, footprint.parts) <= room)


class Footprint:
    """What a row kernel of a graph keeps on chip, per thread and schedule."""

    def __init__(self, graph: Graph):
        self.width = graph.reduced_size
        self.rows = math.prod(graph.space[a] for a in graph.kept)
        along = [a for a in graph.memory if any(a.strides[k] for k in graph.reduced)]
        over_rows = [a for a in along if not graph.kept or any(a.strides[k] for k in graph.kept)]
        self.queued = over_rows
        self.parameters = [a for a in along if a not in over_rows]
        self.itemsize = min((a.itemsize for a in over_rows or along), default=4)
        scalars = [a for a in graph.memory if a not in along and any(a.strides)]
        self.queued_scalars = [a for a in scalars if a.itemsize >= 4]
        self.columns = getattr(graph, "columns", ())
        self.has_moments = any(n.op == "m2" for n in graph.nodes)
        self.parts = 0 if self.columns else parts_of_row(graph)
        self.graph = graph

    @property
    def queued_bytes(self) -> int:
        """Of one row, from memory."""
        return self.width * sum(a.itemsize for a in self.queued)

    @remembered
    def carried(self, moments: str) -> list[str]:
        """Dtypes of the slots in which sweeps keep something for later ones."""
        plan = plan_rows(self.graph, moments)
        return [plan.graph.nodes[i].dtype for i in sorted({*plan.slots.values()})]

    @functools.cached_property
    def keeps_costly_steps(self) -> bool:
        """Whether sweeps, kept from computing again, would keep what more than arithmetic made."""
        if self.columns:
            return False
        plan = plan_rows(self.graph, "two_pass", recompute=False)
        kept = frozenset[int]().union(*(phase.carried_out for phase in plan.phases))
        return any(plan.graph.nodes[i].op in COSTLY for i in kept)

    @remembered
    def kept_at_once(self, moments: str, recompute: bool = True) -> int:
        """Bytes of one element that are kept between two sweeps, at most."""
        plan = plan_rows(self.graph, moments, recompute)
        dtypes = [[plan.graph.nodes[i].dtype for i in p.carried_out] for p in plan.phases]
        return max(sum(TensorSpec(d, ()).itemsize for d in kept) for kept in dtypes)

    @property
    def reads_more_parameters(self) -> bool:
        """Whether a row takes more bytes of what rows have in common than of its own."""
        return self.width * sum(a.itemsize for a in self.parameters) > self.queued_bytes

    def comes_in_bulk(self, device: DeviceSpec) -> bool:
        """Whether the copy engine can fetch pieces of rows: whole 16 bytes, side by side."""
        return (
            device.capability >= 90
            and len(self.graph.reduced) == 1
            and bool(self.queued)
            and all(
                a.strides[self.graph.reduced[0]] == 1
                and access_bytes(a, BULK_BYTES // a.itemsize) == BULK_BYTES
                and self.width * a.itemsize % BULK_BYTES == 0
                for a in self.queued
            )
        )

    def loads_bytes(self, c: RowSchedule) -> int:
        """Of rows, that one block may have on their way at once."""
        rows = c.rows_per_block * c.rows_per_thread * max(c.stages, 1)
        return rows * self.queued_bytes // c.row_blocks

    def turns(self, c: RowSchedule) -> int:
        vectors = vectors_of(self.width, c.vector, c.shifted)
        return math.ceil(vectors / (c.row_threads * c.row_blocks))

    def fills(self, c: RowSchedule) -> bool:
        """Whether every thread takes part in every turn."""
        vectors = vectors_of(self.width, c.vector, c.shifted)
        return vectors % (c.row_threads * c.row_blocks) == 0

    def kept_bytes(self, c: RowSchedule) -> int:
        """Of one thread: the row's own narrowest values."""
        if not c.recompute:
            kept = self.kept_at_once(c.moments, recompute=False)
            return self.turns(c) * c.rows_per_thread * max(c.vector * kept, 4)
        row = c.vector * max(self.itemsize, self.kept_at_once(c.moments))
        if self.columns:
            row = max(row, sum(held_bytes(a.dtype, c.vector) for a in self.queued))
        return self.turns(c) * c.rows_per_thread * max(row, 4)

    def parameter_bytes(self, c: RowSchedule) -> int:
        """Of one thread, for all parameter vectors."""
        dtypes = ("f32" if c.widened and a.dtype in HALVES else a.dtype for a in self.parameters)
        return self.turns(c) * sum(held_bytes(dtype, c.vector) for dtype in dtypes)

    def column_bytes(self, c: RowSchedule) -> int:
        """Of one thread: what it adds up over rows."""
        return self.turns(c) * len(self.columns) * c.vector * COLUMN_ITEMSIZE

    def shared_bytes(self, c: RowSchedule) -> int:
        """Of one block, besides the few bytes that its warps exchange."""
        found = 8 * c.stages * c.rows_per_block if c.bulk else 0  # barriers
        if c.storage == "shared":
            kept = sum(held_bytes(dtype, c.vector) for dtype in self.carried(c.moments))
            found += self.turns(c) * kept * c.block_threads
        if c.parameters == "shared":
            found += self.parameter_bytes(c) * c.row_threads
        row = self.turns(c) * sum(held_bytes(a.dtype, c.vector) for a in self.queued)
        row += sum(a.itemsize for a in self.queued_scalars)
        found += c.stages * c.rows_per_thread * row * c.block_threads
        found = max(found, (c.rows_per_block - 1) * self.column_bytes(c) * c.row_threads)
        if c.combine == "grid":
            columns = len(self.columns)
            joining = finish_bytes(self.width, columns, c.block_threads, COLUMN_ITEMSIZE)
            found = max(found, joining)
        return found


def _misplaced(c: RowSchedule, graph: Graph, device: DeviceSpec) -> str | None:
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
    return None


def _combined_wrongly(c: RowSchedule, footprint: Footprint) -> str | None:
    if c.early and c.combine != "kernel":
        return "there is no second kernel to let in early"
    if c.blocks_per_row > 1 and (c.cluster > 1 or c.rows_per_block > 1 or c.rows_per_thread > 1):
        return "blocks that share a row without being a cluster take that row only"
    if c.blocks_per_row > 1 and (c.persistent or c.storage == "shared" or c.contiguous):
        return "a row that blocks anywhere share is read once, by vectors of all blocks in turn"
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
    if c.shifted and (c.rows_per_thread > 1 or c.persistent or c.moments != "two_pass"):
        return "shifted rows are walked one by one, by kernels that do not persist, in two passes"
    if c.contiguous and c.row_threads * c.cluster <= 32:
        return "the only warp has the whole row to itself anyway"
    if c.tail == "predicated" and (c.contiguous or footprint.fills(c)):
        return "there is no tail to predicate"
    if not c.recompute and (c.storage != "registers" or c.moments != "two_pass" or c.shifted):
        return "what is used is kept by registers, between two passes over aligned rows"
    if c.rematerialize and c.storage != "registers":
        return "what is read again from memory is widened again"
    if c.bulk and (not c.stages or c.contiguous or c.row_threads < 32):
        return "rows come in bulk where warps take the vectors of a queued row side by side"
    if c.in_turn and (not c.persistent or footprint.columns or c.row_threads < 32):
        return "rows are taken in turn by warps of a persistent kernel that adds up no columns"
    if c.persistent or footprint.columns:
        if c.storage != "registers":
            return "a persistent kernel keeps its row in registers"
        bounded = footprint.columns or not c.max_registers  # any cap lets as many threads run
        if bounded and c.min_blocks * c.block_threads < PERSISTENT_THREADS:
            return f"fewer than {PERSISTENT_THREADS} threads on an SM"
        if c.stages and any(access_bytes(a, c.vector) < LEAST_COPY for a in footprint.queued):
            return f"rows are copied ahead in pieces of at least {LEAST_COPY} bytes"
        if c.stages and c.vector > 1 and not all(map(side_by_side, footprint.queued)):
            return "rows are copied ahead in vectors of elements that lie side by side"
    return None


def _capped_in_vain(c: RowSchedule, footprint: Footprint, device: DeviceSpec) -> str | None:
    if not c.max_registers:
        return None
    left = register_cap(replace(c, max_registers=0), device)
    if c.max_registers >= left:
        return f"launch bounds leave a thread {left} registers: max_registers={c.max_registers}"
    if c.max_registers % REGISTER_STEP or c.max_registers < LEAST_CAP:
        return f"registers are capped at {LEAST_CAP} or more, in steps of {REGISTER_STEP}"
    if c.min_blocks > 1 and not footprint.columns:  # whose grid has as many blocks for each SM
        return f"a cap takes the place of launch bounds: min_blocks={c.min_blocks} says nothing"
    return None


def estimated_registers(c: RowSchedule, footprint: Footprint) -> int:
    """What a thread needs, as far as a schedule tells; the compiler's own count decides."""
    needed = footprint.kept_bytes(c)
    if footprint.columns:  # what is added up is fp32, and so is what is kept while it is added
        widened = needed // 4 if c.rematerialize else needed
        needed += widened + footprint.column_bytes(c)
    if c.parameters in ("ahead", "registers"):
        needed += footprint.parameter_bytes(c)
    if c.blocks_per_row > 1:  # what rows have in common is on its way with them, or read again
        needed += footprint.parameter_bytes(c) // 2
    others = ARITHMETIC_REGISTERS if c.recompute else KEEPING_REGISTERS
    others = SHARING_REGISTERS if c.blocks_per_row > 1 else others
    return (needed if c.storage == "registers" else 0) // 4 + others


def _too_many_registers(c: RowSchedule, footprint: Footprint, device: DeviceSpec) -> str | None:
    if c.storage != "registers":
        return None
    needed = estimated_registers(c, footprint)
    room = register_cap(replace(c, max_registers=0), device)  # of a cap the compiler tells
    if needed > room:
        return f"about {needed} registers a thread exceed {room}"
    return None


def _too_much_shared(c: RowSchedule, footprint: Footprint, device: DeviceSpec) -> str | None:
    needed = footprint.shared_bytes(c)
    limit = min(device.shared_bytes_per_block, device.shared_bytes_per_sm // c.min_blocks - 1024)
    warps = max(c.block_threads // device.warp, 1) * c.cluster
    if needed and needed + EXCHANGE_BYTES * c.rows_per_thread * (warps + 8) > limit:
        return f"{needed} bytes of rows and parameters exceed {limit} bytes of shared memory"
    return None


def widest_vectors(graph: Graph, inner: int) -> tuple[int, ...]:
    """Vector lengths that divide the innermost axis, widest first."""
    narrowest = min(a.itemsize for a in (*graph.memory, *(o for _, o in graph.outputs)))
    widest = WIDEST_ACCESS // narrowest
    return tuple(v for v in (8, 4, 2, 1) if v <= widest and inner % v == 0)


def register_cap(c: RowSchedule, device: DeviceSpec) -> int:
    warps = c.min_blocks * max(c.block_threads // device.warp, 1)
    of_one = math.ceil(warps / device.schedulers_per_sm)
    left = device.registers_per_sm // (device.schedulers_per_sm * of_one * device.warp)
    cap = left // REGISTER_STEP * REGISTER_STEP
    return min(device.registers_per_thread, cap, c.max_registers or cap)


def held_bytes(dtype: str, vector: int) -> int:
    """Bytes that a thread's vector takes in registers or shared memory: halves go in pairs."""
    itemsize = TensorSpec(dtype, ()).itemsize
    return vector * itemsize if itemsize >= 4 else 4 * math.ceil(vector * itemsize / 4)
