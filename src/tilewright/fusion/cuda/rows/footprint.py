"""What a row kernel keeps on chip under a schedule, and has on its way from memory."""

from __future__ import annotations

import functools
import math

from tilewright.device import WARP, DeviceSpec
from tilewright.fusion import instructions
from tilewright.fusion.cuda import registers
from tilewright.fusion.cuda.finishing import finish_bytes, finish_shares
from tilewright.fusion.cuda.kernel import JOINS
from tilewright.fusion.cuda.partials import partials_of_row
from tilewright.fusion.cuda.rows.schedule import RowSchedule
from tilewright.fusion.cuda.rows.shifting import vectors_of
from tilewright.fusion.cuda.vectors import access_bytes, held_bytes
from tilewright.fusion.far_means import corrected_far_means
from tilewright.fusion.ir import Graph
from tilewright.fusion.plan import Plan, needed_in, plan_rows
from tilewright.fusion.remembered import remembered
from tilewright.tensor_spec import DTYPES, HALVES

BULK_BYTES = 16
"""The copy engine moves whole ones, from and to multiples of it."""
UNCONVERTED_REGISTERS = 8
"""Fewer for arithmetic where parameters are at hand and nothing is widened: of 83 such kernels in
benchmarks/results/h200 at 7c2ec09 the estimate had been 4 to 24 registers above the compiler's
count, and half of it 24."""
KEEPING_REGISTERS = 16
"""What takes the place of `registers.ARITHMETIC` where sweeps compute nothing again: 80 suffice
beside 64 kept values."""
SHARING_REGISTERS = 20
"""Likewise of a kernel whose rows are shared by blocks: it reads a row once, in one sweep."""
SHIFTING_REGISTERS = 5
"""For each element of a shifted vector, beside sums over rows, to tell what lies in the row: of 178
untuned kernels 8 spilled 12 to 312 bytes that were reckoned without (NVRTC 13.0)."""
MOST_AGAIN = 16
"""Instructions for an element that later sweeps compute again, where it could be kept: softmax's
own are 3 or 10."""
MANY_STEPS = 40
"""Instructions for an element, from which on the estimate alone is not trusted: gradients of rows
that were divided by their norms, f16 to fp32, take up to half a register more for each, and up to
48 in all (NVRTC 13.0, sm_90a)."""


class Footprint:
    """What a row kernel of a graph keeps on chip, per thread and schedule."""

    def __init__(self, graph: Graph):
        self.width = graph.reduced_size
        self.samples = getattr(graph, "samples", 1)
        self.in_sets = hasattr(graph, "set_rows")
        self.rows = self.samples * math.prod(graph.space[a] for a in graph.kept)
        along = [a for a in graph.memory if any(a.strides[k] for k in graph.reduced)]
        over_rows = [a for a in along if not graph.kept or any(a.strides[k] for k in graph.kept)]
        self.queued = over_rows
        self.parameters = [a for a in along if a not in over_rows]
        self.itemsize = min((a.itemsize for a in over_rows or along), default=4)
        scalars = [a for a in graph.memory if a not in along and (any(a.strides) or not graph.kept)]
        self.queued_scalars = [a for a in scalars if a.itemsize >= 4]
        self.columns = getattr(graph, "columns", ())
        added = graph.outputs[getattr(graph, "first_column", len(graph.outputs)) :]
        self.column_itemsize = 8 if any(a.dtype == "f64" for _, a in added) else 4
        self.has_moments = any(n.op == "m2" for n in graph.nodes)
        self.row_partials = 0 if self.columns else partials_of_row(graph)
        self.graph = graph

    @functools.cached_property
    def is_of_fp32(self) -> bool:
        """Whether it is in memory, and in registers, as fp32 alone: nothing is widened."""
        return {n.dtype for n in self.graph.nodes} <= {"f32", "bool"}

    @property
    def queued_bytes(self) -> int:
        """Of one row, from memory."""
        return self.width * sum(a.itemsize for a in self.queued)

    @remembered
    def plan(self, moments: str, recompute: bool) -> Plan:
        return plan_rows(self.graph, moments, recompute, packed=self.in_sets)

    @remembered
    def rare_plan(self, moments: str, recompute: bool) -> Plan:
        """What kernels do where rows are far from zero, too, and have memory for."""
        graph = self.graph if self.in_sets else corrected_far_means(self.graph)
        known = graph is self.graph
        return self.plan(moments, recompute) if known else plan_rows(graph, moments, recompute)

    @remembered
    def carried(self, moments: str) -> list[str]:
        """Dtypes of the slots in which sweeps keep something for later ones."""
        plan = self.rare_plan(moments, True)
        return [plan.graph.nodes[i].dtype for i in sorted({*plan.slots.values()})]

    @functools.cached_property
    def keeps_costly_steps(self) -> bool:
        """Whether sweeps, kept from computing again, would keep what more than arithmetic made."""
        if self.columns:
            return False
        plan = self.plan("two_pass", False)
        kept = frozenset[int]().union(*(phase.carried_out for phase in plan.phases))
        return any(plan.graph.nodes[i].op in instructions.SPECIAL for i in kept)

    @remembered
    def instructions(self, moments: str, recompute: bool = True) -> int:
        """Of the steps that sweeps take for one element of a row, about."""
        plan = self.plan(moments, recompute)
        nodes, found = plan.graph.nodes, 0
        for phase in plan.phases:
            wanted = plan.ends(phase) | phase.carried_out
            steps = needed_in(plan.graph, wanted - phase.carried_in, phase.carried_in)
            found += sum(instructions.of(nodes[i]) for i in steps if plan.inner[i])
        return found

    @functools.cached_property
    def computes_much_again(self) -> bool:
        """Whether sweeps that keep as little as they can compute what is dear more than once."""
        if self.columns:
            return False
        again = self.instructions("two_pass") - self.instructions("two_pass", False)
        return again > MOST_AGAIN

    @functools.cached_property
    def much_is_kept(self) -> bool:
        """Whether sweeps that compute nothing dear again keep several values for it, of many
        steps."""
        several = self.kept_at_once("two_pass", False) > DTYPES["f64"].itemsize
        return several and self.instructions("two_pass", False) >= MANY_STEPS

    @functools.cached_property
    def divides(self) -> bool:
        """Whether elements are divided one by one: a division leaves its way for numbers out of the
        ordinary, and the compiler orders nothing across."""
        if self.columns:
            return False
        plan = self.plan("two_pass", True)
        along = zip(plan.graph.nodes, plan.inner, strict=True)
        return any(n.op == "div" for n, inner in along if inner)

    @remembered
    def kept_at_once(self, moments: str, recompute: bool = True) -> int:
        """Bytes of one element that are kept between two sweeps, at most."""
        plan = self.rare_plan(moments, recompute)
        dtypes = [[plan.graph.nodes[i].dtype for i in p.carried_out] for p in plan.phases]
        return max(sum(DTYPES[d].itemsize for d in kept) for kept in dtypes)

    @remembered
    def widens(self, moments: str, recompute: bool = True) -> bool:
        """Whether the compiler may keep as fp32 what is to be kept packed: where moments are found,
        and several later sweeps read several tensors of halves."""
        plan = self.plan(moments, recompute)
        nodes = plan.graph.nodes
        read = [[i for i in p.carried_in if nodes[i].dtype in HALVES] for p in plan.phases]
        return self.has_moments and sum(len(halves) > 1 for halves in read) > 1

    @remembered
    def told(self, moments: str, recompute: bool = True) -> tuple[int, int]:
        """What a warp tells the others of its row: bytes, and in how many sweeps."""
        plan = self.rare_plan(moments, recompute)
        numbers = {**dict.fromkeys(JOINS, 1), "m2": 2, "sum_exp": 2}
        reductions = [[plan.graph.nodes[i] for i in phase.reductions] for phase in plan.phases]
        found = (numbers.get(n.op, 0) * DTYPES[n.dtype].itemsize for of in reductions for n in of)
        return sum(found), sum(map(bool, reductions))

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
        whole = rows * self.queued_bytes // c.row_blocks
        if c.stages or c.storage == "registers" or (c.storage == "shared" and not c.shifted):
            return whole
        elements = min(c.unroll, self.turns(c)) * c.block_threads * c.rows_per_thread * c.vector
        return min(whole, elements * sum(a.itemsize for a in self.queued))

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
        return self.turns(c) * len(self.columns) * c.vector * self.column_itemsize

    def exchanged_bytes(self, c: RowSchedule) -> int:
        """Of one block, for what warps of a cluster tell each other: two buffers, with a barrier
        for each sweep and a turn."""
        told, sweeps = self.told(c.moments, c.recompute)
        warps = math.ceil(c.block_threads / WARP) * c.cluster
        return 2 * (told * c.rows_per_thread * warps + 8 * (sweeps + 1) * c.rows_per_block)

    def shared_bytes(self, c: RowSchedule) -> int:
        """Of one block, besides `exchanged_bytes`."""
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
            shares = finish_shares(self.width)
            joining = finish_bytes(shares, columns, c.block_threads, self.column_itemsize)
            found = max(found, joining)
        return found


def estimated_registers(c: RowSchedule, footprint: Footprint) -> int:
    """What a thread needs, as far as a schedule tells; the compiler's own count decides."""
    needed = footprint.kept_bytes(c)
    if footprint.columns:  # what is added up is fp32, and so is what is kept while it is added
        widened = needed // 4 if c.rematerialize else needed
        needed += widened + footprint.column_bytes(c)
        needed += 4 * SHIFTING_REGISTERS * c.vector if c.shifted else 0
    if c.parameters in ("ahead", "registers"):
        needed += footprint.parameter_bytes(c)
    if c.blocks_per_row > 1:  # what rows have in common is on its way with them, or read again
        needed += footprint.parameter_bytes(c) // 2
    others = registers.ARITHMETIC if c.recompute else KEEPING_REGISTERS
    others = SHARING_REGISTERS if c.blocks_per_row > 1 else others
    if c.parameters == "ahead" and footprint.is_of_fp32:
        others -= UNCONVERTED_REGISTERS
    return (needed if c.storage == "registers" else 0) // 4 + others


def widened_registers(c: RowSchedule, footprint: Footprint) -> int:
    """Beyond the estimate: one of the tensors that `widens` speaks of, but for the vector that a
    step has at hand anyway. Batch norm's gradient of 25088 halves, 13 vectors of either tensor a
    thread, spills for sm_90 below 240 registers, where 144 are reckoned; 7 below 144, where 96 are;
    4 below 88, where 72 are."""
    if footprint.columns or c.storage != "registers":
        return 0
    vectors = footprint.turns(c) * c.rows_per_thread
    return (vectors - 1) * c.vector if footprint.widens(c.moments, c.recompute) else 0


def register_cap(c: RowSchedule, device: DeviceSpec) -> int:
    room = device.registers_left(c.block_threads, c.min_blocks)
    return min(room, c.max_registers or room)
