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
    let_profiler_leave()
    outputs = call(*inputs)
    device = inputs[0].device
    if device.type == "cpu":
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            outputs = call(*inputs)
        del outputs
        assert profiled.profiler is not None
        events = profiled.profiler.kineto_results.events()
        sizes = [e.nbytes() for e in events if e.name() == "[memory]"]
        return Activity(0, 0, 0, sum(size > 0 for size in sizes))
    del outputs
    torch.cuda.synchronize(device)
    before = _allocations(device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        outputs = call(*inputs)
        torch.cuda.synchronize(device)
    allocations = _allocations(device) - before
    del outputs
    names = [e.name for e in profiled.events() if e.device_type == DeviceType.CUDA]
    memcpys = sum(name.startswith("Memcpy") for name in names)
    memsets = sum(name.startswith("Memset") for name in names)
    return Activity(len(names) - memcpys - memsets, memcpys, memsets, allocations)


def _allocations(device: torch.device) -> int:
    return torch.cuda.memory_stats(device).get("allocation.all.allocated", 0)
