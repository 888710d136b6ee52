"""Fair times on a CPU, where the memory allocator can outweigh the kernel.

A page that a program touches for the first time costs a page fault, often more than the kernel's
own work on that page. glibc returns large buffers to the system and keeps smaller
ones, and where the limit lies depends on what the process freed before. So what is fair here:

- Every call allocates its own outputs; a candidate that hands out one buffer again and again is
  refused. Outputs are freed after the timed region.
- glibc's limit is brought to its highest value, 32 MiB, before anything is timed, as any
  long-running program brings it there by freeing one large tensor, and what earlier work left
  free is given back. From then on smaller buffers are kept, and larger ones are fresh pages for
  everybody: what a loop in an ordinary PyTorch program meets, whatever this process did before.
- A sample is the second of two calls in a row. The first leaves caches, threads and free memory
  as this candidate leaves them, so that each candidate follows itself, and never another one
  that left more or less behind.
- Calls too short for the clock are timed several at a time, for about 50 us.
"""

from __future__ import annotations

import ctypes
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.errors import InvalidMeasurement
from tilewright.measure.timing_clocks import ClockState

Call = Callable[..., Any]
LARGEST_KEPT_BYTES = (32 << 20) - (8 << 10)
"""glibc never keeps a buffer of 32 MiB or more (DEFAULT_MMAP_THRESHOLD_MAX); less its header."""
SHORT_CALL_US, SHORT_SAMPLE_US = 20.0, 50.0
"""Calls shorter than the first are repeated within a sample, which then takes about the second: one
alone would be timed with the clock's own resolution and cost."""


class CpuSampler:
    def __init__(self, calls: Mapping[str, Call], inputs: Sequence[Sequence[Tensor]]):
        self._calls = calls
        self._inputs = inputs[0]
        settle_allocator()
        for name, call in calls.items():
            require_fresh_outputs(name, call, self._inputs)
        self._repeats = {name: self._short_repeats(call) for name, call in calls.items()}

    def take(self, orders: Sequence[Sequence[str]]) -> tuple[list[tuple[str, float]], ClockState]:
        """One sample of each name in each order, microseconds per call."""
        return [(name, self._sample(name)) for order in orders for name in order], ClockState()

    def _sample(self, name: str) -> float:
        call, repeats = self._calls[name], self._repeats[name]
        call(*self._inputs)
        return _elapsed_us(call, self._inputs, repeats) / repeats

    def _short_repeats(self, call: Call) -> int:
        us = min(_elapsed_us(call, self._inputs, 1) for _ in range(2))
        return 1 if us >= SHORT_CALL_US else math.ceil(SHORT_SAMPLE_US / max(us, 0.1))


class HostRound:
    """Calls in a row that are done when they return."""

    def begin(self) -> None:
        self._start = time.perf_counter_ns()

    def end(self) -> tuple[float, ClockState]:
        return (time.perf_counter_ns() - self._start) / 1e3, ClockState()


def _elapsed_us(call: Call, inputs: Sequence[Tensor], repeats: int) -> float:
    start = time.perf_counter_ns()
    for _ in range(repeats - 1):
        call(*inputs)
    outputs = call(*inputs)
    stop = time.perf_counter_ns()
    del outputs
    return (stop - start) / 1e3


def settle_allocator() -> None:
    """Give all free memory back, and make glibc keep every buffer that it would ever keep.

    Freeing a mapped buffer raises glibc's limit between kept and mapped ones to that buffer's
    size, up to 32 MiB, for good. Another C library needs and gets neither.
    """
    torch.empty(LARGEST_KEPT_BYTES, dtype=torch.uint8)
    _malloc_trim()(0)


@functools.cache
def _malloc_trim() -> Callable[[int], Any]:
    return getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: 0)


def require_fresh_outputs(name: str, call: Call, inputs: Sequence[Tensor]) -> None:
    """Refuse a candidate whose second call writes where its first one did.

    Outputs that share memory with an input (in-place forms) are exempt.

    Raises:
        InvalidMeasurement: the candidate keeps a buffer and hands it out again.
    """
    first = call(*inputs)
    second = call(*inputs)
    again = (_buffers(first) & _buffers(second)) - _buffers(inputs)
    if again:
        raise InvalidMeasurement(
            f"{name} returned the same buffer from two calls; a candidate must allocate its "
            "outputs in each call, or its time leaves out what every other one pays"
        )


def _buffers(outputs: Any) -> set[int]:
    """Addresses of the memory behind a tensor or a sequence of them."""
    if isinstance(outputs, Tensor):
        return {outputs.untyped_storage().data_ptr()} if outputs.numel() else set()
    if isinstance(outputs, (tuple, list)):
        return set().union(*map(_buffers, outputs))
    return set()
