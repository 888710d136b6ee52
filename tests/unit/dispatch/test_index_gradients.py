"""Gradients of the operators with an index: PyTorch's, by the implementations that are chosen."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewright as tw
from tilewright.compile import cxx
from tilewright.device import spec_of
from tilewright.dispatch import call, prepared
from tilewright.dispatch.autograd import Recomputed
from tilewright.dispatch.indices import gradients as index_gradients
from tilewright.dispatch.indices.gradients import moves
from tilewright.environment import environment
from tilewright.impl import IMPLS
from tilewright.indexed import Indexed
from tilewright.op import OPS
from tilewright.record import Record
from tilewright.space import config_dict
from tilewright.store import Store


@pytest.fixture
def moving(monkeypatch):
    """Every call that could go by our gradients does."""
    monkeypatch.setattr(index_gradients, "_may_pay", lambda op, x, waived: True)
    monkeypatch.setattr(index_gradients, "_pays", lambda op, bound: True)
    tw.reload_records()
    yield
    tw.reload_records()


def gradients(function, tensors, *others):
    leaves = [t.clone().requires_grad_() for t in tensors]
    out = function(*leaves, *others)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    (out * weights).sum().backward()
    return [out.detach(), *(t.grad for t in leaves)]


CALLS = {
    "gather": lambda m, x, src, dim, index: m.gather(x, dim, index),
    "scatter": lambda m, x, src, dim, index: m.scatter(x, dim, index, src),
    "scatter of a number": lambda m, x, src, dim, index: m.scatter(x, dim, index, 2.5),
    "scatter_add": lambda m, x, src, dim, index: m.scatter_add(x, dim, index, src),
    **{
        f"scatter_reduce {reduce} {own}": lambda m, x, src, dim, index, reduce=reduce, own=own: (
            m.scatter_reduce(x, dim, index, src, reduce, include_self=own)
        )
        for reduce in ("sum", "prod", "mean", "amax", "amin")
        for own in (True, False)
    },
}


@pytest.mark.parametrize("name", CALLS)
@settings(max_examples=12)
@given(
    shape=st.integers(1, 6).flatmap(
        lambda rank: st.lists(st.integers(1, 4 if rank < 5 else 3), min_size=rank, max_size=rank)
    ),
    length=st.integers(1, 4),
    along=st.integers(-6, 5),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]),
)
def test_they_are_pytorchs_for_any_shape_and_dim(name, shape, length, along, dtype):
    function, dim = CALLS[name], along % len(shape)
    if name in ("scatter", "scatter of a number"):  # PyTorch keeps no order of writes
        length = min(length, shape[dim])
    moved = [length if d == dim else n for d, n in enumerate(shape)]
    torch.manual_seed(0)
    unique = torch.rand([max(shape[dim], length) if d == dim else n for d, n in enumerate(shape)])
    index = unique.argsort(dim).narrow(dim, 0, length) % shape[dim]
    x, src = torch.randn(shape, dtype=dtype), torch.randn(moved, dtype=dtype)
    dim -= len(shape) * (along < 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_gradients, "_may_pay", lambda op, x, waived: True)
        patch.setattr(index_gradients, "_pays", lambda op, bound: True)
        tw.reload_records()
        found = gradients(lambda *t: function(tw, *t, dim, index), (x, src))
    tw.reload_records()
    expected = gradients(lambda *t: function(torch, *t, dim, index), (x, src))
    for mine, theirs in zip(found, expected, strict=True):
        if mine is None or theirs is None:
            assert mine is theirs
        else:
            torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("alpha", [1.0, -2.5])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_rows_that_are_added_get_the_rows_of_the_gradient(moving, dim, alpha):
    x, index = torch.randn(5, 6, 5), torch.tensor([3, 0, 3, 4])
    source = torch.randn([4 if d == dim % 3 else n for d, n in enumerate(x.shape)])
    found, expected = (
        gradients(lambda x, s, m=m: m.index_add(x, dim, index, s, alpha=alpha), (x, source))
        for m in (tw, torch)
    )
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("always", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("x", "index", "source"),
    [((2, 3), (), (1, 3)), ((3,), (), (1,)), ((), (), ()), ((), (1,), ())],
)
def test_an_index_or_x_of_no_dims_has_gradients(x, index, source, dtype, always, request):
    if always:
        request.getfixturevalue("moving")
    torch.manual_seed(0)
    tensors = torch.randn(x, dtype=dtype), torch.randn(source, dtype=dtype)
    place = torch.full(index, x[0] - 1 if x else 0)
    found, expected = (
        gradients(lambda x, s, m=m: m.index_add(x, 0, place, s, alpha=2.0), tensors)
        for m in (tw, torch)
    )
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", ["prod", "mean", "amax", "amin"])
def test_rows_that_are_reduced_have_pytorchs_gradients(reduce, include_self):
    x, source, index = torch.randn(5, 6), torch.randn(5, 9), torch.arange(9) % 4
    found, expected = (
        gradients(
            lambda x, s, m=m: m.index_reduce(x, -1, index, s, reduce, include_self=include_self),
            (x, source),
        )
        for m in (tw, torch)
    )
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


REDUCED = {
    "index_reduce": lambda m, x, s, index, *how, **own: m.index_reduce(
        x, -1, index, s, *how, **own
    ),
    "scatter_reduce": lambda m, x, s, index, *how, **own: m.scatter_reduce(
        x, -1, index.expand(5, 9), s, *how, **own
    ),
}


@pytest.fixture
def ran(monkeypatch):
    """What has run with a gradient computed anew, where PyTorch's sums and products of floats are
    made believe to race on a CPU, too."""
    names, forward = [], Recomputed.forward

    def told(ctx, op, *args):
        names.append(op.name)
        return forward(ctx, op, *args)

    monkeypatch.setattr(Indexed, "promises_values", lambda self, dtype, device: dtype == "f32")
    monkeypatch.setattr(Recomputed, "forward", staticmethod(told))
    return names


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize(
    ("name", "reduce"),
    [("index_reduce", "prod"), ("index_reduce", "mean"), ("scatter_reduce", "prod")],
)
def test_a_forward_that_keeps_its_bits_has_pytorchs_gradients(name, reduce, include_self, ran):
    x, source, index = torch.randn(5, 6), torch.randn(5, 9), torch.arange(9) % 4
    found, expected = (
        gradients(
            lambda x, s, m=m: REDUCED[name](m, x, s, index, reduce, include_self=include_self),
            (x, source),
        )
        for m in (tw, torch)
    )
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert ran == [name]


def test_so_has_one_in_place(ran):
    source, index, found = torch.randn(5, 9), torch.arange(9) % 4, []
    for call_of in (tw.index_reduce_, torch.Tensor.index_reduce_):
        x, s = torch.ones(5, 6).requires_grad_(), source.clone().requires_grad_()
        call_of(x * 2, -1, index, s, "prod").square().sum().backward()
        found.append((x.grad, s.grad))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert ran == ["index_reduce"]


@pytest.mark.parametrize("reduce", ["amax", "amin"])
def test_extremes_have_the_same_bits_anyway(reduce, ran):
    x = torch.randn(5, 6, requires_grad=True)
    tw.index_reduce(x, -1, torch.arange(9) % 4, torch.randn(5, 9), reduce).sum().backward()
    assert ran == []


def test_they_are_differentiable_themselves(moving):
    index = torch.tensor([[0, 2], [1, 1], [0, 0]])
    x, src = (torch.randn(3, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    functions = [
        (lambda x: tw.gather(x, 0, index).square(), (x,)),
        (lambda x, s: tw.scatter_add(x, 0, index, s).square(), (x, src)),
        (lambda x, s: tw.scatter_reduce(x, 0, index, s, "mean").square(), (x, src)),
        (lambda x, s: tw.index_add(x, 0, index[:, 0], s, alpha=3.0).square(), (x, src)),
    ]
    for function, leaves in functions:
        assert torch.autograd.gradcheck(function, leaves)
        assert torch.autograd.gradgradcheck(function, leaves)


def test_int32_indices_that_are_expanded_are_read_right():
    """PyTorch's own gather reads them as if they were int64 (2.13, on a CPU)."""
    index, x = torch.tensor([0, 2], dtype=torch.int32), torch.arange(12.0).view(3, 4)
    expanded = index[:, None].expand(2, 4)
    assert torch.equal(tw.gather(x, 0, expanded), x[[0, 2]])
    for function in (tw.scatter, tw.scatter_add, tw.scatter_, tw.scatter_add_):
        src = torch.ones(2, 4, requires_grad=True)
        function(torch.zeros(3, 4), 0, expanded, src).backward(x)
        assert torch.equal(src.grad, x[[0, 2]])
    leaf = x.clone().requires_grad_()
    tw.gather(leaf, 0, expanded).sum().backward()
    assert leaf.grad.sum(1).tolist() == [4, 0, 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
def test_an_expanded_index_that_is_narrower_than_x_names_its_columns_alone(kind, dtype):
    """PyTorch's own sums take it for one of all columns (2.13, on a CPU)."""
    torch.manual_seed(0)
    index = torch.tensor([0, 2, 1, 1, 2])
    x, src = torch.randn(4, 24, dtype=dtype), torch.randn(5, 16, dtype=dtype)
    narrow, whole = index.to(kind)[:, None].expand(5, 16), index[:, None].repeat(1, 16)
    calls = [
        lambda m, x, s, i: m.gather(x, 0, i) * s,
        lambda m, x, s, i: m.scatter_add(x, 0, i, s),
        lambda m, x, s, i: getattr(m, "Tensor", m).scatter_add_(x * 1, 0, i, s),
    ]
    for reduce in ("sum", "mean", "prod", "amax", "amin")[: 2 if dtype.is_complex else 5]:
        more = {"reduce": reduce, "include_self": reduce in ("mean", "amin")}
        calls += [
            lambda m, x, s, i, more=more: m.scatter_reduce(x, 0, i, s, **more),
            lambda m, x, s, i, more=more: getattr(m, "Tensor", m).scatter_reduce_(
                x * 1, 0, i, s, **more
            ),
        ]
    tolerance = {"rtol": 3e-2, "atol": 3e-2} if dtype == torch.bfloat16 else {}
    for call_of in calls:
        expected = call_of(torch, x, src, whole)
        torch.testing.assert_close(call_of(tw, x, src, narrow), expected, **tolerance)
        if dtype.is_complex:
            continue
        found, expected = (
            gradients(lambda x, s, i=i, m=m: call_of(m, x, s, i), (x, src))  # noqa: B023
            for m, i in ((tw, narrow), (torch, whole))
        )
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, **tolerance)


@pytest.mark.parametrize("mapped", [(None, 0, 0), (None, None, 0), (None, 1, None)])
def test_an_expanded_index_that_is_narrower_than_x_is_mapped_with_or_without_x(mapped):
    x, src, index = torch.randn(6, 4), torch.randn(5, 3), torch.randint(6, (5,))
    narrow = index[:, None].expand(5, 3)
    given = [
        t if d is None else torch.stack([t, t.flip(0)], d)
        for t, d in zip((x, narrow, src), mapped, strict=True)
    ]
    for function, more in ((tw.scatter_add, ()), (tw.scatter_reduce, ("amax",))):
        in_full = [*given[:1], given[1].contiguous(), *given[2:]]
        plain = getattr(torch, function.__name__)
        found, expected = (
            torch.func.vmap(lambda x, i, s, f=f, more=more: f(x, 0, i, s, *more), mapped)(*tensors)
            for f, tensors in ((function, given), (plain, in_full))
        )
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize(
    ("name", "more"),
    [("index_add_", {"alpha": 3.0}), ("scatter_add_", {}), ("scatter_reduce_", {"reduce": "mean"})],
)
def test_sums_in_place_have_pytorchs_gradients(moving, name, more, view):
    index = torch.tensor([4, 0, 4, 1, 2, 4, 0, 0, 3])
    moved = index if name == "index_add_" else index[:, None].expand(9, 3)
    results = []
    for module in (tw, torch.Tensor):
        torch.manual_seed(0)
        x, src = torch.randn(6, 3, requires_grad=True), torch.randn(9, 3, requires_grad=True)
        table = x * 2
        written = table[1:] if view else table
        out = getattr(module, name)(written, 0, moved, src, **more)
        assert out.data_ptr() == written.data_ptr()
        (table.square() * torch.arange(18).view(6, 3)).sum().backward()
        results.append((table.detach(), x.grad, src.grad))
        for leaf in (x, x[1:]):
            with pytest.raises(RuntimeError, match="leaf"):
                getattr(module, name)(leaf, 0, moved, src, **more)
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_views_that_may_not_be_written_to_are_left_as_they_were(moving):
    index, src = torch.arange(3), torch.randn(3, 3, requires_grad=True)
    whole = torch.randn(2, 6, 3, requires_grad=True) * 1
    with torch.no_grad():
        made_without = whole[0]
    leaf = torch.randn(2, 6, 3)[0].requires_grad_()
    for view in (whole.unbind(0)[0], made_without, leaf):
        before = view.detach().clone()
        with pytest.raises(RuntimeError, match=r"[Ii]nplace|in-place"):
            tw.index_add_(view, 0, index, src)
        assert torch.equal(view, before)


@pytest.mark.parametrize("value", [None, 2.5])
def test_in_place_an_update_whose_order_pytorch_does_not_keep_is_copied(value, monkeypatch):
    index, seed = torch.tensor([[0, 2], [1, 1]]), torch.randn(4, 2)
    results = []
    for keeps in (True, False):
        monkeypatch.setattr(call, "keeps_order", lambda op, x, keeps=keeps: keeps)
        x, src = torch.ones(4, 2, requires_grad=True), torch.full((2, 2), 3.0, requires_grad=True)
        table = x * 2
        assert tw.scatter_(table[1:], 0, index, src if value is None else value).shape == (3, 2)
        (table * seed).sum().backward()
        results.append((table.detach(), x.grad, src.grad))
        with pytest.raises(RuntimeError, match="leaf"):
            tw.scatter_(x, 0, index, 1.0)
        assert (x == 1).all()
    for mine, theirs in zip(*results, strict=True):
        assert mine is theirs if mine is None else torch.equal(mine, theirs)


@pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing()))
def test_backward_runs_the_gather_that_is_asked_for_in_another_thread_too():
    x, src = torch.zeros(40, 8), torch.randn(90, 8, requires_grad=True)
    index = torch.randint(40, (90, 8))
    with tw.use("gather_cpp", op="gather"):
        out = tw.scatter_add(x, 0, index, src).square().sum()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(out.backward).result()
    ran = {w.op: choice.implementation for (w, _, _), (_, choice) in prepared.state.built.items()}
    assert ran["gather"] == "gather_cpp"
    expected = 2 * x.scatter_add(0, index, src.detach()).gather(0, index)
    torch.testing.assert_close(src.grad, expected)


@pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing()))
def test_backward_runs_the_gather_that_a_record_speaks_for(tmp_path, monkeypatch):
    url = f"sqlite:///{tmp_path}/records.db"
    monkeypatch.setenv("TILEWRIGHT_STORE", url)
    key, info, versions = environment(torch.device("cpu"))
    w = tw.Workload.parse("gather(x=f32[40,8], dim=0, index=i64[90,8])")
    config = config_dict(IMPLS["gather_cpp"].heuristic(w, spec_of(None)))
    common = {"status": "ok", "device": key, "device_info": info, "versions": versions}
    common |= {"final": True, "duel": str(w)}
    with Store(url) as store:
        store.add(
            [
                Record(str(w), "gather", "gather_cpp", config, median_us=1.0, **common),
                Record(str(w), "gather", "aten", {}, median_us=2.0, **common),
            ]
        )
    tw.reload_records()
    src, index = torch.randn(90, 8, requires_grad=True), torch.randint(40, (90, 8))
    grad = torch.randn(40, 8)
    tw.scatter_add(torch.zeros(40, 8), 0, index, src).backward(grad)
    ran = {w.op: choice.implementation for (w, _, _), (_, choice) in prepared.state.built.items()}
    assert ran == {"gather": "gather_cpp"}
    assert torch.equal(src.grad, grad.gather(0, index))
    monkeypatch.undo()
    tw.reload_records()


@pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing()))
def test_what_is_asked_for_need_not_serve_the_gradient():
    x, source = torch.randn(40, 8, requires_grad=True), torch.randn(90, 8, requires_grad=True)
    index = torch.randint(40, (90,))
    with tw.use("rows_cpp"):
        out = tw.index_add(x, 0, index, source)
        out.backward(torch.arange(320.0).view(40, 8))
    assert torch.equal(source.grad, torch.arange(320.0).view(40, 8)[index])


def test_without_evidence_they_are_pytorchs_own():
    x, index = torch.randn(4, 3, requires_grad=True), torch.tensor([[0, 1, 1]])
    for op, src in (("gather", {}), ("scatter", {"src": 1.0}), ("scatter_add", {"src": x})):
        assert not moves(OPS[op], {"x": x, "dim": 0, "index": index, **src})
    assert "Gather" in type(tw.gather(x, 0, index).grad_fn).__name__
    with tw.use("aten"):
        assert not moves(OPS["gather"], {"x": x, "dim": 0, "index": index})


@pytest.mark.parametrize("form", ["", "_"])
@pytest.mark.parametrize("reduce", ["last", "add", "sum", "mean", "prod", "amax"])
def test_of_a_larger_src_what_no_index_names_gets_zeros(reduce, form):
    index = torch.tensor([[1, 0], [0, 0]])
    name = {"last": "scatter", "add": "scatter_add"}.get(reduce, "scatter_reduce")
    more = () if name != "scatter_reduce" else (reduce,)

    def call(module, x, src):
        return getattr(module, f"{name}{form}")(x * 1, 0, index, src, *more)

    torch.manual_seed(0)
    tensors = torch.randn(3, 2), torch.randn(4, 3)
    mine = gradients(lambda *t: call(tw, *t), tensors)
    theirs = gradients(lambda x, src: call(torch.Tensor, x, src[:2, :2]), tensors)
    torch.testing.assert_close(mine, theirs)
    assert not mine[2][2:].any()
    assert not mine[2][:, 2:].any()
