"""Schedules of kernels without reductions: the knobs, which of them fit, and good ones."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tilewright.device import DeviceSpec
from tilewright.fusion import instructions
from tilewright.fusion.cuda import registers
from tilewright.fusion.cuda.vectors import NARROW_BYTES, held_bytes, untuned_vector, widest_vectors
from tilewright.fusion.extents import pointwise_axes
from tilewright.fusion.ir import Access, Graph
from tilewright.space import ConfigSpace, param

FEW_REGISTERS = 24
"""What a pointwise kernel needs besides its vectors."""
FLYING_BYTES = 64
"""Of a thread's loads, from which on it has enough under way with one vector: AdamW's step of 16 M
fp32, which loads four tensors, took 154.4 us on an H100 (755376d), 159.0 by two (2675026)."""
MANY_INSTRUCTIONS = 32
"""Of an element, from which on a thread computes one vector while another is under way: GELU of
8192 rows of 3072 halves and a bias took 35.7 us on an H100 (755376d), 39.1 by one (2675026). Not if
more is under way then: SwiGLU's gradients of 4096 rows took 148.8 us so, and 144.3 by one."""


@dataclass(frozen=True)
class PointwiseSchedule:
    """How a kernel without reductions walks its elements: vectors, several for each thread.

    A vector stays within the innermost axis; or, if `flat`, within the elements in the order of
    memory, and what is broadcast to them is gathered element by element. Of a thread's loads those
    of broadcast tensors, which all threads wait for, may come first. `sizes` that tell rows apart
    are given when the kernel is launched, so that it serves others, too, or compiled in. Registers
    are what launch bounds leave to each thread, or no more than `max_registers`, if that is not 0:
    a search tries the caps that it is told to.
    """

    vector: int = param(8, 4, 2, 1)
    block_threads: int = param(256, 128, 512, 1024)
    vectors_per_thread: int = param(1, 2, 3, 4, 5, 6, 8, 12, 16)
    stream_loads: bool = param(True, False)
    flat: bool = param(False, True)
    stream_stores: bool = param(False, True)
    broadcast_first: bool = param(False, True)
    sizes: str = param("given", "compiled", own=True)
    max_registers: int = param(0, counts=True)


def pointwise_space(graph: Graph, device: DeviceSpec) -> ConfigSpace[PointwiseSchedule]:
    """The pointwise schedules that fit: several axes need vectors that divide the innermost."""
    inner = graph.space[-1] if len(graph.space) > 1 else 0
    vectors = widest_vectors(graph, inner)
    longer = tuple(v for v in widest_vectors(graph, 0) if v > vectors[0])
    flat = longer if all(lies_flat(graph, a) for _, a in graph.outputs) else ()

    rows = range(len(graph.space) - 1)
    given = pointwise_axes(graph, rows, len(rows))
    elements, broadcast = math.prod(graph.space), not all(lies_flat(graph, a) for a in graph.memory)

    def constraint(c: PointwiseSchedule) -> str | None:
        if c.flat == (c.vector in vectors):
            return f"vector={c.vector} of {inner} elements: flat={c.flat}"
        left = device.registers_left(c.block_threads, 1)
        if reason := registers.capped_in_vain(c.max_registers, left):
            return reason
        if c.vectors_per_thread == 1:
            return None
        needed = pointwise_registers(graph, c)
        if needed > left:
            return f"about {needed} registers a thread exceed {left}"
        if c.block_threads * c.vectors_per_thread * c.vector * device.sms > 2 * elements:
            return f"{c.vectors_per_thread} vectors a thread leave more than half of the SMs idle"
        return None

    values: dict[str, tuple[Any, ...]] = {
        "vector": (*flat, *vectors),
        "flat": (False, True) if flat else (False,),
        "broadcast_first": (False, True) if broadcast else (False,),
        "sizes": ("given", "compiled") if given else ("given",),
    }
    return ConfigSpace(PointwiseSchedule, values, constraint)


def pointwise_registers(graph: Graph, c: PointwiseSchedule) -> int:
    """What a thread needs, as far as a schedule tells; the compiler's own count decides."""
    loads = [a for a in graph.memory if a.strides and a.strides[-1]]
    flying = c.vectors_per_thread * sum(held_bytes(a.dtype, c.vector) for a in loads)
    return flying // 4 + FEW_REGISTERS


def loads_bytes(graph: Graph, c: PointwiseSchedule) -> int:
    """What one block may have on its way at once, of tensors that are not broadcast."""
    itemsizes = [a.itemsize for a in graph.memory if lies_flat(graph, a)]
    return c.block_threads * c.vectors_per_thread * c.vector * sum(itemsizes)


def lies_flat(graph: Graph, access: Access) -> bool:
    """Whether a tensor holds the elements of the whole space one after another."""
    axes = [a for a, n in enumerate(graph.space) if n != 1]
    return all(access.strides[a] == math.prod(graph.space[b] for b in axes if b > a) for a in axes)


def pointwise_heuristic(graph: Graph, device: DeviceSpec) -> PointwiseSchedule:
    """The widest vectors and 256 threads; two vectors a thread once every SM is busy, unless some
    tensor is broadcast and steps are few, or one vector is enough to wait for. Flat where the
    innermost axis has only vectors narrower than eight bytes. Of every n-th elements narrow ones,
    three of each of 128 threads: rotary positions of pairs and their gradient took 48.3 and 49.1 us
    on an H100 (762ba9b), by one of each of 256 threads 51.7 and 52.4 (dacf7d8).
    """
    space = pointwise_space(graph, device)
    inner = graph.space[-1] if len(graph.space) > 1 else 0
    widths = widest_vectors(graph, inner)
    narrow = widths[0] * min(a.itemsize for _, a in graph.outputs) < NARROW_BYTES
    flat = narrow and True in space.values["flat"]
    vector = space.values["vector"][0] if flat else untuned_vector(graph, widths)
    vectors = math.prod(graph.space) // vector
    busy = vectors >= 4 * device.sms * device.threads_per_sm
    if vector < widths[0] and not flat:
        return PointwiseSchedule(vector, 128, 3 if busy else 1)
    flying = vector * sum(a.itemsize for a in graph.memory)
    if busy and any(not lies_flat(graph, a) for a in graph.memory):
        if _instructions(graph) >= MANY_INSTRUCTIONS and 2 * flying <= FLYING_BYTES:
            return PointwiseSchedule(vector, 128, 2, flat=flat)
        return PointwiseSchedule(vector, 256, 1, stream_loads=False, flat=flat)
    if busy and flying >= FLYING_BYTES:
        return PointwiseSchedule(vector, 128, 1, stream_loads=False, flat=flat)
    return PointwiseSchedule(vector, 256, 2 if busy else 1, flat=flat)


def roomier_points(c: PointwiseSchedule) -> Iterator[PointwiseSchedule]:
    """Schedules by which a thread keeps less at a time, for a kernel that the compiler made to
    spill."""
    alone = replace(c, vectors_per_thread=1)
    if alone != c:
        yield alone
    while not alone.flat and alone.vector > 1:
        alone = replace(alone, vector=alone.vector // 2)
        yield alone


def _instructions(graph: Graph) -> int:
    """Of the steps that are taken for every element, about."""
    return sum(instructions.of(n) for n in graph.nodes if n.shape == graph.space)


def pointwise_promising(graph: Graph, device: DeviceSpec) -> list[PointwiseSchedule]:
    """Schedules for a search to begin with: the widest vectors, few or many for each thread, and
    the ways to load and to store that the heuristic does not choose between."""
    space, untuned = pointwise_space(graph, device), pointwise_heuristic(graph, device)
    widths = (untuned.vector, max(untuned.vector // 2, 1))
    ways = itertools.product(
        widths, (256, 512, 128), (1, 2, 4, 3, 6), (True, False), space.values["broadcast_first"]
    )
    found = [
        PointwiseSchedule(
            vector, threads, turns, loads, untuned.flat and vector == untuned.vector,
            broadcast_first=first,
        )
        for vector, threads, turns, loads, first in ways
    ]  # fmt: skip
    found += [replace(c, stream_stores=True) for c in found if c.stream_loads]
    found.insert(1, replace(found[0], sizes="compiled"))
    return [c for c in dict.fromkeys(found) if c in space]
