"""Timing: statistics on synthetic samples, the order of calls, what counts as a fair call."""

import dataclasses
import functools
import gc
import itertools
import math
import random
import statistics
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from tilewright.device import DEVICES
from tilewright.errors import InvalidArgument, InvalidMeasurement
from tilewright.measure import timing, timing_clocks, timing_cpu, timing_cuda
from tilewright.measure.timing import (
    HOST_CALLS,
    HOST_MATTERS_US,
    THROTTLED_REPEATS,
    Timing,
    eager,
    input_sets_needed,
    inputs_for,
    sample,
    time_interleaved,
    with_host,
)
from tilewright.measure.timing_clocks import Clocks, ClockState
from tilewright.measure.timing_cpu import CpuSampler
from tilewright.measure.timing_stats import interval_rank, median_interval, relative_half_width
from tilewright.op import Workload

CPU = torch.device("cpu")
X = [[torch.ones(64)]]


def busy(us):
    """A call that keeps the processor for at least `us`, and allocates an output."""

    def call(x):
        end = time.perf_counter_ns() + us * 1000
        while time.perf_counter_ns() < end:
            pass
        return x.clone()

    return call


class FakeSampler:
    """Gives each name's next synthetic value; remembers the orders it was asked for."""

    def __init__(self, draw, clocks=(), take_s=0.0):
        self.draw, self.take_s = draw, take_s
        self.clocks = iter(clocks)
        self.orders = []

    def take(self, orders):
        time.sleep(self.take_s)
        self.orders += orders
        taken = [(name, self.draw(name)) for order in orders for name in order]
        return taken, next(self.clocks, ClockState())


# --- the interval of the median --------------------------------------------------------------


@pytest.mark.parametrize("n", [*range(6, 60), 100, 333, 1000])
def test_interval_covers_the_median_at_95_percent_and_no_narrower_one_does(n):
    def missed(rank):  # P(the true median lies outside samples rank .. n-1-rank)
        return 2 * sum(math.comb(n, k) for k in range(rank + 1)) / 2**n

    rank = interval_rank(n)
    assert missed(rank) <= 0.05
    assert missed(rank + 1) > 0.05


def test_interval_of_fewer_than_six_samples_is_their_range():
    assert median_interval([3.0, 1.0, 2.0, 9.0, 4.0]) == (1.0, 9.0)
    assert median_interval([3.0]) == (3.0, 3.0)


def test_interval_contains_the_median_and_ignores_an_outlier():
    samples = [10.0 + 0.01 * i for i in range(40)] + [1e6]
    low, high = median_interval(samples)
    assert low <= statistics.median(samples) <= high < 11


def test_interval_narrows_with_more_samples():
    rng = random.Random(0)
    samples = [rng.lognormvariate(3, 0.1) for _ in range(1000)]
    assert relative_half_width(samples) < 0.4 * relative_half_width(samples[:30])


# --- rounds ----------------------------------------------------------------------------------


def test_every_round_holds_every_candidate_once_in_changing_order():
    names = ["a", "b", "c", "d"]
    sampler = FakeSampler(lambda name: 1.0)
    sample(sampler, names, target=0.01, budget_s=1.0, min_rounds=20)
    assert all(sorted(order) == names for order in sampler.orders)
    assert len({tuple(order) for order in sampler.orders}) > 5
    followers = {pair for order in sampler.orders for pair in itertools.pairwise(order)}
    assert len(followers) == 12  # each candidate came after each other one


def test_sampling_stops_once_every_interval_is_under_the_target():
    rng = random.Random(1)
    noise = {"quiet": 0.001, "noisy": 0.05}
    sampler = FakeSampler(lambda name: rng.gauss(100.0, 100.0 * noise[name]))
    timings = sample(sampler, list(noise), target=0.01, budget_s=60.0, min_rounds=5)
    assert timings["quiet"].samples == timings["noisy"].samples
    assert 30 < timings["noisy"].samples < 1000
    low, high = timings["noisy"].ci_us
    assert (high - low) / 2 <= 0.01 * timings["noisy"].median_us
    assert low <= 100.0 <= high


def test_sampling_goes_on_to_the_budget_when_the_target_is_out_of_reach():
    rng = random.Random(2)
    sampler = FakeSampler(lambda name: rng.uniform(1.0, 100.0), take_s=0.001)
    start = time.perf_counter()
    timing = sample(sampler, ["a"], target=0.0001, budget_s=0.2, min_rounds=5)["a"]
    assert timing.samples > 5
    assert time.perf_counter() - start >= 0.1


def test_the_fewest_rounds_are_taken_even_over_the_budget():
    sampler = FakeSampler(lambda name: 1.0, take_s=0.01)
    assert sample(sampler, ["a"], target=1.0, budget_s=0.0, min_rounds=7)["a"].samples == 7


def test_many_candidates_get_the_fewest_rounds_in_several_blocks():
    names = [str(i) for i in range(400)]
    timings = sample(FakeSampler(lambda name: 1.0), names, 1.0, 0.0, min_rounds=5)
    assert {t.samples for t in timings.values()} == {5}


def test_throttled_round_is_repeated_and_left_out():
    values = iter([500.0] * 5 + [100.0] * 100)
    clocks = [ClockState(900, throttled=True), ClockState(1980), ClockState(1980)]
    sampler = FakeSampler(lambda name: next(values), clocks)
    timing = sample(sampler, ["a"], target=0.01, budget_s=1.0, min_rounds=5)["a"]
    assert (timing.median_us, timing.ci_us) == (100.0, (100.0, 100.0))
    assert (timing.clock_mhz, timing.throttled) == (1980, False)


def test_throttling_that_does_not_end_is_reported_after_bounded_repeats():
    clocks = [ClockState(900, throttled=True)] * 100
    sampler = FakeSampler(lambda name: 1.0, clocks)
    timing = sample(sampler, ["a"], target=0.01, budget_s=1.0, min_rounds=10)["a"]
    assert timing.throttled
    assert len(sampler.orders) == 10 * (1 + THROTTLED_REPEATS)


# --- the CPU method --------------------------------------------------------------------------


def test_a_candidate_twice_as_slow_is_found_slower():
    calls = {"fast": busy(100), "slow": busy(200)}
    timings = time_interleaved(calls, X, CPU, "cpu", budget_s=0.2)
    assert timings["fast"].median_us >= 100
    assert timings["slow"].median_us > 1.5 * timings["fast"].median_us


def test_each_sample_is_the_second_of_two_calls_of_the_same_candidate():
    log = []

    def logged(name):
        return lambda x: log.append(name) or busy(30)(x)

    sampler = CpuSampler({n: logged(n) for n in "abc"}, X)
    log.clear()
    sampler.take([["a", "b", "c"], ["c", "a", "b"]])
    assert log == list("aabbccccaabb")


def test_short_calls_are_timed_several_at_a_time():
    count = 0

    def short(x):
        nonlocal count
        count += 1

    sampler = CpuSampler({"short": short}, X)
    count = 0
    ((_, us),) = sampler.take([["short"]])[0]
    assert count > 10
    assert 0 < us < 20


def test_a_candidate_that_hands_out_one_buffer_again_is_refused():
    kept = torch.empty(64)
    calls = {"fair": lambda x: x + 1, "reuses": lambda x: torch.add(x, 1, out=kept)}
    with pytest.raises(InvalidMeasurement, match=r"reuses returned the same buffer"):
        time_interleaved(calls, X, CPU, "cpu", budget_s=0.01)


def test_a_reused_buffer_is_found_among_several_outputs_and_behind_a_view():
    kept = torch.empty(2, 64)
    with pytest.raises(InvalidMeasurement):
        time_interleaved({"a": lambda x: (x + 1, kept[1])}, X, CPU, "cpu", budget_s=0.01)


def test_an_in_place_candidate_may_return_its_input():
    timings = time_interleaved({"a": lambda x: x.mul_(1.0)}, X, CPU, "cpu", budget_s=0.01)
    assert timings["a"].median_us > 0


def test_garbage_is_not_collected_while_timing_and_again_afterwards():
    states = set()
    calls = {"a": lambda x: states.add(gc.isenabled())}
    time_interleaved(calls, X, CPU, "cpu", budget_s=0.01)
    assert states == {False}
    assert gc.isenabled()


def test_an_error_of_a_candidate_reaches_the_caller():
    def fails(x):
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        time_interleaved({"a": fails}, X, CPU, "cpu")
    assert gc.isenabled()


def test_no_candidates_no_timings():
    assert time_interleaved({}, X, CPU, "cpu") == {}


@pytest.mark.parametrize(
    ("method", "device", "words"),
    [
        ("events", "cpu", "does not fit device cpu; use cpu"),
        ("graph", "cpu", "does not fit device cpu"),
        ("cpu", "cuda:0", "use events or graph"),
        ("wall", "cpu", "unknown timing method 'wall'"),
    ],
)
def test_a_method_that_does_not_fit_the_device_is_refused(method, device, words):
    with pytest.raises(InvalidArgument, match=words):
        time_interleaved({"a": busy(1)}, X, torch.device(device), method)


class Clock:
    """A processor that nobody else uses: to look at the time takes a microsecond, all else none."""

    def __init__(self):
        self.us = 0

    def perf_counter_ns(self):
        self.us += 1
        return self.us * 1000

    def perf_counter(self):
        return self.perf_counter_ns() / 1e9


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    for module in (timing, timing_cpu, sys.modules[__name__]):
        monkeypatch.setattr(module, "time", made)
    return made


class SlowDevice(timing.HostRound):
    """Needs 100 us more for each call; in all rounds but the first of `every` (0: of none) it is
    throttled, and needs 1000."""

    def __init__(self, every):
        self.every, self.rounds = every, itertools.count(-1)

    def end(self):
        throttled = not self.every or next(self.rounds) % self.every != 0
        busy(HOST_CALLS * (1000 if throttled else 100))(X[0][0])
        us, _ = super().end()
        return us, ClockState(throttled=throttled)


def test_a_call_takes_the_host_its_time_and_then_that_of_the_device(monkeypatch, clock):
    monkeypatch.setattr(timing, "_round_on", lambda device: SlowDevice(1))
    found = eager([functools.partial(busy(100), X[0][0])], CPU)
    assert 100 <= found.host_us < 110
    assert 90 < found.us - found.host_us < 110


def test_rounds_in_which_the_device_slows_itself_down_are_left_out(monkeypatch, clock):
    monkeypatch.setattr(timing, "_round_on", lambda device: SlowDevice(3))
    assert 200 <= eager([functools.partial(busy(100), X[0][0])], CPU).us < 220


def test_a_device_that_is_always_slow_is_timed_as_it_is(monkeypatch, clock):
    monkeypatch.setattr(timing, "_round_on", lambda device: SlowDevice(0))
    monkeypatch.setattr(timing, "THROTTLED_S", 0.2)
    assert eager([functools.partial(busy(100), X[0][0])], CPU).us >= 1000


def test_a_device_rests_after_a_round_and_a_cpu_does_not(clock):
    for device, us in ((CPU, 0), (torch.device("cuda"), 2000)):
        begin = clock.us
        timing._rest(device, 2000.0)
        assert us <= clock.us - begin < us + 10


def test_what_a_caller_waits_for_is_the_longer_of_device_and_host():
    timed = Timing(5.0, (5.0, 5.0), 9)
    found = with_host(timed, functools.partial(busy(100), X[0][0]), CPU, 0.002)
    assert found.host_us is not None
    assert 100 <= found.host_us < 10_000
    assert (found.median_us, found.waited_us) == (5.0, found.host_us)
    assert timed.waited_us == 5.0
    assert dataclasses.replace(found, median_us=1e5).waited_us == 1e5


def test_the_host_is_not_timed_where_the_device_takes_long():
    slow = Timing(HOST_MATTERS_US, (100.0, 100.0), 9)
    assert with_host(slow, lambda: pytest.fail("called"), CPU, 1.0) is slow


def test_eager_calls_take_turns():
    seen = []
    eager([functools.partial(seen.append, i) for i in range(3)], CPU)
    assert seen[:12] == [0, 1, 2] * 4


def test_host_time_is_that_of_a_quiet_host(clock):
    """All rounds but one are disturbed."""
    count = itertools.count(-10)
    quiet, disturbed = busy(100), busy(400)

    def call():
        return (quiet if next(count) // HOST_CALLS == 1 else disturbed)(X[0][0])

    assert 100 <= eager([call], CPU).host_us < 110


# --- argument sets ---------------------------------------------------------------------------


def test_argument_sets_exceed_twice_l2_between_two_uses():
    w = Workload.parse("softmax(x=f16[4096,1024])")
    spec = DEVICES["h200"]
    sets = input_sets_needed(w, spec)
    assert (sets - 1) * sum(w.bytes) >= 2 * spec.l2_bytes > (sets - 2) * sum(w.bytes)


def test_argument_sets_are_two_at_least_and_bounded_for_tiny_workloads():
    spec = DEVICES["h200"]
    huge = Workload.parse("softmax(x=f16[8192,65536])")
    tiny = Workload.parse("softmax(x=f16[1,8])")
    assert input_sets_needed(huge, spec) == 2
    assert input_sets_needed(tiny, spec) == timing_cuda.MAX_INPUT_SETS


def test_a_cpu_needs_one_argument_set():
    w = Workload.parse("lerp(x=f32[4,8], end=f32[8], weight=0.2)")
    (tensors,) = inputs_for(w, CPU, "cpu", seed=3)
    assert [tuple(t.shape) for t in tensors] == [(4, 8), (8,)]
    assert not torch.equal(tensors[0], inputs_for(w, CPU, "cpu", seed=4)[0][0])
    assert torch.equal(tensors[0], inputs_for(w, CPU, "cpu", seed=3)[0][0])


@pytest.mark.parametrize("sets", [2, 3, 100, 256])
@pytest.mark.parametrize("us", [0.1, 2.0, 300.0, 1e5])
def test_a_graph_holds_whole_turns_over_the_sets(us, sets):
    count = timing_cuda.graph_calls(us, sets, rotates=True)
    assert count % sets == 0
    assert sets <= count <= max(sets, timing_cuda.MAX_GRAPH_CALLS)
    assert timing_cuda.graph_calls(us, sets, rotates=False) == sets


def test_moved_bytes_count_expanded_dims_once():
    x = torch.ones(4, 1).expand(4, 1000)
    assert timing_cuda.moved_bytes((x, torch.ones(10, dtype=torch.float16))) == 16 + 20
    assert timing_cuda.moved_bytes(None) == 0


# --- clocks ----------------------------------------------------------------------------------


def fake_nvml(reasons):
    return SimpleNamespace(
        NVMLError=RuntimeError,
        NVML_CLOCK_SM=1,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetClockInfo=lambda handle, kind: 1755,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: reasons,
        nvmlClocksThrottleReasonSwPowerCap=0x4,
        nvmlClocksThrottleReasonHwSlowdown=0x8,
        nvmlClocksThrottleReasonSwThermalSlowdown=0x20,
        nvmlClocksThrottleReasonHwThermalSlowdown=0x40,
        nvmlClocksThrottleReasonHwPowerBrakeSlowdown=0x80,
    )


@pytest.mark.parametrize(("reasons", "throttled"), [(0x0, False), (0x1, False), (0x21, True)])
def test_only_slowdowns_count_as_throttling(monkeypatch, reasons, throttled):
    monkeypatch.setattr(timing_clocks, "pynvml", fake_nvml(reasons))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="1-2")
    )
    assert Clocks(0).read() == ClockState(1755, throttled)


def test_clocks_are_unknown_without_the_library(monkeypatch):
    monkeypatch.setattr(timing_clocks, "pynvml", None)
    assert Clocks(0).read() == ClockState(None, False)
