"""Times on a GPU, without host time and with a cold L2 cache.

A sample is: flush L2, spin on the device, start event, the timed work, end event. The spin holds
the stream until the host has enqueued all of it. That is checked, not assumed: if the start event
had already fired when the host was done, the sample is thrown away, the candidate's spin doubled,
and the sample taken again. A call that itself waits for the device cannot be enqueued ahead; its
wait is part of its time. Nothing is waited for between samples, so that the device never idles.

The flush writes a buffer of twice the L2 cache, which displaces what the cache held, and then
reads it, which leaves clean lines behind: no write-back of the flush falls into the timed work.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.errors import LaunchError
from tilewright.measure.timing_clocks import Clocks, ClockState
from tilewright.measure.timing_cpu import require_fresh_outputs
from tilewright.tensor_spec import TensorSpec

Call = Callable[..., Any]
MAX_INPUT_SETS = 256
MAX_GRAPH_CALLS = 512
GRAPH_US = 1000.0
"""A replay lasts about so long: the gap between start event and first kernel drowns in it."""
MIN_SPIN_US = 10.0
MAX_SPIN_US = 10_000.0
WARM_UP_US = 20_000.0
"""Keeps a device that idled busy until its clock is up, ahead of the first sample."""


class Stage:
    """What timing needs of one device: the flush, the spin, a stream to capture on, its clocks."""

    def __init__(self, device_index: int):
        self.l2_bytes = torch.cuda.get_device_properties(device_index).L2_cache_size
        self._buffer = torch.empty(2 * self.l2_bytes // 4, device=f"cuda:{device_index}")
        self._sum = torch.empty((), device=f"cuda:{device_index}")
        # one for all captures: the allocator keeps free memory per stream
        self.capture_stream = torch.cuda.Stream()
        self.clocks = Clocks(device_index)
        self._cycles_per_us = 1.0
        self._cycles_per_us = 1e6 / self._spin_time_us(1_000_000)

    def flush(self) -> None:
        self._buffer.zero_()
        torch.sum(self._buffer, dim=0, out=self._sum)

    def spin(self, us: float) -> None:
        torch.cuda._sleep(int(us * self._cycles_per_us))

    def _spin_time_us(self, cycles: int) -> float:
        torch.cuda._sleep(cycles)  # loads the kernel, raises the clock
        start, end = _event_pair()
        start.record()
        torch.cuda._sleep(cycles)
        end.record()
        torch.cuda.synchronize(self._buffer.device)
        return start.elapsed_time(end) * 1e3


@functools.cache
def stage(device_index: int) -> Stage:
    """The stage of a device; its buffer stays allocated."""
    with torch.cuda.device(device_index):
        return Stage(device_index)


class EventSampler:
    """Method "events": one call between two events, over the argument sets in turn."""

    def __init__(
        self, calls: Mapping[str, Call], inputs: Sequence[Sequence[Tensor]], device: torch.device
    ):
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._stage = stage(self._index)
        self._work: dict[str, tuple[Callable[[], Any], int]] = {}
        self._spin_us: dict[str, float] = {}
        with torch.cuda.device(self._index):
            for name, call in calls.items():
                require_fresh_outputs(name, call, inputs[0])
                self._add(name, _over(call, inputs), 1)
            self._stage.spin(WARM_UP_US)

    def take(self, orders: Sequence[Sequence[str]]) -> tuple[list[tuple[str, float]], ClockState]:
        """One sample of each name in each order, microseconds per call."""
        with torch.cuda.device(self._index):
            events = [(name, *self._enqueue(name)) for order in orders for name in order]
            clock = self._stage.clocks.read()  # while the device still works
            torch.cuda.synchronize(self._index)
        return [
            (name, start.elapsed_time(end) * 1e3 / self._work[name][1])
            for name, start, end in events
        ], clock

    def _add(self, name: str, work: Callable[[], Any], calls: int) -> None:
        """Register what `name` runs between the events, and spin for the host time it takes."""
        torch.cuda.synchronize(self._index)
        start = time.perf_counter()
        work()
        host_us = (time.perf_counter() - start) * 1e6
        self._work[name] = work, calls
        self._spin_us[name] = min(max(MIN_SPIN_US, 1.5 * host_us), MAX_SPIN_US)

    def _enqueue(self, name: str) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        work, _ = self._work[name]
        start, end = _event_pair()
        while True:
            self._stage.flush()
            self._stage.spin(self._spin_us[name])
            start.record()
            work()
            end.record()
            if not start.query() or self._spin_us[name] >= MAX_SPIN_US:
                return start, end
            self._spin_us[name] = min(2 * self._spin_us[name], MAX_SPIN_US)


class GraphSampler(EventSampler):
    """Method "graph": replays of a CUDA graph that holds many calls of one candidate.

    The calls go over the argument sets in order. The outputs of as many calls as there are sets
    are kept alive during capture, so outputs rotate over buffers of their own and are as cold as
    the inputs; workspace is reused from call to call, as it is in a program. All graphs share one
    memory pool, since they never run at the same time and nothing is kept from one to the next.

    Where the calls on the other sets move twice L2 between two uses of a set, the graph goes over
    the sets several times, for about GRAPH_US; else each is used once per replay, which starts
    with a flushed cache.
    """

    def __init__(
        self, calls: Mapping[str, Call], inputs: Sequence[Sequence[Tensor]], device: torch.device
    ):
        super().__init__(calls, inputs, device)
        eager_us = dict(self.take([list(calls)])[0])
        pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        outputs = next(iter(calls.values()))(*inputs[0])
        others_bytes = (len(inputs) - 1) * (moved_bytes(inputs[0]) + moved_bytes(outputs))
        rotates = others_bytes >= 2 * self._stage.l2_bytes
        with torch.cuda.device(self._index):
            for name, call in calls.items():
                count = graph_calls(eager_us[name], len(inputs), rotates)
                graph = self._capture(name, call, inputs, count, pool)
                graph.replay()
                self._graphs.append(graph)
                self._add(name, graph.replay, count)

    def _capture(
        self, name: str, call: Call, inputs: Sequence[Sequence[Tensor]], count: int, pool: Any
    ) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        current, side = torch.cuda.current_stream(), self._stage.capture_stream
        side.wait_stream(current)
        outputs: deque[Any] = deque(maxlen=len(inputs))
        try:
            with torch.cuda.stream(side):  # the default stream cannot be captured
                call(*inputs[0])
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    for i in range(count):
                        outputs.append(call(*inputs[i % len(inputs)]))
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            raise LaunchError(
                f"{name} cannot be captured in a CUDA graph: {error}; time it by method events"
            ) from error
        current.wait_stream(side)
        return graph


class DeviceRound:
    """Calls in a row between two events, at whose start the device has nothing to do.

    The clock is read before the host waits: what reading takes is not part of the round.
    """

    def __init__(self, device: torch.device):
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._clocks = stage(self._index).clocks

    def begin(self) -> None:
        with torch.cuda.device(self._index):
            torch.cuda.synchronize()
            self._start, self._end = _event_pair()
            self._start.record()

    def end(self) -> tuple[float, ClockState]:
        with torch.cuda.device(self._index):
            self._end.record()
            clock = self._clocks.read()
            self._end.synchronize()
        return self._start.elapsed_time(self._end) * 1e3, clock


def graph_calls(eager_us: float, sets: int, rotates: bool) -> int:
    """Calls in one graph: whole turns over the sets, for about GRAPH_US; one turn if not cold."""
    if not rotates:
        return sets
    turns = math.ceil(GRAPH_US / max(eager_us, 1.0) / sets)
    return sets * max(1, min(turns, MAX_GRAPH_CALLS // sets))


def moved_bytes(tensors: Any) -> int:
    """Distinct bytes behind a tensor or a sequence of them."""
    if isinstance(tensors, Tensor):
        return TensorSpec.of(tensors).distinct_bytes
    return sum(map(moved_bytes, tensors)) if isinstance(tensors, (tuple, list)) else 0


def _over(call: Call, inputs: Sequence[Sequence[Tensor]]) -> Callable[[], Any]:
    turns = itertools.cycle(inputs)
    return lambda: call(*next(turns))


def _event_pair() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
