"""Names, numbers and counts of the arguments that the public functions take."""

import contextlib
import itertools
import math
import re
from decimal import Decimal

import numpy as np
import pytest
import torch
from torch import Tensor

import tilewright as tw
from tilewright.dispatch.call import operators
from tilewright.dispatch.functions.operator import backward_operator
from tilewright.errors import IndexOutOfRange, InvalidArgument, InvalidDim, InvalidType
from tilewright.op import OPS

X = torch.arange(6.0).reshape(2, 3)
INDEX = torch.tensor([[0, 1, 1], [0, 1, 0]])
ROWS = torch.tensor([1, 1])
SRC = torch.full((2, 3), 2.0)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_names_and_counts_of_arguments_are_checked_alike_with_gradients(requires_grad):
    x = X.clone().requires_grad_(requires_grad)
    with pytest.raises(InvalidArgument, match="unknown argument 'self'; known: x, dim, index, src"):
        tw.scatter(self=x, dim=0, index=INDEX, src=SRC)
    with pytest.raises(InvalidArgument, match="argument 'src' is given twice"):
        tw.scatter(x, 0, INDEX, src=SRC, value=2.0)
    with pytest.raises(InvalidArgument, match="5 positional arguments, but there are 4"):
        tw.scatter(x, 0, INDEX, SRC, "add")
    with pytest.raises(InvalidArgument, match="index=None should be"):
        tw.gather(x, 0, None)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_numbers_of_numpy_are_numbers(requires_grad):
    x = X.clone().requires_grad_(requires_grad)
    for alpha in (np.float32(0.5), np.float64(0.5), np.int64(3)):
        mine = tw.index_add(x, np.int64(-2), ROWS, SRC, alpha=alpha)
        torch.testing.assert_close(mine, torch.index_add(x, -2, ROWS, SRC, alpha=alpha.item()))
    table = tw.embedding_backward(SRC, ROWS, np.int64(4), padding_idx=np.int32(-1))
    assert torch.equal(table[1], torch.full((3,), 4.0))
    for zero in (np.float32(0.0), np.float32(-0.0), np.float64(0.0), np.float64(-0.0)):
        for _ in range(3):
            written = tw.scatter(X, 0, INDEX, zero)
            assert torch.equal(written.signbit(), torch.scatter(X, 0, INDEX, zero).signbit())


IN_TENSORS = {
    "gather": lambda m, x, n: m.gather(x, torch.tensor(n - 2, dtype=torch.uint8), INDEX),
    "scatter": lambda m, x, n: m.scatter(x, torch.tensor(n - 4), INDEX, SRC.to(x.dtype)),
    "value": lambda m, x, n: m.scatter(x, 0, INDEX, value=torch.tensor(float(n))),
    "reduce": lambda m, x, n: m.scatter(x, 0, INDEX, value=torch.tensor(n), reduce="add"),
    "scatter_add": lambda m, x, n: m.scatter_add(x, torch.tensor(0), INDEX, SRC.to(x.dtype)),
    "index_add": lambda m, x, n: m.index_add(
        x, torch.tensor(0), ROWS, SRC.to(x.dtype), alpha=torch.tensor(n)
    ),
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("name", IN_TENSORS)
def test_numbers_in_tensors_of_no_dims_are_read(name, dtype, requires_grad):
    call, x = IN_TENSORS[name], X.clone().to(dtype).requires_grad_(requires_grad)
    for n in (2, 3, 3, 2):
        assert torch.equal(call(tw, x, n), call(torch, x, n))
    torch._dynamo.reset()  # else it does what it found out about another dtype
    compiled = torch.compile(lambda x: call(tw, x, 2), backend="eager")
    assert torch.equal(compiled(x), call(torch, x, 2))
    if requires_grad and name != "reduce":  # which PyTorch does not differentiate
        out = (call(m, x, 3) for m in (tw, torch))
        mine, theirs = (torch.autograd.grad(o.abs().sum(), x)[0] for o in out)
        assert torch.equal(mine, theirs)
    assert torch.equal(torch.vmap(lambda x: call(tw, x, 2))(x[None])[0], call(torch, x, 2))


def test_tensors_are_numbers_only_where_pytorch_reads_them():
    two = torch.tensor(2.0)
    for m in (tw, torch):
        for dim in (two, torch.tensor(False), torch.tensor([0])):
            with pytest.raises(TypeError):
                m.gather(X, dim, INDEX)
        with pytest.raises(TypeError):
            m.index_add(X, 0, ROWS, SRC, alpha=two.clone().requires_grad_())
        with pytest.raises(RuntimeError, match=r"rank|number of dim"):
            m.scatter(X, 0, INDEX, two)
    assert tw.scatter(X, 0, INDEX, value=torch.tensor(-0.0))[0, 0].signbit()
    table = tw.embedding_backward(SRC, ROWS, torch.tensor(4), torch.tensor(-1))
    assert torch.equal(table, tw.embedding_backward(SRC, ROWS, 4, -1))


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.int8, torch.complex64])
def test_booleans_of_numpy_are_numbers_where_pytorch_has_them(dtype, requires_grad):
    wanted = requires_grad and (dtype.is_floating_point or dtype.is_complex)
    x, source = X.clone().to(dtype).requires_grad_(wanted), SRC.to(dtype)
    for value in (np.True_, np.False_):
        for call in (
            lambda m, v: m.index_add(x, 0, ROWS, source, alpha=v),
            lambda m, v: m.scatter(x, 0, INDEX, v),
            lambda m, v: m.scatter(x, 0, INDEX, v, reduce="add"),
        ):
            assert torch.equal(call(tw, value), call(torch, value))
        with pytest.raises(TypeError):
            tw.gather(x, value, INDEX)
        with pytest.raises(TypeError):
            tw.scatter_reduce(x, 0, INDEX, source, "sum", include_self=value)


def test_small_integers_are_indexed_by_a_dim_of_numpy():
    x = X.to(torch.int8)
    assert torch.equal(tw.gather(x, np.int64(1), INDEX), torch.gather(x, 1, INDEX))


@pytest.mark.parametrize("other", [np.True_, 1 + 0j, Decimal(1)], ids=repr)
def test_what_equals_a_number_is_none_also_after_a_call_with_the_number(other):
    for _ in range(3):
        tw.gather(X, dim=1, index=INDEX)
        tw.gather(X, 1, INDEX)
    with pytest.raises(TypeError, match="should be int"):
        tw.gather(X, dim=other, index=INDEX)
    with pytest.raises(TypeError, match="should be int"):
        tw.gather(X, other, INDEX)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("huge", [2**63, 2**64, -(2**70)])
def test_a_number_that_64_bits_do_not_hold_is_refused_in_words(huge, requires_grad):
    x = X.clone().requires_grad_(requires_grad)
    with pytest.raises(InvalidDim, match=f"dim={huge} is out of range"):
        tw.gather(x, huge, INDEX)
    with pytest.raises(InvalidArgument, match=f"num_weights={huge} is (no i64|negative)"):
        tw.embedding_backward(x, ROWS, huge)
    with pytest.raises(InvalidArgument, match=f"padding_idx={huge} is no i64: give a number"):
        tw.embedding_backward(x, ROWS, 4, huge)
    with pytest.raises(InvalidArgument, match=f"padding_idx={huge} is out of range for 2 rows"):
        tw.embedding(ROWS, x, huge)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("norm", [tw.layer_norm, tw.rms_norm])
def test_no_dims_are_normalised_nowhere(norm, requires_grad):
    x = X.clone().requires_grad_(requires_grad)
    with pytest.raises(InvalidArgument, match=r"normalized_shape=\[\] does not end x's shape"):
        norm(x, ())
    with pytest.raises(RuntimeError, match="at least 1-dimensional"):
        torch.vmap(lambda row: norm(row, ()))(x)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool])
def test_a_gradient_of_no_floats_names_the_floats(dtype):
    words = "expected f16, bf16, f32 or f64; convert it: grad.float()"
    with pytest.raises(InvalidArgument, match=re.escape(words)):
        tw.embedding_backward(SRC.to(dtype), ROWS, 4)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(("reduce", "meant"), [("max", "amax"), ("min", "amin")])
def test_an_unknown_reduction_names_the_one_that_was_meant(reduce, meant, requires_grad):
    x = X.clone().requires_grad_(requires_grad)
    for name, index in (("scatter_reduce", INDEX), ("index_reduce", ROWS)):
        with pytest.raises(InvalidArgument, match=f"did you mean {meant}\\? known: "):
            getattr(tw, name)(x, 0, index, SRC, reduce)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_errors_are_of_the_kinds_that_pytorch_raises(requires_grad):
    x = X.clone().requires_grad_(requires_grad)
    for call in (
        lambda m: m.scatter(x, 0, INDEX),
        lambda m: m.gather(x, 0, INDEX, 3),
        lambda m: m.gather(x, 0, INDEX, wanted=3),
    ):
        for module in (torch, tw):
            with pytest.raises(TypeError):
                call(module)
    for dim in (2, -3):
        for module in (torch, tw):
            with pytest.raises(IndexError):
                module.gather(x, dim, INDEX)
            with pytest.raises(IndexError):
                module.softmax(x, dim)
    with pytest.raises(tw.InvalidDim, match="gather: dim=2 is out of range for x of rank 2"):
        tw.gather(x, 2, INDEX)


def test_a_read_out_of_range_writes_nothing_to_speak_of():
    for far in (-1, 2):
        with pytest.raises(
            tw.IndexOutOfRange, match=f"index {far} is .* 2 places; nothing was read"
        ):
            tw.gather(X, 0, torch.full((1, 3), far))
        with pytest.raises(tw.IndexOutOfRange, match="2 places; nothing was written"):
            tw.scatter(X, 0, torch.full((1, 3), far), SRC)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_factor_may_be_true(dtype):
    x, source = X.to(dtype), SRC.to(dtype)
    for alpha in (True, False):
        for _ in range(2):
            mine = tw.index_add(x, 0, ROWS, source, alpha=alpha)
            assert torch.equal(mine, torch.index_add(x, 0, ROWS, source, alpha=alpha))
    torch._dynamo.reset()
    traced = torch.compile(tw.index_add, backend="eager", fullgraph=True)
    assert torch.equal(traced(x, 0, ROWS, source, True), torch.index_add(x, 0, ROWS, source))
    leaf = torch.full((2, 3), 2.0, requires_grad=True)
    tw.index_add(X, 0, ROWS, leaf, alpha=True).sum().backward()
    assert torch.equal(leaf.grad, torch.ones(2, 3))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf"), 2**31, -1e10])
def test_a_number_that_integers_do_not_hold_is_refused_in_words(number):
    x, source = X.int(), SRC.int()
    with pytest.raises(
        InvalidArgument, match=r"^index_add: alpha=.* is no i32, which x is; give a"
    ):
        tw.index_add(x, 0, ROWS, source, alpha=number)
    with pytest.raises(InvalidArgument, match=r"^scatter: src=.* is no i32, which x is"):
        tw.scatter(x, 0, INDEX, number)
    if abs(number) < 2**63:
        tw.scatter(x.long(), 0, INDEX, number)


@pytest.mark.parametrize("number", [10**400, -(10**400)])
def test_a_number_that_no_float_holds_is_refused_in_words(number):
    for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.int16, torch.bool):
        with pytest.raises(InvalidArgument, match=r"^index_add: alpha is larger than any float"):
            tw.index_add(X.to(dtype), 0, ROWS, SRC.to(dtype), alpha=number)
    with pytest.raises(InvalidArgument, match=r"^scatter: src is larger than any float"):
        tw.scatter(X, 0, INDEX, number)


@pytest.mark.parametrize("alpha", [1e30, 2j, -1.9, -0.5, -1, 1.9, 127.5, 255.5, -(2**15) - 0.5])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.bool])
def test_beside_small_integers_pytorch_says_what_is_no_factor(dtype, alpha):
    x = X.to(dtype)
    given = 0, ROWS, SRC.to(dtype)
    found = []
    for call in (torch.index_add, tw.index_add, torch.Tensor.index_add_, tw.index_add_):
        try:
            found.append(call(x.clone(), *given, alpha=alpha).tolist())
        except RuntimeError as error:
            found.append(str(error))
    assert found == found[:1] * 4


def test_what_has_no_dims_takes_a_source_and_an_index_of_none():
    x, index = torch.tensor(1.0), torch.tensor([0])
    assert tw.index_add(x, 0, index, x) == tw.index_add(x, 0, index[0], x) == 2.0
    for call in (
        lambda: tw.index_add(x, 0, index, x.reshape(1)),
        lambda: tw.index_add(x, 0, index.repeat(2), x),
        lambda: tw.index_add_(x, 0, index[:0], x),
        lambda: tw.index_reduce(x, 0, index, x.reshape(1), "amax"),
    ):
        with pytest.raises(InvalidArgument, match="x has no dims, but source has shape"):
            call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.uint8, torch.complex64])
@pytest.mark.parametrize(
    ("x", "src"),
    [
        (X[0], SRC[0]),
        (X[0].clone().requires_grad_(), SRC[0]),
        (X[0].to(torch.complex64), SRC[0].to(torch.complex64)),
    ],
    ids=["floats", "differentiable", "complex"],
)
def test_an_empty_index_of_separate_elements_is_of_any_dtype(x, src, dtype):
    nowhere = torch.tensor([], dtype=dtype)
    for call in (
        lambda m: m.scatter(x, 0, nowhere, src),
        lambda m: m.scatter(x, 0, nowhere, 2.0),
        lambda m: m.scatter_add(x, 0, nowhere, src),
        lambda m: m.scatter_reduce(x, 0, nowhere, src, "prod"),
        lambda m: m.gather(x, 0, nowhere),
    ):
        assert torch.equal(call(tw), call(torch))
    with pytest.raises(InvalidArgument, match=r"index is .*, expected i64 or i32"):
        tw.index_add(X[0], 0, nowhere, X[0, :0])


FAR = INDEX + 9


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("scatter", (X, 0, INDEX.short(), SRC)),
        ("scatter", (X, 0, INDEX[0], SRC[0])),
        ("scatter", (X, 0, INDEX, SRC[:1])),
        ("scatter", (X, 0, INDEX, SRC.double())),
        ("scatter", (X.int(), 0, INDEX, 2**40)),
        ("scatter", (X, 0, FAR, SRC)),
        ("scatter", (X, 2, INDEX, SRC)),
        ("scatter_add", (X[:, :2], 0, INDEX, SRC)),
        ("scatter_add", (X, 0, FAR, SRC)),
        ("scatter_reduce", (X, 0, INDEX, SRC, "multiply")),
        ("scatter_reduce", (X, 0, FAR, SRC, "amax")),
        ("gather", (X[:, :2], 0, INDEX)),
        ("gather", (X, 0, FAR)),
        ("gather", (X, 0, INDEX.float())),
        ("index_add", (X, 0, ROWS, SRC[:, :2])),
        ("index_add", (X, 0, ROWS + 9, SRC)),
        ("index_reduce", (X, 0, ROWS, SRC, "sum")),
        ("index_reduce", (X, 0, ROWS, SRC.half(), "amin")),
        ("index_put", (X, (ROWS + 9,), SRC)),
        ("index_put", (X, (ROWS,), SRC[:, :2])),
        ("index_put", (X, (ROWS,), SRC.half())),
    ],
)
def test_what_catches_pytorchs_errors_catches_ours(name, args):
    for form in [""] if name == "gather" else ["", "_"]:
        theirs, ours = getattr(torch.Tensor, name + form), getattr(tw, name + form)
        x = args[0].clone()
        with pytest.raises((RuntimeError, IndexError)) as raised:
            theirs(x.clone(), *args[1:])
        with pytest.raises(raised.type):
            ours(x, *args[1:])
        assert torch.equal(x, args[0])


@pytest.mark.parametrize("accumulate", [1, None, "yes", np.True_], ids=repr)
@pytest.mark.parametrize("form", [tw.index_put, tw.index_put_])
def test_whether_index_put_adds_is_a_bool(form, accumulate):
    with pytest.raises(TypeError, match=r"accumulate is of type .*, expected a bool"):
        form(X.clone(), (ROWS,), SRC, accumulate)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.int8, torch.complex64])
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (2, 0)])
def test_what_is_empty_is_written_in_place_as_pytorch_does(shape, dtype, requires_grad):
    requires_grad &= dtype.is_floating_point or dtype.is_complex
    for index in (
        torch.tensor([0]),
        torch.tensor([7]),
        torch.tensor([0, 1]),
        torch.tensor([0])[:0],
    ):
        rows = torch.ones(len(index), *shape[1:], dtype=dtype, requires_grad=requires_grad)
        one = torch.ones((), dtype=dtype)
        places = index.view(-1, *[1] * (len(shape) - 1)).expand(rows.shape)
        for name, args in (
            ("index_add_", (0, index, rows)),
            ("index_reduce_", (0, index, rows, "prod")),
            ("index_put_", ((index,), rows)),
            ("index_put_", ((index,), one, True)),
            ("scatter_", (0, places, rows)),
            ("scatter_add_", (0, places, rows)),
            ("scatter_reduce_", (0, places, rows, "sum")),
        ):
            found = [torch.empty(shape, dtype=dtype) for _ in range(2)]
            try:
                getattr(found[1], name)(*args)
            except (RuntimeError, IndexError) as error:
                with pytest.raises((type(error), NotImplementedError)):
                    getattr(tw, name)(found[0], *args)
            else:
                assert getattr(tw, name)(found[0], *args) is found[0]


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("padding", [None, 0])
def test_a_table_without_rows_is_read_nowhere(padding, requires_grad):
    tables = [torch.ones(0, 3, requires_grad=requires_grad) for _ in range(2)]
    embeddings = tw.embedding, torch.nn.functional.embedding
    for table, embedding in zip(tables, embeddings, strict=True):
        found = embedding(torch.empty(2, 0).long(), table, padding)
        assert found.shape == (2, 0, 3)
        if requires_grad:
            found.sum().backward()
            assert table.grad.shape == (0, 3)
    with pytest.raises(IndexOutOfRange, match=r"index 0 is out of range .* nothing was read"):
        tw.embedding(torch.tensor([0]), tables[0], padding)


@pytest.mark.parametrize("accumulate", [False, True])
def test_an_expanded_tensor_is_written_as_pytorch_does(accumulate):
    found = [torch.zeros(3).expand(4, 3) for _ in range(2)]
    for x, put in zip(found, (tw.index_put_, Tensor.index_put_), strict=True):
        with pytest.warns(UserWarning, match="expanded tensors is deprecated"):
            put(x, (torch.tensor([2]),), torch.tensor(2.0), accumulate)
    assert torch.equal(*found)


@pytest.mark.parametrize("form", [tw.index_put, tw.index_put_])
def test_no_index_tensors_are_refused_in_words(form):
    with pytest.raises(InvalidArgument, match="indices is empty; give an index tensor"):
        form(X.clone(), (), X)


@pytest.mark.usefixtures("forgets_functions")
@pytest.mark.parametrize("other", [np.ones(2), {"a": 1}, {1}, [[1], [2]]], ids=str)
def test_what_is_neither_a_tensor_nor_a_number_is_named_or_left_to_pytorch(other):
    counted = tw.fuse(lambda x, by: x * 2, name="counted")
    for args in ((X, other), (other, X)):
        with pytest.raises(InvalidType, match=r"counted: (x|by) is or holds.*; give a tensor"):
            counted(*args)
    left = tw.fuse(lambda x, by: x * len(by), name="left", fallback=True)
    assert torch.equal(left(X, other), X * len(other))


@pytest.mark.usefixtures("forgets_functions")
def test_an_argument_of_a_fused_function_too_many_is_told_from_a_seed():
    product = tw.fuse(lambda x, y: x * y, name="product")
    told = r"product\(x, y\): seed={}, given beside its arguments, should be an int64 scalar tensor"
    needing = X.clone().requires_grad_()
    for other, shown in ((X, r"f32\[2,3\]"), (2, "2"), (2.5, "2.5"), ("a", "a")):
        for call in (lambda v: product(X, 1, v), lambda v: product(needing, 1, seed=v)):
            with pytest.raises(InvalidType, match=told.format(shown)):
                call(other)
    for call in (tw.fuse(lambda x, y: x * y, name="left", fallback=True), torch.vmap(product)):
        with pytest.raises(InvalidType, match=r"\(x, y\): seed, given beside its arguments, "):
            call(X, X, X)


@pytest.mark.usefixtures("forgets_functions")
def test_scalars_of_a_fused_function_are_parameters_of_it():
    with pytest.raises(InvalidArgument, match=r"no parameter 'alhpa'; .*known: x, alpha$"):
        tw.fuse(lambda x, alpha: x * alpha, name="scaled_by", scalars=["alhpa"])
    with pytest.raises(InvalidArgument, match=r"'alpha' is a string; .*: scalars=\['alpha'\]$"):
        tw.fuse(lambda x, alpha: x * alpha, name="scaled_by", scalars="alpha")


@pytest.mark.parametrize("name", ["index_add", "index_reduce"])
def test_an_index_of_rows_has_one_dim(name):
    more = {"index_add": (), "index_reduce": ("prod",)}[name]
    for m in (tw, torch):
        with pytest.raises(IndexError):
            getattr(m, name)(X, 0, INDEX, SRC, *more)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["index_add", "scatter", "add", "multiply"])
def test_a_number_beyond_the_dtype_of_x_is_refused_as_by_pytorch(name, dtype):
    x, index = torch.ones(4, dtype=dtype), torch.tensor([1])
    most = torch.finfo(dtype).max

    def call(module, value):
        if name == "index_add":
            return module.index_add(x, 0, index, torch.ones(1, dtype=dtype), alpha=value)
        reduce = {} if name == "scatter" else {"reduce": name}
        return module.scatter(x, 0, index, value, **reduce)

    for value in (most, -most, math.inf, -math.inf):
        assert torch.equal(call(tw, value), call(torch, value))
    for value in (most * 1.01, -most * 2):
        with pytest.raises(RuntimeError, match="without overflow"):
            call(torch, value)
        with pytest.raises(InvalidArgument, match="which x is; give a number from -"):
            call(tw, value)


@pytest.mark.usefixtures("forgets_functions")
@pytest.mark.parametrize(
    ("who", "function"),
    [
        *itertools.product(["aten", "fused", "disabled", "autocast"], ["lerp", "norm", "own"]),
        ("differentiated", "lerp"),
        ("differentiated", "norm"),
    ],
)
def test_gradients_come_in_the_operators_order_in_a_tuple_whoever_answers(who, function):
    g, x, w, one = torch.randn(5, 33), torch.randn(5, 33), torch.randn(33), torch.ones(5, 1)

    def gradients(*grads):
        return gradients_of(grads)

    def gradients_of(grads):
        given = x.clone().requires_grad_() if who == "differentiated" else x
        if function == "lerp":
            return tw.lerp_backward(g, given, w, 0.25, grads)
        if function == "own":
            return operators[own.name](g, given, w, grads=grads)
        return tw.rms_norm_backward(g, given, one, None, w, grads)

    tw.fuse(lambda x, end: x.exp() * end, name="scaled")
    own = backward_operator(OPS["scaled"])
    names = ("x", "weight") if function == "norm" else ("x", "end")
    with contextlib.ExitStack() as inside:
        if who in ("aten", "fused"):
            inside.enter_context(tw.use(who))
        if who == "autocast":
            inside.enter_context(torch.autocast("cpu", torch.bfloat16))
        if who == "disabled":
            tw.disable()
            inside.callback(tw.enable)
        both = gradients(*names)
        turned = gradients(*reversed(names))
        assert [t.shape for t in both] == [t.shape for t in turned] == [x.shape, w.shape]
        assert all(torch.equal(a, b) for a, b in zip(both, turned, strict=True))
        for name, expected in zip(names, both, strict=True):
            (alone,) = found = gradients(name, name)
            assert type(found) is tuple
            torch.testing.assert_close(alone, expected)
            assert torch.equal(gradients(name)[0], alone)
            (by_name,) = gradients_of(name)
            assert torch.equal(by_name, alone)
        with pytest.raises(InvalidArgument, match="grads is empty; ask for some of x, "):
            gradients()
        with pytest.raises(InvalidArgument, match="there is no gradient of 'bias'; ask for some"):
            gradients("bias")


def test_one_gradient_is_a_tuple_in_a_compiled_program():
    x, one = torch.randn(5, 33), torch.ones(5, 1)
    with tw.use("fused"):
        compiled = torch.compile(lambda x: tw.rms_norm_backward(x, x, one), backend="eager")
        (found,) = compiled(x)
    torch.testing.assert_close(found, tw.rms_norm_backward(x, x, one)[0])


@pytest.mark.parametrize("config", [5, "rows=2", ("rows", 2)])
def test_a_config_that_is_none_is_refused_at_once(config):
    told = pytest.raises(InvalidArgument, match=r"use: config=.* is none; give knob values")
    with told, tw.use("fused", config):
        raise AssertionError("it was taken")


@pytest.mark.usefixtures("forgets_functions")
def test_a_seed_that_is_a_number_is_told_as_a_tensor():
    dropped = tw.fuse(lambda x: torch.dropout(x, 0.5, True), name="dropped_by_number")
    with pytest.raises(InvalidType, match=r"seed=5, .* should be .*: torch.tensor\(5\)$"):
        dropped(torch.ones(4), seed=5)
