"""Tensors that are not what lies at their address: views whose sign is a flag, zeros without
memory. Kernels read memory, so every way in has to hand them copies, at the first call too."""

import pytest
import torch
from dispatching import ProbeExecutable
from torch.nn import functional as F

import tilewright as tw
from tilewright.compile import cxx
from tilewright.dispatch.prepared import state

pytestmark = pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing()))


@pytest.fixture(autouse=True)
def _nothing_prepared(store, forgets_functions):
    state.forget()


def strided(*shape):
    """The imaginary part of a conjugated tensor."""
    view = torch.randn(*shape, dtype=torch.complex64).conj().imag
    assert view.is_neg()
    return view


def contiguous(*shape):
    view = torch._neg_view(torch.randn(*shape))
    assert view.is_neg()
    assert view.is_contiguous()
    return view


def without_memory(*shape):
    zeros = torch._efficientzerotensor(shape)
    assert zeros.data_ptr() == 0
    return zeros


def plain(t):
    return torch.zeros(t.shape) if t._is_zerotensor() else t.resolve_neg()


@pytest.fixture
def kernels(probe, monkeypatch):
    """An implementation of everything that reads memory, as kernels do, and no flags."""

    def of_memory(self, *tensors):
        assert all(t.data_ptr() for t in tensors)
        self.probe.runs += 1
        operator = self.w.operator
        flagless = [torch._neg_view(t) if t.is_neg() else t for t in tensors]
        run = operator.inplace if operator.destinations(self.w) else operator.reference
        return run(**self.w.call(flagless))

    monkeypatch.setattr(ProbeExecutable, "__call__", of_memory)
    with tw.use("probe"):
        yield probe
    assert probe.runs


VIEWS = pytest.mark.parametrize("view", [strided, contiguous, without_memory])
INDEX = torch.tensor([[0, 2, 1, 2], [3, 1, 0, 0]])


def assert_at_each_call(function, given, right, **kwargs):
    """The first call, those after it, and those after a plain tensor's."""
    for _ in range(3):
        torch.testing.assert_close(function(given, **kwargs), right)
    for _ in range(3):
        torch.testing.assert_close(function(plain(given), **kwargs), right)
    for _ in range(2):
        torch.testing.assert_close(function(given, **kwargs), right)


@VIEWS
@pytest.mark.parametrize("kwargs", [{}, {"dim": -1}])
def test_an_operator_that_was_asked_for(view, kwargs):
    x = view(6, 8)
    with tw.use("fused"):
        assert_at_each_call(tw.softmax, x, torch.softmax(plain(x), -1), **kwargs)


@VIEWS
def test_an_operator_whose_number_changes(view):
    x, end = view(6, 8), torch.randn(6, 8)
    with tw.use("fused"):
        for weight in (0.25, 0.5, 0.75, 0.125):
            torch.testing.assert_close(tw.lerp(x, end, weight), torch.lerp(plain(x), end, weight))


@VIEWS
def test_a_function_of_a_persons_own_and_its_gradient(view):
    fused = tw.fuse(lambda x: x.exp() * 2, name="twice_the_exponential")
    x = view(6, 8)
    assert_at_each_call(fused, x, plain(x).exp() * 2)
    leaf = torch.randn(6, 8, requires_grad=True)
    for _ in range(3):
        (found,) = torch.autograd.grad(fused(leaf), leaf, x)
        torch.testing.assert_close(found, plain(x) * leaf.detach().exp() * 2)


def test_the_imaginary_part_of_a_conjugated_tensor_is_differentiated():
    fused = tw.fuse(lambda x: x.exp() * 3, name="thrice_the_exponential")
    z = torch.randn(6, 8, dtype=torch.complex64, requires_grad=True)
    (found,) = torch.autograd.grad(fused(z.conj().imag).sum(), z)
    (right,) = torch.autograd.grad((z.conj().imag.exp() * 3).sum(), z)
    torch.testing.assert_close(found, right)


@VIEWS
@pytest.mark.parametrize("call", ["gather", "scatter_add", "scatter", "index_put"])
def test_operators_with_an_index(kernels, view, call):
    x, base = view(4, 4), torch.randn(4, 4)
    index = INDEX.repeat(2, 1)
    calls = {
        "gather": (lambda t: tw.gather(t, 0, INDEX), lambda t: torch.gather(t, 0, INDEX)),
        "scatter_add": (
            lambda t: tw.scatter_add(base, 0, index, t),
            lambda t: base.scatter_add(0, index, t),
        ),
        "scatter": (
            lambda t: tw.scatter(t, 0, INDEX, base),
            lambda t: t.scatter(0, INDEX, base),
        ),
        "index_put": (
            lambda t: tw.index_put(base, (index[:, 0],), t, True),
            lambda t: base.index_put((index[:, 0],), t, True),
        ),
    }
    mine, right = calls[call]
    assert_at_each_call(mine, x, right(plain(x)))


@pytest.mark.parametrize("view", [strided, contiguous])
def test_what_is_written_in_place_keeps_its_flag(kernels, view):
    for _ in range(3):
        x, src = view(4, 4), view(4, 4)
        right = plain(x).clone().scatter_add(0, INDEX, plain(src))
        found = tw.scatter_add_(x, 0, INDEX, src)
        assert found is x
        assert x.is_neg()
        torch.testing.assert_close(plain(x), right)


@VIEWS
def test_gradients_of_embeddings_and_convolutions(kernels, view):
    index, table = torch.randint(5, (2, 4)), torch.randn(5, 3, requires_grad=True)
    x, weight = torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3, requires_grad=True)
    pairs = [
        (lambda: tw.embedding(index, table), lambda: F.embedding(index, table), table),
        (lambda: tw.conv2d(x, weight), lambda: F.conv2d(x, weight), weight),
    ]
    for mine, pytorchs, leaf in pairs:
        grad = view(*pytorchs().shape)
        (right,) = torch.autograd.grad(pytorchs(), leaf, plain(grad))
        for _ in range(3):
            (found,) = torch.autograd.grad(mine(), leaf, grad)
            torch.testing.assert_close(found, right)
