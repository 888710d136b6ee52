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
            copies and sets with their bytes and the innermost of PyTorch's operators that launched
            them (`Memset (Device), 1048576 bytes, aten::zero_`), where the profiler tells. After
            `MOST_NAMES` the rest are "others".
    """

    kernels: int
    memcpys: int
    memsets: int
    allocations: int
    names: dict[str, int] = field(default_factory=dict)


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
    # The CPU's activities are the operators, by which copies and sets are named.
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for call in calls:
            torch.cuda._sleep(1)
            before = _allocations(device)
            outputs = call(*inputs)
            allocations.append(_allocations(device) - before)
            del outputs
            torch.cuda.synchronize(device)
    found = by_call(profiled.events() or ())
    return [counted(*each) for each in zip(found, allocations, strict=True)]


def by_call(events: Iterable[Any]) -> list[list[str]]:
    """What ran on the device behind each mark, of all events of a profile."""
    events = list(events)
    launchers = _launchers(events)
    # A range that a program names, as torch.compile's code does, is shown on the device too.
    on_device = [e for e in events if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    names: list[list[str]] = []
    for event in sorted(on_device, key=lambda e: e.time_range.start):
        if MARK in event.name:
            names.append([])
        else:
            names[-1].append(_named(event, launchers.get(event.id)))
    return names


def _launchers(events: Iterable[Any]) -> dict[int, str]:
    """By correlation id of a call of the CUDA runtime or driver: the innermost operator around it.

    Operators have ids of their own, which may equal a correlation id.
    """
    calls = [e for e in events if e.device_type == DeviceType.CPU and e.name.startswith("cu")]
    around = {call.id: _operator_around(call) for call in calls}
    return {id: name for id, name in around.items() if name}


def _operator_around(event: Any) -> str | None:
    while event := event.cpu_parent:
        if event.name.startswith("aten::"):
            return str(event.name)
    return None


def _named(event: Any, launcher: str | None) -> str:
    """Of what copies or sets memory with its bytes and launcher; some releases of torch do not
    tell them."""
    if not event.name.startswith(("Memcpy", "Memset")):
        return str(event.name)
    told = re.search(r'"bytes": *(\d+)', getattr(event, "_metadata_json", None) or "")
    size = f"{told[1]} bytes" if told else None
    return ", ".join(filter(None, (event.name, size, launcher)))


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
