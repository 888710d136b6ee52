"""Batch norm of channels-last images in training, with the ReLU behind it, and its gradients.

    tilewright bench --import benchmarks/batch_norms.py --suite batch_norms

Shapes are those of ResNet-50 with 32 images: He et al., arXiv 1512.03385.
"""

from torch import Tensor
from torch.nn import functional as F

import tilewright as tw
from tilewright.suite import suite


@tw.fuse
def batch_normed_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.relu(F.batch_norm(x, None, None, weight, bias, training=True))


STAGES = [(64, 56), (128, 28), (512, 28), (256, 14), (1024, 14), (512, 7), (2048, 7)]
"""Channels and size of images."""


def both(channels: int, size: int) -> list[str]:
    """Forward and backward."""
    image = f"f16[32,{channels},{size},{size}]@channels_last"
    tensors = f"x={image}, weight=f32[{channels}], bias=f32[{channels}]"
    return [
        f"batch_normed_relu({tensors})",
        f"batch_normed_relu_backward(grad_output={image}, {tensors})",
    ]


batch_norms = suite("batch_norms", [w for stage in STAGES for w in both(*stage)])
