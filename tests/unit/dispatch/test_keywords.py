"""PyTorch's keywords `out=`, `reduce=` and `sparse_grad=` of the operators with an index."""

import inspect
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewright as tw
from tilewright.dispatch.call import _Operators
from tilewright.errors import IndexOutOfRange, InvalidArgument

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64]
X = torch.arange(6.0).reshape(2, 3)
INDEX = torch.tensor([[0, 1, 1], [0, 1, 0]])
ROWS = torch.tensor([1, 1])
SRC = torch.full((2, 3), 2.0)

CALLS = {
    "gather": lambda m, x, index, src, **more: m.gather(x, 0, index, **more),
    "scatter": lambda m, x, index, src, **more: m.scatter(x, 0, index, src, **more),
    "scatter of a number": lambda m, x, index, src, **more: m.scatter(x, 0, index, 7, **more),
    "scatter by reduce": lambda m, x, index, src, **more: m.scatter(
        x, 0, index, src, reduce="multiply", **more
    ),
    "scatter_add": lambda m, x, index, src, **more: m.scatter_add(x, 0, index, src, **more),
    "scatter_reduce": lambda m, x, index, src, **more: m.scatter_reduce(
        x, 0, index, src, "amax", **more
    ),
    "index_add": lambda m, x, index, src, **more: m.index_add(x, 0, ROWS, src, **more),
    "index_reduce": lambda m, x, index, src, **more: m.index_reduce(
        x, 0, ROWS, src, "prod", **more
    ),
}
WRITING = [name for name in CALLS if name != "gather"]


@pytest.fixture(params=CALLS)
def call(request):
    return CALLS[request.param]


@pytest.fixture(autouse=True)
def no_warnings_of_pytorchs_own():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "index_reduce|The reduce argument of torch.scatter")
        yield


# --- out -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda like: torch.empty_like(like),
        lambda like: torch.empty(like.shape[::-1]).t(),
        lambda like: torch.empty(4, 6)[::2, ::2],
        lambda like: torch.empty(0),
        lambda like: torch.nn.Parameter(torch.empty_like(like), requires_grad=False),
    ],
    ids=["contiguous", "transposed", "strided", "empty", "a parameter"],
)
def test_out_gets_the_result_in_its_own_layout_and_is_returned(call, make):
    expected = call(torch, X, INDEX, SRC, out=make(X))
    out = make(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "index_reduce|The reduce argument of torch.scatter")
        assert call(tw, X, INDEX, SRC, out=out) is out
    assert torch.equal(out, expected)
    assert out.stride() == expected.stride()
    assert torch.equal(call(tw, X, INDEX, SRC, out=None), expected)


@settings(max_examples=40)
@given(
    st.sampled_from(WRITING),
    st.sampled_from(DTYPES),
    st.integers(0, 3),
    st.booleans(),
    st.booleans(),
)
def test_out_may_share_memory_with_any_argument(name, dtype, shift, with_x, exactly):
    memory = torch.arange(1, 11).to(dtype)
    shift = 0 if exactly else shift
    out = memory[shift : shift + 6].view(2, 3)
    shared, other = memory[:6].view(2, 3), torch.full((2, 3), 2, dtype=dtype)
    x, src = (shared, other) if with_x else (other, shared)
    expected = CALLS[name](tw, x.clone(), INDEX, src.clone())
    CALLS[name](tw, x, INDEX, src, out=out)
    assert torch.equal(out, expected)
    if dtype == torch.int64:
        index = INDEX.clone()
        CALLS[name](tw, other, index, other, out=index)
        assert torch.equal(index, CALLS[name](tw, other, INDEX, other))


def test_x_as_out_is_written_in_place(call):
    x, expected = X.clone(), call(torch, X, INDEX, SRC)
    place = x.data_ptr()
    assert call(tw, x, INDEX, SRC, out=x) is x
    assert torch.equal(x, expected)
    assert x.data_ptr() == place


def test_out_of_another_shape_is_resized_with_a_warning(call):
    out = torch.empty(5)
    with pytest.warns(UserWarning, match=r"out of shape \[5\] is resized to \[2, 3\]") as told:
        call(tw, X, INDEX, SRC, out=out)
    assert torch.equal(out, call(torch, X, INDEX, SRC))
    assert {w.filename for w in told if "resized" in str(w.message)} == {__file__}


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (torch.zeros(2, 3, dtype=torch.float64), "out is torch.float64 on cpu, but the result is"),
        (torch.zeros(2, 3, dtype=torch.int64), "out is torch.int64 on cpu, but the result is"),
        (torch.zeros(2, 3, device="meta"), "out is torch.float32 on meta, but the result is"),
        (torch.zeros(1, 3).expand(2, 3), "more than one element of the written-to tensor"),
        (torch.zeros(2, 3).requires_grad_(), "out= has no gradients, but a tensor of the call"),
        ((torch.zeros(2, 3),), "out is of type tuple, expected a Tensor"),
        (3, "out is of type int, expected a Tensor"),
    ],
)
def test_out_that_pytorch_refuses_is_refused(call, out, message):
    with pytest.raises((RuntimeError, TypeError)):
        call(torch, X, INDEX, SRC, out=out)
    wanted = RuntimeError if isinstance(out, torch.Tensor) else TypeError
    with pytest.raises(wanted, match=message):
        call(tw, X, INDEX, SRC, out=out)


def test_out_takes_no_part_in_gradients(call):
    x = X.clone().requires_grad_()
    with pytest.raises(InvalidArgument, match="out= has no gradients"):
        call(tw, x, INDEX, SRC, out=torch.empty(2, 3))
    with torch.no_grad():
        found = call(tw, x, INDEX, SRC, out=torch.empty(2, 3, requires_grad=True))
    assert torch.equal(found, call(torch, X, INDEX, SRC))


@pytest.mark.parametrize("name", [n for n in CALLS if not n.startswith("index")])
def test_out_is_left_as_it_was_where_the_call_raises(name):
    out = SRC.clone()
    with pytest.raises((IndexOutOfRange, RuntimeError)):
        CALLS[name](tw, X, INDEX + 5, SRC, out=out)
    with pytest.raises(InvalidArgument):
        CALLS[name](tw, X, INDEX[0], SRC, out=out)
    with pytest.raises(InvalidArgument):
        CALLS[name](tw, X, None, SRC, out=out)
    assert torch.equal(out, SRC)


def test_forms_without_out_say_what_they_take():
    with pytest.raises(InvalidArgument, match="scatter_: unknown argument 'out'; known: x, dim,"):
        tw.scatter_(X.clone(), 0, INDEX, SRC, out=X)
    with pytest.raises(InvalidArgument, match="embedding_backward: unknown argument 'out'"):
        tw.embedding_backward(SRC, ROWS, 2, out=X)
    with pytest.raises(TypeError, match="out"):
        tw.index_put(X, (ROWS,), SRC, out=X)


# --- reduce --------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduce", ["add", "multiply"])
@pytest.mark.parametrize("form", ["scatter", "scatter_"])
@settings(max_examples=15)
@given(
    shape=st.lists(st.integers(1, 4), min_size=0, max_size=4),
    length=st.integers(0, 6),
    along=st.integers(-4, 3),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from([torch.int32, torch.int64]),
    given_number=st.booleans(),
)
def test_scatter_with_reduce_is_pytorchs(
    form, reduce, shape, length, along, dtype, kind, given_number
):
    torch.manual_seed(0)
    dim = along % len(shape) if shape else 0
    moved = [length if d == dim else n for d, n in enumerate(shape)]
    x, src = torch.randint(-3, 4, shape).to(dtype), torch.randint(1, 3, moved).to(dtype)
    index = torch.randint(shape[dim] if shape else 1, moved, dtype=kind)
    dim -= max(len(shape), 1) * (along < 0)
    theirs, mine = (
        getattr(m, form)(x.clone(), dim, index, 2 if given_number else src, reduce=reduce)
        for m in (ByMethod, tw)
    )
    assert torch.equal(mine, theirs)
    assert mine.dtype is theirs.dtype


class ByMethod:
    scatter = torch.scatter
    scatter_ = torch.Tensor.scatter_


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_bool_is_a_number_to_write(value, dtype):
    x = X.to(dtype) + 5
    theirs = torch.scatter(x, 1, INDEX, value)
    traced = torch.compile(lambda *call: tw.scatter(*call), backend="eager", fullgraph=True)
    for scatter in (tw.scatter, traced):
        assert torch.equal(scatter(x, 1, INDEX, value), theirs)
    assert torch.equal(tw.scatter(x, 1, INDEX, value=value), theirs)
    assert torch.equal(tw.scatter_(x, 1, INDEX, value), theirs)
    leaf = X.clone().requires_grad_()
    tw.scatter(leaf, 1, INDEX, value).sum().backward()
    assert torch.equal(leaf.grad, torch.scatter(torch.ones(2, 3), 1, INDEX, 0.0))


@pytest.mark.parametrize("value", [2, 1.5, -0.0, float("inf"), float("nan"), True])
@pytest.mark.parametrize("reduce", ["add", "multiply"])
def test_a_number_is_reduced_as_pytorch_does(value, reduce):
    theirs = torch.scatter(X, 1, INDEX, value, reduce=reduce)
    for keyword in ({"src": value}, {"value": value}):
        mine = tw.scatter(input=X, dim=1, index=INDEX, reduce=reduce, **keyword)
        torch.testing.assert_close(mine, theirs, equal_nan=True, rtol=0, atol=0)
    if value == value and value != float("inf"):
        whole = torch.scatter(X.long(), 1, INDEX, value, reduce=reduce)
        assert torch.equal(tw.scatter(X.long(), 1, INDEX, value, reduce=reduce), whole)


@pytest.mark.parametrize("reduce", ["add", "multiply"])
@pytest.mark.parametrize("value", [1 - 2j, np.complex128(2j), torch.tensor(1 + 1j)])
def test_so_is_a_complex_one(value, reduce):
    x, number = torch.view_as_complex(torch.randn(4, 3, 2)), complex(value)
    theirs = torch.scatter(x, 0, INDEX, number, reduce=reduce)
    torch.testing.assert_close(tw.scatter(x, 0, INDEX, value=value, reduce=reduce), theirs)
    with pytest.raises(RuntimeError, match="without overflow"):
        tw.scatter(x.real, 0, INDEX, value=value, reduce=reduce)


def test_scatter_with_reduce_has_the_gradients_of_what_it_calls():
    def gradients(function):
        x, src = X.clone().requires_grad_(), (SRC + X).requires_grad_()
        (function(x, src) * (X + 1)).sum().backward()
        return x.grad, src.grad

    for reduce, known in (("add", "sum"), ("multiply", "prod")):
        mine = gradients(lambda x, src, r=reduce: tw.scatter(x, 0, INDEX, src, reduce=r))
        theirs = gradients(lambda x, src, r=known: torch.scatter_reduce(x, 0, INDEX, src, r))
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("reduce", ["sum", "prod", "amax", "", 3])
@pytest.mark.parametrize("src", [SRC, 2.0])
def test_other_reductions_are_refused_by_name(reduce, src):
    with pytest.raises((RuntimeError, TypeError)):
        torch.scatter(X, 0, INDEX, src, reduce=reduce)
    with pytest.raises(InvalidArgument, match="is not one of add, multiply; scatter_reduce knows"):
        tw.scatter(X, 0, INDEX, src, reduce=reduce)
    with pytest.raises(InvalidArgument, match="is not one of add, multiply; scatter_reduce_ knows"):
        tw.scatter_(X.clone(), 0, INDEX, src, reduce=reduce)


@pytest.mark.parametrize(
    "args",
    [
        (X, 0, INDEX + 2, SRC),
        (X, 0, INDEX - 1, 2.0),
        (X, 2, INDEX, SRC),
        (X, 0, INDEX, SRC.double()),
        (X, 0, INDEX, SRC[:1]),
        (X, 0, INDEX.float(), 2.0),
        (X, 0, None, 2.0),
        (None, 0, INDEX, 2.0),
        (X, 0, INDEX, None),
        (X, 0, INDEX, torch.tensor(2.0)),
        (X, 0, INDEX, 2j),
        (X, 0, INDEX),
    ],
)
@pytest.mark.parametrize("reduce", ["add", "multiply"])
def test_calls_with_reduce_that_pytorch_refuses_are_refused(args, reduce):
    with pytest.raises((RuntimeError, TypeError, IndexError)):
        torch.scatter(*args, reduce=reduce)
    with pytest.raises((InvalidArgument, RuntimeError)):
        tw.scatter(*args, reduce=reduce)


# --- sparse_grad ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_sparse_grad_makes_the_gradient_of_x_a_sparse_tensor(kind):
    found = []
    for m, sparse in ((tw, True), (tw, False), (torch, True)):
        x = X.clone().requires_grad_()
        out = m.gather(x, 1, INDEX.to(kind), sparse_grad=sparse)
        out.square().sum().backward()
        assert torch.equal(out, torch.gather(X, 1, INDEX))
        assert x.grad.is_sparse == sparse
        found.append(x.grad.to_dense())
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[2])


def test_sparse_grad_changes_nothing_where_no_gradient_is_needed():
    expected = torch.gather(X, 0, INDEX)
    assert torch.equal(tw.gather(X, 0, INDEX, sparse_grad=True), expected)
    x = X.clone().requires_grad_()
    out = torch.empty(2, 3)
    with torch.no_grad():
        assert tw.gather(x, 0, INDEX, sparse_grad=True, out=out) is out
    assert torch.equal(out, expected)


def test_sparse_grad_that_is_no_bool_and_calls_that_pytorch_refuses_are_refused():
    x = X.clone().requires_grad_()
    for value in (1, "yes"):
        with pytest.raises(TypeError, match=f"sparse_grad={value} should be bool"):
            tw.gather(x, 0, INDEX, sparse_grad=value)
    with pytest.raises(InvalidArgument, match="gather: dim=7 is out of range"):
        tw.gather(x, 7, INDEX, sparse_grad=True)
    with pytest.raises(InvalidArgument, match="gather: index=None should be"):
        tw.gather(x, 0, None, sparse_grad=True)
    with pytest.raises(InvalidArgument, match="gather: argument 'index' is missing"):
        tw.gather(x, 0, sparse_grad=True)


# --- all of them ---------------------------------------------------------------------------------


def test_keywords_run_below_transforms_and_torch_compile():
    def function(x):
        out = torch.empty(2, 3)
        tw.scatter(x, 0, INDEX, SRC, reduce="multiply", out=out)
        tw.scatter_(out, 0, INDEX, 3.0, reduce="add")
        return tw.gather(out, 0, INDEX, sparse_grad=True)

    expected = function(X)
    assert torch.equal(torch.compile(function, fullgraph=True, backend="eager")(X), expected)
    lines = torch.vmap(lambda x: tw.scatter(x, 0, ROWS, 2.0, reduce="add"))(X)
    assert torch.equal(lines, X + torch.tensor([0.0, 4.0, 0.0]))
    with torch.autocast("cpu"):
        assert torch.equal(function(X), expected)


def test_what_a_keyword_calls_is_made_before_torch_compile_needs_it():
    made = _Operators()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tilewright.dispatch.call.public_operator", lambda op: op)
        made["scatter"]
    forms = {n + end for n in ("scatter", "scatter_add", "scatter_reduce") for end in ("", "_")}
    assert forms <= set(made._made)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("scatter", ["x", "dim", "index", "src", "out", "reduce"]),
        ("scatter_", ["x", "dim", "index", "src", "reduce"]),
        ("gather", ["x", "dim", "index", "out", "sparse_grad"]),
        ("index_add", ["x", "dim", "index", "source", "alpha", "out"]),
    ],
)
def test_signatures_tell_the_keywords(name, expected):
    assert list(inspect.signature(getattr(tw, name)).parameters) == expected
