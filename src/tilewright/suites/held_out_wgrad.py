"""Weight gradients of layers that no model of speed was fitted to, fp16, at batch 8, 32 and 256.

They tell how good an untuned config is. Sources: VGG-16 (Simonyan & Zisserman, arXiv 1409.1556),
DenseNet-121 (Huang et al., arXiv 1608.06993), RetinaNet's heads (Lin et al., arXiv 1708.02002) on
800 x 800 images, and Wide ResNet-50-2 (Zagoruyko & Komodakis, arXiv 1605.07146).
"""

from tilewright.suites._convolutions import Conv, weight_grad_suite

VGG16 = [
    Conv(64, 128, 3, 112),
    Conv(128, 256, 3, 56),
    Conv(256, 512, 3, 28),
    Conv(512, 512, 3, 28),
]
DENSENET121 = [
    Conv(128, 32, 3, 56),
    Conv(160, 128, 1, 56),
    Conv(384, 128, 1, 28),
    Conv(128, 32, 3, 14),
    Conv(992, 128, 1, 7),
]
RETINANET = [Conv(256, 256, 3, size) for size in (50, 25, 13)]
WIDE_RESNET50 = [Conv(256, 256, 3, 28), Conv(1024, 1024, 3, 14, stride=2), Conv(2048, 1024, 1, 7)]

held_out_wgrad = weight_grad_suite(
    "held_out_wgrad", [*VGG16, *DENSENET121, *RETINANET, *WIDE_RESNET50], (8, 32, 256)
)
