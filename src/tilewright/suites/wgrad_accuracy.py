"""Weight gradients whose differences to cuDNN docs/weight_gradient.md explains, in its order.

`tilewright verify --suite wgrad_accuracy` measures them. Source: layers of ResNet-50 v1 of which
the split-K study beside apache/tvm PR 10185 reported that results differed from cuDNN's: the sums
of most and of fewest terms, and the two layers in which most elements differed.
"""

from tilewright.suite import suite
from tilewright.suites._convolutions import Conv, weight_grad

LAYERS = [
    (Conv(64, 64, 1, 56), 8),
    (Conv(64, 64, 1, 56), 256),
    (Conv(1024, 2048, 1, 14, stride=2), 256),
    (Conv(1024, 512, 1, 14, stride=2), 8),
]
"""Each with its batch size."""

wgrad_accuracy = suite(
    "wgrad_accuracy", [weight_grad(layer, batch) for layer, batch in LAYERS], method="graph"
)
