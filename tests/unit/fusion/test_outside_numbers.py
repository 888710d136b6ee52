"""Numbers that a fused function takes from its globals and its closure."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import tilewright as tw
from tilewright.compile import cxx
from tilewright.dispatch.functions.outside import MOST_OBJECTS
from tilewright.dispatch.prepared import state
from tilewright.errors import InvalidArgument
from tilewright.fusion.frontend import trace
from tilewright.impls._vendor import vendor
from tilewright.op import OPS, Workload

pytestmark = [
    pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing())),
    pytest.mark.usefixtures("records_of_its_own"),
]

FACTOR, SHIFT = 2.0, 1
FIRST = SECOND = None
X = torch.randn(4, 5)


@pytest.fixture
def traces(monkeypatch):
    """The workloads that were traced."""
    found = []
    run = trace.trace_reference

    def counted(w, *args, **kwargs):
        found.append(str(w))
        return run(w, *args, **kwargs)

    monkeypatch.setattr("tilewright.fusion.frontend.lower.trace_reference", counted)
    return found


def scaled(x):
    return x * FACTOR + SHIFT


VALUES = [2.0, 3.0, 2.0, 0.0, -0.0, 2, True, math.nan, np.float64(4.0), np.int64(5), 3.0]


def test_a_global_is_read_at_each_call(monkeypatch):
    fused = tw.fuse(scaled)
    for value in VALUES:
        monkeypatch.setitem(globals(), "FACTOR", value)
        for _ in range(3):
            right = scaled(X)
            found = fused(X)
            torch.testing.assert_close(found, right, equal_nan=True)
            assert torch.equal((found - 1).signbit(), (right - 1).signbit())
            torch.testing.assert_close(fused(x=X), right, equal_nan=True)


def test_a_closure_is_read_at_each_call():
    factor, form = 2.0, "none"

    def inner(x, p=0.5):
        y = sum(x * factor * p for _ in range(2))
        return F.gelu(y, approximate=form)

    fused = tw.fuse(inner, name="of_a_closure")
    for value in (2.0, 3.0, 2.0):
        for approximation in ("none", "tanh", "none"):
            factor, form = value, approximation
            for _ in range(3):
                torch.testing.assert_close(fused(X), inner(X))
                torch.testing.assert_close(fused(X, 0.25), inner(X, 0.25))


def test_what_stays_as_it_is_is_traced_once(monkeypatch, traces):
    fused = tw.fuse(scaled)
    for _ in range(5):
        fused(X)
    first = len(traces)
    assert first
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    fused(X)
    assert len(traces) == 2 * first
    for value in (2.0, 3.0) * 3:
        monkeypatch.setitem(globals(), "FACTOR", value)
        fused(X)
    assert len(traces) == 2 * first
    assert len(state.recent["scaled"].kept) == 1  # where a call costs the least
    assert traces[-1] == "scaled(x=f32[4,5], FACTOR=3.0)"


def test_a_backward_has_the_numbers_of_its_forward(monkeypatch):
    fused = tw.fuse(lambda x: (x * FACTOR).exp(), name="exponential_of_a_global")
    for value in (2.0, 3.0):
        monkeypatch.setitem(globals(), "FACTOR", value)
        x = X.clone().requires_grad_()
        right = value * (X * value).exp()
        y = fused(x)
        monkeypatch.setitem(globals(), "FACTOR", 7.0)
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], right)
        (found,) = tw.exponential_of_a_global_backward(torch.ones_like(X), X)
        torch.testing.assert_close(found, 7 * (X * 7).exp())


def either(x):
    return x * 2 if FACTOR is None else x * FACTOR[1]


def test_a_number_that_becomes_another_object_is_another_workload_and_so_is_its_backward(
    monkeypatch,
):
    monkeypatch.setitem(globals(), "FACTOR", None)
    fused = tw.fuse(either)
    for value, factor in ((None, 2.0), ([3.0, 5.0], 5.0), ((1.0, 7.0), 7.0), (None, 2.0)):
        monkeypatch.setitem(globals(), "FACTOR", value)
        for _ in range(2):
            torch.testing.assert_close(fused(X), X * factor)
        x = X.clone().requires_grad_()
        y = fused(x)
        monkeypatch.setitem(globals(), "FACTOR", 1.0)
        assert torch.autograd.grad(y.sum(), x)[0].eq(factor).all()


def two_steps(x):
    y = x * 1.5
    if FIRST is not None:
        y = FIRST(y)
    return y if SECOND is None else y * SECOND(y)


def test_numbers_that_become_objects_of_one_type_are_told_apart(monkeypatch):
    fused = tw.fuse(two_steps)
    for first, second in ((F.relu, F.silu), (F.silu, F.relu), (F.silu, None), (None, None)):
        monkeypatch.setitem(globals(), "FIRST", first)
        monkeypatch.setitem(globals(), "SECOND", second)
        torch.testing.assert_close(fused(X), two_steps(X))
        x = X.clone().requires_grad_()
        y = fused(x)
        (right,) = torch.autograd.grad(two_steps(x).sum(), x)
        for now in (None, F.gelu):
            monkeypatch.setitem(globals(), "FIRST", now)
            monkeypatch.setitem(globals(), "SECOND", now)
            (found,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
            torch.testing.assert_close(found, right)


def test_objects_that_come_again_and_equal_tuples_are_not_traced_again(monkeypatch, traces):
    monkeypatch.setitem(globals(), "FACTOR", None)
    fused = tw.fuse(either)
    one, other = [0.0, 3.0], [0.0, 5.0]
    for _ in range(3):
        for value in (one, other, (0.0, *other[1:]), torch.Size([1, 7])):
            monkeypatch.setitem(globals(), "FACTOR", value)
            torch.testing.assert_close(fused(X), X * value[1])
    assert len(set(traces)) == len(traces) == 4


def test_a_new_object_for_each_call_neither_fills_memory_nor_is_taken_for_another(monkeypatch):
    monkeypatch.setitem(globals(), "FACTOR", None)
    op = OPS[tw.fuse(either).__name__]
    told = []
    for k in range(2 * MOST_OBJECTS):
        monkeypatch.setitem(globals(), "FACTOR", [0.0, k])
        told.append(op.outside()["FACTOR"])
    assert len(set(told)) == len(told)
    assert len(op.outside._others) == MOST_OBJECTS
    assert op.reference(X, FACTOR=told[-MOST_OBJECTS]).equal(X * MOST_OBJECTS)
    with pytest.raises(InvalidArgument, match=f"FACTOR={told[0]} is an object .* pass it as an"):
        op.reference(X, FACTOR=told[0])


def test_a_function_that_is_defined_further_down_is_no_number(monkeypatch, traces):
    fused = tw.fuse(lambda x: further_down(x) + 1, name="of_a_helper")  # noqa: F821
    monkeypatch.setitem(globals(), "further_down", lambda x: x * 3)
    torch.testing.assert_close(fused(X), X * 3 + 1)
    assert traces[-1] == "of_a_helper(x=f32[4,5])"


def test_a_backward_finds_what_is_defined_further_down(monkeypatch):
    fused = tw.fuse(lambda x: further_down(x) * FACTOR, name="scaled_helper")  # noqa: F821
    monkeypatch.setitem(globals(), "further_down", lambda x: x * 3)
    x = X.clone().requires_grad_()
    y = fused(x)
    monkeypatch.setitem(globals(), "FACTOR", 7.0)
    assert torch.autograd.grad(y.sum(), x)[0].eq(6).all()


def test_what_is_not_there_yet_is_read_when_it_is(monkeypatch):
    fused = tw.fuse(lambda x: x * LATER, name="later")  # noqa: F821
    with pytest.raises(InvalidArgument, match="NameError"):
        fused(X)
    for value in (2.0, 3.0):
        monkeypatch.setitem(globals(), "LATER", value)
        torch.testing.assert_close(fused(X), X * value)


def test_scalars_need_no_other_kernel_beside_numbers_from_outside(monkeypatch, traces):
    fused = tw.fuse(lambda x, a: x * FACTOR + a, name="beside", scalars=["a"])
    for _ in range(2):
        for value in (2.0, 3.0):
            monkeypatch.setitem(globals(), "FACTOR", value)
            for a in (0.5, 1.5, 2.5):
                torch.testing.assert_close(fused(X, a), X * value + a)
    assert len(set(traces)) == 2


def test_a_workload_may_name_them():
    tw.fuse(scaled)
    assert str(Workload.parse("scaled(x=f32[4,5], FACTOR=2.0)")) == "scaled(x=f32[4,5])"
    w = Workload.parse("scaled(x=f32[4,5], FACTOR=5.0)")
    torch.testing.assert_close(OPS["scaled"].truth(w, [X])[0], X.double() * 5 + 1)
    torch.testing.assert_close(vendor(w)(X), X * 5 + 1)


def test_under_torch_compile_they_are_read_too(monkeypatch):
    fused = tw.fuse(scaled)
    compiled = torch.compile(lambda x: fused(x) * 2, backend="eager")
    for value in (2.0, 3.0):
        monkeypatch.setitem(globals(), "FACTOR", value)
        torch.testing.assert_close(compiled(X), scaled(X) * 2)
        with tw.use("inductor"):
            torch.testing.assert_close(fused(X), scaled(X))


def test_a_number_with_the_name_of_a_seed_is_refused():
    seed = 3
    with pytest.raises(InvalidArgument, match="'seed' from outside"):
        tw.fuse(lambda x: x * seed, name="seeded")


WORD = "a_word_numbered_3"


def by_a_word(x):
    return x * 2 if WORD == "a_word_numbered_3" else x * 3


def test_words_that_read_as_those_of_objects_are_words(monkeypatch):
    x = torch.ones(3, requires_grad=True)
    out = tw.fuse(by_a_word, name="by_a_word")(x)
    monkeypatch.setitem(globals(), "WORD", "another")
    assert torch.equal(out, 2 * x)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(grad, torch.full((3,), 2.0))
