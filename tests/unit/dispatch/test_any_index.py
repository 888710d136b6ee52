"""PyTorch's kernels where they run on a GPU, made believe on a CPU: they see no index out of range,
what one would write is left out, and a later call tells."""

import math

import pytest
import torch

import tilewright as tw
from tilewright.dispatch import call, prepared
from tilewright.dispatch.indices import put as index_put
from tilewright.dispatch.indices.flat_index import by_operators
from tilewright.errors import IndexOutOfRange
from tilewright.impls.indices._any_index import beyond, of_any_index, outside
from tilewright.op import OPS, Op, Workload
from tilewright.ops._indexing import told_once

FAR = {7: -1, 29: 2**31 - 1, 3: 5}
"""By position. There are 30, and 5 places."""


@pytest.fixture
def gpu(monkeypatch):
    """Every device is one that PyTorch's kernels end the use of."""
    monkeypatch.setattr(Op, "outlives_indices", lambda self, device: self.indexed is not None)
    monkeypatch.setattr(call, "look_first", lambda op, bound: None)
    monkeypatch.setattr(prepared, "in_range_first", lambda w, run: run)
    monkeypatch.setattr(prepared, "HOT_CALLS", 1000)
    tw.reload_records()
    yield
    tw.reload_records()


def dies_of_no_index(w, run, tensors, *, at):
    """`run` on indices of which some are out of range: it returns what the others give, and the
    next call raises."""
    tensors = [t.clone(memory_format=torch.preserve_format) for t in tensors]
    dim = w["dim"] if "dim" in dict(w.args) else 0
    axis = dim if tensors[at].dim() > 1 else 0
    for position, value in FAR.items():
        told_once(tensors[at]).select(axis, position).fill_(value)
    found = run(*tensors)
    with pytest.raises(IndexOutOfRange, match="its write was skipped"):
        run(*tensors)
    tw.check()
    return found


WRITES = [
    "scatter_add(x=f32[5,4], dim=0, index=i64[30,4], src=f32[30,4])",
    "scatter_add(x=i32[4,5], dim=1, index=i32[4,30], src=i32[4,30])!donate=x",
    "scatter_add(x=bf16[5,4], dim=0, index=i64[30,4]@strides(1,0), src=bf16[30,4])!donate=x",
    "scatter_add(x=f64[4,5]@strides(1,4), dim=1, index=i64[4,30], src=f64[4,30])!donate=x",
    *(
        f"scatter_reduce(x=i64[5,4], dim=0, index=i64[30,4], src=i64[30,4], reduce={reduce}, "
        f"include_self={own})"
        for reduce in ("sum", "prod", "mean", "amax", "amin")
        for own in (True, False)
    ),
    "index_add(x=i32[3,5,4], dim=1, index=i32[30], source=i32[3,30,4], alpha=3)!donate=x",
    "index_add(x=f64[5], dim=0, index=i64[30], source=f64[30])",
    "index_reduce(x=f64[5,4], dim=0, index=i64[30], source=f64[30,4], reduce=mean, "
    "include_self=False)",
    "embedding_backward(grad=f64[30,4], index=i64[30], num_weights=5, padding_idx=2)",
    "embedding_backward(grad=f32[30,4], index=i32[30], num_weights=5, scale_grad_by_freq=True)",
]


@pytest.mark.parametrize("text", WRITES)
def test_what_an_index_out_of_range_would_write_is_left_out(text):
    w = Workload.parse(text)
    tensors = w.operator.examples(w, "integer", 0, "cpu")
    names = list(w.tensors)
    dim = dict(w.args).get("dim", 0)
    kept = torch.tensor([i for i in range(30) if i not in FAR])
    index, source = (
        next(n for n in names if n in of) for of in (("index",), ("src", "source", "grad"))
    )
    left = dict(zip(names, tensors, strict=True))
    left[index] = left[index].index_select(dim if left[index].dim() > 1 else 0, kept)
    left[source] = left[source].index_select(dim, kept)
    expected = w.operator.reference(**w.call([left[n] for n in names]))
    run = of_any_index(w)
    assert torch.equal(run(*(t.clone() for t in tensors)), w.operator.reference(**w.call(tensors)))
    found = dies_of_no_index(w, run, tensors, at=names.index("index"))
    assert torch.equal(found, expected)
    assert found.stride() == w.outputs[0].real_strides


def test_in_place_the_tensor_itself_is_returned_and_nothing_else_is_written():
    x, index = torch.zeros(5, 4), torch.tensor([1, 9, 1])
    w = Workload.parse("index_add(x=f32[5,4], dim=0, index=i64[3], source=f32[3,4])!donate=x")
    assert of_any_index(w)(x, index, torch.ones(3, 4)) is x
    assert x.sum(1).tolist() == [0, 8, 0, 0, 0]
    with pytest.raises(IndexOutOfRange):
        tw.check()


@pytest.mark.parametrize("shape", [(6, 4), (0, 4), (6,), ()])
def test_a_gather_reads_zeros_there(shape):
    x = torch.ones(shape)
    index = torch.zeros(x.dim() * (3,), dtype=torch.int64)
    index.view(-1)[-1] = 6
    w = OPS["gather"].workload_of(x, 0, index)[0]
    found = of_any_index(w)(x, index)
    assert found.view(-1)[-1] == 0
    assert (found.view(-1)[:-1] == (1 if x.numel() else 0)).all()
    with pytest.raises(IndexOutOfRange):
        tw.check()


@pytest.mark.parametrize("far", [1, -1])
def test_tensors_without_dims_have_one_place(far):
    x, one = torch.tensor(2), torch.tensor(5)
    for index, expected in ((torch.tensor(0), 7), (torch.tensor([far]), 2)):
        for name in ("scatter_add", "index_add"):
            args = (x.clone(), 0, index.view(-1) if name == "index_add" else index, one)
            w = OPS[name].in_place_form.workload_of(*args)[0]
            found = of_any_index(w)(args[0], args[2], one)
            assert found.item() == args[0].item() == expected
            if expected == 2:
                with pytest.raises(IndexOutOfRange):
                    tw.check()


def test_a_table_of_no_places_takes_nothing():
    w = Workload.parse("index_add(x=f32[0,4], dim=0, index=i64[3], source=f32[3,4])")
    found = of_any_index(w)(torch.zeros(0, 4), torch.tensor([0, 1, 2]), torch.ones(3, 4))
    assert found.shape == (0, 4)
    with pytest.raises(IndexOutOfRange):
        tw.check()


# --- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("reduce", ["prod", "amax", "mean"])
@pytest.mark.parametrize("in_place", [False, True])
def test_gradients_of_what_was_left_out_are_zero(gpu, reduce, in_place):
    index, results = torch.tensor([0, 3, 9, 3]), []
    for kept in (None, torch.tensor([0, 1, 3])):
        x, source = torch.full((5, 2), 2.0, requires_grad=True), torch.arange(8.0).view(4, 2) + 1
        source.requires_grad_()
        i, s = (index, source) if kept is None else (index[kept], source[kept])
        table = x * 1
        form = tw.index_reduce_ if in_place else tw.index_reduce
        out = form(table, 0, i, s, reduce)
        assert not in_place or out is table
        if kept is None:
            with pytest.raises(IndexOutOfRange):
                tw.check()
        out.square().sum().backward()
        if kept is None:
            prepared.state.forget()
        results.append((out.detach(), x.grad, source.grad))
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


def test_a_sparse_gradient_of_a_gather_has_nothing_of_them(gpu):
    x, index = torch.ones(5, requires_grad=True), torch.tensor([4, 9, 4])
    out = tw.gather(x, 0, index, sparse_grad=True)
    out.sum().backward()
    assert out.tolist() == [1, 0, 1]
    assert x.grad.is_sparse
    assert x.grad.to_dense().tolist() == [0, 0, 0, 0, 2]
    with pytest.raises(IndexOutOfRange):
        tw.check()


# --- embeddings and index_put --------------------------------------------------------------------


@pytest.fixture
def tells():
    yield
    with pytest.raises(IndexOutOfRange):
        tw.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.complex64])
def test_an_embedding_looks_up_zeros_there(gpu, tells, dtype):
    weight = torch.ones(3, 2).to(dtype)
    found = tw.embedding(torch.tensor([[0, 3], [-1, 2]]), weight)
    assert found[..., 0].tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("again", [False, True])
def test_no_row_of_an_embedding_learns_or_shrinks_of_them(gpu, sparse, max_norm, again):
    weight = torch.ones(4, 2, requires_grad=True)
    out = tw.embedding(torch.tensor([1, 7, 1]), weight, max_norm=max_norm, sparse=sparse)
    with pytest.raises(IndexOutOfRange):
        tw.check()
    assert (out[1] == 0).all()
    assert (weight[[0, 2, 3]] == 1).all()
    assert (weight[1] == 1).all() == (max_norm is None)
    (grad,) = torch.autograd.grad(out.sum(), weight, create_graph=again and not sparse)
    assert (grad.to_dense() if sparse else grad)[:, 0].tolist() == [0, 2, 0, 0]
    if not sparse:
        with pytest.raises(IndexOutOfRange):
            tw.check()


def test_an_embedding_under_autocast_does_the_same(gpu, tells):
    with torch.autocast("cpu"):
        found = tw.embedding(torch.tensor([[0, 3], [-1, 2]]), torch.ones(3, 2))
    assert found[..., 0].tolist() == [[1, 0], [0, 1]]


def test_an_embedding_of_no_rows_is_zeros(gpu, tells):
    assert tw.embedding(torch.tensor([0]), torch.ones(0, 2)).tolist() == [[0, 0]]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.complex64])
def test_index_put_leaves_out_what_is_out_of_range_in_any_dim(
    gpu, tells, in_place, accumulate, dtype
):
    x, values = torch.zeros(3, 4, 2).to(dtype), torch.arange(1, 11).view(5, 2).to(dtype)
    first, second = torch.tensor([0, 3, -3, 1, -1]), torch.tensor([-1, 0, 0, 4, -4])
    form = tw.index_put_ if in_place else tw.index_put
    found = form(x, (first, second), values, accumulate)
    expected = torch.zeros(3, 4, 2).to(dtype)
    for i in (0, 2, 4):
        expected[first[i], second[i]] += values[i]
    assert torch.equal(found, expected)
    assert (found is x) is in_place


def test_so_does_one_with_masks(gpu, tells):
    x, values = torch.zeros(2, 3, 4, dtype=torch.int8), torch.ones((), dtype=torch.int8)
    mask = torch.tensor([True, False])
    found = tw.index_put(x, (mask, torch.tensor([-4, 1, 3])), values)
    assert found.nonzero().tolist() == [[0, 1, c] for c in range(4)]


def test_a_mask_alone_and_a_wrong_call_are_pytorchs(gpu):
    x, one = torch.zeros(2, 3, dtype=torch.int8), torch.ones((), dtype=torch.int8)
    assert tw.index_put(x, (torch.tensor([True, False]),), one).sum() == 3
    index = torch.tensor([0, 1])
    with pytest.raises(IndexError, match="too many indices"):
        tw.index_put(x, (index, index, index), one)
    with pytest.raises(IndexError, match="shape mismatch"):
        tw.index_put(x, (index, torch.tensor([0, 1, 2])), one)
    tw.check()


# --- more places than an int32 index can name ----------------------------------------------------

MANY = [2**31 - 1, 2**31, 2**31 + 10, 2**32 + 1]
ENDS = torch.tensor([-(2**31), -2, -1, 0, 1, 2**31 - 2, 2**31 - 1], dtype=torch.int32)


@pytest.mark.parametrize("places", MANY)
def test_an_int32_index_is_compared_with_any_number_of_places(places):
    names = ENDS.tolist()
    assert outside(ENDS, places).tolist() == [not 0 <= n < places for n in names]
    assert outside(ENDS, 1, skipped=places).tolist() == [n != 0 and n != places for n in names]
    moved = beyond(ENDS, outside(ENDS, places), places)
    assert moved.tolist() == [n if 0 <= n < places else places for n in names]


@pytest.mark.parametrize("places", MANY)
def test_negative_int32_positions_count_from_the_end_of_any_number_of_places(places):
    for sizes in ([places], [places, 3], [3, places]):
        indices = [ENDS if n == places else torch.ones_like(ENDS) for n in sizes]
        expected = []
        for n in ENDS.tolist():
            place = n + places if n < 0 else n
            named = [place if n == places else 1 for n in sizes]
            flat = named[0] * sizes[1] + named[1] if len(sizes) == 2 else named[0]
            expected.append(flat if 0 <= place < places else -1)
        found = by_operators(indices, sizes)
        outside_of_all = (found < 0) | (found.long() >= math.prod(sizes))
        assert found.masked_fill(outside_of_all, -1).tolist() == expected


@pytest.mark.parametrize("places", [2**31, 2**31 + 10])
def test_of_so_many_places_the_index_that_is_out_of_range_is_named(places):
    x = torch.empty(3, places, dtype=torch.float16, device="meta")
    index_put._refuse_far_indices(x, (torch.zeros_like(ENDS), ENDS))
    with pytest.raises(IndexOutOfRange, match=f"index {-places - 1} is out of range for dim 1"):
        index_put._refuse_far_indices(x, (ENDS[3:4], torch.tensor([5, -places - 1])))
