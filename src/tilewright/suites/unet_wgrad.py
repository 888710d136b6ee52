"""Weight gradients of a U-Net on 512 x 512 images, fp16: many pixels, few channels.

Source: Ronneberger et al., arXiv 1505.04597, with padded convolutions as is usual today.
"""

from tilewright.suites._convolutions import Conv, weight_grad_suite

DOWN = [Conv(64 << level, 64 << level, 3, 512 >> level) for level in range(5)]
WIDEN = [Conv(64 << level, 128 << level, 3, 256 >> level) for level in range(4)]
UP = [Conv(128 << level, 64 << level, 3, 512 >> level) for level in range(4)]

unet_wgrad = weight_grad_suite("unet_wgrad", [*DOWN, *WIDEN, *UP], (1, 4))
