"""Schedules of generated CUDA kernels: the knobs, and which of their values fit a graph."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tilewright.device import DeviceSpec
from tilewright.fusion.ir import Access, Graph
from tilewright.op import TensorSpec
from tilewright.space import ConfigSpace, param

WIDEST_ACCESS = 16
"""Bytes of the widest memory access of one thread."""


@dataclass(frozen=True)
class RowSchedule:
    """How a kernel walks rows that it reduces.

    A row is cut into vectors of `vector` elements; `row_threads` threads of each of `cluster`
    blocks take them in turn. `rows_per_thread` rows are walked together, so that a parameter
    vector loaded once serves all of them; `rows_per_block` such groups share a block.
    """

    vector: int = param(8, 4, 2, 1)
    row_threads: int = param(
        *(4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 1024),
        default=256,
    )
    rows_per_block: int = param(1, 2, 4, 8)
    rows_per_thread: int = param(1, 2, 4)
    storage: str = param("registers", "shared", "reread")
    moments: str = param("two_pass", "merge")
    cluster: int = param(1, 2, 4, 8)
    min_blocks: int = param(1, 2, 3, 4, 6, 8)
    stream_loads: bool = param(True, False)

    @property
    def block_threads(self) -> int:
        return self.row_threads * self.rows_per_block


@dataclass(frozen=True)
class PointwiseSchedule:
    """How a kernel without reductions walks its elements: vectors, several for each thread."""

    vector: int = param(8, 4, 2, 1)
    block_threads: int = param(256, 128, 512, 1024)
    vectors_per_thread: int = param(1, 2, 4, 8)
    stream_loads: bool = param(True, False)


def access_bytes(access: Access, vector: int) -> int:
    """The widest aligned access to `vector` consecutive elements, wherever a row starts."""
    steps = [s * access.itemsize for s in access.strides if s > 1]
    whole = vector * access.itemsize
    return max(math.gcd(whole, access.align, WIDEST_ACCESS, *steps), access.itemsize)


def row_space(graph: Graph, device: DeviceSpec) -> ConfigSpace[RowSchedule]:
    """The row schedules that fit `graph` on `device`.

    A vector never crosses the end of a row; the values a thread keeps leave registers for the
    arithmetic; no more than half of the lanes idle.
    """
    inner = graph.space[graph.reduced[-1]]
    width = graph.reduced_size
    itemsize = _row_itemsize(graph)
    has_moments = any(n.op == "m2" for n in graph.nodes)

    def constraint(c: RowSchedule) -> str | None:
        vectors = width // c.vector
        lanes = c.row_threads * c.cluster
        turns = math.ceil(vectors / lanes)
        if c.row_threads > 32 and c.row_threads % 32:
            return f"row_threads={c.row_threads} is no whole number of warps"
        if c.block_threads > 1024 or c.block_threads % 32:
            return f"a block of {c.block_threads} threads"
        if c.cluster > 1 and (c.rows_per_block > 1 or c.row_threads < 64):
            return "a cluster shares one row among whole blocks of at least 64 threads"
        if 2 * vectors <= turns * lanes and lanes > 4:
            return f"{vectors} vectors leave more than half of {lanes} threads idle"
        if c.min_blocks * c.block_threads > device.threads_per_sm:
            return f"{c.min_blocks} blocks of {c.block_threads} threads exceed an SM"
        kept_bytes = turns * c.rows_per_thread * max(c.vector * itemsize, 4)
        if c.storage == "registers":
            room = min(device.registers_per_thread, _register_cap(c, device)) - 36
            if kept_bytes / 4 > room:
                return f"{kept_bytes} bytes per thread exceed {4 * room} bytes of registers"
        if c.storage == "shared":
            needed = kept_bytes * c.block_threads
            limit = min(device.shared_bytes_per_block, device.shared_bytes_per_sm // c.min_blocks)
            if needed + 4096 > limit:
                return f"{needed} bytes of rows exceed {limit} bytes of shared memory"
            if c.rows_per_thread > 1:
                return "rows in shared memory are walked one by one"
        if c.storage == "reread" and (c.moments == "merge" or c.rows_per_thread > 1):
            return "re-reading goes with two_pass and one row per thread"
        if turns > 64 and c.storage == "registers":
            return f"{turns} unrolled turns"
        return None

    return ConfigSpace(
        RowSchedule,
        {
            "vector": _vectors(graph, inner),
            "moments": ("two_pass", "merge") if has_moments else ("two_pass",),
            "cluster": tuple(c for c in (1, 2, 4, 8) if c <= device.max_cluster),
        },
        constraint,
    )


def pointwise_space(graph: Graph, device: DeviceSpec) -> ConfigSpace[PointwiseSchedule]:
    """The pointwise schedules that fit: several axes need vectors that divide the innermost."""
    inner = graph.space[-1] if len(graph.space) > 1 else 0
    return ConfigSpace(PointwiseSchedule, {"vector": _vectors(graph, inner)})


def row_heuristic(graph: Graph, device: DeviceSpec) -> RowSchedule:
    """A schedule from device numbers.

    The widest vectors; a row by one warp while a thread keeps at most 64 bytes, else by enough
    threads to keep that (registers then allow 32 or more warps per SM); beyond 1024 threads a
    thread keeps up to 128 bytes, then clusters share the row, and re-reading is the last resort.
    Measured as the best single rule over `bias_layer_norm_gpt` on an H200.
    """
    space = row_space(graph, device)
    itemsize = _row_itemsize(graph)
    width = graph.reduced_size
    choices = list(_row_candidates(space, width, itemsize))
    for config in choices:
        if config in space:
            return config
    return next(iter(space))


def _row_candidates(space: ConfigSpace[RowSchedule], width: int, itemsize: int):
    vector = space.values["vector"][0]
    moments = space.values["moments"][-1]
    for kept_bytes in (64, 128):
        threads = math.ceil(width * itemsize / kept_bytes)
        for cluster in space.values["cluster"]:
            fits = [t for t in space.values["row_threads"] if t * cluster >= threads and t >= 32]
            if fits:
                rows = max(1, 128 // fits[0]) if cluster == 1 else 1
                way = "two_pass" if fits[0] <= 32 else moments
                for blocks in (rows, 1):
                    yield RowSchedule(vector, fits[0], blocks, 1, "registers", way, cluster, 1)
    small = [t for t in space.values["row_threads"] if t * vector <= max(width, 4 * vector)]
    for threads in reversed(small):
        for rows in (8, 4, 2, 1):
            yield RowSchedule(vector, threads, rows, 1, "registers", "two_pass", 1, 1)
    for threads in (1024, 512, 256):
        yield RowSchedule(vector, threads, 1, 1, "shared", "two_pass", 1, 1)
        yield RowSchedule(vector, threads, 1, 1, "reread", "two_pass", 1, 1)


def pointwise_heuristic(graph: Graph, device: DeviceSpec) -> PointwiseSchedule:
    """The widest vectors and 256 threads; two vectors a thread once every SM is busy."""
    space = pointwise_space(graph, device)
    vector = space.values["vector"][0]
    vectors = math.prod(graph.space) // vector
    busy = vectors >= 4 * device.sms * device.threads_per_sm
    return PointwiseSchedule(vector, 256, 2 if busy else 1)


def _row_itemsize(graph: Graph) -> int:
    """Bytes per element of what a row kernel keeps: the row's own narrowest load."""
    rows = [a for a in graph.inputs if any(a.strides[k] for k in graph.reduced)]
    full = [a for a in rows if not graph.kept or any(a.strides[k] for k in graph.kept)]
    return min((a.itemsize for a in full or rows), default=4)


def _vectors(graph: Graph, inner: int) -> tuple[int, ...]:
    """Vector lengths that divide the innermost axis, widest first."""
    narrowest = min(a.itemsize for a in (*graph.inputs, *(o for _, o in graph.outputs)))
    widest = WIDEST_ACCESS // narrowest
    return tuple(v for v in (8, 4, 2, 1) if v <= widest and inner % v == 0)


def _register_cap(c: RowSchedule, device: DeviceSpec) -> int:
    return device.registers_per_sm // (c.min_blocks * max(c.block_threads, 32)) // 8 * 8


def held_bytes(dtype: str, vector: int) -> int:
    """Bytes that a thread's vector takes in registers or shared memory: halves go in pairs."""
    itemsize = TensorSpec(dtype, ()).itemsize
    return vector * itemsize if itemsize >= 4 else 4 * math.ceil(vector * itemsize / 4)
