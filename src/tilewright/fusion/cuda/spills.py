"""What kernels lose by registers that they spill, once a compiler has told."""

from __future__ import annotations

from tilewright.compile.cache import Compiled
from tilewright.compile.resources import parse_ptxas
from tilewright.device import DeviceSpec
from tilewright.impl import Executable, Launched

SPILLED_BYTES, ENOUGH_THREADS, IDLE_POWER = 1800, 512, 0.7
"""Bytes that a thread spills in as long as all else takes; threads of an SM, half as many of which
take 1.6 times as long. Of 23 kernels that spill, gradients of losses, norms and columns of 256 to
65536 elements, 16 give way to others, which take 0.45 to 0.96 of their time on an H100 (61c63d2, no
file kept)."""


def lost(executable: Executable, entry: str, built: Compiled, device: DeviceSpec) -> float:
    """How much longer kernels take for what they spill, and for threads that an SM lacks: the sum
    of what each adds to its time, as shares of that.

    Args:
        entry: of the first kernel.
    """
    first = Launched(entry, executable.block_threads, executable.shared_bytes)
    found = 0.0
    for kernel in (first, *executable.later):
        r = parse_ptxas(built.log, kernel.entry)
        shared_bytes = kernel.shared_bytes + r.shared_bytes
        blocks, _ = device.occupancy(kernel.block_threads, r.registers, shared_bytes)
        assert blocks, (kernel, r)
        threads = min(blocks * kernel.block_threads, ENOUGH_THREADS)
        spills = 1 + r.spill_bytes / SPILLED_BYTES
        found += spills * (ENOUGH_THREADS / threads) ** IDLE_POWER - 1
    return found
