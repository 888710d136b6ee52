"""Functions whose gradients are summed over the rows of each sample apart."""

from torch.nn import functional as F

ADAPTIVE = "adaptive_backward(grad_output={d}[{s},{r},{h}], x={d}[{s},{r},{h}], shift={d}[{s},1,{h}], scale={d}[{s},1,{h}])"  # noqa: E501

GATED = "gated_backward(grad_output0={d}[{s},{r},{h}], grad_output1={d}[{s},{r},{h}], x={d}[{s},{r},{h}], branch={d}[{s},{r},{h}], gate={d}[{s},1,{h}], scale={d}[{s},1,{h}])"  # noqa: E501

ODDLY_APART = "adaptive_backward(grad_output={d}[3,33,264]@strides(8714,264,1), x={d}[3,33,264]@strides(8713,264,1), shift={d}[3,1,264]@strides(265,265,1), scale={d}[3,1,264]@strides(266,266,1))"  # noqa: E501
"""Samples that begin where only some accesses, or one element, are aligned."""


def adaptive(x, shift, scale):
    """Peebles & Xie, Scalable Diffusion Models with Transformers, arXiv 2212.09748."""
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1.0 + scale) + shift


def gated(x, branch, gate, scale):
    """With the residual before it, which is an output too."""
    total = x + gate * branch
    return total, F.rms_norm(total, total.shape[-1:], eps=1e-6) * scale
