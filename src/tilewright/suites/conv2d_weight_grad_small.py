"""Weight gradients small enough for a CPU of a few cores, of kinds for which PyTorch has no good
kernel there: halves, depthwise filters, fp64, and tensors in channels_last."""

from tilewright.suite import suite
from tilewright.suites._convolutions import Conv, weight_grad

LAYERS = [
    (Conv(64, 64, 3, 28), "f16", ""),
    (Conv(256, 64, 1, 28), "f16", "@channels_last"),
    (Conv(96, 96, 3, 28, groups=96), "f32", ""),
    (Conv(96, 96, 7, 28, groups=96), "f32", ""),
    (Conv(96, 96, 7, 28, groups=96), "f16", "@channels_last"),
    (Conv(64, 64, 3, 28), "f64", ""),
    (Conv(256, 64, 1, 28), "f64", "@channels_last"),
    (Conv(64, 64, 3, 28), "f32", "@channels_last"),
]

conv2d_weight_grad_small = suite(
    "conv2d_weight_grad_small",
    [weight_grad(layer, 4, dtype, layout) for layer, dtype, layout in LAYERS],
)
