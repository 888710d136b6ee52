"""Where a forward can be fused and its gradients cannot, the backward says so, and that alone."""

import pytest
import torch

import tilewright as tw
from tilewright.compile import cxx
from tilewright.dispatch import gradients
from tilewright.errors import InvalidArgument, NoImplementation

pytestmark = [
    pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing())),
    pytest.mark.usefixtures("forgets_functions"),
]


class Deciding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2 if gradient.sum() > 0 else gradient


def by_values(x):
    return Deciding.apply(x) + 1


def of_whole_numbers(x):
    return torch.ldexp(x, torch.tensor(3))


def by_a_view(x):
    return torch.diag_embed(x) * 2


def written_to(x):
    y = x.clone().relu_()
    y += 1
    return y


REFUSED = {
    by_values: (NoImplementation, "decides by values of a tensor .*fallback=True"),
    of_whole_numbers: (NoImplementation, "integer arithmetic.*fallback=True"),
    by_a_view: (NoImplementation, "aten.diagonal.*fallback=True"),
    written_to: (InvalidArgument, "modified by an inplace operation"),
}


@pytest.fixture
def x():
    return torch.randn(3, 5, requires_grad=True)


@pytest.mark.parametrize("function", REFUSED)
def test_the_forward_runs_and_the_backward_raises(function, x):
    fused = tw.fuse(function, name="refused")
    kind, told = REFUSED[function]
    for _ in range(3):
        out = fused(x)
        assert out.grad_fn.name() == "GeneratedBackward"
        torch.testing.assert_close(out, function(x))
        for given in (torch.ones_like(out), torch.ones(()).expand_as(out)):
            with pytest.raises(kind, match=f"(?s)refused_backward.*{told}"):
                out.backward(given, retain_graph=True)
    assert x.grad is None


@pytest.mark.parametrize("function", REFUSED)
def test_calls_that_come_again_are_not_traced(function, x):
    called = []

    def counted(x):
        called.append(x)
        return function(x)

    fused = tw.fuse(counted, name="refused")
    fused(x), fused(x)
    before = len(called)
    fused(x), fused(torch.randn(3, 5, requires_grad=True))
    assert len(called) == before


@pytest.mark.parametrize("function", [by_values, of_whole_numbers, by_a_view])
def test_with_a_fallback_pytorch_differentiates(function, x):
    out = tw.fuse(function, name="refused", fallback=True)(x)
    found, right = (torch.autograd.grad(o.sum(), x) for o in (out, function(x)))
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize("function", [of_whole_numbers, by_a_view])
def test_pytorch_differentiates_where_the_backward_is_asked_to_be_its(function, x):
    fused = tw.fuse(function, name="refused")
    with tw.use("aten", op="refused_backward"):
        out = fused(x)
    found, right = (torch.autograd.grad(o.sum(), x) for o in (out, function(x)))
    torch.testing.assert_close(found, right)


def test_gradients_of_an_output_that_can_be_fused_are_given_beside_one_that_cannot(x):
    weight = torch.randn(3, 5, requires_grad=True)
    function = lambda x, weight: (torch.diag_embed(x), weight.exp())  # noqa: E731
    diagonal, powers = tw.fuse(function, name="refused")(x, weight)
    powers.sum().backward(retain_graph=True)
    torch.testing.assert_close(weight.grad, weight.exp())
    with pytest.raises(NoImplementation, match="diagonal"):
        (diagonal.sum() + powers.sum()).backward()


def test_what_the_forward_raises_is_raised_by_the_call(x):
    with pytest.raises(NoImplementation, match="decides by values"):
        tw.fuse(lambda x: x * x.sum().item(), name="refused")(x)


def test_a_fault_of_ours_is_no_refusal(monkeypatch, x):
    def failing(*args):
        raise AssertionError("a fault")

    monkeypatch.setattr(gradients, "_same_gradients", failing)
    with pytest.raises(AssertionError, match="a fault"):
        tw.fuse(lambda x: x.sin(), name="refused")(x)
