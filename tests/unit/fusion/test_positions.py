"""Positions that a function counts itself, and elements that labels name."""

import re

import pytest
import torch
from torch.nn import functional as F

import tilewright as tw
from counted import BY_LABELS, WITH_POSITIONS
from on_targets import TARGETS, executable
from tilewright.device import DEVICES
from tilewright.dispatch.functions.fuse import fuse
from tilewright.errors import InvalidArgument, NoImplementation
from tilewright.impl import IMPLS
from tilewright.impls.fused import graph_of
from tilewright.measure.verify import Verifier
from tilewright.op import OPS

pytestmark = pytest.mark.usefixtures("forgets_functions")

CPU = torch.device("cpu")
EVERY = {**WITH_POSITIONS, **BY_LABELS}


def workload(function, *tensors):
    fuse(function, name="counted")
    return OPS["counted"].workload_of(*tensors)[0]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("dtype", "rows", "columns"), [(torch.float32, 40, 1003), (torch.bfloat16, 33, 64)]
)
@pytest.mark.parametrize("name", EVERY)
def test_they_pass_verification(target, dtype, rows, columns, name):
    x, labels = torch.zeros(rows, columns, dtype=dtype), torch.zeros(rows, dtype=torch.int64)
    w = workload(EVERY[name], x, labels)
    verdict = Verifier(w, CPU).check(executable(target, w))
    assert verdict.ok, verdict.message


@pytest.mark.parametrize("name", EVERY)
def test_calls_and_gradients_are_pytorchs(name):
    torch.manual_seed(0)
    x = torch.randn(17, 103, requires_grad=True)
    labels = torch.randint(0, 17, (17,))
    fused = tw.fuse(EVERY[name], name="counted")
    with tw.use("fused"):
        found = fused(x, labels)
        found = found if isinstance(found, tuple) else (found,)
        (grad,) = torch.autograd.grad(found[0].square().sum(), x)
    wide = x.detach().double().requires_grad_()
    right = EVERY[name](wide, labels)
    right = right if isinstance(right, tuple) else (right,)
    (right_grad,) = torch.autograd.grad(right[0].square().sum(), wide)
    for one, other in zip((*found, grad), (*right, right_grad), strict=True):
        near = 2e-6 * max(1.0, other.abs().max().item())
        torch.testing.assert_close(one.double(), other.double(), rtol=2e-5, atol=near)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, i: x.expand(5, 7, 6).gather(1, i).sum(),
        lambda x, i: x.expand(5, 7, 6).gather(1, i).mean((0, 2)),
        lambda x, i: x.expand(5, 7, 6).gather(1, i).sum(0) + x,
        lambda x, i: x.expand(5, 7, 6).gather(1, i).prod(0),
        lambda x, i: x.sum().expand(5, 7, 6).gather(1, i).var(0) + x,
        lambda x, i: torch.full((5, 7, 6), 0.5, device=x.device).gather(1, i).sum((0, 1)) + x,
        lambda x, i: torch.zeros(5, 7, 6, device=x.device).gather(1, i).amax(0),
        lambda x, i: x[:1, None, None].expand(5, 7, 6).gather(1, i) * 2,
    ],
)
@pytest.mark.parametrize("target", TARGETS)
def test_what_is_picked_repeats_where_only_the_index_varies(target, function):
    torch.manual_seed(0)
    x, i = torch.rand(6) + 0.5, torch.randint(0, 7, (5, 1, 6))
    right = function(x, i)
    torch.testing.assert_close(executable(target, workload(function, x, i))(x, i), right)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("x_dtype", "columns"), [(torch.float32, 1003), (torch.bfloat16, 64)])
def test_an_index_may_name_no_element(target, dtype, x_dtype, columns):
    def named(x, index):
        at = torch.arange(x.shape[-1], dtype=index.dtype, device=x.device)
        hit = at == index[:, None]
        return torch.where(hit, x, 0.0).sum(-1), torch.where(hit, 2 * x, x)

    index = torch.tensor([-1, 0, columns - 1, columns, -3, columns + 2, 5, -(2**31)], dtype=dtype)
    x = torch.rand(len(index), columns).add_(1).to(x_dtype)
    for found, right in zip(
        executable(target, workload(named, x, index))(x, index), named(x, index), strict=True
    ):
        assert torch.equal(found, right)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("each", r"Sum::join\(acc\d+\[r\], fold_named\(v\d+, s\d+\[r\], v\d+\)\)"),
        ("scatter", r"where_named<8>\(s\d+\[r\], v\d+, s\d+, v\d+\)"),
    ],
)
def test_vectors_that_have_no_named_element_are_passed_by(name, step):
    x, labels = torch.zeros(2048, 1024, dtype=torch.bfloat16), torch.zeros(2048, dtype=torch.int64)
    w, h200, fused = workload(BY_LABELS[name], x, labels), DEVICES["h200"], IMPLS["fused"]
    assert re.search(step, fused.task(fused.untuned(w, h200), w, h200).source)


def test_labels_lie_in_images_and_have_weights():
    torch.manual_seed(0)
    x, weight = torch.randn(4, 7, 5, 6, requires_grad=True), torch.rand(7)
    labels = torch.randint(0, 7, (4, 5, 6))
    labels[1, 2] = -100
    fused = tw.fuse(lambda x, labels, w: F.cross_entropy(x, labels, w), name="weighted")
    with tw.use("fused"):
        found = fused(x, labels, weight)
        (grad,) = torch.autograd.grad(found, x)
    right = F.cross_entropy(x, labels, weight)
    torch.testing.assert_close(found, right)
    torch.testing.assert_close(grad, *torch.autograd.grad(right, x))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, i: x.sum(1, keepdim=True).expand(-1, 10).gather(1, i),
        lambda x, i: torch.zeros_like(x).gather(1, i) + x,
        lambda x, i: F.nll_loss(x[:, :1].expand(-1, 5), i[:, 0] * 0),
        lambda x, i: F.cross_entropy((x * 2).double(), i[:, 0]),
        lambda x, i: ((x * 2).double() + x.double()).gather(1, i),
        lambda x, i: x.gather(1, i.float().long()),
        lambda x, i: x.gather(1, (x > 0).sum(1, keepdim=True) - 1),
        lambda x, i: x.gather(1, torch.where(i > 5, 0, 3)),
    ],
)
@pytest.mark.parametrize("target", TARGETS)
def test_what_is_picked_may_be_constant_wide_or_named_by_floats(target, function):
    torch.manual_seed(0)
    x, i = torch.randn(6, 10).abs_(), torch.randint(0, 10, (6, 1))
    w = workload(function, x, i)
    torch.testing.assert_close(executable(target, w)(x, i), function(x, i))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("target", TARGETS)
def test_an_index_into_a_row_has_any_shape_and_counts_from_either_end(target, dtype):
    def function(x, i):
        return x[i] * 2, x.index_put((i,), x[:1], accumulate=True)

    x, i = torch.randn(7), torch.randint(-7, 7, (5, 3), dtype=dtype)
    found = executable(target, workload(function, x, i))(x, i)
    torch.testing.assert_close(tuple(found), function(x, i))


@pytest.mark.parametrize("size", [0, 1, 9])
def test_a_row_is_read_and_added_to_by_as_many_elements_as_are_named(size):
    def function(x, i):
        return x.gather(0, i).sum() + x.scatter_add(0, i, x[:1].expand(i.shape))

    x, i = torch.randn(4, requires_grad=True), torch.randint(0, 4, (size,))
    fused = tw.fuse(function, name="named")
    totals = [f(x, i).square().sum() for f in (fused, function)]
    torch.testing.assert_close(*totals)
    torch.testing.assert_close(*(torch.autograd.grad(total, x) for total in totals))


def test_elements_that_no_index_names_keep_the_sign_of_zero():
    x, i = torch.full((3, 4), -0.0), torch.zeros(3, 1, dtype=torch.int64)
    fused = tw.fuse(lambda x, i, src: 1 / x.scatter_add(1, i, src), name="signs")
    found = fused(x, i, torch.ones(3, 1))
    assert torch.equal(found, 1 / x.scatter_add(1, i, torch.ones(3, 1)))
    fused = tw.fuse(lambda x, i: 1 / x[0].scatter_add(0, i[0], x[0, :1] + 1), name="of_one_row")
    assert torch.equal(fused(x, i), 1 / torch.tensor([1.0, -0.0, -0.0, -0.0]))


def test_examples_name_elements_of_the_whole_row_or_are_of_either_sign():
    x, labels = torch.zeros(400, 300), torch.zeros(400, dtype=torch.int64)
    for function, least, most in (
        (F.cross_entropy, 0, 299),
        (lambda x, i: x.gather(0, i[:300][None]), 0, 399),
        (lambda x, i: torch.where(i[:, None] < 0, x, 0.0), -3, 3),
    ):
        w = workload(lambda x, i, function=function: function(x, i), x, labels)
        _, drawn = w.operator.examples(w, "random", 0)
        assert least <= drawn.min() <= least + 5
        assert most - 5 <= drawn.max() <= most


@pytest.mark.parametrize("name", ["cross_entropy", "each", "scatter"])
def test_a_kernel_that_misses_later_labels_is_refused(name):
    x, labels = torch.zeros(64, 5000), torch.zeros(64, dtype=torch.int64)
    w = workload(BY_LABELS[name], x, labels)
    right = executable("cpp", w)
    verifier = Verifier(w, CPU)
    assert verifier.check(right).ok
    assert not verifier.check(lambda x, labels: right(x, labels.clamp(max=3))).ok


PLACES = {
    "argmax": lambda x: x.argmax(-1),
    "argmin": lambda x: x.argmin(0, keepdim=True),
    "of all": lambda x: (x.argmax(), x.min(1).indices),
    "of what follows": lambda x: (2 - x.abs()).max(1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", PLACES)
def test_of_equals_the_first_is_the_place_of_the_greatest(name, target, dtype):
    torch.manual_seed(0)
    x = torch.randint(-3, 4, (40, 77)).to(dtype)
    x[3, 70], x[4], x[5, 9], x[6, 60] = torch.nan, -torch.inf, torch.inf, torch.nan
    x[6, 61] = torch.nan
    found, right = executable(target, workload(PLACES[name], x))(x), PLACES[name](x)
    pairs = zip(found, right, strict=True) if isinstance(right, tuple) else [(found, right)]
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_places_of_booleans_are_refused_as_by_pytorch():
    with pytest.raises(InvalidArgument, match=r"argmax\(\) does not support bool input"):
        tw.fuse(lambda x: x.argmax(-1), name="counted")(torch.ones(3, 4, dtype=torch.bool))


def test_gradients_of_the_greatest_go_to_the_first_of_equals():
    x = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]], requires_grad=True)
    fused = tw.fuse(lambda x: x.max(-1).values, name="counted")
    with tw.use("fused"):
        (grad,) = torch.autograd.grad(fused(x).sum(), x)
    assert torch.equal(grad, *torch.autograd.grad(x.max(-1).values.sum(), x))


def test_a_row_of_one_and_labels_of_32_bits():
    x, labels = torch.randn(5, 1), torch.zeros(5, 1, dtype=torch.int32)
    fused = tw.fuse(lambda x, i: x.gather(1, i.long()) + torch.arange(1), name="alone")
    assert torch.equal(fused(x, labels), x)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, i: x.max(0).values * 2,
        lambda x, i: x.min(-1, keepdim=True).values * x,
        lambda x, i: x.gather(0, i) * x,
        lambda x, i: x.scatter_add(-1, i, x * 2) * x,
    ],
)
def test_a_number_is_a_row_of_one(function):
    x, i = torch.tensor(3.0, requires_grad=True), torch.tensor(0)
    found, right = tw.fuse(function, name="alone")(x, i), function(x, i)
    assert torch.equal(found, right)
    assert torch.equal(*torch.autograd.grad(found, x), *torch.autograd.grad(right, x))


def test_the_loss_of_labels_is_one_walk_over_logits():
    """And puts together what blocks found; its gradient is one walk over them again."""
    x, labels = torch.zeros(8192, 4096), torch.zeros(8192, dtype=torch.int64)
    w = workload(BY_LABELS["cross_entropy"], x, labels)
    fused, h200 = IMPLS["fused"], tw.device.DEVICES["h200"]
    first, *others = fused.describe(fused.heuristic(w, h200), w, h200)
    assert "space [8192, 4096]" in first
    assert not any("4096" in line for line in others)
    each = workload(BY_LABELS["each"], x, labels)
    assert len(fused.describe(fused.heuristic(each, h200), each, h200)) == 1


def test_another_number_of_rows_follows_from_two_others():
    fused = tw.fuse(lambda x, labels: F.cross_entropy(x.tril(), labels), name="many")
    for rows in (3, 5, 9, 17, 33, 65, 129):
        x, labels = torch.randn(rows, 40), torch.randint(0, 40, (rows,))
        torch.testing.assert_close(fused(x, labels), F.cross_entropy(x.tril(), labels))


@pytest.mark.parametrize("first", [0, 3])
def test_positions_are_no_memory(first):
    w = workload(lambda x, labels: x + torch.arange(first, first + 64), torch.zeros(9, 64), None)
    graph = graph_of(w)
    assert [a.generator is None for a in graph.inputs] == [True, False]
    assert len(graph.memory) == 1


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (lambda x, i: x + torch.arange(6, 0, -1), "from 6 by -1; whole numbers that grow"),
        (lambda x, i: x + torch.arange(0, 3, 0.5), "by 0.5; whole numbers that grow"),
        (lambda x, i: x.gather(1, i[:, None].expand(6, 3)), r"\[6, 3\] along dim 1 of \[6, 6\]"),
        (lambda x, i: x.scatter(0, i[None].expand(2, 6), 0.0), "one element of each row"),
        (lambda x, i: x[0].scatter(0, i, 0.0), r"\[6\] along dim 0 of \[6\]; one element of each"),
        (lambda x, i: x[0].scatter_add(0, i[:3], x[0]), r"an index of \[3\] along dim 0 of \[6\]"),
        (lambda x, i: x[i], "aten.index.Tensor.*of indexing, slices are taken"),
        (lambda x, i: x[0].index_put((i,), x[1]), "aten.index_put.default.*of indexing, slices"),
        (lambda x, i: x[0].repeat(10**6).gather(0, i), r"\[6\] along dim 0 of \[6000000\]"),
        (lambda x, i: i[:, None].gather(1, i[:, None]), "gather.*of torch.int64; floats are"),
        (lambda x, i: x.scatter(1, i[:, None], x), "slice it to the index's shape"),
        (lambda x, i: x.scatter(1, i[:, None], 2.0, reduce="multiply"), "with reduce='multiply'"),
        (lambda x, i: x.gather(1, x.median(1, True).indices), "median"),
        (lambda x, i: x * torch.arange(252, 258, dtype=torch.uint8), "to 257 in torch.uint8"),
        (lambda x, i: x * torch.arange(40000, 40006, dtype=torch.int16), "to 40005 in torch.int16"),
        (lambda x, i: x * (torch.arange(6, dtype=torch.uint8) - 3), "integer arithmetic"),
    ],
)
def test_other_ways_to_count_and_to_pick_are_named(function, told):
    fused = tw.fuse(function, name="refused_positions")
    with pytest.raises(NoImplementation, match=told):
        fused(torch.randn(6, 6), torch.arange(6))
