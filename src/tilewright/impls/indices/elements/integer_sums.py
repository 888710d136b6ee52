"""Sums of floats on a GPU as sums of integers, which atomic operations may add in any order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.device import DeviceSpec
from tilewright.impls.indices._indexed import AT_ONCE, Launch, Step, Workspace, fit_at_once
from tilewright.impls.indices._integers import (
    MARK_BYTES,
    MOST_ELEMENTS_UNTUNED,
    MOST_TERMS_UNTUNED,
    SUM_BYTES,
    few_enough,
    not_by_integers,
    table_bytes,
    takes_tables,
    too_large,
    unit_bits,
)
from tilewright.impls.indices.elements._elements import (
    PLACES_BY_NAME,
    ElementProblem,
    element_problem,
    rows_as_elements,
)
from tilewright.impls.indices.rows._rows import RowProblem, row_problem
from tilewright.impls.indices.rows._rows_kernels import RowKernels
from tilewright.op import Workload
from tilewright.space import ConfigSpace, param


class IntegerSums(RowKernels):
    """For any indices, rows or separate elements, few enough to stay in the L2 cache.

    Workspace: 12 bytes a place of an element, 20 in fp64; at most 48 for each element of src, and
    at most 1 GiB.
    """

    name = "integer_sums"
    op = ("scatter_add", "scatter_reduce", "index_add", "embedding_backward")
    files = (
        "elements/added.cuh",
        "integers.cuh",
        "elements/elements.cuh",
        "elements/integer_sums.cuh",
    )
    entry = "add"
    yields_to = (
        *("scatter_tiled", "scatter_serial", "bucket_sums"),
        *("rows_serial", "rows_bins", "rows_dealt"),
    )

    @dataclass(frozen=True)
    class Config:
        block_threads: int = param(128, 256, 512, 1024)
        items: int = param(1, 2, 4)  # elements of a thread at once
        private: bool = param(False, True)  # blocks add in shared memory first
        launches: int = param(4, 1)  # one: blocks that all run at once wait for one another

    def problem(self, w: Workload) -> ElementProblem | str:
        of_rows = w.op == "embedding_backward" or (w.op == "index_add" and w["x"].rank > 1)
        return rows_as_elements(w) if of_rows else element_problem(w)

    def refused(self, p: RowProblem, w: Workload) -> str | None:
        assert isinstance(p, ElementProblem)
        if reason := not_by_integers(p.dtype, p.reduce, p.length):
            return reason
        return too_large(p.places, p.count, p.dtype)

    def suits(self, w: Workload, device: DeviceSpec) -> bool:
        p = self.served(w)
        assert isinstance(p, ElementProblem)
        rows = row_problem(w)
        if isinstance(rows, RowProblem) and rows.columns > 1:
            return p.count <= MOST_ELEMENTS_UNTUNED and p.length <= MOST_TERMS_UNTUNED
        return few_enough(p.count, p.length, p.places, p.dtype, device)

    def space(self, w: Workload, device: DeviceSpec) -> ConfigSpace[Any]:
        p = self.served(w)
        assert isinstance(p, ElementProblem)

        def fits(c: IntegerSums.Config) -> str | None:
            if c.block_threads * c.items >= 2 * max(p.count, 128):
                return f"{c.block_threads} threads of {c.items} are twice {p.count} elements"
            if c.private and table_bytes(p.places, p.dtype) > device.shared_bytes_per_block:
                return f"{p.places} places exceed {device.shared_bytes_per_block} bytes"
            return None

        return ConfigSpace(self.Config, constraint=fits)

    def heuristic(self, w: Workload, device: DeviceSpec) -> Any:
        p = self.served(w)
        assert isinstance(p, ElementProblem)
        resident = device.sms * device.threads_per_sm

        def merit(c: IntegerSums.Config) -> tuple[float, ...]:
            # Tables where each place has many elements; then all threads that run at once, with as
            # many elements on the way as that leaves.
            return (
                c.private == takes_tables(p.count, p.places, p.dtype, device),
                min(p.count / c.items, resident),
                c.block_threads == (1024 if c.private else 256),
                c.items,
                (c.launches == 1) == fit_at_once(p.count, device),
            )

        return max(self.space(w, device), key=merit)

    def sources(self, config: Any) -> tuple[str, ...]:
        if config.launches == 1:
            return (*self.files, "elements/meet.cuh", "elements/integer_sums_at_once.cu")
        return (*self.files, "elements/integer_sums.cu")

    def macros(self, p: RowProblem, c: Any) -> dict[str, int | str]:
        assert isinstance(p, ElementProblem)
        return {
            **p.meaning,
            "THREADS": c.block_threads,
            "ITEMS": c.items,
            "PRIVATE": c.private,
            "BY_NAME": by_name(p),
            **({"AT_ONCE": AT_ONCE} if c.launches == 1 else {}),
            **p.macros,
        }

    def launches(
        self, w: Workload, p: RowProblem, c: Any, device: DeviceSpec
    ) -> tuple[Sequence[Step], Workspace]:
        assert isinstance(p, ElementProblem)
        of_elements = (blocks_of(p, c, device), 1, 1)
        resident = device.sms * device.threads_per_sm // c.block_threads
        of_places = (min(math.ceil(p.places / c.block_threads), resident), 1, 1)
        over = of_elements if by_name(p) else of_places
        sizes, bits = (p.count, p.places), unit_bits(p.length)
        rest = (p.skipped, "fault", *p.arguments)
        code = f"qP{p.signature}"
        old = "x" if p.old else "out"
        threads, of_block = c.block_threads, table_bytes(p.places, p.dtype) if c.private else 0
        workspace = Workspace(marks=MARK_BYTES * p.places, integers=SUM_BYTES[p.dtype] * p.places)
        if c.launches == 1:
            tensors = (old, "index", "out", "marks", "integers", "counter")
            args = (*tensors, *sizes, bits, p.alpha, *rest)
            launch = Launch(
                "add", f"PPPPPPiiid{code}", of_elements, threads, of_block, args, meets=True
            )
            return [launch], workspace
        steps = [
            Launch("clear", f"PPPii{code}", over, threads, 0,
                   ("index", "marks", "integers", *sizes, *rest)),
            Launch("bound", f"PPii{code}", of_elements, threads, of_block,
                   ("index", "marks", *sizes, *rest), overlapping=True),
            Launch("add", f"PPPiii{code}", of_elements, threads, of_block,
                   ("index", "marks", "integers", *sizes, bits, *rest), overlapping=True),
            Launch("finish", f"PPPPPiiid{code}", over, threads, 0,
                   (old, "index", "out", "marks", "integers", *sizes, bits, p.alpha, *rest),
                   overlapping=True),
        ]  # fmt: skip
        return steps, workspace


def by_name(p: ElementProblem) -> bool:
    return p.fill is None and p.places >= PLACES_BY_NAME * p.count


def blocks_at_once(p: ElementProblem, c: IntegerSums.Config, device: DeviceSpec) -> int:
    most = AT_ONCE if c.launches == 1 else device.threads_per_sm
    of_sm = most // c.block_threads
    if c.private:  # tables of all places
        of_sm = min(of_sm, device.blocks_by_shared(table_bytes(p.places, p.dtype)))
    return device.sms * max(1, of_sm)


def blocks_of(p: ElementProblem, c: IntegerSums.Config, device: DeviceSpec) -> int:
    """For the elements. A table of a block is worth as many elements as it has places."""
    blocks = math.ceil(p.count / (c.block_threads * c.items))
    if c.private or c.launches == 1:
        blocks = min(blocks, blocks_at_once(p, c, device))
    return max(1, min(blocks, p.count // p.places)) if c.private else blocks
