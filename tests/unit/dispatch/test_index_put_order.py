"""Of several writes of tw.index_put to one place the last one wins: whatever the dtype, with masks
beside indices, and below torch.compile, where tw.scatter promises it, too."""

import pytest
import torch

import tilewright as tw
from tilewright.errors import IndexOutOfRange

RUNS = 6
PLACES = 4
INDEX = torch.randint(PLACES, (2_000_000,), generator=torch.Generator().manual_seed(0))
LAST = [int((place == INDEX).nonzero()[-1]) for place in range(PLACES)]
POSITION = torch.arange(len(INDEX))


@pytest.fixture(autouse=True)
def nothing_compiled():
    """Tests compile the same function for many dtypes and shapes, of which there may be eight."""
    torch.compiler.reset()


def values_of(dtype):
    """Of which neighbouring positions differ."""
    if dtype is torch.bool:
        return POSITION * 2654435761 % 97 > 48
    if dtype.is_complex:
        return torch.complex(POSITION.double(), -POSITION.double()).to(dtype)
    if dtype.itemsize == 1 and dtype.is_floating_point:
        return (POSITION % 16).float().to(dtype)
    return (POSITION % 127 if dtype.itemsize == 1 else POSITION).to(dtype)


def assert_the_last_wins(put, x, indices, values, last):
    for _ in range(RUNS):
        found = put(x.clone(), indices, values)
        assert torch.equal(found.view(-1).view(torch.uint8), last.view(-1).view(torch.uint8))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", ["index_put", "index_put_"])
def test_below_torch_compile(backend, name):
    values = POSITION.float()
    put = torch.compile(lambda *call: getattr(tw, name)(*call), backend=backend, fullgraph=True)
    assert_the_last_wins(put, torch.zeros(PLACES), (INDEX,), values, values[LAST])
    x = torch.zeros(PLACES)
    assert (put(x, (INDEX,), values) is x) is (name == "index_put_")
    assert torch.equal(x, values[LAST]) is (name == "index_put_")


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["scatter", "scatter_"])
def test_so_does_an_update_by_a_tensor(backend, name):
    values = POSITION.float()

    def scatter(x, index, values):
        return getattr(tw, name)(x, 0, index, values)

    put = torch.compile(scatter, backend=backend, fullgraph=True)
    assert_the_last_wins(put, torch.zeros(PLACES), INDEX, values, values[LAST])
    x = torch.zeros(PLACES)
    assert torch.equal(put(x, INDEX, values), values[LAST])
    assert torch.equal(x, values[LAST]) is (name == "scatter_")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", ["scatter", "scatter_"])
def test_gradients_of_an_update_below_torch_compile_are_pytorchs(backend, name):
    index, weights = torch.tensor([[0, 1, 0]]), torch.randn(2, 3)
    results = []
    for module in (tw, torch.Tensor):
        x, src = torch.randn(2, 3).requires_grad_(), torch.randn(1, 3).requires_grad_()
        put = getattr(module, name)
        if module is tw:
            put = torch.compile(put, backend=backend, fullgraph=True)
        (put(x * 1, 0, index, src) * weights).sum().backward()
        results.append([x.grad, src.grad])
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", ["index_put", "index_put_"])
def test_sums_below_torch_compile_have_the_same_bits_in_every_run(name):
    values = torch.randn(len(INDEX), generator=torch.Generator().manual_seed(0))
    put = torch.compile(lambda *call: getattr(tw, name)(*call), backend="eager", fullgraph=True)
    expected = tw.index_put(torch.zeros(PLACES), (INDEX,), values, True)
    for _ in range(RUNS):
        assert torch.equal(put(torch.zeros(PLACES), (INDEX,), values, True), expected)


def _added(add, x, index, source):
    x = x * 1
    out = add(x, 0, index, source)
    return x if add.__name__.endswith("_") else out


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", ["scatter_add", "scatter_add_", "index_add", "index_add_"])
def test_sums_below_torch_compile_round_halves_once_and_have_gradients(name, backend, dynamic):
    index = torch.randint(0, PLACES, (5000,), generator=torch.Generator().manual_seed(0))
    counts = torch.bincount(index, minlength=PLACES).to(torch.bfloat16)
    x = torch.zeros(PLACES, dtype=torch.bfloat16, requires_grad=True)
    source = torch.ones(5000, dtype=torch.bfloat16, requires_grad=True)
    add = torch.compile(_added, backend=backend, fullgraph=True, dynamic=dynamic)
    out = add(getattr(tw, name), x, index, source)
    assert torch.equal(out, counts)
    (out * counts).sum().backward()
    assert torch.equal(x.grad, counts)
    assert torch.equal(source.grad, counts[index])


@pytest.mark.parametrize("mask", [torch.tensor([True]), torch.tensor([3], dtype=torch.uint8)])
@pytest.mark.parametrize("compiled", [False, True])
def test_with_a_mask_beside_an_index(mask, compiled):
    put = torch.compile(tw.index_put, backend="eager", fullgraph=True) if compiled else tw.index_put
    values = POSITION.float()
    x, last = torch.zeros(1, PLACES), values[LAST][None]
    assert_the_last_wins(put, x, (mask, INDEX), values, last)


@pytest.mark.parametrize("mask", [True, False])
def test_with_a_mask_of_no_dims_which_takes_none(mask):
    values = POSITION.float()
    indices = torch.tensor(mask), INDEX
    assert_the_last_wins(tw.index_put, torch.zeros(PLACES), indices, values, values[LAST])


OTHERS = [
    *(torch.bool, torch.int8, torch.uint8, torch.int16),
    *(torch.complex32, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
]


@pytest.mark.parametrize("dtype", OTHERS, ids=str)
@pytest.mark.parametrize("name", ["index_put", "index_put_"])
def test_of_dtypes_that_no_operator_takes(dtype, name):
    values = values_of(dtype)
    x = torch.zeros(PLACES, dtype=dtype)
    assert_the_last_wins(getattr(tw, name), x, (INDEX,), values, values[LAST])


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8, torch.bool, torch.complex64])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_these_are_written_row_by_row_and_added_as_by_pytorch(dtype, accumulate, in_place):
    torch.manual_seed(0)
    base = torch.randint(-9, 9, (2, 5, 4, 3)).to(dtype)
    for x in (base[0], base[0].transpose(0, 2), base[:, :, 0, 0]):
        indices = [torch.randint(-n, n, (30,)) for n in x.shape[:2]]
        for values in (torch.randint(-9, 9, (30, *x.shape[2:])), torch.tensor(3)):
            values = values.to(dtype)
            expected = x.clone()
            if accumulate:
                expected = torch.index_put(x, indices, values, accumulate=True)
            else:
                for *place, j in zip(*(i.tolist() for i in indices), range(30), strict=True):
                    expected[tuple(place)] = values[j] if values.dim() else values
            given = x.clone(memory_format=torch.preserve_format)
            found = (tw.index_put_ if in_place else tw.index_put)(
                given, indices, values, accumulate
            )
            assert torch.equal(found, expected)
            assert found.stride() == torch.index_put(given, indices, values).stride()
            assert (found is given) is in_place


def test_a_conjugate_is_written_as_what_it_stands_for():
    x, values = torch.zeros(2, dtype=torch.complex64), torch.tensor([1 + 2j, 3 - 1j])
    index = torch.tensor([1, 1])
    for form in (tw.index_put, tw.index_put_):
        assert form(x.conj(), (index,), values.conj()).tolist() == [0, 3 + 1j]
    assert x.tolist() == [0, 3 - 1j]


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("how", ["eagerly", "eager", "aot_eager"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_gradients_are_pytorchs(accumulate, how, dtype):
    torch.manual_seed(0)
    indices = torch.tensor([0, 2, 2, -1]), torch.tensor([1, 0, 0, 3])
    weights = torch.randn(3, 4, 2, dtype=dtype)
    put = tw.index_put
    if how != "eagerly":
        put = torch.compile(put, backend=how, fullgraph=True)
    for shape in ((4, 2), (2,), (4, 1)):
        x, values = torch.randn(3, 4, 2, dtype=dtype), torch.randn(shape, dtype=dtype)
        results = []
        for function in (put, torch.index_put):
            leaves = x.clone().requires_grad_(), values.clone().requires_grad_()
            out = function(leaves[0] * 1, indices, leaves[1], accumulate)
            (out * weights).sum().abs().backward()
            results.append([leaf.grad for leaf in leaves])
        for mine, theirs in zip(*results, strict=True):
            torch.testing.assert_close(mine, theirs)


def test_under_function_transforms_it_is_pytorchs():
    x, index = torch.arange(6.0).view(3, 2), torch.tensor([1])

    def put(row):
        return tw.index_put(row, (index,), torch.ones(1))

    expected = torch.tensor([[0.0, 1], [2, 1], [4, 1]])
    assert torch.equal(torch.vmap(put)(x), expected)
    assert torch.equal(torch.compile(torch.vmap(put), backend="eager")(x), expected)


def test_under_a_default_device():
    values = POSITION.float()
    torch.set_default_device("cpu")
    try:
        x = torch.zeros(PLACES)
        assert_the_last_wins(tw.index_put, x, (INDEX,), values, values[LAST])
        weight = torch.zeros(3, 2, dtype=torch.bfloat16, requires_grad=True)
        tw.embedding(torch.zeros(5000, dtype=torch.int64), weight).sum().backward()
    finally:
        torch.set_default_device(None)
    assert weight.grad[0].tolist() == [4992, 4992]


@pytest.mark.parametrize("dtype", [torch.int16, torch.complex64, torch.float32])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_an_index_out_of_range_is_named_and_nothing_written(dtype, accumulate, in_place):
    x, indices = torch.zeros(3, 4).to(dtype), (torch.tensor([0, 1]), torch.tensor([0, -5]))
    form = tw.index_put_ if in_place else tw.index_put
    with pytest.raises(IndexOutOfRange, match="index -5 is out of range for dim 1 of size 4"):
        form(x, indices, torch.ones(2).to(dtype), accumulate)
    assert not x.any()


def test_shapes_are_broadcast_once(monkeypatch):
    asked, broadcast_shapes = [], torch.broadcast_shapes
    monkeypatch.setattr(
        torch, "broadcast_shapes", lambda *shapes: asked.append(shapes) or broadcast_shapes(*shapes)
    )
    x, rows, columns = torch.zeros(13, 17), torch.tensor([[3], [5]]), torch.tensor([7, 11])
    values = torch.arange(4.0).view(2, 2)
    for _ in range(3):
        assert torch.equal(tw.index_put(x, (rows, columns), values)[[3, 5]][:, [7, 11]], values)
    assert len(asked) == 2
    for _ in range(2):
        with pytest.raises(RuntimeError, match="cannot be broadcast"):
            tw.index_put(x, (rows, columns[[0, 0, 0]]), values)
