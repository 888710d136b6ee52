"""What of a fused function has gradients is what PyTorch's autograd says, and nothing else has."""

import re

import pytest
import torch

import tilewright as tw
from tilewright.compile import cxx
from tilewright.dispatch.call import operators
from tilewright.errors import InvalidArgument
from tilewright.op import OPS, Workload

pytestmark = [
    pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing())),
    pytest.mark.usefixtures("forgets_functions"),
]


def scaled_by_detached(x, y, m):
    scale = x.detach().abs().amax(-1, keepdim=True)
    with torch.no_grad():
        total = (x * y).sum()
    return x / scale, scale, total, m.float().mean(), y > 0


def ignoring(x, y, m):
    return x.exp()


def of_positions(x, y, m):
    with torch.no_grad():
        return x.max(-1).values


@pytest.fixture
def tensors():
    x, y = (torch.randn(4, 8, requires_grad=True) for _ in range(2))
    return x, y, torch.rand(4, 8) > 0.5


@pytest.mark.parametrize("forced", [False, True])
def test_outputs_without_a_gradient_require_none(tensors, forced):
    fused = tw.fuse(scaled_by_detached, name="detached")
    with tw.use("fused", op="detached") if forced else torch.enable_grad():
        own = fused(*tensors)
    right = scaled_by_detached(*tensors)
    assert [o.requires_grad for o in own] == [True, False, False, False, False]
    for a, b in zip(own, right, strict=True):
        torch.testing.assert_close(a.detach(), b.detach())
    weights = torch.randn(4, 8)
    found, rest = torch.autograd.grad(own[0], tensors[:2], weights, allow_unused=True)
    assert rest is None
    torch.testing.assert_close(found, torch.autograd.grad(right[0], tensors[0], weights)[0])


def test_an_argument_that_no_gradient_flows_to_has_none(tensors):
    x, y, _ = tensors
    tw.fuse(ignoring, name="detached")(*tensors).sum().backward()
    torch.testing.assert_close(x.grad, x.detach().exp())
    assert y.grad is None


def test_a_gradient_that_nothing_asks_for_need_not_be_fused(tensors):
    found = tw.fuse(of_positions, name="detached")(*tensors)
    assert not found.requires_grad
    torch.testing.assert_close(found, of_positions(*tensors))


def test_pytorch_differentiates_what_decides_by_values_where_it_is_named(tensors):
    x = tensors[0]
    decided = tw.fuse(lambda x: x * x.sum().item(), name="detached")
    with tw.use("aten", op="detached"):
        decided(x).sum().backward()
    torch.testing.assert_close(x.grad, x.sum().detach().expand_as(x))


def separate(x, y, m):
    return x * 2, x.sin() + y, x.detach() * y


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("output", range(3))
def test_what_an_unused_output_alone_needs_has_none_as_in_pytorch(tensors, output, forced):
    fused = tw.fuse(separate, name="detached")
    with tw.use("fused", op="detached") if forced else torch.enable_grad():
        own = fused(*tensors)
    pairs = own[output], separate(*tensors)[output]
    weights = torch.randn(4, 8)
    found, right = (torch.autograd.grad(o, tensors[:2], weights, allow_unused=True) for o in pairs)
    assert [g is None for g in found] == [g is None for g in right]
    torch.testing.assert_close(found, right)


def beside_roots(x, y):
    return 2.0 * x, x.sqrt() * y, x.log()


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)])
def test_infinite_slopes_of_an_output_that_is_not_used_reach_nothing(used):
    """A gradient of zeros in its place would become NaN."""
    found = []
    for called in (tw.fuse(beside_roots, name="beside_roots"), beside_roots):
        x, y = torch.tensor([0.0, 1.0, 4.0]).requires_grad_(), torch.ones(3, requires_grad=True)
        sum(called(x, y)[i].sum() for i in used).backward()
        found.append((x.grad, y.grad))
    assert (found[0][1] is None) == (found[1][1] is None) == (1 not in used)
    for own, right in zip(*found, strict=True):
        if right is not None:
            torch.testing.assert_close(own, right)


def test_gradients_by_name_from_those_of_some_outputs():
    tw.fuse(beside_roots, name="beside_roots")
    x, y, given = torch.tensor([0.0, 1.0, 4.0]), torch.rand(3), torch.rand(3)
    op = OPS.named("beside_roots_backward", ["grad_output0", "grad_output1", "grad_output2"])
    (found,) = operators[op.name](given, None, None, x, y, grads=["x"])
    torch.testing.assert_close(found, 2 * given)
    text = (
        "beside_roots_backward(grad_output0=f32[3], grad_output1=None, grad_output2=None, "
        "x=f32[3], y=f32[3], grads=[x])"
    )
    w = Workload.parse(text)
    assert str(w) == text
    for outputs in ((None, None, None), (given, None, torch.rand(4))):
        with pytest.raises(InvalidArgument, match="does not fit what beside_roots returns"):
            operators[op.name](*outputs, x, y)


def test_of_outputs_whose_gradient_is_an_arguments_those_unused_are_zeros():
    """The sign of x has a gradient of zeros in PyTorch, not none."""
    fused = tw.fuse(lambda x, y: (x + y, x.sign()), name="beside_signs")
    x, y = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    x_grad, y_grad = torch.autograd.grad(fused(x, y)[1].sum(), (x, y), allow_unused=True)
    assert torch.equal(x_grad, torch.zeros(4))
    assert y_grad is None


def test_a_gradient_whose_strides_allow_no_view_is_copied_beside_none():
    def in_other_rows(x):
        return x.softmax(-1).view(4, 15), x.sqrt()

    x, given, found = torch.rand(6, 10, requires_grad=True), torch.rand(15, 4).t(), []
    for called in (tw.fuse(in_other_rows), in_other_rows):
        found += torch.autograd.grad(called(x)[0], x, given)
    torch.testing.assert_close(*found)


HOWS = {
    "differentiable": lambda y, x: torch.autograd.grad(y.sum(), x, create_graph=True)[0],
    "batched": lambda y, x: torch.autograd.grad(y, x, torch.eye(16), is_grads_batched=True)[0],
    "under autocast": lambda y, x: under_autocast(y, x),
    "fused anew": lambda y, x: fused_anew(y, x),
}


def under_autocast(y, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.autograd.grad(y.sum(), x)[0]


def fused_anew(y, x):
    tw.fuse(squared_beside, name="squared_beside")
    return torch.autograd.grad(y.sum(), x)[0]


def squared_beside(x, table, index):
    return x * x + table[index]


@pytest.mark.parametrize("how", HOWS)
def test_an_index_that_no_gradient_reads_still_names_something(how, monkeypatch):
    """It is not kept. Where the function runs anew for its gradients, it is given another one."""
    x, table, index = torch.randn(16, requires_grad=True), torch.randn(5), torch.randint(5, (16,))
    y = tw.fuse(squared_beside, name="squared_beside")(x, table, index)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)  # which fills memory with the greatest number
    try:
        found = HOWS[how](y, x)
    finally:
        torch.use_deterministic_algorithms(False)
    right = 2 * x.detach()
    torch.testing.assert_close(found.detach(), right.diag() if how == "batched" else right)


@pytest.mark.parametrize("changed", range(2))
@pytest.mark.parametrize("needing", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize(
    "function", [lambda x, y: x * y, lambda x, y: x.sin() + y, lambda x, y: 3 * x - y]
)
def test_what_a_gradient_does_not_read_may_change_before_it(function, needing, changed):
    found = []
    for called in (tw.fuse(function, name="detached"), function):
        given = [torch.linspace(0, 1, 12).reshape(3, 4) + k for k in range(2)]
        leaves = [given[i].requires_grad_() for i in needing]
        out = called(*given)
        with torch.no_grad():
            given[changed].add_(1)
        try:
            found.append(torch.autograd.grad(out.sum(), leaves, create_graph=True))
        except RuntimeError as error:
            found.append(re.search("modified by an inplace operation", str(error))[0])
    assert type(found[0]) is type(found[1])
    if isinstance(found[0], tuple):
        torch.testing.assert_close(*found)


COUNTS = {
    "vector_norm": lambda x: torch.linalg.vector_norm(x.sin(), 0, -1),
    "norm": lambda x: x.norm(0),
    "aten.norm": lambda x: torch.ops.aten.norm(x, 0),
    "dist": lambda x: torch.dist(x, x.detach() + 1, 0),
}


@pytest.mark.parametrize("norm", COUNTS)
def test_no_gradient_flows_through_a_norm_that_counts(norm, tensors):
    x, count = tensors[0], COUNTS[norm]
    own = tw.fuse(count, name="detached")(x)
    assert own.requires_grad
    assert torch.autograd.grad(own.sum(), x, allow_unused=True) == (None,)
    assert torch.autograd.grad(count(x).sum(), x, allow_unused=True) == (None,)
    beside = tw.fuse(lambda x: count(x)[..., None] * x, name="beside")(x)
    (found,) = torch.autograd.grad(beside.sum(), x)
    torch.testing.assert_close(found, torch.full_like(x, 32 if count(x).dim() == 0 else 8))


def floored(x, y):
    return (x // 0.3) * y, torch.nn.functional.dropout(x * y, 0.5)


@pytest.mark.parametrize("forced", [False, True])
def test_a_step_without_a_derivative_raises_in_the_backward(forced, tensors):
    x, y, _ = tensors
    fused, seed = tw.fuse(floored), torch.tensor(3)
    with tw.use("fused", op="floored") if forced else torch.enable_grad():
        low, dropped = fused(x, y, seed=seed)
        again, alone = fused(x.detach(), y, seed=seed)
    torch.testing.assert_close(low, floored(x, y)[0])
    for out in (low, floored(x, y)[0]):
        with pytest.raises(RuntimeError, match="derivative for aten::floor_divide is not impl"):
            out.sum().backward()
    for found in torch.autograd.grad(dropped.sum(), (x, y)):
        assert torch.equal(found == 0, dropped == 0)
    (found,) = torch.autograd.grad(again.sum(), y)
    torch.testing.assert_close(found, x.detach() // 0.3)
    torch.testing.assert_close(alone, dropped)
