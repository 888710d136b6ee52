"""Weight gradients of grouped and depthwise convolutions, fp16.

Sources: ResNeXt-50 32x4d (Xie et al., arXiv 1611.05431), MobileNetV3-Large (arXiv 1905.02244),
EfficientNet-B0 (arXiv 1905.11946) and ConvNeXt-T (arXiv 2201.03545), as torchvision has them.
"""

from tilewright.suites._convolutions import Conv, weight_grad_suite


def depthwise(channels: int, kernel: int, size: int, stride: int = 1) -> Conv:
    return Conv(channels, channels, kernel, size, stride, groups=channels)


RESNEXT50 = [
    Conv(128, 128, 3, 56, groups=32),
    Conv(256, 256, 3, 56, stride=2, groups=32),
    Conv(256, 256, 3, 28, groups=32),
    Conv(512, 512, 3, 28, stride=2, groups=32),
    Conv(512, 512, 3, 14, groups=32),
    Conv(1024, 1024, 3, 14, stride=2, groups=32),
    Conv(1024, 1024, 3, 7, groups=32),
]
MOBILENET_V3 = [
    depthwise(16, 3, 112),
    depthwise(64, 3, 112, 2),
    depthwise(72, 3, 56),
    depthwise(72, 5, 56, 2),
    depthwise(120, 5, 28),
    depthwise(240, 3, 28, 2),
    depthwise(200, 3, 14),
    depthwise(480, 3, 14),
    depthwise(672, 3, 14),
    depthwise(672, 5, 14, 2),
    depthwise(960, 5, 7),
]
EFFICIENTNET_B0 = [
    depthwise(32, 3, 112),
    depthwise(96, 3, 112, 2),
    depthwise(144, 3, 56),
    depthwise(144, 5, 56, 2),
    depthwise(240, 5, 28),
    depthwise(480, 5, 14),
    depthwise(1152, 5, 7),
    depthwise(1152, 3, 7),
]
CONVNEXT_T = [depthwise(96 << stage, 7, 56 >> stage) for stage in range(4)]

resnext50_wgrad = weight_grad_suite("resnext50_wgrad", RESNEXT50, (32, 256))
depthwise_wgrad = weight_grad_suite(
    "depthwise_wgrad", [*MOBILENET_V3, *EFFICIENTNET_B0, *CONVNEXT_T], (32, 256)
)
