"""lerp's weight in a tensor of no dims, of whatever real dtype: cast as PyTorch casts it; numbers
of a person's own function: as they came."""

import pytest
import torch

import tilewright as tw
from tilewright.compile import cxx
from tilewright.dispatch.pytorch import with_scalars_alike
from tilewright.errors import InvalidArgument
from tilewright.op import OPS

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


SCALED = [
    (lambda x, alpha: x.float() * alpha, torch.tensor(0.1), torch.bfloat16),
    (lambda x, alpha: x * alpha, torch.tensor(0.1), torch.bfloat16),
    (lambda x, alpha: (x * 2, torch.ones(4, dtype=torch.int64) + alpha), torch.tensor(3), None),
    (lambda x, alpha: x + alpha, torch.tensor(0.1, dtype=torch.float64), torch.int64),
]


@pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing()))
@pytest.mark.parametrize(("function", "alpha", "dtype"), SCALED)
def test_a_persons_function_has_a_number_in_the_dtype_that_it_came_in(
    function, alpha, dtype, forgets_functions
):
    x, fused = torch.ones(4, dtype=dtype), tw.fuse(function, name="scaled", scalars=["alpha"])
    for _ in range(2):
        torch.testing.assert_close(fused(x, alpha), function(x, alpha), rtol=0, atol=0)


@pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing()))
def test_and_so_has_its_gradient(forgets_functions):
    fused = tw.fuse(lambda x, alpha: x.float() * alpha, name="scaled", scalars=["alpha"])
    x, alpha = torch.ones(64, dtype=torch.bfloat16), torch.tensor(0.1, requires_grad=True)
    given = torch.full((64,), 0.1)
    (found,) = torch.autograd.grad(fused(x, alpha), alpha, given)
    torch.testing.assert_close(found, given.sum(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float16])
@pytest.mark.parametrize("number", [torch.tensor(0.1), torch.tensor(3)])
def test_beside_tensors_elsewhere_it_is_read_but_where_a_gradient_follows(
    number, dtype, forgets_functions
):
    """So captures have no copy of it; `meta` is any other device."""
    tw.fuse(lambda x, alpha: x * alpha, name="scaled", scalars=["alpha"])
    x = torch.ones(4, dtype=dtype, device="meta")
    read = with_scalars_alike(OPS["scaled"], (x, number), {})
    assert (read["alpha"], type(read["alpha"])) == (number.item(), type(number.item()))
    if number.is_floating_point():
        moved = with_scalars_alike(OPS["scaled"], (x, number.clone().requires_grad_()), {})
        assert (moved["alpha"].device.type, moved["alpha"].dtype) == ("meta", number.dtype)


@pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing()))
def test_an_argument_named_value_leaves_tensors_tensors(forgets_functions):
    def tempered(x, value, t):
        return (x + value) * t.exp()

    fused = tw.fuse(tempered)
    x, given = torch.randn(3, 8), {"value": torch.randn(8), "t": torch.tensor(0.5)}
    right = tempered(x, **given)
    torch.testing.assert_close(torch.vmap(lambda row: fused(row, **given))(x), right)
    tw.disable()
    try:
        torch.testing.assert_close(fused(x, **given), right)
    finally:
        tw.enable()
