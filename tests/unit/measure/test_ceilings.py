"""Ceilings and floors, on made-up curves where the right answer is known, and on this CPU."""

import dataclasses
import functools
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.compile import nvrtc
from tilewright.compile.cache import compiled
from tilewright.compile.resources import parse_ptxas
from tilewright.device import DEVICES, spec_of
from tilewright.errors import InvalidArgument
from tilewright.measure.ceilings import Ceilings, hard_limit_us, measure_ceilings, rising
from tilewright.measure.ceilings_kernels import UNROLLS, stream_calls, stream_task
from tilewright.measure.ceilings_kernels_cpu import cpu_calls
from tilewright.measure.timing import time_interleaved
from tilewright.op import Workload
from tilewright.suite import SUITES

CPU = torch.device("cpu")
SIZES = [4096 << i for i in range(0, 19, 2)]
LAUNCH_US = 2.0


def ceilings(copy, read, write, **more):
    """From three functions of bytes, in microseconds."""
    curves = {
        name: rising(SIZES, [f(n) for n in SIZES], LAUNCH_US)
        for name, f in {"copy": copy, "read": read, "write": write}.items()
    }
    return Ceilings("events", **curves, empty_kernel_us=LAUNCH_US, copy_bytes_per_s=4e12, **more)


def affine(rate):
    return lambda n: LAUNCH_US + n / rate


IDEAL = ceilings(affine(2e6), affine(5e6), affine(4e6))  # bytes per microsecond


@pytest.fixture(scope="module")
def measured():
    return measure_ceilings(CPU, "cpu", quick=True)


# --- traffic ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("read", "written", "us"),
    [
        (0, 0, LAUNCH_US),
        (3_000_000, 3_000_000, LAUNCH_US + 1.5),
        (10_000_000, 0, LAUNCH_US + 2.0),
        (0, 10_000_000, LAUNCH_US + 2.5),
        (13_000_000, 3_000_000, LAUNCH_US + 1.5 + 2.0),
        (3_000_000, 7_000_000, LAUNCH_US + 1.5 + 1.0),
        (40 << 30, 40 << 30, LAUNCH_US + (40 << 30) / 2e6),  # far beyond the last measured size
    ],
)
def test_traffic_counts_launch_once_and_each_byte_at_its_rate(read, written, us):
    assert IDEAL.traffic_us(read, written) == pytest.approx(us, rel=1e-6)


def test_traffic_at_measured_sizes_is_what_was_measured():
    for size, us in IDEAL.copy:
        assert IDEAL.traffic_us(size, size) == pytest.approx(us)
    for size, us in IDEAL.read:
        assert IDEAL.traffic_us(size, 0) == pytest.approx(us)


times = st.lists(st.floats(0.1, 1e4), min_size=len(SIZES), max_size=len(SIZES))
bytes_ = st.integers(0, 8 << 30)


@settings(max_examples=100)
@given(times, times, times, bytes_, bytes_, bytes_, bytes_)
def test_traffic_rises_with_reads_and_writes_whatever_the_noise(c, r, w, read, more, written, also):
    noisy = Ceilings(
        "events",
        *(rising(SIZES, curve, LAUNCH_US) for curve in (c, r, w)),
        empty_kernel_us=LAUNCH_US,
        copy_bytes_per_s=1.0,
    )
    less = noisy.traffic_us(read, written)
    assert less >= LAUNCH_US
    assert noisy.traffic_us(read + more, written + also) >= less * (1 - 1e-9)


def test_a_curve_never_falls_and_takes_the_faster_of_two_contradicting_times():
    assert rising([1, 2, 3], [5.0, 9.0, 7.0], 6.0) == ((1, 6.0), (2, 7.0), (3, 7.0))


# --- arithmetic and limits -------------------------------------------------------------------


def test_floor_is_the_larger_of_traffic_and_arithmetic():
    w = Workload.parse("softmax(x=f64[8192,4096])")
    spec = DEVICES["h200"]
    slow = ceilings(affine(1e12), affine(1e12), affine(1e12))
    assert IDEAL.floor_us(w, spec) == IDEAL.traffic_us(*w.bytes)
    assert slow.floor_us(w, spec) == pytest.approx(w.flops / 34e12 * 1e6)


def test_arithmetic_of_halves_goes_by_the_rate_of_fp32():
    w = Workload.parse("softmax(x=bf16[8192,4096])")
    assert IDEAL.arithmetic_us(w, DEVICES["h200"]) == pytest.approx(w.flops / 67e12 * 1e6)


def test_a_device_without_a_datasheet_uses_its_measured_rate_or_none():
    w = Workload.parse("softmax(x=f32[64,64])")
    known = ceilings(affine(1e6), affine(1e6), affine(1e6), matmul_flops_per_s={"f32": 1e9})
    assert known.arithmetic_us(w, DEVICES["cpu"]) == pytest.approx(w.flops / 1e9 * 1e6)
    assert IDEAL.arithmetic_us(w, DEVICES["cpu"]) == 0.0


def test_hard_limit_is_compulsory_reads_over_datasheet_bandwidth():
    w = Workload.parse("lerp(x=f32[4096,4096], end=f32[4096], weight=0.3)")
    read = 4 * (4096 * 4096 + 4096)
    assert hard_limit_us(w, DEVICES["h200"]) == pytest.approx(read / 4.8e12 * 1e6)


def test_hard_limit_of_an_unknown_device_is_zero():
    w = Workload.parse("softmax(x=f32[64,64])")
    assert hard_limit_us(w, DEVICES["cpu"]) == 0.0


def test_ceilings_are_told_in_json():
    full = ceilings(affine(2e6), affine(5e6), affine(4e6), matmul_flops_per_s={"f16": 7e14})
    told = json.loads(json.dumps(full.as_dict()))
    assert set(told) == {f.name for f in dataclasses.fields(Ceilings)}
    assert told["matmul_flops_per_s"] == {"f16": 7e14}
    for curve in ("copy", "read", "write"):
        assert tuple(map(tuple, told[curve])) == getattr(full, curve)


# --- measured on this machine ----------------------------------------------------------------


def test_measured_curves_share_their_sizes_never_fall_and_start_at_launch(measured):
    assert measured.empty_kernel_us > 0
    for curve in (measured.copy, measured.read, measured.write):
        assert [size for size, _ in curve] == [size for size, _ in measured.copy]
        us = [time for _, time in curve]
        assert us == sorted(us)
        assert us[0] >= measured.empty_kernel_us


def test_measured_rates_follow_from_the_measured_times(measured):
    size, us = measured.copy[-1]
    assert measured.copy_bytes_per_s == pytest.approx(2 * size / us * 1e6)
    assert set(measured.matmul_flops_per_s) == {"f32", "f64"}
    assert min(measured.matmul_flops_per_s.values()) > 0


def test_every_quickstart_workload_has_a_floor_over_launch(measured):
    for w in SUITES["quickstart"].workloads():
        assert measured.floor_us(w, spec_of(None)) >= measured.empty_kernel_us


def test_ceilings_of_a_cpu_refuse_a_gpu_method():
    with pytest.raises(InvalidArgument, match="does not fit"):
        measure_ceilings(CPU, "graph")


# --- the kernels -----------------------------------------------------------------------------


def test_plain_calls_copy_read_and_write_on_a_cpu():
    calls = stream_calls(CPU)
    x = torch.arange(64, dtype=torch.float32)
    for name, call in calls.items():
        result = call(x)
        if name.startswith("copy"):
            assert torch.equal(result, x)
        if name.startswith("write"):
            assert torch.equal(result, torch.ones(64))
        assert result is not x
    assert {name.split()[0] for name in calls} == {"copy", "read", "write", "empty"}


@pytest.mark.parametrize("size", [4, 36, 16 * 1024, 3 * 16 * 1024 + 20])
def test_own_kernels_of_a_cpu_touch_every_element(size):
    x = torch.arange(1, size + 1, dtype=torch.float32)
    calls = cpu_calls()
    for name in ("copy own cached", "copy own past"):
        assert torch.equal(calls[name](x), x)
    for name in ("write own cached", "write own past"):
        assert torch.equal(calls[name](x), torch.ones(size))
    together = functools.reduce(int.__or__, x.view(torch.int32).tolist())
    assert calls["read own cached"](x).view(torch.int32).item() == together


def test_own_kernels_of_a_cpu_are_not_slower_than_pytorchs_on_fresh_pages():
    x = [[torch.ones(16 << 20)]]  # 64 MiB
    timings = time_interleaved(stream_calls(CPU), x, CPU, "cpu", budget_s=1.0)
    for kind in ("copy", "write"):
        own, aten = (
            min(t.median_us for n, t in timings.items() if n.startswith(f"{kind} {whose}"))
            for whose in ("own", "aten")
        )
        assert own <= 1.1 * aten


@pytest.mark.parametrize("compiler", ["/nowhere/c++", "/bin/false"])
def test_without_a_compiler_pytorchs_kernels_are_the_ceilings(monkeypatch, tmp_path, compiler):
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TILEWRIGHT_CXX", compiler)
    assert {name.split()[1] for name in stream_calls(CPU)} == {"aten"}


@pytest.mark.skipif(nvrtc.missing() is not None, reason="NVRTC is not installed")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_stream_kernels_compile_without_spills(arch):
    log = compiled(stream_task(arch)).log
    for kind in ("copy", "read", "write"):
        for unroll in UNROLLS:
            resources = parse_ptxas(log, f"{kind}_{unroll}")
            assert resources.spill_bytes == 0
            assert resources.stack_bytes == 0
