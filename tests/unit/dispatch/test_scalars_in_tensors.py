"""lerp's weight in a tensor of no dims, of whatever real dtype: cast as PyTorch casts it."""

import pytest
import torch

import tilewright as tw
from tilewright.compile import cxx
from tilewright.errors import InvalidArgument

REAL = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool]


def pair(dtype=torch.float32):
    return torch.randn(3, 40, dtype=dtype), torch.randn(40, dtype=dtype)


@pytest.fixture(autouse=True)
def _fresh_traces():
    torch._dynamo.reset()


@pytest.mark.parametrize("of_weight", REAL)
@pytest.mark.parametrize("dtype", REAL[:4])
def test_results_are_pytorchs(dtype, of_weight):
    (x, end), weight = pair(dtype), torch.tensor(0.3, dtype=torch.float64).to(of_weight)
    right = torch.lerp(x, end, weight)
    compiled = torch.compile(lambda *a: tw.lerp(*a), backend="aot_eager", fullgraph=True)
    for _ in range(2):
        assert torch.equal(tw.lerp(x, end, weight), right)
    assert torch.equal(tw.lerp(x, weight=weight, end=end), right)
    assert torch.equal(tw.lerp(x, end, weight, out=torch.empty(0, dtype=dtype)), right)
    assert torch.equal(compiled(x, end, weight), right)


@pytest.mark.parametrize("of_weight", [torch.float16, torch.float64])
def test_the_weights_gradient_has_its_dtype(of_weight):
    (x, end), weight = pair(), torch.tensor(0.25, dtype=of_weight, requires_grad=True)
    x.requires_grad_()
    tw.lerp(x, end, weight).sum().backward()
    assert weight.grad.dtype == of_weight
    right = (end.double() - x.detach().double()).sum()
    torch.testing.assert_close(weight.grad.double(), right, rtol=2e-3, atol=1e-2)
    assert torch.equal(x.grad, torch.full_like(x, 0.75))


@pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing()))
def test_a_forced_implementation_gets_it_too():
    (x, end), weight = pair(), torch.tensor(0.3, dtype=torch.float64)
    with tw.use("fused"):
        torch.testing.assert_close(tw.lerp(x, end, weight), torch.lerp(x, end, weight))


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (torch.full((40,), 0.3, dtype=torch.float64), "weight is f64, but x is f32"),
        (torch.tensor(0.3 + 1j), "weight is torch.complex64"),
    ],
)
def test_others_are_refused_in_words(weight, words):
    x, end = pair()
    with pytest.raises(InvalidArgument, match=words):
        tw.lerp(x, end, weight)
