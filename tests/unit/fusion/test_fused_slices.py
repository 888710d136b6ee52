"""Slices of tensors in fused functions, and results put together of slices, on both targets."""

import math

import pytest
import torch
from fused_on_cpu import assert_verified
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import tilewright as tw
from tilewright.compile import cxx
from tilewright.device import DEVICES
from tilewright.dispatch.functions.fuse import fuse
from tilewright.dispatch.functions.operator import backward_operator
from tilewright.fusion.cuda import target
from tilewright.fusion.frontend.pieces import others
from tilewright.fusion.segments import cut
from tilewright.impl import IMPLS
from tilewright.impls.fused import graph_of
from tilewright.op import OPS
from tilewright.tensor_spec import TensorSpec

H200 = DEVICES["h200"]
pytestmark = [
    pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing())),
    pytest.mark.usefixtures("forgets_functions"),
]


def swiglu(x):
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def rotated(x, cos, sin):
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


def reductions(x, y):
    both = torch.cat((x, y * 2), 0)
    return (
        both.square().sum(),
        both.square().mean(0),
        both.amax(0),
        both.prod(0),
        (both > 2).any(0),
        both.amin(-1),
    )


def merged_patches(x, weight):
    """A Swin Transformer's."""
    four = torch.cat([x[:, i::2, j::2] for j in range(2) for i in range(2)], -1)
    return F.layer_norm(four, four.shape[-1:], weight)


def moments(x):
    pieces = x.roll(3, -1) + x
    return (
        *torch.var_mean(pieces, -1, correction=3),
        pieces.std(0, keepdim=True),
        F.pad(x, (1, 2, 3, 0)).var(),
        torch.cat((x[:, :1].expand(-1, 4), x.double()), -1).var(-1, correction=0),
        torch.cat((x, x), -1).sum(-1) / (2 * x.shape[-1]),
    )


def windowed(x, y):
    rows = torch.slice_scatter(x[:, 1:5], y, 2, 2, 8, 2)
    return torch.slice_scatter(x, rows, 1, 2, 6)


WITH_GRADIENTS = {
    "swiglu": (swiglu, "f32", (6, 64)),
    "swiglu of halves": (swiglu, "bf16", (6, 96)),
    "swiglu of an odd width": (swiglu, "f16", (5, 34)),
    "geglu": (lambda x: (lambda a, b: a * F.gelu(b))(*x.split([20, 20], -1)), "f32", (6, 40)),
    "glu over rows": (lambda x: F.glu(x, 0), "f32", (6, 40)),
    "three slices": (lambda x: (lambda q, k, v: (q * k).sum(-1) + v.amax(-1))(*x.chunk(3, 1)),
                    "f32", (6, 48)),
    "slices of steps": (lambda x: (lambda a, b: a * b)(*torch.tanh(x * 2).chunk(2, 1)),
                       "f32", (6, 40)),
    "rotated": (rotated, "f32", (3, 5, 32), (5, 32), (5, 32)),
    "some of softmax": (lambda x: x.softmax(-1)[:, 1:] * 2, "f32", (6, 33)),
    "normed together": (lambda x, y: (lambda both: both - both.mean(-1, keepdim=True))(
                            torch.cat((x, y.exp()), -1)), "f32", (6, 13), (6, 20)),
    "padded": (lambda x, y: (F.pad(x, (2, 1, 0, 3), value=-1.5) + y).softmax(-1),
               "f32", (5, 17), (8, 20)),
    "padded and cut": (lambda x: F.pad(x * 2, (-3, 2, 1, -1)).exp(), "bf16", (6, 20)),
    "rolled": (lambda x: (x.roll((1, -2), (0, 1)) - x).softmax(-1), "f32", (5, 17)),
    "rolled without dims": (lambda x: x.roll(-4) * x, "f16", (5, 17)),
    "norms of patches": (merged_patches, "f32", (2, 4, 6, 8), (32,)),
    "norms of halves": (lambda x, y: F.layer_norm(torch.cat((x, y), -1), (33,)),
                        "bf16", (6, 13), (6, 20)),
    "norms of doubles": (lambda x, y: F.group_norm(torch.cat((x, y), 1), 2), "f64",
                         (2, 3, 5), (2, 5, 5)),
    "norms of a stencil": (lambda x: F.instance_norm(x + F.pad(x, (1, 1, 1, 1))[..., 2:, 2:]),
                           "f32", (2, 3, 4, 5)),
    "norms of a batch": (lambda x: F.batch_norm(x.roll(1, -1) * x, None, None, training=True),
                         "f32", (4, 4, 5)),
    "deviations of what is rolled": (lambda x: x.roll(1, -1).std(-1), "f32", (6, 40)),
}  # fmt: skip
VALUES = {
    "an end": (lambda x: x[..., 1:] * 2 - x[..., :-1], "f32", (6, 33)),
    "every third": (lambda x: x[1::3, ::2].exp(), "f32", (7, 20)),
    "whose ends PyTorch leaves out": (lambda x, y: torch.trapezoid(x, y, dim=0), "f32", (7, 20),
                                      (7, 20)),
    "one row": (lambda x: x - x[0] + x[:, -1:], "f32", (6, 40)),
    "slices of softmax": (lambda x: (lambda a, b: a * b)(*x.softmax(-1).chunk(2, -1)),
                         "f32", (6, 40)),
    "several put together": (lambda x: torch.cat((x, x.exp(), x[:, :3]), -1), "bf16", (6, 13)),
    "reduced along what was put together": (reductions, "f32", (4, 13), (3, 13)),
    "moments along what was put together": (moments, "f32", (5, 17)),
    "reduced along both of two cuts": (lambda x, y: windowed(x, y).sum((1, 2)), "f32", (3, 8, 9),
                                       (3, 4, 3)),
    "reduced along one of two cuts": (lambda x, y: windowed(x, y).amax(1), "f32", (3, 8, 9),
                                      (3, 4, 3)),
}  # fmt: skip


@pytest.mark.parametrize("case", [*WITH_GRADIENTS, *VALUES])
def test_slices_and_what_is_put_together_of_them_are_within_what_fp64_allows(case):
    function, dtype, *shapes = {**WITH_GRADIENTS, **VALUES}[case]
    fuse(function, name="slices")
    op = OPS["slices"]
    specs = [TensorSpec(dtype, shape) for shape in shapes]
    given = dict(zip(op.parameters, specs, strict=False))
    w = op.workload(**given)
    assert_verified(w)
    if case in WITH_GRADIENTS:
        (out,) = w.outputs
        assert_verified(backward_operator(op, 1).workload(grad_output=out, grads=("x",), **given))


def test_swiglu_of_one_tensor_is_one_kernel_that_reads_and_writes_each_element_once():
    fuse(swiglu)
    spec = TensorSpec("bf16", (64, 512))
    w = OPS["swiglu"].workload(x=spec)
    graph = graph_of(w)
    assert [a.offset for a in graph.inputs] == [0, 256]
    assert len(IMPLS["fused"].describe(target.heuristic(graph, H200), w, H200)) == 1
    gradient = backward_operator(OPS["swiglu"], 1).workload(grad_output=w.outputs[0], x=spec)
    graph = graph_of(gradient)
    assert len(graph.inputs) == 3
    assert graph.written == ((0, 0), (0, 512))
    assert len(IMPLS["fused"].describe(target.heuristic(graph, H200), gradient, H200)) == 1


def test_a_call_and_its_gradient_take_tensors_that_begin_anywhere():
    fused = tw.fuse(swiglu)
    for first in range(3):
        x = torch.randn(4, 43)[:, first : first + 40].detach().requires_grad_()
        own, right = fused(x), swiglu(x)
        torch.testing.assert_close(own, right)
        found = torch.autograd.grad(own.square().sum(), x)
        expected = torch.autograd.grad(right.square().sum(), x)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.pad(x, (2, 2), value=-math.inf).amax(-1),
        lambda x: F.pad(x > 0, (1, 1), value=True),
        lambda x: F.pad(x, (0, 0)),
        lambda x: F.pad(x, (1, 0))[:, :-1] * 2,
        lambda x: F.pad(x, (-3, -2)),
        lambda x: x.roll(14, 1) + 1,
        lambda x: x.roll(-15, (1,)) + 1,
        lambda x: x.roll((1, 1), (1, 1)),
    ],
)
@pytest.mark.parametrize("shape", [(4, 7), (0, 7)])
def test_pads_and_rolls_are_pytorchs(function, shape):
    x = torch.randn(shape)
    assert torch.equal(tw.fuse(function, name="padded_or_rolled")(x), function(x))


EMPTY_SLICES = {
    "none is left": (lambda x: x[1:] + x[:-1], (1, 3)),
    "differences of one": (lambda x: x.diff(), (3, 1)),
    "beside another": (lambda x: (x[1:] * 2, x.sum(-1)), (1, 3)),
    "halves": (lambda x: (x[1:], x.exp()), (1, 3)),
}


@pytest.mark.parametrize("case", EMPTY_SLICES)
def test_results_without_elements_are_pytorchs(case):
    function, shape = EMPTY_SLICES[case]
    fused = tw.fuse(function, name="empty_slice")
    x = torch.randn(shape, dtype=torch.float16 if case == "halves" else None, requires_grad=True)
    torch.testing.assert_close(fused(x), function(x))
    totals = [sum(o.sum() for o in tree_leaves(f(x))) for f in (fused, function)]
    torch.testing.assert_close(*(torch.autograd.grad(total, x) for total in totals))


OF_NOTHING = {
    "sum": lambda none: none.sum(0),
    "mean": lambda none: none.mean(0),
    "product": lambda none: none.prod(0),
    "any": lambda none: none.any(0),
    "all": lambda none: (none > 0).all(),
    "count": lambda none: (none > 0).sum(0),
    "softmax": lambda none: none.softmax(0).sum(),
    "greatest of each": lambda none: none.amax(1).sum(),
    "two": lambda none: (none.softmax(0) + none.softmax(1)).sum(),
}


@pytest.mark.parametrize("case", OF_NOTHING)
def test_a_reduction_over_no_elements_is_pytorchs(case):
    def function(x):
        return torch.where(x > 0, OF_NOTHING[case](x[1:]) + x, x)

    fused = tw.fuse(function, name="of_nothing")
    x = torch.tensor([[0.5, math.inf, -2.0, 3.0, 0.0]], requires_grad=True)
    torch.testing.assert_close(fused(x), function(x), equal_nan=True)
    totals = [f(x).sum() for f in (fused, function)]
    gradients = [torch.autograd.grad(total, x)[0] for total in totals]
    torch.testing.assert_close(*gradients, equal_nan=True)


WRITES_TO_NOTHING = {
    "a slice": (lambda y, x: y[:, 1:1].add_(x[:, :0]), (4, 2)),
    "a mask": (lambda y, x: y[:, :0].masked_fill_(y[:, :0] > 0, 0.3), (4, 2)),
    "a view": (lambda y, x: y[:, :0].view(-1)[0:0].copy_(x[0, :0]), (4, 2)),
    "of one column": (lambda y, x: y[:, :-3].mul_(x), (4, 1)),
    "rows": (lambda y, x: y[4:].copy_(x[4:].softmax(0)), (4, 2)),
}


@pytest.mark.parametrize("case", WRITES_TO_NOTHING)
def test_writes_to_no_elements_change_nothing(case):
    write, shape = WRITES_TO_NOTHING[case]

    def function(x):
        y = x * 2
        y[:, -1] = 0.25
        write(y, x)
        y[1] *= 3.0
        empty = y[:, :-3] * x.sum()
        return y + empty.sum(), empty

    fused = tw.fuse(function, name="written_nowhere")
    x = torch.randn(shape, requires_grad=True)
    torch.testing.assert_close(fused(x), function(x))
    totals = [sum(o.sum() for o in f(x)) for f in (fused, function)]
    torch.testing.assert_close(*(torch.autograd.grad(total, x) for total in totals))


@given(
    value=st.floats(-1e9, 1e9, width=32),
    widths=st.lists(st.integers(1, 40), min_size=2, max_size=4),
)
@settings(max_examples=15, deadline=None)
def test_equal_numbers_that_are_put_together_have_no_deviations(value, widths):
    def norms(x):
        both = torch.cat(x.split(widths, -1)[::-1], -1)
        return F.layer_norm(both, both.shape[-1:]), both.var(-1), both.mean(-1)

    x = torch.full((3, sum(widths)), value)
    normed, variance, mean = fuse(norms, name="equal")(x)
    assert not normed.any()
    assert not variance.any()
    assert torch.equal(mean, x[:, 0])


@pytest.mark.parametrize("width", [0, 2])
def test_the_gradient_of_what_is_padded_all_around_is_pytorchs(width):
    """That of no elements is a pad by which nothing is left."""

    def padded(x):
        return F.pad(x[:, :width], (1, 1), value=2.0) * x[:, : width + 2]

    x = torch.arange(12.0).view(3, 4).requires_grad_()
    own = tw.fuse(padded, name="padded_or_rolled")
    found, right = (torch.autograd.grad(f(x).square().sum(), x)[0] for f in (own, padded))
    assert torch.equal(found, right)


def test_every_nth_element_and_its_gradient_are_one_kernel(forgets_functions):
    """Of each all that is left is every n-th element, too, and so no other pieces."""

    def rotated(x, cos, sin):
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)

    def turned(x, cos, sin):
        a, b, c = (x[..., k::3] for k in range(3))
        return torch.stack((b * cos, c * sin, a * b), -1).flatten(-2)

    for function, n in ((rotated, 2), (turned, 3)):
        own, width = tw.fuse(function), 5 * n
        cos, sin = torch.rand(2, 5, dtype=torch.float64)
        x = torch.rand(4, width, dtype=torch.float64, requires_grad=True)
        torch.testing.assert_close(own(x, cos, sin), function(x, cos, sin))
        found, right = (torch.autograd.grad(f(x, cos, sin).exp().sum(), x) for f in (own, function))
        torch.testing.assert_close(found, right)
        given = f"grad_output=f32[40,{width}], x=f32[40,{width}], cos=f32[5], sin=f32[5]"
        w = tw.Workload.parse(f"{function.__name__}_backward({given}, grads=[x])")
        assert len(cut(graph_of(w)).segments) == 1


@pytest.mark.parametrize(
    ("elements", "size", "left"),
    [
        (range(0, 10, 2), 10, [range(1, 10, 2)]),
        (range(1, 9, 3), 9, [range(0, 7, 3), range(2, 9, 3)]),
        (range(0, 50, 100), 50, [range(1, 50)]),
        (range(0, 5, 2), 9, [range(1, 4, 2), range(5, 9)]),
        (range(3, 6), 9, [range(3), range(6, 9)]),
    ],
)
def test_what_is_left_of_a_dim_is_in_few_stretches(elements, size, left):
    found = others(elements, size)
    assert found == left
    assert sorted([*elements, *(i for r in found for i in r)]) == [*range(size)]
