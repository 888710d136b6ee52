"""Weight gradients of ResNet-50's convolutions, at batch 8, 32 and 256; fp16, and other dtypes.

v1.5 (torchvision's) strides in the 3x3 convolutions, v1 (He et al., arXiv 1512.03385) in the first
1x1 of a stage. The 19 layers of v1 are those of the split-K study beside apache/tvm PR 10185, in
its order; like that study they leave out the 7x7 stem. Figures of v1.5 are told without it, too: it
is the one filter of 7x7 (--without "kernel_size=[7,7]").
"""

from tilewright.suites._convolutions import Conv, weight_grad_suite

STEM = Conv(3, 64, 7, 224, stride=2)

V15 = {
    STEM: 1,
    Conv(64, 64, 1, 56): 1,
    Conv(64, 64, 3, 56): 3,
    Conv(64, 256, 1, 56): 4,
    Conv(256, 64, 1, 56): 2,
    Conv(256, 128, 1, 56): 1,
    Conv(128, 128, 3, 56, stride=2): 1,
    Conv(128, 512, 1, 28): 4,
    Conv(256, 512, 1, 56, stride=2): 1,
    Conv(512, 128, 1, 28): 3,
    Conv(128, 128, 3, 28): 3,
    Conv(512, 256, 1, 28): 1,
    Conv(256, 256, 3, 28, stride=2): 1,
    Conv(256, 1024, 1, 14): 6,
    Conv(512, 1024, 1, 28, stride=2): 1,
    Conv(1024, 256, 1, 14): 5,
    Conv(256, 256, 3, 14): 5,
    Conv(1024, 512, 1, 14): 1,
    Conv(512, 512, 3, 14, stride=2): 1,
    Conv(512, 2048, 1, 7): 3,
    Conv(1024, 2048, 1, 14, stride=2): 1,
    Conv(2048, 512, 1, 7): 2,
    Conv(512, 512, 3, 7): 2,
}
"""Each distinct layer, and how often the network has it."""

V1 = [
    Conv(64, 256, 1, 56),
    Conv(64, 64, 1, 56),
    Conv(64, 64, 3, 56),
    Conv(256, 64, 1, 56),
    Conv(256, 512, 1, 56, stride=2),
    Conv(256, 128, 1, 56, stride=2),
    Conv(128, 128, 3, 28),
    Conv(128, 512, 1, 28),
    Conv(512, 128, 1, 28),
    Conv(512, 1024, 1, 28, stride=2),
    Conv(512, 256, 1, 28, stride=2),
    Conv(256, 256, 3, 14),
    Conv(256, 1024, 1, 14),
    Conv(1024, 256, 1, 14),
    Conv(1024, 2048, 1, 14, stride=2),
    Conv(1024, 512, 1, 14, stride=2),
    Conv(512, 512, 3, 7),
    Conv(512, 2048, 1, 7),
    Conv(2048, 512, 1, 7),
]

resnet50_v15_wgrad = weight_grad_suite("resnet50_v15_wgrad", V15, (8, 32, 256))
resnet50_v15_stem_wgrad = weight_grad_suite("resnet50_v15_stem_wgrad", {STEM: 1}, (8, 32, 256))
resnet50_v15_wgrad_nchw = weight_grad_suite("resnet50_v15_wgrad_nchw", V15, (8, 32, 256), layout="")
resnet50_v15_wgrad_bf16 = weight_grad_suite(
    "resnet50_v15_wgrad_bf16", V15, (8, 32, 256), dtype="bf16"
)
resnet50_v15_wgrad_f32_out = weight_grad_suite(
    "resnet50_v15_wgrad_f32_out", V15, (8, 32, 256), options="out_dtype=f32"
)
resnet50_v15_wgrad_f32 = weight_grad_suite("resnet50_v15_wgrad_f32", V15, (32,), dtype="f32")
resnet50_v15_wgrad_tf32 = weight_grad_suite(
    "resnet50_v15_wgrad_tf32", V15, (32,), dtype="f32", options="allow_tf32=True"
)
resnet50_v15_wgrad_f64 = weight_grad_suite("resnet50_v15_wgrad_f64", V15, (8,), dtype="f64")
resnet50_v1_wgrad = weight_grad_suite("resnet50_v1_wgrad", V1, (8, 256))
