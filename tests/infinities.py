"""Infinities at the border of a convolution, which its padding must not multiply by 0; and those of
results beyond the range of a half."""

import itertools

import torch


def without_padding(w, x, grad):
    """The gradient in fp64, of which no term is a product with the padding."""
    names = ("kernel_size", "stride", "padding", "dilation", "groups")
    kernel, stride, padding, dilation, groups = (w[name] for name in names)
    n, k, *outs = grad.shape
    grad = grad.double().reshape(n, groups, k // groups, *outs)
    x = x.double().reshape(n, groups, -1, *x.shape[2:])
    found = torch.zeros(k, x.shape[2], *kernel, dtype=torch.float64)
    for tap in itertools.product(*(range(size) for size in kernel)):
        pixels, outputs = [], []
        for t, s, pad, d, size, out in zip(
            tap, stride, padding, dilation, x.shape[3:], outs, strict=True
        ):
            inside = [i for i in range(out) if 0 <= i * s - pad + t * d < size]
            outputs.append(inside)
            pixels.append([i * s - pad + t * d for i in inside])
        g = grad[..., outputs[0], :][..., outputs[1]]
        met = x[..., pixels[0], :][..., pixels[1]]
        for i, j in itertools.product(range(g.shape[2]), range(met.shape[2])):
            sums = (g[:, :, i] * met[:, :, j]).sum((0, 2, 3))
            found.view(groups, k // groups, *found.shape[1:])[(slice(None), i, j, *tap)] = sums
    return found


def with_infinities(w):
    """Random operands; grad_output has infinities at its borders and a NaN, x an infinity."""
    x, grad = (t.clone() for t in w.operator.examples(w, "random", 0, "cpu")[:2])
    grad[0, 1, 0, 0], grad[0, 3, -1, -1], grad[-1, 5, 1, 0] = torch.inf, -torch.inf, torch.inf
    grad[0, 2, -1, 1], x[0, -1, -1, 0] = torch.nan, torch.inf
    return x, grad


def assert_infinities_stay(w, found, x, grad):
    """Sums that no infinity and no NaN is a term of are finite, others what those make of them."""
    truth = without_padding(w, x, grad)
    assert found.isnan().sum() < found.isfinite().sum()
    assert torch.equal(found.isnan(), truth.isnan())
    for sign in (-1, 1):
        assert torch.equal(found == sign * torch.inf, truth == sign * torch.inf)
    finite = truth.isfinite()
    assert torch.allclose(found.double()[finite], truth[finite], rtol=0.02, atol=0.05)


def assert_overflow_is_infinite(w, kernel):
    """Sums of 48 x 48 are exact in fp32, and infinite in fp16 from 29 of them on."""
    x, grad = (torch.full_like(t, 48.0) for t in w.operator.examples(w, "random", 0, "cpu")[:2])
    (truth,) = w.operator.truth(w, (x, grad))
    expected = truth.to(w.outputs[0].torch_dtype)
    assert expected.isinf().any()
    assert torch.equal(kernel(x, grad), expected)
