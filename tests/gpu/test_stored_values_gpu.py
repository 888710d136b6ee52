"""Values that are stored between kernels, on a device: as PyTorch has them, and in CUDA graphs."""

import pytest
import torch

import tilewright as tw
from stencil_functions import blurred_thrice, sobel, with_transposes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
    pytest.mark.usefixtures("forgets_functions"),
]


def largest_of_edges(x):
    return sobel(x).amax(-1) + blurred_thrice(x).mean(-1)


FUNCTIONS = [sobel, blurred_thrice, with_transposes, largest_of_edges]


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
