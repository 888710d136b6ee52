"""Schedules for rows that begin at any place of an aligned vector."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tilewright.device import DeviceSpec
from tilewright.fusion.cuda.rows.few_rows import FULL_ROW_BYTES, MANY_ROWS
from tilewright.fusion.cuda.rows.footprint import Footprint, estimated_registers, register_cap
from tilewright.fusion.cuda.rows.schedule import RowSchedule
from tilewright.space import ConfigSpace

VECTOR = 4
"""Elements of an access, at most: more of wider ones cross the end of a row."""
ROW_BYTES = 136
"""Of a row, that a thread keeps."""
THREADS = (96, 448)
"""Of a block, from and to."""
MOST_THREADS = 896
"""On an SM."""
WIDENING_REGISTERS = 40
"""For vectors of halves that the compiler widens ahead for sm_100a: layer norm of 8193 takes 115,
where 74 are reckoned."""
SEVERAL_REGISTERS = 32
"""Where a row has several tensors: 16385 halves that are added before a norm spilled 56 bytes."""


def shifted_block_candidates(
    space: ConfigSpace[RowSchedule], footprint: Footprint, device: DeviceSpec, widest: int
) -> Iterator[RowSchedule]:
    """Many rows, each by so few threads that several blocks share an SM, as clusters where a row is
    wide; each turn asks for itself whether it lies in the row. With 8192 rows of bf16 on an H200,
    softmax of 5141, 16385 and 50257 took 48, 144 and 457 us and layer norm 58, 180 and 689
    (af2484b), by one block on an SM 61, 318, 1056, 85, 361 and 1128 (6ff8358, no file kept).
    """
    row_bytes = footprint.width * footprint.itemsize
    many = footprint.rows >= MANY_ROWS * device.sms and row_bytes >= FULL_ROW_BYTES
    if not many or footprint.columns:
        return
    packed = True in space.values["rematerialize"]
    least, most = THREADS
    for cluster in space.values["cluster"]:
        needed = max(row_bytes / ROW_BYTES / cluster, least)
        sized = (
            RowSchedule(
                min(widest, VECTOR), threads, 1, 1, "registers", "two_pass", cluster, 1,
                stream_loads=bool(footprint.parameters), rematerialize=packed, shifted=True,
                tail="predicated",
            )
            for threads in space.values["row_threads"]
            if needed <= threads <= most
        )  # fmt: skip
        c = next((c for c in sized if not footprint.fills(c)), None)  # there is a tail
        if c is not None:
            filled = (replace(c, min_blocks=n) for n in reversed(space.values["min_blocks"]))
            yield from [f for f in filled if _fits(f, footprint, device)][:1]


def _fits(c: RowSchedule, footprint: Footprint, device: DeviceSpec) -> bool:
    few = c.min_blocks * c.block_threads <= MOST_THREADS
    beside = WIDENING_REGISTERS if device.capability >= 100 else 0
    beside += SEVERAL_REGISTERS if len(footprint.queued) > 1 else 0
    return few and estimated_registers(c, footprint) + beside <= register_cap(c, device)
