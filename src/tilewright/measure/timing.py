"""Honest times: every candidate under the same conditions, interleaved, with an interval.

Each method takes one sample of every candidate per round, in an order shuffled anew, so that
drift of the clock or of the machine hits all of them alike. All candidates have the same number
of samples. A time is the median with a distribution-free 95% interval. What a sample is:

- "events" (GPU): the L2 cache is flushed, a device-side spin holds the stream until the host has
  enqueued everything, and CUDA events stand around one call. See timing_cuda.py.
- "graph" (GPU): a CUDA graph of many calls over rotating inputs and outputs is replayed once,
  behind the same flush and spin; the sample is its time per call. See timing_cuda.py.
- "cpu": the second of two calls in a row, each with outputs of its own. See timing_cpu.py.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from tilewright.device import DeviceSpec, spec_of
from tilewright.errors import InvalidArgument
from tilewright.measure.timing_clocks import ClockState
from tilewright.measure.timing_cpu import CpuSampler, HostRound
from tilewright.measure.timing_cuda import (
    MAX_INPUT_SETS,
    DeviceRound,
    EventSampler,
    GraphSampler,
)
from tilewright.measure.timing_stats import median_interval, relative_half_width
from tilewright.op import Workload

Call = Callable[..., Any]
METHODS = ("events", "graph", "cpu")
FEWEST_SAMPLES = 10
"""Fewer may agree by chance, all taken within one disturbance of the machine."""
THROTTLED_REPEATS = 3
HOST_S = 0.2
HOST_MATTERS_US = 100.0
"""Where the device takes so long, no call's host is what a caller waits for."""
HOST_BESIDE_S, HOST_BRIEFLY_S = 0.05, 0.002
"""For the host's part of calls that are timed on the device, in a duel and in a search."""
HOST_CALLS = 50
"""So few that none of them waits for a place in the launch queue."""
THROTTLED_S, THROTTLED_REST = 2.0, 10
"""Where the device slows itself down in all rounds of eager calls, they go on for so long, and it
rests for so many times a round's time."""
BLOCK_SAMPLES = 1000
"""At most so many samples are enqueued before the host waits for the device."""


@dataclass(frozen=True)
class Timing:
    """Time of one call, in microseconds.

    Attributes:
        median_us: of the samples.
        ci_us: at least 95% interval of the median (with fewer than six samples, their range).
        samples: how many were taken.
        clock_mhz: SM clock while they were taken, where the driver tells.
        throttled: the device was still slowing itself down after the bounded repeats.
        host_us: what an eager call costs the host, by method "events" where the device takes less
            than HOST_MATTERS_US.
    """

    median_us: float
    ci_us: tuple[float, float]
    samples: int
    clock_mhz: int | None = None
    throttled: bool = False
    host_us: float | None = None

    @property
    def waited_us(self) -> float:
        """What each of many calls in a row takes: the longer of the device's time and the host's;
        in a graph the device's alone."""
        return max(self.median_us, self.host_us or 0.0)


@dataclass(frozen=True)
class Eager:
    """One call from PyTorch in steady state, in microseconds.

    Attributes:
        host_us: of the host's time; the device may still be at work.
        us: of all the time that many calls in a row take, until the device is done, too.
    """

    host_us: float
    us: float


class Round(Protocol):
    """Some calls in a row, and the time until the device is done with them."""

    def begin(self) -> None: ...
    def end(self) -> tuple[float, ClockState]:
        """Microseconds since `begin`."""


class Sampler(Protocol):
    """Takes samples by one method; made once per set of candidates, warm-up included."""

    def take(
        self, orders: Sequence[Sequence[str]]
    ) -> tuple[list[tuple[str, float]], ClockState]: ...


def time_interleaved(
    calls: Mapping[str, Call],
    inputs: Sequence[Sequence[Tensor]],
    device: torch.device,
    method: str,
    *,
    target: float = 0.01,
    budget_s: float = 2.0,
    min_rounds: int = 5,
) -> dict[str, Timing]:
    """Time every candidate against the others.

    Args:
        calls: by name; each takes the tensors of one argument set and returns outputs that it
            allocated in that call.
        inputs: argument sets, see `inputs_for`; every candidate goes through them in order.
        device: where the tensors are.
        method: "events" or "graph" on a GPU, "cpu" on a CPU.
        target: sampling ends when half the width of each candidate's interval is at most this
            fraction of its median, with FEWEST_SAMPLES at least.
        budget_s: sampling ends after so many seconds, target reached or not; warm-up and
            capture before it are not counted, and `min_rounds` rounds are always taken.
        min_rounds: samples of each candidate at least.

    Raises:
        InvalidArgument: the method does not fit the device.
        InvalidMeasurement: a candidate returned the same buffer from two calls.
        LaunchError: a candidate cannot be captured in a CUDA graph (method "graph").
    """
    check_method(method, device)
    assert inputs, "no argument sets"
    if not calls:
        return {}
    with _no_garbage_collection():
        return sample(_sampler(calls, inputs, device, method), list(calls),
                      target, budget_s, min_rounds)  # fmt: skip


def sample(
    sampler: Sampler, names: list[str], target: float, budget_s: float, min_rounds: int
) -> dict[str, Timing]:
    """Take blocks of rounds until every interval is narrow enough or the budget is spent."""
    samples: dict[str, list[float]] = {name: [] for name in names}
    clocks: list[ClockState] = []
    shuffler = random.Random(0)
    repeats = THROTTLED_REPEATS
    start, rounds, block = time.perf_counter(), 0, min_rounds
    while True:
        block = max(1, min(block, BLOCK_SAMPLES // len(names)))
        orders = [shuffler.sample(names, len(names)) for _ in range(block)]
        taken, clock = sampler.take(orders)
        spent_s = time.perf_counter() - start
        if clock.throttled and repeats and spent_s < budget_s:
            repeats -= 1
            continue
        for name, us in taken:
            samples[name].append(us)
        clocks.append(clock)
        rounds += block
        if rounds < min_rounds:
            block = min_rounds - rounds
            continue
        if spent_s >= budget_s or all(_settled(s, target) for s in samples.values()):
            break
        affordable = int((budget_s - spent_s) / spent_s * rounds)
        block = min(rounds, affordable)  # at most doubles what there is before the next look
        if not block:
            break
    return {name: _timing(s, clocks) for name, s in samples.items()}


def _settled(samples: Sequence[float], target: float) -> bool:
    return len(samples) >= FEWEST_SAMPLES and relative_half_width(samples) <= target


def _timing(samples: Sequence[float], clocks: Sequence[ClockState]) -> Timing:
    known = [c.mhz for c in clocks if c.mhz is not None]
    return Timing(
        statistics.median(samples),
        median_interval(samples),
        len(samples),
        clock_mhz=round(statistics.median(known)) if known else None,
        throttled=any(c.throttled for c in clocks),
    )


def check_method(method: str, device: torch.device) -> None:
    if method not in METHODS:
        raise InvalidArgument(f"unknown timing method {method!r}; use one of {', '.join(METHODS)}")
    if (method == "cpu") != (device.type == "cpu"):
        fits = "cpu" if device.type == "cpu" else "events or graph"
        raise InvalidArgument(f"timing method {method!r} does not fit device {device}; use {fits}")


def _sampler(
    calls: Mapping[str, Call],
    inputs: Sequence[Sequence[Tensor]],
    device: torch.device,
    method: str,
) -> Sampler:
    if method == "cpu":
        return CpuSampler(calls, inputs)
    return (EventSampler if method == "events" else GraphSampler)(calls, inputs, device)


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def eager(calls: Sequence[Callable[[], Any]], device: torch.device) -> Eager:
    """What one call takes that PyTorch's users make, as rounds of calls in a row tell.

    The host's part is the median call of the quietest round: other programs on the host only ever
    add to a call, often for longer than a round lasts, so rounds are repeated for HOST_S. Freeing
    the outputs is part of a call.

    A GPU that works without pause soon slows its clock to stay within its power, by a quarter for
    matrix products, which `time_interleaved` does not count either. So the device rests after each
    round for as long, after one at a lower clock longer, and such rounds are left out of the time
    if there are others.

    Args:
        calls: alike but for their inputs; they take turns.
    """
    this_round, turns = _round_on(device), itertools.cycle(calls)
    this_round.begin()
    for call in itertools.islice(turns, 10):
        call()
    this_round.end()
    quietest, rounds, slowed = math.inf, list[float](), list[float]()
    begin = time.perf_counter()
    with _no_garbage_collection():
        while True:
            this_round.begin()
            host_us = _host_us_of_a_round(turns)
            us, clock = this_round.end()
            (slowed if clock.throttled else rounds).append(us / HOST_CALLS)
            quietest = min(quietest, host_us)
            spent_s = time.perf_counter() - begin
            if spent_s >= (HOST_S if rounds else THROTTLED_S):
                return Eager(quietest, statistics.median(rounds or slowed))
            _rest(device, us * (THROTTLED_REST if clock.throttled else 1))


def with_host(
    timing: Timing, call: Callable[[], Any], device: torch.device, for_s: float
) -> Timing:
    """The timing with the host's part of an eager call, as `eager` has it, where it matters."""
    if timing.median_us >= HOST_MATTERS_US:
        return timing
    quietest, until = math.inf, time.perf_counter() + for_s
    with _no_garbage_collection():
        while math.isinf(quietest) or time.perf_counter() < until:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            quietest = min(quietest, _host_us_of_a_round(itertools.repeat(call)))
    return replace(timing, host_us=quietest)


def _host_us_of_a_round(turns: Iterator[Callable[[], Any]]) -> float:
    """The median call's, of calls in a row."""
    samples = []
    for call in itertools.islice(turns, HOST_CALLS):
        start = time.perf_counter_ns()
        call()
        samples.append(time.perf_counter_ns() - start)
    return statistics.median(samples) / 1e3


def _round_on(device: torch.device) -> Round:
    return HostRound() if device.type == "cpu" else DeviceRound(device)


def _rest(device: torch.device, us: float) -> None:
    """Wait with a busy host: one that slept would be slow at first itself."""
    until = time.perf_counter() + (us / 1e6 if device.type != "cpu" else 0)
    while time.perf_counter() < until:
        pass


def input_sets_needed(w: Workload, spec: DeviceSpec) -> int:
    """Argument sets that method "graph" rotates over.

    Between two uses of a set the others move at least twice the L2 cache. Workloads so small that
    this would take more than MAX_INPUT_SETS sets have each set used once per replay.
    """
    if spec.kind == "cpu":
        return 1
    others = math.ceil(2 * spec.l2_bytes / max(1, sum(w.bytes)))
    return min(MAX_INPUT_SETS, 1 + others)


def inputs_for(w: Workload, device: torch.device, method: str, seed: int = 0) -> list[list[Tensor]]:
    """Argument sets of a workload for `time_interleaved`: random values, one seed per set."""
    check_method(method, device)
    sets = 1
    if method == "graph":
        index = torch.cuda.current_device() if device.index is None else device.index
        sets = input_sets_needed(w, spec_of(index))
    return [w.operator.examples(w, "random", seed + i, device) for i in range(sets)]
