"""A gradient that another tensor of PyTorch's backward is, is that tensor here: nobody computes it,
nor copies it. As PyTorch's own addition hands on what it was given. Other equal ones are apart."""

import pytest
import torch
from torch.nn import functional as F

import tilewright as tw
from tilewright.compile import cxx
from tilewright.dispatch.gradients import Way

pytestmark = [
    pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing())),
    pytest.mark.usefixtures("forgets_functions"),
]


def scaled_branch(x, y, w):
    return x + y * w


def of_a_sum(x, y, w):
    total = x + y
    return F.rms_norm(total, (total.shape[-1],), w), total


def weighed_sum(x, y, w):
    return (x + y) * w


def turned(x, y, w):
    return x.t() + y * w


def sums(x, y, w):
    return x + y, w + w


def scaled_alike(x, y, w):
    return 3 * x + 3 * y


def times_one(x, y, w):
    return x + y * 1


def casts(x, y, w):
    wide = torch.float64 if x.dtype == torch.float32 else torch.float32
    return ((x.to(wide) + y.to(wide)) * 2).to(x.dtype)


def plain_sum(x, y):
    return x + y


def leaves(rows=8, dtype=torch.float32):
    return [torch.randn(n, dtype=dtype, requires_grad=True) for n in ((rows, 8), (rows, 8), (8,))]


@pytest.fixture
def asked(monkeypatch):
    """What backwards were asked for."""
    found = []
    choose = Way.asked

    def spy(way, wanted):
        found.append(choose(way, wanted))
        return found[-1]

    monkeypatch.setattr(Way, "asked", spy)
    return found


def gradients(function, tensors, wanted, given):
    out = function(*tensors)
    outs = out if isinstance(out, tuple) else (out,)
    return torch.autograd.grad(outs, [tensors[i] for i in wanted], given[: len(outs)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize(
    ("function", "wanted", "computed", "same"),
    [
        (scaled_branch, (0, 1, 2), ("y", "w"), {0: "given"}),
        (scaled_branch, (0,), (), {0: "given"}),
        (scaled_branch, (1,), ("y",), {}),
        (of_a_sum, (0, 1, 2), ("x", "w"), {1: 0}),
        (of_a_sum, (1, 2), ("y", "w"), {}),
        (weighed_sum, (0, 1, 2), ("x", "w"), {1: 0}),
        (sums, (0, 1, 2), ("w",), {0: "given", 1: "given"}),
        (turned, (0, 1, 2), ("x", "y", "w"), {}),
        (scaled_alike, (0, 1), ("x", "y"), {}),
        (times_one, (0, 1), ("y",), {0: "given"}),
        (casts, (0, 1), ("x", "y"), {}),
    ],
)
def test_it_is_that_tensor(function, wanted, computed, same, dtype, asked):
    tensors = leaves(dtype=dtype)
    given = [torch.randn_like(t) for t in (tensors[0], tensors[2 if function is sums else 0])]
    for i, t in enumerate(tensors):
        t.requires_grad_(i in wanted)
    found = gradients(tw.fuse(function, name="of_sums"), tensors, wanted, given)
    right = gradients(function, tensors, wanted, given)
    bound = 4e-3 if dtype == torch.float16 else 1e-5  # PyTorch's halves round at each step
    torch.testing.assert_close(found, right, rtol=bound, atol=bound)
    assert asked[-1] == computed
    by_place = dict(zip(wanted, found, strict=True))
    for i, source in same.items():
        assert by_place[i] is (given[0] if source == "given" else by_place[source])
    ours = {t.data_ptr() for i, t in by_place.items() if i not in same}
    assert len(ours) == len(by_place) - len(same)
    assert not ours & {g.data_ptr() for g in given}


@pytest.mark.parametrize("wanted", [(1,), (1, 2), (2,), (2, 0)])
def test_some_of_those_that_were_to_be_had(wanted):
    tensors, given = leaves(), [torch.randn(8, 8), torch.randn(8, 8)]
    found = gradients(tw.fuse(of_a_sum, name="of_sums"), tensors, wanted, given)
    torch.testing.assert_close(found, gradients(of_a_sum, tensors, wanted, given))


def test_hooks_may_write_to_equal_gradients_of_which_pytorch_computes_two():
    found = []
    for function in (tw.fuse(scaled_alike, name="of_sums"), scaled_alike):
        x, y, w = leaves()
        x.register_hook(lambda grad: grad.mul_(2))
        y.register_hook(lambda grad: grad.mul_(5))
        function(x, y, w).sum().backward()
        found.append((x.grad, y.grad))
    torch.testing.assert_close(*found)


def test_leaves_accumulate_each_for_itself():
    fused = tw.fuse(plain_sum, name="of_sums")
    x, y, _ = leaves()
    given = torch.randn(8, 8)
    once = given.clone()
    for _ in range(2):
        fused(x, y).backward(given)
    x.grad.add_(1.0)
    assert torch.equal(given, once)
    assert torch.equal(y.grad, 2 * once)
    assert torch.equal(x.grad, 2 * once + 1.0)


def test_a_gradient_of_a_broadcast_or_in_another_dtype_is_computed(asked):
    wide = tw.fuse(lambda x, y: x.float() + y, name="of_sums")
    x, y = torch.randn(8, 8, dtype=torch.half, requires_grad=True), leaves()[2]
    x_grad, y_grad = torch.autograd.grad(wide(x, y), (x, y), torch.ones(8, 8))
    assert asked[-1] == ("x", "y")
    assert torch.equal(x_grad, torch.ones(8, 8, dtype=torch.half))
    assert torch.equal(y_grad, torch.full((8,), 8.0))


@pytest.mark.parametrize("number", [1, True, 1.0])
def test_of_another_number_it_is_another(number):
    fused = tw.fuse(lambda x, y, alpha: x + alpha * y, name="of_sums", scalars=["alpha"])
    (x, y, _), given = leaves(), torch.randn(8, 8)
    for alpha in (number, number, 2.0, 0, 3, False):  # what the first two find is kept
        x_grad, y_grad = torch.autograd.grad(fused(x, y, alpha), (x, y), given)
        assert torch.equal(x_grad, given)
        assert torch.equal(y_grad, given * alpha)


def test_of_an_output_that_has_no_gradient_it_is_zero():
    fused = tw.fuse(of_a_sum, name="of_sums")
    tensors = leaves()
    found = torch.autograd.grad(fused(*tensors)[0].sum(), tensors)
    torch.testing.assert_close(found, torch.autograd.grad(of_a_sum(*tensors)[0].sum(), tensors))
    both = tw.fuse(sums, name="two_sums")  # of which the second needs nothing of the first
    (zero,) = torch.autograd.grad(both(*tensors)[1].sum(), tensors[0], allow_unused=True)
    assert zero is None


def test_one_that_the_loss_expanded_is_handed_on_as_it_came():
    fused = tw.fuse(plain_sum, name="of_sums")
    x, y, _ = leaves()
    fused(x, y).sum().backward()
    assert torch.equal(x.grad, torch.ones(8, 8))
    x.grad.zero_()
    assert torch.equal(y.grad, torch.ones(8, 8))


def test_gradients_of_gradients_are_pytorchs():
    fused = tw.fuse(scaled_branch, name="of_sums")
    tensors = [t.double().detach().requires_grad_() for t in leaves(3)]
    assert torch.autograd.gradcheck(fused, tensors)
    assert torch.autograd.gradgradcheck(fused, tensors)
