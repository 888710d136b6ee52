"""Calls that need gradients and come again: what is done once, and what is never taken for them."""

import contextlib
import math

import pytest
import torch
from torch.nn import functional as F

import tilewright as tw
from tilewright.compile import cxx
from tilewright.dispatch import call, gradients, prepared
from tilewright.dispatch.recent import MISSED
from tilewright.registry import Registry
from tilewright.signature import Signature
from tilewright.tensor_spec import TensorSpec

pytestmark = [
    pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing())),
    pytest.mark.usefixtures("records_of_its_own"),
]
NAME = "remembered"


def swiglu(gate, up, limit=3.0):
    return F.silu(gate.clamp(max=limit)) * up


def leaves(*shapes, **options):
    return [torch.randn(s, requires_grad=True, **options) for s in shapes or [(8, 8)] * 2]


def gradients_of(function, *args, **kwargs):
    """Of all tensors that require some, after the result."""
    out = function(*args, **kwargs)
    given = (*args, *kwargs.values())
    wanted = [v for v in given if isinstance(v, torch.Tensor) and v.requires_grad]
    wanted = [v for i, v in enumerate(wanted) if all(v is not w for w in wanted[:i])]
    weights = torch.arange(float(out.numel()), dtype=out.dtype).view(out.shape)
    return (out.detach(), *torch.autograd.grad(out, wanted, weights))


def assert_right(fused, function, *args, **kwargs):
    torch.testing.assert_close(
        gradients_of(fused, *args, **kwargs), gradients_of(function, *args, **kwargs)
    )


@pytest.fixture
def anew(monkeypatch):
    """The bound arguments of calls that were not found among those that came before."""
    seen, found_out = [], call.generated_backward

    def spy(op, bound):
        seen.append(bound)
        return found_out(op, bound)

    monkeypatch.setattr(call, "generated_backward", spy)
    return seen


def remembered(function, *args, name=NAME):
    fused = tw.fuse(function, name=name)
    for _ in range(3):
        gradients_of(fused, *args)
    return fused


def refuse(*args, **kwargs):
    raise AssertionError("a call that came before should not need this")


def test_a_call_that_came_before_looks_nothing_up_again(monkeypatch):
    x, y = leaves()
    fused = remembered(swiglu, x, y)
    right = gradients_of(swiglu, x, y)
    with monkeypatch.context() as patch:
        for owner, name in (
            (TensorSpec, "__post_init__"),
            (Registry, "_load"),  # which reads the environment
            (Signature, "bind"),
            (gradients.Way, "asked"),
            (gradients, "description"),
            (call, "generated_backward"),
            (call, "first_call"),
        ):
            patch.setattr(owner, name, refuse)
        found = gradients_of(fused, x, y)
    torch.testing.assert_close(found, right)


def test_a_call_at_an_address_of_its_own_makes_no_spec(monkeypatch, anew):
    x = torch.randn(65)[1:].view(8, 8).requires_grad_()
    (y,) = leaves((8, 8))
    fused = remembered(swiglu, x, y)
    right = gradients_of(swiglu, x, y)
    anew.clear()
    with monkeypatch.context() as patch:
        patch.setattr(TensorSpec, "__post_init__", refuse)
        patch.setattr(Registry, "_load", refuse)
        found = gradients_of(fused, x, y)
    torch.testing.assert_close(found, right)
    assert len(anew) == 1  # what is found at once is aligned


def test_a_call_by_keyword_is_found_as_one_by_place(anew):
    x, y = leaves()
    fused = remembered(swiglu, x, y, 3.0, None)
    anew.clear()
    assert_right(fused, swiglu, up=y, gate=x)
    assert_right(fused, swiglu, x, up=y)
    assert not anew


def test_a_parameter_may_come_first(anew):
    x, y = torch.nn.Parameter(torch.randn(8, 8)), torch.randn(8, 8)
    fused = remembered(swiglu, x, y)
    anew.clear()
    assert_right(fused, swiglu, x, y)
    assert not anew


# --- what is another call ------------------------------------------------------------------------


def of_a_kind(x, y, k):
    return x * (y * {bool: 2.0, int: 3.0, float: 5.0}[type(k)] * math.copysign(1.0, k))


@pytest.mark.parametrize("first", [True, 1, 1.0, 0, 0.0, -0.0, False])
def test_equal_numbers_are_others_where_their_types_or_signs_differ(first):
    x, y = leaves()
    fused = remembered(of_a_kind, x, y, first)
    for k in (True, 1, 1.0, 0, 0.0, -0.0, False, first):
        assert_right(fused, of_a_kind, x, y, k)


def test_nan_is_a_number_as_others(anew):
    x, y = leaves()
    fused = remembered(swiglu, x, y, 2.0)
    for limit in (math.nan, 2.0, float("nan")):
        torch.testing.assert_close(
            gradients_of(fused, x, y, limit), gradients_of(swiglu, x, y, limit), equal_nan=True
        )


def misaligned():
    return torch.randn(65)[1:].view(8, 8).requires_grad_()


def of_the_sign():
    """A negated view, whose sign is a flag."""
    return torch.randn(8, 8, dtype=torch.complex64).conj().imag


@pytest.mark.parametrize(
    "others",
    [
        lambda x, y: (x, torch.randn(8, 8)),
        lambda x, y: (x.detach(), y),
        lambda x, y: (x, torch.nn.Parameter(torch.randn(8, 8))),
        lambda x, y: (x, misaligned()),
        lambda x, y: (misaligned(), y),
        lambda x, y: (x, torch.randn(8, 8).t().requires_grad_()),
        lambda x, y: (x, torch.randn(8, 1).expand(8, 8).requires_grad_()),
        lambda x, y: (x, torch.randn(8, requires_grad=True)),
        lambda x, y: (x, torch.randn((), requires_grad=True)),
        lambda x, y: (torch.randn(9, 8, requires_grad=True), torch.randn(1, 8)),
        lambda x, y: (x.double().detach().requires_grad_(), y.double().detach()),
        lambda x, y: (x, x),
        lambda x, y: (x, of_the_sign()),
        lambda x, y: (x, torch.randn(8, 8).to(torch.complex64).conj().imag.neg()),
        lambda x, y: (x, y.detach(), 1.0),
    ],
)
def test_a_call_that_differs_is_found_out_anew(others, anew):
    x, y = leaves()
    fused = remembered(swiglu, x, y)
    args = others(x, y)
    anew.clear()
    assert_right(fused, swiglu, *args)
    assert anew
    anew.clear()
    assert_right(fused, swiglu, x, y)  # which is still there
    assert not anew


def test_no_gradient_is_recorded_where_none_is_wanted(anew):
    x, y = leaves()
    fused = remembered(swiglu, x, y)
    with torch.no_grad():
        assert not fused(x, y).requires_grad
    with torch.inference_mode(), torch.enable_grad():
        assert not fused(x, y).requires_grad
    assert fused(x, y).requires_grad


@pytest.mark.parametrize("by", [None, "fused", "aten"])
def test_copies_of_what_inference_mode_made_are_kept(anew, by):
    """PyTorch keeps what the function first computes of them, and refuses the rest."""
    x, y = leaves()
    fused = remembered(swiglu, x, y.detach())
    with torch.inference_mode():
        z = torch.randn(8, 8)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
        swiglu(x, z)
    with tw.use(by) if by else contextlib.nullcontext():
        found = fused(x, z)
    (right,) = torch.autograd.grad(swiglu(x, z.clone()).sum(), x)
    with torch.inference_mode():
        z.zero_()
    torch.testing.assert_close(*torch.autograd.grad(found.sum(), x), right)


def test_some_of_the_gradients_may_be_asked_for():
    x, y = leaves()
    fused = remembered(swiglu, x, y)
    for wanted in ((x,), (y,), (y, x)):
        found, right = (torch.autograd.grad(f(x, y).sum(), wanted) for f in (fused, swiglu))
        torch.testing.assert_close(found, right)


def two(x, y):
    return x * y, x.exp(), (y > 0)


def test_outputs_without_a_gradient_are_told_apart_from_those_with_one():
    x, y = leaves()
    fused = tw.fuse(two, name=NAME)
    for used in ((0, 1), (0,), (1,), (1, 0)) * 2:
        found, right = (
            torch.autograd.grad(sum(f(x, y)[i].sum() for i in used), (x, y), allow_unused=True)
            for f in (fused, two)
        )
        for a, b in zip(found, right, strict=True):
            torch.testing.assert_close(a, torch.zeros(8, 8) if b is None and a is not None else b)


# --- what changes between two calls --------------------------------------------------------------


def test_another_number_of_threads_is_chosen_for_anew(monkeypatch):
    x, y = misaligned(), misaligned()
    fused = remembered(swiglu, x, y)
    threads, chosen, choose = torch.get_num_threads(), [], gradients._choose
    monkeypatch.setattr(gradients, "_choose", lambda *a: chosen.append(a) or choose(*a))
    assert_right(fused, swiglu, x, y)
    assert not chosen
    try:
        torch.set_num_threads(threads + 1)
        assert_right(fused, swiglu, x, y)
    finally:
        torch.set_num_threads(threads)
    assert len(chosen) == 1


def test_nothing_is_remembered_of_before_a_switch(anew):
    x, y = leaves()
    fused = remembered(lambda x, y: x * y, x, y)
    for switch, node in ((tw.disable, "MulBackward0"), (tw.enable, "GeneratedBackward")):
        try:
            switch()
            assert type(fused(x, y).grad_fn).__name__ == node
        finally:
            tw.enable()
    fused(x, y)
    anew.clear()
    tw.reload_records()
    fused(x, y)
    assert len(anew) == 1


def test_what_everything_was_forgotten_during_is_not_kept(monkeypatch, anew):
    x, y = leaves()
    fused, along = tw.fuse(swiglu, name=NAME), call.along

    def forgetting(*args):
        run = along(*args)
        return lambda *tensors: (run(*tensors), prepared.state.forget())[0]

    monkeypatch.setattr(call, "along", forgetting)
    fused(x, y)
    monkeypatch.undo()
    assert prepared.state.recent[NAME].last((x, y), True) is MISSED
    assert_right(fused, swiglu, x, y)


def test_a_function_fused_anew_under_the_name_is_not_taken_for_the_first():
    def other(gate, up, limit=3.0):
        return gate - up

    x, y = leaves()
    fused = remembered(swiglu, x, y)
    before = fused(x, y).sum()
    other.__qualname__, other.__module__ = swiglu.__qualname__, swiglu.__module__
    replaced = tw.fuse(other, name=NAME)
    with pytest.raises(tw.InvalidArgument, match="another function was fused under this name"):
        fused(x, y)
    assert_right(replaced, other, x, y)
    right = torch.autograd.grad(swiglu(x, y).sum(), (x, y))
    torch.testing.assert_close(torch.autograd.grad(before, (x, y)), right)


def test_a_function_fused_anew_while_a_call_runs_gives_no_result(monkeypatch):
    x, y = leaves()
    fused = remembered(swiglu, x, y)
    run = call.operators[NAME]

    with monkeypatch.context() as patch:

        def replaced_meanwhile(*args):
            patch.setitem(call.OPS._things, NAME, None)
            return run(*args)

        patch.setitem(call.operators._made, NAME, replaced_meanwhile)
        with pytest.raises(tw.InvalidArgument, match="another function was fused under this name"):
            fused(x, y)


def test_numbers_that_change_take_no_room():
    x, y = leaves()
    fused = tw.fuse(swiglu, name=NAME, scalars=["limit"])
    for limit in (1.0, 1.0, 2.0, 3.0, 2.0, 1.0):
        assert_right(fused, swiglu, x, y, limit)
    recent = prepared.state.recent[NAME]
    found = [limit for limit in (1.0, 2.0, 3.0) if recent.last((x, y, limit), True) is not MISSED]
    assert found == [1.0]
    assert len(recent.kept[x.shape, x.dtype, 3]) == 1


# --- surroundings --------------------------------------------------------------------------------


def test_gradients_of_gradients_follow_a_call_that_came_before():
    x, y = leaves()
    fused = remembered(swiglu, x, y)
    found, right = (
        torch.autograd.grad(
            torch.autograd.grad(f(x, y).square().sum(), x, create_graph=True)[0].square().sum(),
            (x, y),
        )
        for f in (fused, swiglu)
    )
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)


def test_an_argument_written_to_before_the_backward_is_refused():
    x, y = leaves()
    out = remembered(swiglu, x, y)(x, y)
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_graph_may_be_kept_and_is_freed_else():
    x, y = leaves()
    out = remembered(swiglu, x, y)(x, y).sum()
    first = torch.autograd.grad(out, (x, y), retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(out, (x, y)), first)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.backward()


def test_hooks_see_what_is_saved():
    x, y = leaves()
    fused, kept = remembered(swiglu, x, y), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = fused(x, y)
    assert [t.data_ptr() for t in kept] == [x.data_ptr(), y.data_ptr()]
    right = torch.autograd.grad(swiglu(x, y).sum(), (x, y))
    torch.testing.assert_close(torch.autograd.grad(out.sum(), (x, y)), right)


def test_each_call_draws_a_mask_of_its_own():
    (x,) = leaves((64, 64))
    fused = remembered(lambda x: F.dropout(x, 0.5) * 2, x)
    first, second = fused(x), fused(x)
    assert not torch.equal(first, second)
    (found,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(found, torch.where(first == 0, 0.0, 4.0))


@contextlib.contextmanager
def autocast():
    with torch.autocast("cpu", torch.bfloat16):
        yield


@pytest.mark.parametrize("kept_inside", [False, True])
def test_autocast_is_left_to_pytorch(kept_inside):
    def product(x, w):
        return F.linear(x, w)

    x, w = leaves()
    around, inside = (autocast, contextlib.nullcontext)[:: 1 if kept_inside else -1]
    fused = tw.fuse(product, name=NAME, fallback=True)
    for surroundings in (around, around, inside, around):
        with surroundings():
            assert fused(x, w).dtype == product(x, w).dtype


def test_a_trace_has_pytorchs_steps():
    x, y = leaves()
    fused = remembered(lambda x, y: x * y.exp(), x, y)
    traced = torch.jit.trace(lambda x, y: fused(x, y), (x, y))
    assert {"aten::mul", "aten::exp"} <= {n.kind() for n in traced.graph.nodes()}


def test_transforms_are_seen_as_ever():
    x, y = leaves()
    fused = remembered(swiglu, x, y)
    found, right = (torch.func.grad(lambda x, f=f: f(x, y).sum())(x) for f in (fused, swiglu))
    torch.testing.assert_close(found, right)
    found, right = (
        torch.vmap(lambda y, f=f: f(x, y).sum())(torch.stack([y, y])) for f in (fused, swiglu)
    )
    torch.testing.assert_close(found, right)


def test_what_is_asked_for_by_name_is_not_passed_over():
    x, y = leaves()
    fused = remembered(swiglu, x, y)
    with tw.use("aten", op=NAME):
        assert type(fused(x, y).grad_fn).__name__ == "RecomputedBackward"
    with tw.use("aten", op=f"{NAME}_backward"):
        out = fused(x, y)
    assert type(out.grad_fn).__name__ == "GeneratedBackward"
    right = torch.autograd.grad(swiglu(x, y).sum(), (x, y))
    torch.testing.assert_close(torch.autograd.grad(out.sum(), (x, y)), right)
