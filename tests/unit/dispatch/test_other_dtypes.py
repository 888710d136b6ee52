"""Operators with an index on complex numbers, booleans and small integers."""

import pytest
import torch
from torch.testing import assert_close

import tilewright as tw

SMALL = [torch.bool, torch.int8, torch.uint8, torch.int16]
COMPLEX = [torch.complex64, torch.complex128]


def drawn(shape, dtype):
    if dtype.is_complex:
        return torch.randn(shape, dtype=dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 7, shape).to(dtype)


def calls(dtype, rank):
    """(name, arguments after x): each operator along each dim."""
    shape, line = [5, 3, 4][:rank], torch.tensor([1, 1, 0, 1])
    for dim in range(-rank, rank):
        larger = [4 if d == dim % rank else n for d, n in enumerate(shape)]
        index = torch.randint(2, larger)
        src = drawn(larger, dtype)
        yield "scatter", (dim, index, src)
        yield "scatter_add", (dim, index, src)
        yield "gather", (dim, index)
        yield "index_add", (dim, line, src)
        for reduce in ("sum", "mean", "prod"):
            if dtype != torch.bool or reduce != "mean":
                yield "scatter_reduce", (dim, index, src, reduce)
        if dtype in (torch.int8, torch.int16):
            yield "scatter_reduce", (dim, index, src, "amax")
            yield "index_reduce", (dim, line, src, "amin")


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("dtype", [*SMALL, *COMPLEX])
def test_they_are_what_pytorch_computes(dtype, rank):
    torch.manual_seed(rank)
    x = drawn([5, 3, 4][:rank], dtype)
    for name, args in calls(dtype, rank):
        expected = getattr(torch, name)(x, *args)
        assert_close(getattr(tw, name)(x, *args), expected, msg=name)
        assert_close(getattr(tw, name)(x, *args, out=torch.empty_like(expected)), expected)
        if name != "gather":
            written = x.clone()
            assert getattr(tw, f"{name}_")(written, *args) is written
            assert_close(written, expected, msg=f"{name}_")


@pytest.mark.parametrize("dtype", [*SMALL, *COMPLEX])
def test_the_last_of_several_writes_wins(dtype):
    x, src = torch.zeros(9, dtype=dtype), drawn([3000], dtype)
    index = torch.randint(9, (3000,))
    last = {int(i): at for at, i in enumerate(index)}
    expected = torch.stack([src[last[i]] for i in range(9)])
    assert torch.equal(tw.scatter(x, 0, index, src), expected)
    assert torch.equal(tw.scatter_(x, 0, index, src), expected)


def test_numbers_and_tensors_of_no_dims_do_too():
    x, index = torch.zeros(5, dtype=torch.complex64), torch.tensor([1, 3])
    assert_close(tw.scatter(x, 0, index, 2 - 1j), torch.scatter(x, 0, index, 2 - 1j))
    small = torch.zeros(5, dtype=torch.int8)
    assert_close(tw.scatter(small, 0, index, 3), torch.scatter(small, 0, index, 3))
    one = torch.tensor(2j)
    place = torch.tensor(0)
    assert_close(tw.scatter_add(one, 0, place, one), torch.tensor(4j))
    assert_close(tw.gather(one, -1, place), one)
    assert_close(tw.gather(one, 0, place[None]), one[None])
    for name in ("scatter", "scatter_add", "index_add"):
        written = torch.tensor(1j)
        assert getattr(tw, f"{name}_")(written, 0, place, one) is written
        assert_close(written, getattr(torch, name)(torch.tensor(1j), 0, place, one))
    source = drawn([2], torch.complex64)
    for alpha in (2j, 2.0, 3):
        assert_close(
            tw.index_add(x, 0, index, source, alpha=alpha),
            torch.index_add(x, 0, index, source, alpha=alpha),
        )


def test_conjugated_views_are_read_and_written():
    x, index = drawn([5], torch.complex64), torch.tensor([1, 3])
    src, kept = drawn([2], torch.complex64), x.clone()
    assert_close(
        tw.scatter_add(x.conj(), 0, index, src.conj()), tw.scatter_add(x, 0, index, src).conj()
    )
    view = x.conj()
    assert tw.scatter_add_(view, 0, index, src) is view
    assert_close(x, kept.scatter_add(0, index, src.conj().resolve_conj()))


@pytest.mark.parametrize("form", ["", "_"])
def test_complex_numbers_have_gradients(form):
    index, line = torch.randint(5, (4, 3)), torch.tensor([1, 1, 0, 1])

    def call(x, src):
        x = x * 1
        added = getattr(tw, f"scatter_add{form}")(x, 0, index, src)
        moved = getattr(tw, f"scatter{form}")(added, 0, torch.tensor([[0, 1, 2]]), src[:1] * 2)
        return tw.gather(getattr(tw, f"index_add{form}")(moved, 0, line, src, alpha=2), 0, index)

    given = [drawn(s, torch.complex128).requires_grad_() for s in ([5, 3], [4, 3])]
    assert torch.autograd.gradcheck(call, given)


def test_what_is_wrong_is_said_in_words_as_for_other_dtypes():
    x, index = torch.zeros(5, dtype=torch.int8), torch.tensor([1, 3])
    ones = torch.ones(2, dtype=torch.int8)
    with pytest.raises(tw.InvalidArgument, match=r"src is torch\.uint8, but x is torch\.int8"):
        tw.scatter(x, 0, index, ones.to(torch.uint8))
    with pytest.raises(IndexError, match="dim=1 is out of range for x of rank 1"):
        tw.scatter(x, 1, index, ones)
    with pytest.raises(tw.InvalidArgument, match=r"source has shape \[2\], but x \[5\] and 3"):
        tw.index_add(x, 0, torch.tensor([1, 1, 1]), ones)
    with pytest.raises(tw.InvalidArgument, match=r"index is torch\.int8, expected i64 or i32"):
        tw.gather(x, 0, ones)
    for call in (tw.scatter, tw.scatter_):
        with pytest.raises(tw.IndexOutOfRange, match="index 9 is out of range for 5 places"):
            call(x, 0, torch.tensor([1, 9]), ones)
    with pytest.raises(tw.SharedMemory, match="shares memory with src"):
        tw.scatter_(x, 0, index, x[:2])
    complex_x = torch.zeros(5, dtype=torch.complex64)
    with pytest.raises(tw.SharedMemory, match="shares memory with source"):
        tw.index_add_(complex_x, 0, index, complex_x[1:3])
    with tw.use("rows_cpp"), pytest.raises(tw.InvalidArgument, match=r"x is torch\.int8, expected"):
        tw.index_add(x, 0, index, ones)
    assert not x.any()


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize(
    ("dtype", "reduce", "words"),
    [
        (torch.complex64, "amax", r"reduce=amax of torch\.complex64, which has no order"),
        (torch.complex128, "amin", "has no order"),
        (torch.bool, "mean", r"a mean of torch\.bool is none; convert x"),
    ],
)
def test_what_has_no_such_reduction_is_not_written(dtype, reduce, words, include_self):
    index, src = torch.tensor([1, 1]), torch.zeros(2, dtype=dtype)
    for name in ("scatter_reduce", "index_reduce"):
        x = torch.ones(3, dtype=dtype)
        for form in ("", "_"):
            with pytest.raises(tw.InvalidArgument, match=words):
                getattr(tw, name + form)(x, 0, index, src, reduce, include_self=include_self)
        assert torch.equal(x, torch.ones(3, dtype=dtype))


def test_booleans_take_any_factor_but_zero_for_true():
    x, index, source = torch.zeros(3, dtype=torch.bool), torch.tensor([1]), torch.tensor([True])
    for alpha in (0.1, -0.5, 2, 0.0, 0, True):
        for call in (tw.index_add, tw.index_add_):
            found = call(x.clone(), 0, index, source, alpha=alpha)
            assert torch.equal(found, torch.index_add(x, 0, index, source, alpha=alpha))


def test_products_have_gradients_of_a_source_that_is_larger_than_the_index():
    x, src = drawn([4, 5], torch.complex128), drawn([4, 5], torch.complex128)
    index = torch.tensor([[1, 0, 1], [0, 0, 3]])
    results = []
    for narrowed in (False, True):
        leaves = x.clone().requires_grad_(), src.clone().requires_grad_()
        given = leaves[1][:2, :3] if narrowed else leaves[1]
        out = tw.scatter_reduce_(leaves[0] * 1, 0, index, given, "prod")
        results.append(torch.autograd.grad(out, leaves, torch.ones_like(out)))
    for mine, theirs in zip(*results, strict=True):
        assert_close(mine, theirs)


@pytest.mark.parametrize("dtype", [*SMALL, torch.complex64])
def test_below_torch_compile_they_are_pytorchs(dtype):
    torch._dynamo.reset()
    x, src, index = drawn((5, 3), dtype), drawn((4, 3), dtype), torch.randint(4, (4, 3))
    for call in (
        lambda m, x: m.gather(x, 0, index),
        lambda m, x: m.scatter_add(x, 0, index, src),
        lambda m, x: m.index_add(x, 0, index[:, 0], src),
    ):
        traced = torch.compile(lambda x, call=call: call(tw, x), backend="eager", fullgraph=True)
        assert_close(traced(x), call(torch, x))


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.jacfwd])
def test_two_dtypes_are_refused_below_transforms_too(transform):
    index, src = torch.tensor([0, 1, 1]), torch.ones(3, dtype=torch.bfloat16)
    x = torch.ones((2, 3) if transform is torch.vmap else 3)
    for call in (
        lambda m, x: m.scatter_add(x, -1, index, src),
        lambda m, x: m.scatter_reduce(x, -1, index, src, "sum"),
        lambda m, x: m.index_add(x, -1, index, src),
    ):
        for m in (torch, tw):
            with pytest.raises(RuntimeError, match=r"dtype|scalar type"):
                transform(lambda x, m=m, call=call: call(m, x))(x)


@pytest.mark.parametrize("name", ["index_add", "index_add_"])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.float32, torch.int8])
def test_nothing_has_no_places_to_add_to(name, dtype):
    x, index = torch.zeros(0, dtype=dtype), torch.tensor([0, 7])
    for add in (getattr(tw, name), getattr(torch.Tensor, name)):
        with pytest.raises(IndexError):
            add(x, 0, index, torch.ones(2, dtype=dtype))
        assert add(x, 0, index[:0], x.clone()).shape == (0,)
