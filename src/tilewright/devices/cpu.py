"""The CPU that this process runs on. Its rates are measured, never assumed."""

from tilewright.device import DeviceSpec, device_spec

cpu = device_spec(DeviceSpec(name="cpu", kind="cpu", arch="native", clock_hz=0.0))
