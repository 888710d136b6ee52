"""NVIDIA A100 SXM 80 GB. Source: NVIDIA A100 datasheet and the CUDA programming guide, CC 8.0."""

from tilewright.device import DeviceSpec, device_spec

a100 = device_spec(
    DeviceSpec(
        name="a100",
        kind="cuda",
        arch="sm_80",
        matches=("A100",),
        sms=108,
        shared_bytes_per_sm=167936,
        shared_bytes_per_block=166912,
        l2_bytes=41943040,
        dram_bytes_per_s=2.039e12,
        clock_hz=1.41e9,
        flops={"f16_tensor": 312e12, "bf16_tensor": 312e12, "tf32_tensor": 156e12,
               "f16": 78e12, "bf16": 39e12, "f32": 19.5e12, "f64": 9.7e12},
    )
)  # fmt: skip
