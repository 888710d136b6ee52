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


def with_fp32_bias(w):
    """Both gradients in fp32, of halves."""
    args = dict(with_bias(w).args) | {"out_dtype": "f32"}
    return OPS["conv2d_weight_bias_grad"].workload(**args)


def bias_off_by(kernel, w):
    """The largest error of the bias's gradient, in ulps of fp32."""
    x, grad = w.operator.examples(w, "random", 0, "cpu")
    truth = grad.double().sum((0, 2, 3))
    unit = 2.0 ** (truth.abs().clamp_min(truth.abs().mean()).log2().floor() - 23)
    return float(((kernel(x, grad)[1].double() - truth).abs() / unit).max())


RESNET50 = [w for w in SUITES["resnet50_v15_wgrad"].workloads() if w["kernel_size"] != (7, 7)]
"""Without the stem, whose three channels are served by other kernels."""
SIMPLE = weight_grad("8,64,56,56", "8,128,56,56", "kernel_size=3, padding=1")


def fp32(allow_tf32, channels=64, dtype="f32"):
    return weight_grad(
        f"8,{channels},56,56", "8,128,56,56",
        f"kernel_size=3, padding=1, allow_tf32={allow_tf32}", dtype=dtype,
    )  # fmt: skip
