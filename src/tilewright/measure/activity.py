"""What one call makes the device do, as the profiler tells: kernels, copies, sets, allocations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from tilewright.settings import let_profiler_leave

MARK = "spin_kernel"
"""What torch.cuda._sleep launches."""


@dataclass(frozen=True)
class Activity:
    """Counts of one call.

    Attributes:
        kernels, memcpys, memsets: on the GPU; 0 on a CPU.
        allocations: of tensors' memory, outputs among them.
    """

    kernels: int
    memcpys: int
    memsets: int
    allocations: int


def activity_of(call: Callable[..., Any], inputs: Sequence[Tensor]) -> Activity:
    """Profile one call, after one that may load and build things."""
    return activities_of([call], inputs)[0]


def activities_of(calls: Sequence[Callable[..., Any]], inputs: Sequence[Tensor]) -> list[Activity]:
    """Profile one call of each, after one that may load and build things.

    On a GPU all of them share one profile, since starting and ending one takes longer than most
    calls do; a kernel of a known name stands before each.
    """
    let_profiler_leave()
    for call in calls:
        call(*inputs)
    device = inputs[0].device
    if device.type == "cpu":
        return [_activity_on_cpu(call, inputs) for call in calls]
    torch.cuda.synchronize(device)
    allocations = []
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for call in calls:
            torch.cuda._sleep(1)
            before = _allocations(device)
            outputs = call(*inputs)
            allocations.append(_allocations(device) - before)
            del outputs
            torch.cuda.synchronize(device)
    events = [e for e in profiled.events() if e.device_type == DeviceType.CUDA]
    events.sort(key=lambda e: e.time_range.start)
    names: list[list[str]] = []
    for event in events:
        if MARK in event.name:
            names.append([])
        else:
            names[-1].append(event.name)
    return [_counted(*found) for found in zip(names, allocations, strict=True)]


def _counted(names: Sequence[str], allocations: int) -> Activity:
    memcpys = sum(name.startswith("Memcpy") for name in names)
    memsets = sum(name.startswith("Memset") for name in names)
    return Activity(len(names) - memcpys - memsets, memcpys, memsets, allocations)


def _activity_on_cpu(call: Callable[..., Any], inputs: Sequence[Tensor]) -> Activity:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        outputs = call(*inputs)
    del outputs
    assert profiled.profiler is not None
    events = profiled.profiler.kineto_results.events()
    sizes = [e.nbytes() for e in events if e.name() == "[memory]"]
    return Activity(0, 0, 0, sum(size > 0 for size in sizes))


def _allocations(device: torch.device) -> int:
    return torch.cuda.memory_stats(device).get("allocation.all.allocated", 0)
