"""Clock and throttling of an NVIDIA GPU, where nvidia-ml-py is installed."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch

try:
    import pynvml
except ImportError:
    pynvml = None


@dataclass(frozen=True)
class ClockState:
    """SM clock in MHz (None if unknown) and whether the device slows itself down."""

    mhz: int | None = None
    throttled: bool = False


class Clocks:
    """Reads one device. Where the driver tells nothing, every state is unknown."""

    def __init__(self, device_index: int):
        self._handle: Any = None
        if pynvml is None:
            return
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            # by UUID: CUDA_VISIBLE_DEVICES renumbers torch's devices, not the driver's
            uuid = torch.cuda.get_device_properties(device_index).uuid
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")

    def read(self) -> ClockState:
        if self._handle is None:
            return ClockState()
        try:
            mhz = pynvml.nvmlDeviceGetClockInfo(self._handle, pynvml.NVML_CLOCK_SM)
            reasons = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)
        except pynvml.NVMLError:
            return ClockState()
        slowed = (
            pynvml.nvmlClocksThrottleReasonHwSlowdown
            | pynvml.nvmlClocksThrottleReasonSwPowerCap
            | pynvml.nvmlClocksThrottleReasonSwThermalSlowdown
            | pynvml.nvmlClocksThrottleReasonHwThermalSlowdown
            | pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown
        )
        return ClockState(mhz, bool(reasons & slowed))
