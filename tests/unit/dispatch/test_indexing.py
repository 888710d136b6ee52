"""tw.embedding and tw.index_put against PyTorch's functions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import tilewright as tw
from allocations import peak_bytes
from tilewright.dispatch.indices.put import _as_rows
from tilewright.errors import IndexOutOfRange
from tilewright.ops._indexing import NUMBERS
from tilewright.tensor_spec import DTYPES

# --- embedding -----------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    st.lists(st.integers(0, 4), min_size=0, max_size=3),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.sampled_from([torch.int32, torch.int64]),
    st.sampled_from([None, 0, 3, -1]),
    st.booleans(),
    st.sampled_from([None, 0.5]),
)
def test_an_embedding_and_its_gradient_are_pytorchs(shape, dtype, kind, padding, scaled, max_norm):
    torch.manual_seed(0)
    index = torch.randint(7, shape, dtype=kind)
    table = torch.randn(7, 5, dtype=dtype)
    seed = torch.randn(*shape, 5, dtype=dtype)
    results = []
    for function in (tw.embedding, F.embedding):
        # PyTorch rounds halves at each addition, which the gradient here does once.
        computed = torch.promote_types(dtype, torch.float32) if function is F.embedding else dtype
        weight = table.to(computed, copy=True).requires_grad_()
        out = function(index, weight, padding, max_norm, 2.0, scaled)
        (out * seed).sum().backward()
        results.append([t.detach().to(dtype) for t in (out, weight.grad, weight)])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_the_gradient_comes_from_the_implementation_that_is_asked_for():
    weight = torch.randn(50, 8, requires_grad=True)
    index = torch.randint(50, (90,))
    with tw.use("rows_cpp"):
        tw.embedding(index, weight).square().sum().backward()
    expected = torch.zeros(50, 8).index_add(0, index, 2 * weight.detach()[index])
    torch.testing.assert_close(weight.grad, expected)


def test_the_gradient_of_an_embedding_under_autocast_is_rounded_once():
    weight = torch.randn(6, 3, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cpu"):
        out = tw.embedding(torch.full((5000,), 2), weight)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert weight.grad[2].tolist() == [4992.0] * 3


def test_an_embedding_differentiates_twice():
    weight = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([0, 2, 2, 5])
    assert torch.autograd.gradgradcheck(lambda w: tw.embedding(index, w).square(), (weight,))


def test_an_embedding_is_pytorchs_where_ours_is_of_no_use():
    weight = torch.randn(6, 3, requires_grad=True)
    index = torch.tensor([1, 4])
    out = tw.embedding(index, weight, sparse=True)
    out.sum().backward()
    assert weight.grad.is_sparse
    assert torch.equal(tw.embedding(index, weight.detach()), weight.detach()[index])
    traced = torch.compile(lambda w: tw.embedding(index, w), backend="eager")
    assert torch.equal(traced(weight), weight[index])
    with pytest.raises(ValueError, match="padding_idx=6 is out of range for 6 rows"):
        tw.embedding(index, weight, padding_idx=6)


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (0, [1], "input is of type list, expected a Tensor"),
        (1, None, "weight is of type NoneType, expected a Tensor"),
        (2, "a", "padding_idx is of type str, expected an int or None"),
        (2, True, "padding_idx is of type bool, expected an int or None"),
        (3, (1,), "max_norm is of type tuple, expected a float or None"),
        (4, None, "norm_type is of type NoneType, expected a float"),
        (5, 1, "scale_grad_by_freq is of type int, expected a bool"),
        (6, None, "sparse is of type NoneType, expected a bool"),
    ],
)
def test_an_argument_of_another_type_is_named(place, value, words):
    for grad in (False, True):
        args = [torch.tensor([1]), torch.ones(3, 2).requires_grad_(grad), None, None, 2.0]
        args += [False, False]
        args[place] = value
        with pytest.raises(TypeError, match=f"embedding: {words}"):
            tw.embedding(*args)


def test_no_row_is_renormalised_before_an_index_out_of_range():
    weight = torch.ones(3, 2)
    for far in (3, -1):
        with pytest.raises(IndexOutOfRange, match=f"index {far} is out of range for 3 places"):
            tw.embedding(torch.tensor([0, far]), weight, max_norm=0.5)
        assert (weight == 1).all()


# --- index_put -----------------------------------------------------------------------------------


@st.composite
def calls(draw):
    """(x, indices, values) that torch.index_put takes; positions repeat, and may be negative."""
    rank = draw(st.integers(1, 6))
    shape = draw(st.lists(st.integers(1, 4 if rank < 5 else 2), min_size=rank, max_size=rank))
    covered = draw(st.integers(1, rank))
    base = draw(st.lists(st.integers(1, 4), min_size=0, max_size=2))
    indices = []
    for size in shape[:covered]:
        its = [n if draw(st.booleans()) else 1 for n in base]
        kind = draw(st.sampled_from([torch.int32, torch.int64]))
        indices.append(torch.randint(-size, size, its, dtype=kind))
    dtype = draw(st.sampled_from([DTYPES[name] for name in NUMBERS]))
    whole = [*torch.broadcast_shapes(*(i.shape for i in indices)), *shape[covered:]]
    its = [n if draw(st.booleans()) else 1 for n in whole]
    x = torch.randint(-9, 9, shape).to(dtype)
    return x, indices, torch.randint(-9, 9, its).to(dtype)


def one_by_one(x, indices, values, accumulate):
    """Position by position, in their order."""
    out = x.clone()
    shape = torch.broadcast_shapes(*(i.shape for i in indices))
    rest = x.shape[len(indices) :]
    spread = [i.expand(shape).reshape(-1).tolist() for i in indices]
    rows = values.expand((*shape, *rest)).reshape(-1, *rest)
    for j, place in enumerate(zip(*spread, strict=True)):
        out[place] = out[place] + rows[j] if accumulate else rows[j]
    return out


@settings(max_examples=80)
@given(calls(), st.booleans(), st.booleans())
def test_index_put_writes_in_the_order_of_positions(call, accumulate, in_place):
    x, indices, values = call
    expected = one_by_one(x, indices, values, accumulate)
    given_x = x.clone()
    function = tw.index_put_ if in_place else tw.index_put
    found = function(given_x, indices, values, accumulate)
    assert torch.equal(found, expected)
    assert (found is given_x) is in_place
    assert in_place or torch.equal(given_x, x)


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_position_out_of_range_in_any_dim_is_refused(accumulate):
    x, values = torch.zeros(4, 5, 3), torch.ones(2, 3)
    first, second = torch.tensor([0, 1]), torch.tensor([0, 5])  # flat, [1, 5] would be [2, 0]
    with pytest.raises(IndexOutOfRange, match="index 5 is out of range for dim 1 of size 5"):
        tw.index_put(x, (first, second), values, accumulate)


INDEX = torch.tensor([0, 1, 99, 2])
WHOLE = INDEX[:, None].expand(4, 3)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("index_add_", (0, INDEX, torch.ones(4, 3))),
        ("index_reduce_", (0, INDEX, torch.ones(4, 3), "amax")),
        ("index_put_", ((INDEX,), torch.ones(4, 3))),
        ("index_put_", ((INDEX,), torch.ones(4, 3), True)),
        ("scatter_", (0, WHOLE, torch.ones(4, 3))),
        ("scatter_", (0, WHOLE.contiguous(), 2.0)),
        ("scatter_add_", (0, WHOLE.int().contiguous() - 3, torch.ones(4, 3))),
        ("scatter_reduce_", (0, WHOLE.contiguous(), torch.ones(4, 3), "amin")),
    ],
)
def test_in_place_nothing_is_written_before_an_index_out_of_range(name, args):
    x, words = torch.zeros(6, 3), r"index (99|-3) is out of range for (6 places|dim 0 of size 6)"
    for _ in range(3):  # anew, then prepared
        with pytest.raises(IndexOutOfRange, match=words):
            getattr(tw, name)(x, *args)
        assert not x.any()
    moved = [a.requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a
             for a in args]  # fmt: skip
    if any(isinstance(a, torch.Tensor) and a.requires_grad for a in moved):
        with pytest.raises(IndexOutOfRange, match=words):
            getattr(tw, name)(x, *moved)
        assert not x.any()


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("index_add", (0, INDEX, torch.ones(4, 3))),
        ("index_add", (0, INDEX, torch.ones(4, 3).bfloat16())),
        ("index_reduce", (0, INDEX, torch.ones(4, 3), "amax")),
        ("index_reduce", (0, INDEX, torch.ones(4, 3), "prod")),
        ("index_put", ((INDEX,), torch.ones(4, 3))),
        ("index_put", ((INDEX,), torch.ones(4, 3), True)),
        ("gather", (0, WHOLE)),
        ("gather", (0, WHOLE.int().contiguous() - 3)),
        ("scatter", (0, WHOLE, torch.ones(4, 3))),
        ("scatter", (0, WHOLE.contiguous(), 2.0)),
        ("scatter_add", (0, WHOLE.int().contiguous() - 3, torch.ones(4, 3))),
        ("scatter_reduce", (0, WHOLE.contiguous(), torch.ones(4, 3), "amin")),
    ],
)
@pytest.mark.parametrize("differentiable", [False, True])
def test_out_of_place_the_error_is_the_same_one(name, args, differentiable):
    x = torch.zeros(6, 3)
    words = r"index (99|-3)( at position 2)? is out of range for (6 places|dim 0 of size 6)"
    if any(isinstance(a, torch.Tensor) and a.dtype is torch.bfloat16 for a in args):
        x = x.bfloat16()
    for _ in range(3):  # anew, then prepared
        with pytest.raises(IndexOutOfRange, match=words):
            getattr(tw, name)(x.requires_grad_(differentiable), *args)


@pytest.mark.parametrize("implementation", ["index_add_index_put", "index_add_scatter_add"])
@pytest.mark.parametrize("far", [6, -1])
def test_by_pytorchs_other_kernels_it_is_the_same_one_too(implementation, far):
    x, index = torch.zeros(6, 3), torch.tensor([0, far])
    for run in (tw.index_add, tw.index_add_):
        with (
            tw.use(implementation),
            pytest.raises(IndexOutOfRange, match=f"index {far} is out of range for 6 places"),
        ):
            run(x, 0, index, torch.ones(2, 3))
    with tw.use(implementation), pytest.raises(tw.SharedMemory, match="memory with source"):
        tw.index_add_(x, 0, torch.tensor([0, 5]), x[1:3])
    assert not x.any()


def test_without_a_second_look_at_indices_that_are_in_range(monkeypatch):
    from tilewright.dispatch import ranges as index_ranges

    looks = []
    monkeypatch.setattr(index_ranges, "refuse_out_of_range", lambda *call: looks.append(call))
    x, index = torch.zeros(6, 3), INDEX.clamp(max=5)
    for _ in range(2):
        tw.gather(x, 0, WHOLE.clamp(max=5))
        tw.index_add(x, 0, index, torch.ones(4, 3))
        tw.scatter_reduce(x.requires_grad_(), 0, WHOLE.clamp(max=5), torch.ones(4, 3), "amax")
    assert not looks
    with pytest.raises(RuntimeError):
        tw.gather(x.detach(), 0, WHOLE)
    assert looks


@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("far", [6, -1])
@pytest.mark.parametrize("width", [3, 0])
def test_an_embedding_names_the_index_that_is_out_of_range(differentiable, far, width):
    weight = torch.zeros(6, width, requires_grad=differentiable)
    with pytest.raises(IndexOutOfRange, match=f"embedding: index {far} is out of range for 6"):
        tw.embedding(torch.tensor([[0], [far]]), weight)


@pytest.mark.parametrize("far", [99, -7, 10**8])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("differentiable", [False, True])
def test_no_gradient_of_an_embedding_leaves_an_index_out(far, scaled, differentiable):
    """PyTorch's kernel adds what is in range, or reads beyond its memory."""
    grad = torch.ones(4, 3, requires_grad=differentiable)
    for _ in range(2):
        with pytest.raises(IndexOutOfRange, match=f"index {far} is out of range for 6 places"):
            tw.embedding_backward(grad, torch.tensor([0, 1, far, 2]), 6, -1, scaled)


def test_a_mask_beside_indices_is_looked_at_before_anything_is_written():
    x, mask = torch.zeros(6, 3), torch.ones(6, dtype=torch.bool)
    with pytest.raises(IndexOutOfRange, match="index 9 is out of range for dim 1 of size 3"):
        tw.index_put_(x, (mask, torch.tensor([0, 1, 2, 0, 1, 9])), torch.ones(6))
    assert not x.any()
    with pytest.raises(IndexError, match="shape of the mask"):
        tw.index_put_(x, (mask[:5], torch.tensor([0, 1, 2, 0, 1])), torch.ones(5))


@pytest.mark.parametrize("accumulate", [False, True])
def test_masks_beside_indices_are_their_positions(accumulate):
    x, values = torch.randn(4, 5, 3, 2), torch.randn(3, 2)
    mask, index = torch.zeros(4, 5, dtype=torch.bool), torch.tensor([2, 0, 2])
    mask[0, 3] = mask[1, 1] = mask[3, 4] = True
    expected = torch.index_put(x, (mask, index), values, accumulate)
    assert torch.equal(tw.index_put(x, (mask, index), values, accumulate), expected)
    assert torch.equal(tw.index_put_(x, (mask, index), values, accumulate), expected)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.uint8])
def test_other_dtypes_are_pytorchs(dtype):
    x, index, values = torch.zeros(4, dtype=dtype), (torch.tensor([0, 2]),), torch.ones(2).to(dtype)
    assert torch.equal(tw.index_put(x, index, values), torch.index_put(x, index, values))


def test_the_last_write_wins_under_autocast():
    torch.manual_seed(0)
    index, values = torch.randint(16, (300_000,)), torch.arange(3e5, dtype=torch.float64)
    last = torch.stack([values[index == i][-1] for i in range(16)])
    x, mask = torch.zeros(16, dtype=torch.float64), torch.ones(1, dtype=torch.bool)
    with torch.autocast("cpu"):
        for _ in range(5):
            assert torch.equal(tw.index_put(x, (index,), values), last)
            assert torch.equal(tw.scatter(x, 0, index, values), last)
            assert torch.equal(tw.index_put(x[None], (mask, index), values), last[None])


def test_an_index_out_of_range_is_no_reason_to_give_a_kernel_up(recwarn):
    x, source = torch.zeros(6, 3), torch.ones(4, 3)
    for index in (INDEX, INDEX.clamp(max=5)):
        if index is INDEX:
            with pytest.raises(IndexOutOfRange):
                tw.index_add_(x, 0, index, source)
        else:
            tw.index_add_(x, 0, index, source)
    assert not [warning for warning in recwarn if "from now on" in str(warning.message)]


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("index_add", (torch.ones(5, 3), 0, torch.empty(0).long(), torch.ones(0, 3))),
        ("index_add", (torch.ones(5, 0), 0, torch.tensor([1, 2]), torch.ones(2, 0))),
        ("index_reduce", (torch.ones(5, 3), 0, torch.empty(0).long(), torch.ones(0, 3), "amax")),
        ("scatter", (torch.ones(5), 0, torch.empty(0).long(), torch.ones(0))),
        ("scatter", (torch.ones(0), 0, torch.empty(0).int().long(), 2.0)),
        ("scatter", (torch.ones(5, 0), 0, torch.empty(3, 0).long(), torch.ones(3, 0))),
        ("scatter_add", (torch.ones(5, 3), 1, torch.empty(0, 2).long(), torch.ones(5, 3))),
        (
            "scatter_reduce",
            (torch.ones(5, 3), 1, torch.empty(5, 0).long(), torch.ones(5, 0), "mean"),
        ),
        ("gather", (torch.ones(5, 3), 0, torch.empty(0, 3).long())),
        ("gather", (torch.ones(0, 3), 0, torch.empty(0, 3).long())),
        ("index_put", (torch.ones(5, 3), (torch.empty(0).long(),), torch.ones(0, 3))),
        ("index_put", (torch.ones(5, 3), (torch.empty(0).long(),), torch.ones(3), True)),
        ("scatter", (torch.tensor(3.0), 0, torch.tensor(0), torch.tensor(5.0))),
        ("gather", (torch.tensor(3.0), 0, torch.tensor(0))),
    ],
)
def test_what_is_empty_or_a_scalar_is_pytorchs(name, args):
    for _ in range(2):
        assert torch.equal(getattr(tw, name)(*args), getattr(torch, name)(*args))


def test_a_mask_is_pytorchs():
    x, values = torch.arange(12.0).view(3, 4), torch.tensor(7.0)
    mask = x > 5
    assert torch.equal(tw.index_put(x, (mask,), values), torch.index_put(x, (mask,), values))


STRIDED = [
    torch.zeros(5, 4, 3).transpose(0, 2),
    torch.zeros(3, 4, 7)[:, :, ::2],
    torch.zeros(8, 4, 3)[::2],
]


@pytest.mark.parametrize("x", STRIDED, ids=lambda x: str(x.stride()))
@pytest.mark.parametrize("covered", [1, 2, 3])
@pytest.mark.parametrize("accumulate", [False, True])
def test_any_strides_are_taken_and_kept(x, covered, accumulate):
    indices = [torch.arange(20) * (d + 3) % n for d, n in enumerate(x.shape[:covered])]
    values = torch.arange(20.0 * x.shape[covered:].numel()).view(20, *x.shape[covered:])
    expected = one_by_one(x, indices, values, accumulate)
    found = tw.index_put(x, indices, values, accumulate)
    assert torch.equal(found, expected)
    assert found.stride() == torch.index_put(x, indices, values).stride()
    base = torch.full((500,), 9.0)
    table = base.as_strided(x.shape, x.stride()).zero_()
    untouched = base == 9
    assert tw.index_put_(table, indices, values, accumulate) is table
    assert torch.equal(table, expected)
    assert (base[untouched] == 9).all()


@settings(max_examples=60)
@given(calls(), st.booleans(), st.booleans())
def test_its_gradients_are_pytorchs(call, accumulate, in_place):
    x, indices, values = call
    x, values = x.double(), values.double()
    weights = torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape)
    results = []
    for module in (tw, torch):
        leaves = x.clone().requires_grad_(), values.clone().requires_grad_()
        table = leaves[0] * 1
        if module is torch:
            out = table.index_put(tuple(i.long() for i in indices), leaves[1], accumulate)
        elif in_place:
            out = tw.index_put_(table, indices, leaves[1], accumulate)
            assert out is table
        else:
            out = tw.index_put(table, indices, leaves[1], accumulate)
        (out * weights).sum().backward()
        results.append([leaf.grad for leaf in leaves])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs)


LONG = torch.zeros(3).long()


@pytest.mark.parametrize(
    ("indices", "values"),
    [
        ((LONG, LONG[:2]), torch.ones(3)),
        ((LONG,), torch.ones(2, 5)),
        ((LONG,), torch.ones(1, 3, 5)),
        ((LONG, LONG, LONG), torch.ones(3)),
        ((LONG.float(),), torch.ones(3, 5)),
        ((LONG,), torch.ones(3, 5).double()),
    ],
)
def test_a_wrong_call_is_refused_in_pytorchs_words(indices, values):
    messages = []
    for module in (torch, tw):
        with pytest.raises((IndexError, RuntimeError)) as caught:
            module.index_put(torch.zeros(4, 5), indices, values)
        messages.append((caught.type, str(caught.value)))
    assert messages[0] == messages[1]


def test_backward_of_a_sum_by_index_put_does_without_the_values():
    x, values = (torch.randn(n, 3, requires_grad=True) for n in (4, 2))
    found = []
    for m in (tw, torch):
        given = values * 1
        out = m.index_put(x, (torch.tensor([1, -3]),), given, True)
        with torch.no_grad():
            given.add_(1)
        found.append(torch.autograd.grad(out.square().sum(), (x, values)))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "call",
    [
        lambda m, x, i: m.index_put(x, (i,), torch.ones(3), True),
        lambda m, x, i: m.index_put(x, (i,), torch.ones(3)),
        lambda m, x, i: m.gather(x, 0, i.view(-1, 1), sparse_grad=True),
        lambda m, x, i: (m.embedding if m is tw else F.embedding)(i, x),
    ],
)
def test_a_jit_trace_with_gradients_has_pytorchs_nodes(call):
    x, index = torch.randn(4, 3, requires_grad=True), torch.tensor([2, 0, 2])
    mine = torch.jit.trace(lambda x, i: call(tw, x, i), (x, index))
    theirs = torch.jit.trace(lambda x, i: call(torch, x, i), (x, index))
    kinds = [[n.kind() for n in traced.graph.nodes()] for traced in (mine, theirs)]
    assert kinds[0] == kinds[1]
    assert torch.equal(mine(x, index), theirs(x, index))


def test_a_leaf_is_not_written_in_place():
    leaf = torch.zeros(5, 2, requires_grad=True)
    for accumulate in (False, True):
        with pytest.raises(RuntimeError, match="leaf"):
            tw.index_put_(leaf, (torch.tensor([1, 1]),), torch.ones(2, 2), accumulate)
    assert not leaf.any()


def test_sums_come_from_the_implementation_that_is_asked_for():
    x, values = torch.zeros(6, 7, 5), torch.randn(90, 5)
    first, second = torch.randint(-6, 6, (90,)), torch.randint(-7, 7, (90,))
    with tw.use("rows_cpp"):
        found = tw.index_put(x, (first, second), values, accumulate=True)
    torch.testing.assert_close(found, torch.index_put(x, (first, second), values, accumulate=True))


def test_index_put_of_what_is_no_tensor_or_no_tuple_is_refused():
    x, index = torch.zeros(3, 4), torch.tensor([0, 2])
    for form in (tw.index_put, tw.index_put_):
        with pytest.raises(TypeError, match="values is of type float, expected a Tensor"):
            form(x, (index,), 1.0)
        with pytest.raises(
            TypeError, match=r"indices is one Tensor, expected a tuple: \(indices,\)"
        ):
            form(x, index, torch.ones(()))
        with pytest.raises(TypeError, match="indices is of type int, expected a tuple of Tensors"):
            form(x, 2, torch.ones(()))
        with pytest.raises(TypeError, match=r"indices\[1\] is of type list, expected a Tensor"):
            form(x, (index, [0, 1]), torch.ones(()))
        with pytest.raises(TypeError, match="input is of type list, expected a Tensor"):
            form([0.0], (index,), torch.ones(()))


@pytest.mark.parametrize("accumulate", [False, True])
def test_in_place_what_is_written_may_not_be_read(accumulate):
    x = torch.arange(12).view(4, 3)
    kept, index = x.clone(), torch.tensor([1, 1])
    shared = [
        ((index,), x[2], "values"),
        ((index,), x[:2], "values"),
        ((x[0, 1:], index), torch.tensor(1), r"indices\[0\]"),
        ((index, x[3, :2]), torch.tensor(1), r"indices\[1\]"),
    ]
    for indices, values, name in shared:
        with pytest.raises(tw.SharedMemory, match=f"shares memory with {name}; clone"):
            tw.index_put_(x, indices, values, accumulate)
    with pytest.raises(tw.SharedMemory, match="shares memory with values; clone"):
        tw.index_put_(x.t(), (index, index), x[:, 0][:2], accumulate)
    assert torch.equal(x, kept)
    wide = torch.zeros(4, 8)
    beside = tw.index_put_(wide[:, :3], (torch.arange(4),), wide[:, 3:6] + 1, accumulate)
    assert torch.equal(beside, torch.ones(4, 3))
    assert torch.equal(
        tw.index_put_(wide[:, 3:6], (torch.arange(4),), wide[:, :3], accumulate), torch.ones(4, 3)
    )


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_number_for_all_rows_is_made_one_row_of(accumulate):
    x, index = torch.zeros(6, 5, 1000), [torch.randint(n, (500,)) for n in (6, 5)]
    value = torch.tensor(2.0)
    assert torch.equal(
        tw.index_put(x, index, value, accumulate), x.index_put(index, value, accumulate)
    )
    *_, rows = _as_rows(x, index, value, torch.Size([500]))
    assert (rows.shape, rows.stride()) == ((500, 1000), (0, 1))  # which kernels take as it is


@pytest.mark.parametrize("accumulate", [False, True])
def test_of_a_tensor_that_is_not_contiguous_one_copy_is_made(accumulate):
    x, index = torch.zeros(400, 500).t(), [torch.randint(400, (50,)) for _ in range(2)]
    with tw.use("aten"):
        tw.index_put_(x, index, torch.ones(50), accumulate)
        took = peak_bytes(lambda: tw.index_put_(x, index, torch.ones(50), accumulate))
        assert took < 1.5 * x.nbytes
        took = peak_bytes(lambda: tw.index_put(x, index, torch.ones(50), accumulate))
        assert took < 2.5 * x.nbytes


@pytest.mark.parametrize("place", ["indices", "a mask", "values"])
def test_what_has_no_memory_is_not_read_beside_what_has(place):
    x, index, values = torch.zeros(6, 3), torch.tensor([0, 2]), torch.ones(2, 3)
    given = {
        "indices": ((index.to("meta"),), values),
        "a mask": ((torch.ones(6, dtype=torch.bool, device="meta"),), values[0]),
        "values": ((index,), values.to("meta")),
    }[place]
    for run in (tw.index_put, tw.index_put_):
        with pytest.raises(ValueError, match="is on meta, but input is on cpu"):
            run(x, *given)
    with pytest.raises(ValueError, match="input is on meta, but weight is on cpu"):
        tw.embedding(index.to("meta"), x)
    assert tw.index_put(x.to("meta"), (index,), values).is_meta


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bool])
@pytest.mark.parametrize("differentiable", [False, True])
def test_nor_is_an_index_on_meta(differentiable, dtype):
    x, index = torch.zeros(6, 3, dtype=dtype), torch.zeros(2, 3, dtype=torch.long, device="meta")
    x.requires_grad_(differentiable and dtype is not torch.bool)
    for call in (
        lambda: tw.gather(index=index, dim=0, input=x),
        lambda: tw.scatter(x, 0, index, x[:2]),
        lambda: tw.index_add(x, 0, index[:, 0], x[:2]),
    ):
        with pytest.raises(ValueError, match=r"index is on meta|tensors are on cpu, meta"):
            call()
