"""NVIDIA B200 SXM. Source: NVIDIA DGX B200 datasheet and the CUDA programming guide, CC 10.0."""

from tilewright.device import DeviceSpec, device_spec

b200 = device_spec(
    DeviceSpec(
        name="b200",
        kind="cuda",
        arch="sm_100a",
        matches=("B200",),
        sms=148,
        shared_bytes_per_sm=233472,
        shared_bytes_per_block=232448,
        max_cluster=8,
        l2_bytes=132120576,
        dram_bytes_per_s=8.0e12,
        clock_hz=1.965e9,
        flops={"f16_tensor": 2250e12, "bf16_tensor": 2250e12, "tf32_tensor": 1125e12,
               "f16": 150e12, "bf16": 150e12, "f32": 75e12, "f64": 37e12},
    )
)  # fmt: skip
