"""Values that are stored between kernels, on a device: as PyTorch has them, and in CUDA graphs."""

import functools

import pytest
import torch
from torch.nn import functional as F

import tilewright as tw

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
    pytest.mark.usefixtures("forgets_functions"),
]


def edges(x):
    """Sobel's filter."""
    p = F.pad(x, (1, 1, 1, 1))
    right = p[..., :-2, 2:] + 2 * p[..., 1:-1, 2:] + p[..., 2:, 2:]
    left = p[..., :-2, :-2] + 2 * p[..., 1:-1, :-2] + p[..., 2:, :-2]
    below = p[..., 2:, :-2] + 2 * p[..., 2:, 1:-1] + p[..., 2:, 2:]
    above = p[..., :-2, :-2] + 2 * p[..., :-2, 1:-1] + p[..., :-2, 2:]
    across, down = right - left, below - above
    return (across * across + down * down + 1e-2).sqrt()


def blurred_thrice(x):
    for _ in range(3):
        p, (h, w) = F.pad(x, (1, 1, 1, 1)), x.shape[-2:]
        x = sum(p[..., i : i + h, j : j + w] for i in range(3) for j in range(3)) / 9
    return x


def with_transposes(x):
    return functools.reduce(lambda a, _: (a + a.mT / 3).tanh(), range(6), x)


def largest_of_edges(x):
    return edges(x).amax(-1) + blurred_thrice(x).mean(-1)


FUNCTIONS = [edges, blurred_thrice, with_transposes, largest_of_edges]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_values_and_gradients_are_pytorchs(function, dtype):
    fused = tw.fuse(function)
    for shape in ((3, 65, 65), (2, 130, 130), (1, 514, 514)):
        x = torch.randn(shape, device="cuda", dtype=dtype).mT.requires_grad_()
        out = fused(x)
        given = torch.randn_like(out)
        (found,) = torch.autograd.grad(out, x, given)
        wide = x.detach().double().requires_grad_()
        right = function(wide)
        (gradient,) = torch.autograd.grad(right, wide, given.double())
        close = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
        torch.testing.assert_close(out, right.to(dtype), **close)
        close = close or {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(found, gradient.to(dtype), **close)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_they_are_replayed(function):
    fused = tw.fuse(function)
    x = torch.randn(2, 100, 100, device="cuda")
    fused(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fused(x)
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.testing.assert_close(out, function(x.double()).float(), rtol=1e-4, atol=1e-5)
