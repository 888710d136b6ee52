"""Functions of tw.fuse with annotations, which make them nodes below torch.compile, give what they
give without."""

import math
import typing
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import tilewright as tw
from tilewright.compile import cxx
from tilewright.dispatch.torch_ops import schemas
from tilewright.errors import InvalidArgument
from tilewright.op import OPS

pytestmark = [
    pytest.mark.usefixtures("forgets_functions"),
    pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing())),
]

X, W = torch.linspace(-1, 1, 32).reshape(4, 8), torch.linspace(0.5, 2, 8)
FACTOR = 2.0


def silu_times(x: Tensor, w: Tensor) -> Tensor:
    return F.silu(x) * w


def scaled(x: Tensor) -> Tensor:
    return x * FACTOR


def compiled(function):
    return torch.compile(function, backend="aot_eager", fullgraph=True)


TRANSFORMED = {
    "jvp": lambda f, x, w: torch.func.jvp(lambda x: f(x, w), (x,), (x,))[1],
    "jacfwd": lambda f, x, w: torch.func.jacfwd(lambda w: f(x, w))(w),
    "grad": lambda f, x, w: torch.func.grad(lambda x: f(x, w).sum())(x),
    "vmap": lambda f, x, w: torch.vmap(lambda x: f(x, w))(x),
}


@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMED.values(), ids=TRANSFORMED)
def test_function_transforms_below_compile_are_pytorchs(transform, called_before):
    own = tw.fuse(silu_times)
    if called_before:
        own(X, W)
    found = compiled(lambda x, w: transform(own, x, w))(X, W)
    torch.testing.assert_close(found, transform(silu_times, X, W))
    torch.testing.assert_close(own(X, W), silu_times(X, W))  # and eager calls go on


@pytest.mark.parametrize("transform", TRANSFORMED.values(), ids=TRANSFORMED)
def test_function_transforms_of_a_named_implementation_below_compile_are_pytorchs(transform):
    with tw.use("fused"):
        found = compiled(lambda x, w: transform(lambda x, w: tw.softmax(x * w, -1), x, w))(X, W)
        expected = transform(lambda x, w: torch.softmax(x * w, -1), X, W)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(tw.softmax(X, -1), torch.softmax(X, -1))


@pytest.mark.parametrize("transform", TRANSFORMED.values(), ids=TRANSFORMED)
def test_function_transforms_of_the_node_itself_are_pytorchs(transform):
    tw.fuse(silu_times)(X, W)
    found = transform(torch.ops.tilewright.silu_times, X, W)
    torch.testing.assert_close(found, transform(silu_times, X, W))


def test_a_number_from_outside_is_read_below_compile_too(monkeypatch):
    own = tw.fuse(scaled)
    run = compiled(lambda x: own(x) + 0)
    assert torch.equal(run(X), X * 2)
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    assert torch.equal(own(X), X * 3)
    assert torch.equal(run(X), X * 3)
    with tw.use("fused"):
        assert torch.equal(compiled(lambda x: own(x) + 1)(X), X * 3 + 1)


def test_untuned_it_is_traced_step_by_step():
    def large(x: Tensor) -> Tensor:
        return (x * 100) * 100 / 10000

    halves = torch.full((4,), 30.0, dtype=torch.half)
    assert tw.fuse(large)(halves).tolist() == [30] * 4
    assert compiled(tw.fuse(large))(halves).tolist() == [math.inf] * 4  # as PyTorch has it

    def summed(x: Tensor, w: Tensor) -> Tensor:
        return x.cumsum(-1) * w

    assert torch.equal(compiled(tw.fuse(summed))(X, W), summed(X, W))


def a_pair(x: Tensor, w: Tensor):
    return x * w, x.exp()


def a_list(x: Tensor, w: Tensor) -> list[Tensor]:
    return [x * w, x.exp()]


def some(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return x * w, x.exp()


def named(x: Tensor, w: Tensor) -> "jaxtyping.Float":  # noqa: F821
    return x * w, x.exp()


@pytest.mark.parametrize("function", [a_pair, a_list, some, named])
def test_results_need_no_annotation(function):
    own = tw.fuse(function)
    for found in (own(X, W), compiled(own)(X, W)):
        torch.testing.assert_close(tuple(found), tuple(function(X, W)))
    leaf = X.clone().requires_grad_()
    (grad,) = torch.autograd.grad(sum(o.sum() for o in own(leaf, W)), leaf)
    torch.testing.assert_close(grad, W + X.exp())
    assert schemas(OPS[own.__name__]) is None


def of_any(x: Tensor, how: Any = "a") -> Tensor:
    return x * 2


def optional(x: Tensor, w: Tensor = None, p: float = None) -> Tensor:  # noqa: RUF013
    return x * 2


def literal(x: Tensor, how: typing.Literal["a", "b"] = "a") -> Tensor:
    return x * 2


def listed(x: Tensor, n: typing.List[int] = (1, 2)) -> Tensor:  # noqa: UP006
    return x * n[1]


def as_text(x: "typing.Optional[torch.Tensor]" = None) -> Tensor:  # noqa: UP045
    return x * 2


def of_flags(x: Tensor, which: tuple[bool, ...] = (True,), p: float = False) -> Tensor:
    return x * 2


def by_word(x: Tensor, mode: str = "sum") -> Tensor:
    return x * 2


def without_end(x: Tensor, p: float = math.inf) -> Tensor:
    return (x * 2).clamp(max=p)


def dims(x: Tensor, d: "tuple[int, ...] | int" = 0) -> Tensor:
    return x * 2


def of_greeks(x: Tensor, *, α: float = 2.0) -> Tensor:
    return x * α


@pytest.mark.parametrize(
    "function",
    [of_any, optional, literal, listed, as_text, of_flags, by_word, without_end, dims, of_greeks],
)
def test_whatever_a_parameter_is_annotated_with_a_call_is_taken(function):
    own = tw.fuse(function)
    assert torch.equal(own(X), X * 2)
    assert torch.equal(compiled(own)(X), X * 2)
    leaf = X.clone().requires_grad_()
    assert torch.equal(torch.autograd.grad(own(leaf).sum(), leaf)[0], torch.full_like(X, 2))


@pytest.mark.parametrize("wanted", [False, True])
def test_a_number_in_place_of_several_comes_as_it_was_given(wanted):
    def times(x: Tensor, k: int | tuple[int, ...]) -> Tensor:
        return x * k if isinstance(k, int) else x * k[0] + 100

    own = tw.fuse(times)
    x = X.clone().requires_grad_(wanted)
    assert torch.equal(own(x, 3), X * 3)
    assert torch.equal(own(x, (3,)), X * 3 + 100)
    assert torch.equal(compiled(own)(x, 3), X * 3)
    assert torch.equal(torch.vmap(lambda x: own(x, 3))(x), X * 3)


def test_what_an_annotation_says_is_still_asked_for():
    def of_whole(x: Tensor, n: int) -> Tensor:
        return x * n

    with pytest.raises(InvalidArgument, match="n=two should be int"):
        tw.fuse(of_whole)(X, "two")
