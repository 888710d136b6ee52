"""Workloads of the convolution weight gradient."""

from tilewright.op import Workload


def weight_grad(x, grad, rest, layout="@channels_last", dtype="f16"):
    return Workload.parse(
        f"conv2d_weight_grad(x={dtype}[{x}]{layout}, grad_output={dtype}[{grad}]{layout}, {rest})"
    )


SIMPLE = weight_grad("8,64,56,56", "8,128,56,56", "kernel_size=3, padding=1")


def fp32(allow_tf32, channels=64, dtype="f32"):
    return weight_grad(
        f"8,{channels},56,56", "8,128,56,56",
        f"kernel_size=3, padding=1, allow_tf32={allow_tf32}", dtype=dtype,
    )  # fmt: skip
