"""What one call makes the device do, as the profiler tells: kernels, copies, sets, allocations."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from tilewright.settings import let_profiler_leave

MARK = "spin_kernel"
"""What torch.cuda._sleep launches."""
MOST_NAMES = 12
LONGEST_NAME = 100


@dataclass(frozen=True)
class Activity:
    """Counts of one call.

    Attributes:
        kernels, memcpys, memsets: on the GPU; 0 on a CPU.
        allocations: of tensors' memory, outputs among them.
        names: how often each was run: a kernel by its name, at most `LONGEST_NAME` letters of it,
            copies and sets with their bytes where the profiler tells. After `MOST_NAMES` the rest
            are "others".
    """

    kernels: int
    memcpys: int
    memsets: int
    allocations: int
    names: dict[str, int] = field(default_factory=dict)


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
    return [counted(*found) for found in zip(by_call(events), allocations, strict=True)]


def by_call(events: Iterable[Any]) -> list[list[str]]:
    """What ran behind each mark."""
    names: list[list[str]] = []
    for event in events:
        if MARK in event.name:
            names.append([])
        else:
            names[-1].append(_named(event))
    return names


def _named(event: Any) -> str:
    """With the bytes of what copies or sets memory; releases of torch may not have them."""
    told = re.search(r'"bytes": *(\d+)', getattr(event, "_metadata_json", None) or "")
    moves = event.name.startswith(("Memcpy", "Memset"))
    return f"{event.name}, {told[1]} bytes" if moves and told else event.name


def counted(names: Sequence[str], allocations: int) -> Activity:
    memcpys = sum(name.startswith("Memcpy") for name in names)
    memsets = sum(name.startswith("Memset") for name in names)
    kernels = len(names) - memcpys - memsets
    # Copies and sets first: of many names they are those that are looked for.
    short = Counter(_shortened(n) for n in sorted(names, key=lambda n: n[:3] != "Mem"))
    listed = dict([*short.items()][:MOST_NAMES])
    if rest := len(names) - sum(listed.values()):
        listed["others"] = rest
    return Activity(kernels, memcpys, memsets, allocations, listed)


def _shortened(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 3] + "..."


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
