"""Schedules of generated C++ kernels: the knobs, and which of their values fit a graph."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tilewright.device import DeviceSpec
from tilewright.fusion.ir import Access, Graph
from tilewright.op import TensorSpec
from tilewright.space import ConfigSpace, param

HUGE_PAGE_BYTES = 2 << 20
KEPT_BYTES_LIMIT = 4 << 20
"""Bytes of kept values per thread: beyond the caches, computing again is cheaper."""
SERIAL_BYTES = 256 << 10
"""Below this traffic, waking threads (some 5 us) costs more than they save."""


@dataclass(frozen=True)
class LoopSchedule:
    """How a kernel walks memory.

    `rows` rows are walked together, so that a parameter vector loaded once serves all of them;
    a sweep over a row takes `unroll` vectors at a time, each with sums of its own. Between sweeps
    it keeps the `values` that later ones use, or the fewest `bytes` from which they can be
    computed again, or `nothing`.
    """

    rows: int = param(1, 2, 4)
    unroll: int = param(1, 2, 4)
    keep: str = param("values", "bytes", "nothing")
    stream_stores: bool = param(False, True)
    huge_pages: bool = param(True, False)
    threads: str = param("all", "one")


def loop_space(graph: Graph, device: DeviceSpec) -> ConfigSpace[LoopSchedule]:
    """The schedules that fit `graph`; knobs that cannot matter have one value."""
    output_bytes = max(_bytes(graph, access) for _, access in graph.outputs)
    traffic = output_bytes + max((_bytes(graph, access) for access in graph.inputs), default=0)
    row_count = math.prod(graph.space[a] for a in graph.kept)
    if not graph.reductions:
        row_count //= max(graph.space, default=1)
    kept_bytes = 4 * graph.reduced_size if graph.reductions else 0

    def constraint(c: LoopSchedule) -> str | None:
        if c.rows * c.unroll > 4:
            return f"{c.rows} rows of {c.unroll} vectors leave no registers for the arithmetic"
        if c.keep != "nothing" and c.rows * kept_bytes > KEPT_BYTES_LIMIT:
            return f"{c.rows * kept_bytes} kept bytes exceed {KEPT_BYTES_LIMIT} bytes"
        return None

    return ConfigSpace(
        LoopSchedule,
        {
            "rows": tuple(r for r in (1, 2, 4) if r <= max(row_count, 1)),
            "unroll": (1, 2, 4) if graph.reductions else (1,),
            "keep": ("values", "bytes", "nothing") if graph.reductions else ("nothing",),
            "stream_stores": (False, True) if output_bytes >= HUGE_PAGE_BYTES else (False,),
            "huge_pages": (True, False) if output_bytes >= 2 * HUGE_PAGE_BYTES else (False,),
            "threads": _thread_choices(traffic, device),
        },
        constraint,
    )


def loop_heuristic(graph: Graph, device: DeviceSpec) -> LoopSchedule:
    """A schedule that is good untuned."""
    space = loop_space(graph, device)
    for rows, unroll, keep in ((2, 2, "values"), (1, 4, "values"), (1, 4, "nothing")):
        config = LoopSchedule(
            rows=rows if rows in space.values["rows"] else 1,
            unroll=unroll if graph.reductions else 1,
            keep=keep if graph.reductions else "nothing",
            stream_stores=False,
            huge_pages=space.values["huge_pages"][0],
            threads=space.values["threads"][0],
        )
        if config in space:
            return config
    return next(iter(space))


def _thread_choices(traffic: int, device: DeviceSpec) -> tuple[str, ...]:
    if device.threads == 1 or traffic < SERIAL_BYTES // 16:
        return ("one",)
    if traffic < SERIAL_BYTES:
        return ("one", "all")
    return ("all",)


def _bytes(graph: Graph, access: Access) -> int:
    sizes = [n for n, stride in zip(graph.space, access.strides, strict=True) if stride]
    return math.prod(sizes) * TensorSpec(access.dtype, ()).itemsize
