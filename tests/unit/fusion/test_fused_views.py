"""Views that split and merge dims in fused functions, group and instance norm among them, and the
gradients of slices, on both targets."""

import functools

import pytest
import torch
from fused_on_cpu import assert_verified
from torch.nn import functional as F

import tilewright as tw
from tilewright.compile import cxx
from tilewright.device import DEVICES
from tilewright.dispatch.functions.fuse import fuse
from tilewright.dispatch.functions.operator import backward_operator
from tilewright.errors import NoImplementation
from tilewright.fusion.cuda import target
from tilewright.fusion.frontend.axes import refined
from tilewright.fusion.frontend.pieces import boxed, common, in_boxes, others, within
from tilewright.impl import IMPLS
from tilewright.impls.fused import graph_of
from tilewright.op import OPS
from tilewright.tensor_spec import TensorSpec

H200 = DEVICES["h200"]
pytestmark = [
    pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing())),
    pytest.mark.usefixtures("forgets_functions"),
]


def normed(groups):
    def group_norm(x, weight, bias):
        return F.group_norm(x, groups, weight, bias)

    return group_norm


def instance_norm(x, weight, bias):
    return F.instance_norm(x, weight=weight, bias=bias)


def by_heads(x, weight):
    heads = x.view(*x.shape[:-1], -1, weight.shape[0])
    return F.rms_norm(heads, weight.shape, weight).flatten(-2)


def rotated_heads(x, cos):
    left, right = x.unflatten(-1, (-1, 2 * cos.shape[-1])).chunk(2, -1)
    return torch.cat((left * cos, right - left), -1).flatten(-2)


CHANNELS_LAST = TensorSpec("f32", (2, 8, 3, 5), (120, 1, 40, 8))
VIEWS = {
    "group norm": (normed(4), (2, 8, 3, 5), (8,), (8,)),
    "group norm of one group": (normed(1), (2, 6, 7), (6,), (6,)),
    "group norm of as many groups as channels": (normed(6), (3, 6, 5, 5), (6,), (6,)),
    "group norm without parameters": (lambda x: F.group_norm(x, 2), (2, 8, 3, 5)),
    "group norm of one pixel": (normed(2), (5, 12), (12,), (12,)),
    "group norm, channels last": (normed(4), CHANNELS_LAST, (8,), (8,)),
    "group norm of halves": (normed(3), TensorSpec("bf16", (2, 6, 4, 4)),
                             TensorSpec("bf16", (6,)), TensorSpec("bf16", (6,))),
    "instance norm": (instance_norm, (2, 5, 3, 7), (5,), (5,)),
    "instance norm without parameters": (lambda x: F.instance_norm(x), (2, 5, 9)),
    "heads": (by_heads, (2, 3, 32), (8,)),
    "rotated heads": (rotated_heads, (2, 5, 24), (5, 1, 4)),
    "pixels": (lambda x: x.flatten(1).softmax(-1).view(x.shape), (3, 4, 5)),
    "tiles": (lambda x: x.unflatten(0, (2, 3)).unflatten(2, (2, 4)).amax((1, 3)), (6, 8)),
    "shuffled": (lambda x, y: x.unflatten(1, (2, 3)).transpose(1, 2).flatten(1, 2) * y,
                 (4, 6, 5), (6, 1)),
    "slices of merged dims": (lambda x: x.exp().flatten(1)[:, 5:10] + x.flatten(1)[:, ::5][:, :1],
                             (4, 3, 5)),
    "repeated": (lambda x, y: x.repeat(2, 3) + y, (4, 5), (8, 15)),
}  # fmt: skip
SLICES = {
    "steps": (lambda x: torch.tanh(x[:, 1:5:2]) + x[:, -2:], (4, 6)),
    "overlapping": (lambda x: x[:, 1:] * 2 - x[:, :-1].exp(), (4, 9)),
    "overlapping steps": (lambda x: x[::2, :3] * x[::3, 2:5].sum(0), (12, 6)),
    "two dims": (lambda x: x[1:, 1:] * x[:-1, :-1], (5, 7)),
    "several": (lambda x: (x[:, :, 1:] - x[:, :, :-1])[:, 1:] * 2, (3, 5, 7)),
    "select": (lambda x: x[:, 0] * x.select(1, -1), (4, 6)),
    "unbind": (lambda x: (lambda a, b, c: a * b + c)(*x.unbind(1)), (4, 3, 6)),
    "chunks of different sizes": (lambda x: x[:, :2].sum(1) * x[:, 2:].amax(1), (4, 6)),
    "heads of three": (lambda x: (lambda q, k, v: q * k - v)(*x.view(4, 3, 2, 5).unbind(1)),
                       (4, 30)),
    "halves": (lambda x: F.silu(x[..., ::2]) * x[..., 1::2], TensorSpec("bf16", (6, 32))),
    "one of all": (lambda x: x[0:4], (4, 6)),
}  # fmt: skip


def workloads(function, *specs):
    """The function's, and its gradients'."""
    fuse(function, name="viewed")
    op = OPS["viewed"]
    specs = [s if isinstance(s, TensorSpec) else TensorSpec("f32", s) for s in specs]
    given = dict(zip(op.parameters, specs, strict=False))
    w = op.workload(**given)
    (out,) = w.outputs
    return w, backward_operator(op, 1).workload(grad_output=out, **given)


@pytest.mark.parametrize("case", [*VIEWS, *SLICES])
def test_views_and_slices_and_their_gradients_are_within_what_fp64_allows(case):
    for w in workloads(*{**VIEWS, **SLICES}[case]):
        assert_verified(w, lucky=True)


@pytest.mark.parametrize("function", [normed(1), normed(2), normed(6), instance_norm])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_gradients_of_group_and_instance_norm_are_those_of_fp64(function, layout):
    x = torch.randn(3, 6, 5, 7).to(memory_format=layout).requires_grad_()
    weight, bias = (torch.randn(6, requires_grad=True) for _ in range(2))
    out = tw.fuse(function)(x, weight, bias)
    gradient = torch.randn_like(out)
    found = torch.autograd.grad(out, (x, weight, bias), gradient)
    wide = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    right = function(*wide)
    expected = torch.autograd.grad(right, wide, gradient.double())
    torch.testing.assert_close(out, right.float(), rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs.float(), rtol=1e-4, atol=1e-4)


def test_group_norm_of_no_images_is_empty_and_so_are_its_gradients():
    x = torch.randn(0, 6, 5, 7, requires_grad=True)
    weight, bias = (torch.randn(6, requires_grad=True) for _ in range(2))
    out = tw.fuse(normed(2))(x, weight, bias)
    assert out.shape == x.shape
    found = torch.autograd.grad(out.sum(), (x, weight, bias))
    assert [g.abs().sum().item() for g in found] == [0, 0, 0]


def test_a_view_that_only_names_pixels_anew_leaves_one_kernel_that_reads_each_element_once():
    w, _ = workloads(by_heads, (64, 512), (64,))
    graph = graph_of(w)
    assert len(graph.inputs) == 2
    assert graph.space == (512, 64)
    assert len(IMPLS["fused"].describe(target.heuristic(graph, H200), w, H200)) == 1


def test_what_is_cut_in_two_ways_is_read_in_both():
    w, _ = workloads(lambda x: x.view(2, 3) * x.view(3, 2).sum(1), (6,))
    assert_verified(w, lucky=True)


UNFITTING = {
    "rows": (lambda x: x.view(4, 3, 5).softmax(-1), (6, 10)),
    "rows and back": (lambda x: F.rms_norm(x.view(4, 15), (15,)).view(6, 10), (6, 10)),
    "groups": (lambda x: F.layer_norm(x.view(4, 1, 3, 5), (3, 5)).sum(0), (6, 1, 10)),
    "a result": (lambda x: x.softmax(-1).view(4, 15), TensorSpec("bf16", (6, 10))),
    "one number": (lambda x: torch.ones(6, 10).view(4, 15) * x, (4, 15)),
}  # fmt: skip
ELEMENTS = {
    "columns": (lambda x, y: x.t().view(15, 4).amax(-1) * y,
                TensorSpec("f32", (10, 6), (1, 10)), (15,)),
    "of some rows": (lambda x: x[1:5].view(5, 8).softmax(-1), (6, 10)),
    "of two": (lambda x, y: (x * y.exp()).view(4, 15).sum(-1), (6, 10), (6, 10)),
    "by what all sum to": (lambda x: (x / x.norm()).view(4, 15).softmax(-1), (6, 10)),
}  # fmt: skip


@pytest.mark.parametrize("case", [*UNFITTING, *ELEMENTS])
def test_tensors_are_read_and_results_stored_along_dims_that_do_not_fit_theirs(case):
    both = workloads(*{**UNFITTING, **ELEMENTS}[case])
    for w in both if case in UNFITTING else both[:1]:
        assert_verified(w, lucky=True)


@pytest.mark.parametrize("layout", ["one number", "rows", "columns", "steps"])
def test_gradients_of_any_layout_are_read_along_dims_that_do_not_fit(layout):
    def stored(x):
        return x.softmax(-1).view(4, 15)

    upstream = {
        "one number": torch.rand(1, 1).expand(4, 15),
        "rows": torch.rand(4, 1).expand(4, 15),
        "columns": torch.rand(15, 4).t(),
        "steps": torch.rand(4, 30)[:, ::2],
    }[layout]
    found = []
    for function in (tw.fuse(stored), stored):
        x = torch.linspace(-1, 2, 60).reshape(6, 10).requires_grad_()
        found += torch.autograd.grad(function(x), x, upstream)
    torch.testing.assert_close(*found)


def test_a_mask_is_the_same_along_dims_that_do_not_fit():
    @tw.fuse
    def dropped(x):
        return F.dropout(x, 0.5).view(4, 15).sum(-1)

    x, seed = torch.rand(6, 10), torch.tensor(5)
    found = dropped(x, seed=seed)
    with tw.use("aten", op="dropped"):
        torch.testing.assert_close(found, dropped(x, seed=seed))


def test_dims_that_do_not_fit_each_other_are_refused_with_their_line():
    def shuffled(x):
        rows = x.view(2, 3).softmax(-1)
        return rows.view(3, 2).softmax(-1)

    line = shuffled.__code__.co_firstlineno + 2
    with pytest.raises(NoImplementation, match=rf"\[2, 3\] to \[3, 2\].*views\.py:{line}"):
        tw.fuse(shuffled)(torch.randn(6))


def test_factors_are_common_to_all_that_have_them():
    assert refined([6, 4], [24]) == (6, 4)
    assert refined([12, 2], [3, 8]) == (3, 4, 2)
    assert refined([2, 3], [3, 2]) is None
    assert refined([0, 3], [0, 3]) == (0, 3)


RANGES = [range(a, b, s) for a in range(4) for b in range(a + 1, 12) for s in (1, 2, 3, 5)]


def test_ranges_meet_and_leave_what_sets_do():
    for a in RANGES:
        left = others(a, 12)
        assert sorted(i for r in left for i in r) == sorted(set(range(12)) - set(a))
        for b in RANGES:
            both = common(a, b)
            assert set(both) == set(a) & set(b)
            if both:
                assert [b[k] for k in within(both, b)] == list(both)


def test_elements_of_a_dim_are_a_box_of_its_factors_or_none():
    boxes = 0
    for sizes in ([3, 4], [2, 3, 2], [12], [2, 6]):
        strides = [functools.reduce(int.__mul__, sizes[k + 1 :], 1) for k in range(len(sizes))]
        for elements in RANGES:
            box = boxed(elements, sizes)
            if box is None:
                assert len(elements) > 1
                assert len(sizes) > 1
                continue
            boxes += 1
            found = [0]
            for r, stride in zip(box, strides, strict=True):
                found = [i + stride * k for i in found for k in r]
            assert found == list(elements)
    assert boxes > len(RANGES)


def test_elements_of_a_dim_are_boxes_of_its_factors_one_after_another():
    several = 0
    for sizes in ([3, 4], [2, 3, 2], [12], [2, 6]):
        for elements in filter(None, RANGES):
            found = in_boxes(elements, sizes, 12)
            assert [i for r in found for i in r] == list(elements)
            assert None not in [boxed(r, sizes) for r in found]
            several += len(found) > 1
    assert several > len(RANGES) // 4
    assert len(in_boxes(range(3, 60), [6, 10], 64)) == 2
    assert in_boxes(range(0, 6000, 7), [600, 10], 64) is None
