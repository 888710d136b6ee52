"""Workloads of the convolution weight gradient."""

from dataclasses import replace

from tilewright.op import OPS, Workload
from tilewright.suite import SUITES


def weight_grad(x, grad, rest, layout="@channels_last", dtype="f16"):
    return Workload.parse(
        f"conv2d_weight_grad(x={dtype}[{x}]{layout}, grad_output={dtype}[{grad}]{layout}, {rest})"
    )


def with_bias(w, into=None, donated=False):
    """The bias's gradient beside the weight's; with `into`, both added to others of that dtype."""
    args = dict(w.args)
    if into:
        weight = replace(w.outputs[0], dtype=into)
        bias = replace(weight, shape=weight.shape[:1], strides=None)
        args |= {"into": weight, "into_bias": bias, "out_dtype": None}
    flags = ("donate=into,into_bias",) if donated else ()
    return OPS["conv2d_weight_bias_grad"].workload(flags=flags, **args)


RESNET50 = [w for w in SUITES["resnet50_v15_wgrad"].workloads() if w["kernel_size"] != (7, 7)]
"""Without the stem, whose three channels are served by other kernels."""
SIMPLE = weight_grad("8,64,56,56", "8,128,56,56", "kernel_size=3, padding=1")


def fp32(allow_tf32, channels=64, dtype="f32"):
    return weight_grad(
        f"8,{channels},56,56", "8,128,56,56",
        f"kernel_size=3, padding=1, allow_tf32={allow_tf32}", dtype=dtype,
    )  # fmt: skip
