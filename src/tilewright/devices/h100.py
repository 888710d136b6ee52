"""NVIDIA H100 SXM. Source: NVIDIA H100 datasheet and the CUDA programming guide, CC 9.0."""

from tilewright.device import DeviceSpec, device_spec

h100 = device_spec(
    DeviceSpec(
        name="h100",
        kind="cuda",
        arch="sm_90a",
        matches=("H100",),
        sms=132,
        shared_bytes_per_sm=233472,
        shared_bytes_per_block=232448,
        max_cluster=8,
        cluster_sms={3: 117, 4: 120, 6: 102, 8: 120},  # cuOccupancyMaxActiveClusters on one of them
        l2_bytes=52428800,
        dram_bytes_per_s=3.35e12,
        clock_hz=1.98e9,
        flops={"f16_tensor": 989e12, "bf16_tensor": 989e12, "tf32_tensor": 494e12,
               "f16": 134e12, "bf16": 134e12, "f32": 67e12, "f64": 34e12},
    )
)  # fmt: skip
