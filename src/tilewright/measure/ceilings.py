"""What the device can do, measured, and the floor that follows for a workload.

The floor of a workload is the larger of two times. Traffic: what a plain vectorised kernel with
the same compulsory reads and writes takes, read off three curves that were measured by the same
method as the workload, so that launch, ramp-up and (on a CPU) page faults are in it. Arithmetic:
its operations over the rate of the unit that does them.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from tilewright.device import DeviceSpec
from tilewright.measure.ceilings_kernels import stream_calls
from tilewright.measure.timing import check_method, time_interleaved
from tilewright.measure.timing_cpu import LARGEST_KEPT_BYTES
from tilewright.measure.timing_cuda import MAX_INPUT_SETS
from tilewright.op import Workload
from tilewright.tensor_spec import DTYPES

KIB, MIB = 1 << 10, 1 << 20
PASSES = 2
"""Over all sizes: a neighbour's seconds of noise on the machine must not raise a ceiling's time."""
FAR_BYTES = 1 << 44
"""The curves are continued to here at the rate of their last point."""

Curve = tuple[tuple[int, float], ...]
"""(bytes, microseconds) by rising bytes: copied (read and written), read only, written only."""


@dataclass(frozen=True)
class Ceilings:
    """Measured rates of one device by one method; times in microseconds.

    Attributes:
        copy, read, write: curves over the same byte counts, none falling.
        empty_kernel_us: an empty kernel; on a CPU, an operator that only allocates its output.
        copy_bytes_per_s: bytes read plus bytes written of the largest copy.
        matmul_flops_per_s: by dtype, and "tf32" on a GPU; square, random data.
        clock_mhz: SM clock during the largest copy, where the driver tells.
    """

    method: str
    copy: Curve
    read: Curve
    write: Curve
    empty_kernel_us: float
    copy_bytes_per_s: float
    matmul_flops_per_s: Mapping[str, float] = field(default_factory=dict, hash=False)
    clock_mhz: int | None = None

    def floor_us(self, w: Workload, spec: DeviceSpec) -> float:
        """The time under which no implementation of the workload can be expected to get."""
        return max(self.traffic_us(*w.bytes), self.arithmetic_us(w, spec))

    def arithmetic_us(self, w: Workload, spec: DeviceSpec) -> float:
        """Operations over the rate of the unit that does them; zero where it is not known.

        For a matrix product that is the measured rate of one, in the dtype of its operands; else
        the datasheet's rate of the plain units for the arithmetic dtype. Where the datasheet has
        none (a CPU) the rate of a matrix product stands in: nothing runs the units better.
        """
        product = self.matmul_flops_per_s
        operands = "tf32" if dict(w.args).get("allow_tf32") else w.main.dtype
        if w.operator.tensor_cores(w) and operands in product:
            return w.flops / product[operands] * 1e6
        if w.arithmetic in spec.flops:
            return plain_units_us(w, spec)
        rate = product.get(w.arithmetic, 0.0)
        return w.flops / rate * 1e6 if rate else 0.0

    def traffic_us(self, read_bytes: int, written_bytes: int) -> float:
        """Time to read and write so many bytes; rises with both, never under an empty kernel.

        What is read and written in equal parts goes by the copy curve. The rest adds the rise of
        the read-only or the write-only curve from the equal part to the whole: launch and ramp-up
        are counted once, and each byte at the rate of its own size of transfer. These times are
        tabulated at the measured sizes, made monotone against noise, and interpolated linearly
        between three corners of a cell (the diagonal, equal reads and writes, is an edge), which
        is exact for a launch time plus bytes over rates.
        """
        sizes, table = self._table
        i, u = _cell(sizes, read_bytes)
        j, v = _cell(sizes, written_bytes)
        none, both = table[i][j], table[i + 1][j + 1]
        one = table[i + 1][j] if u > v else table[i][j + 1]
        return none + (one - none) * abs(u - v) + (both - none) * min(u, v)

    @functools.cached_property
    def _table(self) -> tuple[list[int], list[list[float]]]:
        """Times [read][written] at the sizes 0, the measured ones and FAR_BYTES."""
        sizes = [0, *(size for size, _ in self.copy), FAR_BYTES]
        copy, read, write = (self._continued(c) for c in (self.copy, self.read, self.write))
        n = range(len(sizes))
        table = [
            [copy[min(i, j)] + max(read[i] - read[j], 0.0) + max(write[j] - write[i], 0.0)
             for j in n] for i in n
        ]  # fmt: skip
        rows = (list(accumulate(row, max)) for row in table)
        table = list(accumulate(rows, lambda above, row: list(map(max, above, row))))
        return sizes, table

    def _continued(self, curve: Curve) -> list[float]:
        launch_us, (last_bytes, last_us) = self.empty_kernel_us, curve[-1]
        far_us = launch_us + (last_us - launch_us) * FAR_BYTES / last_bytes
        return [launch_us, *(us for _, us in curve), far_us]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            **dataclasses.asdict(self),
            **{c: [list(point) for point in getattr(self, c)] for c in ("copy", "read", "write")},
        }


def _cell(sizes: Sequence[int], size: int) -> tuple[int, float]:
    """The interval of `sizes` that holds `size`, and the place in it from 0 to 1."""
    i = min(bisect.bisect_right(sizes, size), len(sizes) - 1) - 1
    return i, (size - sizes[i]) / (sizes[i + 1] - sizes[i])


def plain_units_us(w: Workload, spec: DeviceSpec) -> float:
    """Operations over the datasheet's rate of the plain units; zero where it has none."""
    rate = spec.flops.get(w.arithmetic)
    return w.flops / rate * 1e6 if rate else 0.0


def hard_limit_us(w: Workload, spec: DeviceSpec) -> float:
    """A time that physics does not allow to undercut, from the datasheet; 0.0 where unknown.

    Compulsory reads over the memory rate (caches are flushed before a call is timed, so every
    input comes from memory, while outputs may stay in a cache), and operations over the fastest
    unit of the device, whatever its dtype.
    """
    read_bytes, _ = w.bytes
    peak = max(spec.flops.values(), default=0.0)
    memory_s = read_bytes / spec.dram_bytes_per_s if spec.dram_bytes_per_s else 0.0
    return max(memory_s, w.flops / peak if peak else 0.0) * 1e6


def measure_ceilings(device: torch.device, method: str, quick: bool = False) -> Ceilings:
    """Measure the curves and rates of a device by a timing method.

    Args:
        method: as the workloads are timed: "events", "graph" or "cpu".
        quick: fewer sizes and samples; under 5 s, or 20 s where other programs keep a CPU busy.

    Raises:
        InvalidArgument: the method does not fit the device.
    """
    check_method(method, device)
    effort: dict[str, Any] = (
        {"budget_s": 0.04, "min_rounds": 3} if quick else {"budget_s": 0.1, "min_rounds": 5}
    )
    calls = stream_calls(device)
    empty = {name: calls.pop(name) for name in list(calls) if name.startswith("empty")}
    sets_of = {size: _sets(size, device, method) for size in _sizes(device, quick)}
    elements = max(size * sets for size, sets in sets_of.items()) // 4
    memory = torch.arange(elements, dtype=torch.float32, device=device)

    points = {kind: dict.fromkeys(sets_of, math.inf) for kind in ("copy", "read", "write")}
    smallest = _slices(memory, *next(iter(sets_of.items())))
    timings = time_interleaved(empty, smallest, device, method, **effort)
    empty_us = min(t.median_us for t in timings.values())
    for size, sets in [*sets_of.items()] * (1 if quick else PASSES):
        slices = _slices(memory, size, sets)
        timings = time_interleaved(calls, slices, device, method, **effort)
        for kind, times in points.items():
            fastest = min(t.median_us for n, t in timings.items() if n.startswith(kind))
            times[size] = min(times[size], fastest)
    curves = {kind: rising(list(t), list(t.values()), empty_us) for kind, t in points.items()}
    largest, us = curves["copy"][-1]
    return Ceilings(
        method=method,
        empty_kernel_us=empty_us,
        copy_bytes_per_s=2 * largest / us * 1e6,
        matmul_flops_per_s=_matmul_rates(device, effort),
        clock_mhz=next(iter(timings.values())).clock_mhz,
        **curves,
    )


def rising(sizes: Sequence[int], times: Sequence[float], least_us: float) -> Curve:
    """A curve that never falls: no transfer takes longer than a larger one was seen to take."""
    lowest = list(accumulate(reversed(times), min))[::-1]
    return tuple((size, max(us, least_us)) for size, us in zip(sizes, lowest, strict=True))


def _sizes(device: torch.device, quick: bool) -> list[int]:
    """Bytes that are copied, read or written; doubling, so that interpolation stays true."""
    if device.type == "cuda":
        return [4 * KIB << shift for shift in range(0, 19, 3 if quick else 1)]  # to 1 GiB
    # around the limit from which on every output is fresh pages, the curves have a step
    large = [LARGEST_KEPT_BYTES, 32 * MIB, 64 * MIB]
    medium = [n * MIB for n in (4, 6, 8, 12, 16, 24)]  # dense where caches end
    if quick:
        return [4 * KIB, 64 * KIB, MIB, *medium, *large]
    return [*(4 * KIB << shift for shift in range(10)), *medium, *large, 128 * MIB, 256 * MIB]


def _sets(size: int, device: torch.device, method: str) -> int:
    """Slices to rotate over, as `input_sets_needed` has it, for calls that only read them."""
    if method != "graph":
        return 1
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return min(MAX_INPUT_SETS, 1 + math.ceil(2 * l2_bytes / size))


def _slices(memory: torch.Tensor, size: int, sets: int) -> list[list[torch.Tensor]]:
    return [[memory[i * size // 4 : (i + 1) * size // 4]] for i in range(sets)]


def _matmul_rates(device: torch.device, effort: Mapping[str, Any]) -> dict[str, float]:
    """Operations per second of square matrix products on random data, by dtype."""
    on_gpu = device.type == "cuda"
    n, method = (8192, "events") if on_gpu else (1024, "cpu")
    rates = {}
    for name in ("f16", "bf16", "tf32", "f32", "f64") if on_gpu else ("f32", "f64"):
        dtype = torch.float32 if name == "tf32" else DTYPES[name]
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        with _float32_matmul("high" if name == "tf32" else "highest"):
            call = {name: torch.matmul}
            timing = time_interleaved(call, [[a, b]], device, method, **effort)[name]
        rates[name] = 2 * n**3 / timing.median_us * 1e6
    return rates


@contextlib.contextmanager
def _float32_matmul(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
