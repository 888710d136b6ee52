"""tw.index_put on a GPU: the last of several writes to one place wins, whatever the dtype, wherever
the indices are, and below torch.compile; what is out of range is left out."""

import math

import pytest
import torch

import tilewright as tw
from tilewright.dispatch import prepared, selection
from tilewright.dispatch.indices.flat_index import by_operators, flat_index
from tilewright.errors import IndexOutOfRange
from tilewright.measure.activity import activities_of
from tilewright.op import Workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]
PLACES, COUNT = 4, 2_000_000
DTYPES = [torch.float32, torch.int16, torch.uint8, torch.bool, torch.complex64, torch.float8_e5m2]


def drawn(dtype):
    index = torch.randint(PLACES, (COUNT,), generator=torch.Generator().manual_seed(0))
    last = [int((place == index).nonzero()[-1]) for place in range(PLACES)]
    values = (torch.arange(COUNT) % 97 % 2 if dtype is torch.bool else torch.arange(COUNT) % 97).to(
        dtype
    )
    return index, values.cuda(), values[last].view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("where", ["cuda", "cpu"])
@pytest.mark.parametrize("form", [tw.index_put, tw.index_put_])
def test_the_last_write_wins(dtype, where, form):
    index, values, last = drawn(dtype)
    x, mask = torch.zeros(1, PLACES, dtype=dtype, device="cuda"), torch.ones(1, dtype=torch.uint8)
    for indices in ((index.to(where),), (mask.to(where), index.to(where))):
        for _ in range(3):
            table = x[0] if len(indices) == 1 else x
            found = form(table.clone(), indices, values)
            assert torch.equal(found.view(-1).cpu().view(torch.uint8), last)


@pytest.mark.parametrize("form", [tw.index_put, tw.index_put_])
def test_also_below_torch_compile(form):
    index, values, last = drawn(torch.float32)
    put = torch.compile(lambda *call: form(*call), backend="aot_eager", fullgraph=True)
    for _ in range(3):
        found = put(torch.zeros(PLACES, device="cuda"), (index.cuda(),), values)
        assert torch.equal(found.cpu().view(torch.uint8), last)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_what_is_out_of_range_is_left_out_and_told(dtype):
    index = torch.tensor([0, 4, 2, -5, 2], device="cuda")
    values = torch.tensor([1, 1, 0, 1, 1], device="cuda").to(dtype)
    found = tw.index_put(torch.zeros(4, dtype=dtype, device="cuda"), (index,), values)
    found = found.real if dtype.is_complex else found.float()
    assert found.tolist() == [1, 0, 1, 0]
    with pytest.raises(IndexOutOfRange):
        tw.check()


# --- several index tensors -----------------------------------------------------------------------

SIZES = 7, 2**31 + 5, 9, 2600


def several(kinds, shape=(5, 60, 70)):
    """Index tensors on the CPU that broadcast to the shape, one in a hundred of them wrong."""
    generator = torch.Generator().manual_seed(0)
    own = [shape, shape[1:], (shape[0], 1, shape[2]), (shape[1], 1)]
    found = []
    for n, (kind, size) in enumerate(zip(kinds, SIZES, strict=False)):
        near = min(size, torch.iinfo(kind).max)
        t = torch.randint(-near, near, own[n], generator=generator, dtype=kind)
        t[torch.randint(100, own[n], generator=generator) == 0] = torch.iinfo(kind).min
        found.append(t.mT.contiguous().mT if n == 0 else t)
    return found, torch.broadcast_shapes(*own[: len(kinds)])


def by_cpu(indices, shape):
    flat = by_operators(indices, SIZES[: len(indices)]).expand(shape).reshape(-1)
    return torch.where(flat < SIZES[0], flat, -1).clamp(min=-1) if len(indices) == 1 else flat


@pytest.mark.parametrize(
    "kinds",
    [
        [torch.int64] * 4,
        [torch.int32, torch.int64, torch.int64],
        [torch.int64, torch.int32],
        [torch.int32],
    ],
)
@pytest.mark.parametrize("on", ["default", "side"])
def test_one_launch_makes_one_index_of_several(kinds, on):
    given, shape = several(kinds)
    there, sizes = [t.cuda() for t in given], SIZES[: len(kinds)]
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream() if on == "side" else None):
        found = flat_index(there, sizes, shape)
        torch.cuda.current_stream().synchronize()
    expected = by_cpu(given, shape)
    assert found.dtype == expected.dtype
    assert torch.equal(found.cpu(), expected)
    (activity,) = activities_of([lambda *indices: flat_index(indices, sizes, shape)], there)
    assert (activity.kernels, activity.memcpys, activity.memsets) == (1, 0, 0)
    assert activity.allocations == 1


def test_a_capture_has_that_launch_or_what_operators_make_where_it_is_not_built():
    for kinds in ([torch.int64] * 3, [torch.int32, torch.int32, torch.int64]):
        given, shape = several(kinds)
        there, sizes = [torch.zeros_like(t, device="cuda") for t in given], SIZES[:3]
        if kinds[0] is torch.int64:
            flat_index(there, sizes, shape)  # loads what the capture has
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = flat_index(there, sizes, shape)
        for t, now in zip(there, given, strict=True):
            t.copy_(now)
        graph.replay()
        assert torch.equal(found.cpu(), by_cpu(given, shape))


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("where", ["called", "captured"])
def test_of_several_indices_what_is_out_of_range_in_any_is_left_out_and_told(accumulate, where):
    shape, count = (21, 3, 26, 21), 5000
    generator = torch.Generator().manual_seed(0)
    good = [torch.randint(-n, n, (count,), generator=generator) for n in shape]
    values = torch.arange(1.0, count + 1)
    far = [t.clone() for t in good]
    kept = torch.ones(count, dtype=torch.bool)
    for n, (t, size) in enumerate(zip(far, shape, strict=True)):
        t[n::97] = torch.tensor([size, -size - 1])[torch.arange(len(t[n::97])) % 2]
        kept[n::97] = False
    x, there, added = torch.zeros(shape, device="cuda"), [t.cuda() for t in good], values.cuda()

    def call():
        tw.index_put_(x, there, added, accumulate)

    for _ in range(4):  # until what runs is built
        call()
    again = call
    if where == "captured":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        again = graph.replay
    for indices, chosen in ((good, slice(None)), (far, kept), (good, slice(None))):
        for t, now in zip(there, indices, strict=True):
            t.copy_(now)
        x.zero_()
        again()
        if chosen is kept:
            with pytest.raises(IndexOutOfRange):
                tw.check()
        tw.check()
        named = [t[chosen] for t in indices]
        right = tw.index_put_(torch.zeros(shape), named, values[chosen], accumulate)
        assert torch.equal(x.cpu(), right)


# --- an index tensor for each dim ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "count", "accumulate", "expected"),
    [
        ((1000, 1000), 300_000, True, "bucket_sums"),
        ((8, 3, 1000, 1000), 200_000, True, "rows_sorted"),
        ((64, 1024, 1024), 131_072, True, "rows_sorted"),
        ((64, 1024, 1024), 131_072, False, "scatter_strided"),
        ((1000, 1000), 300_000, False, "scatter_buckets"),
    ],
)
@pytest.mark.parametrize("values", ["each", "one"])
def test_separate_elements_go_by_how_few_of_all_places_are_named(
    shape, count, accumulate, expected, values
):
    generator = torch.Generator().manual_seed(0)
    indices = [torch.randint(-n, n, (count,), generator=generator) for n in shape]
    indices = [torch.cat([i, i[: count // 7]]) for i in indices]
    each = torch.randint(-99, 99, indices[0].shape, generator=generator).float()
    given = each if values == "each" else torch.tensor(3.0)
    n = math.prod(shape)
    op, src = ("index_add", "source") if accumulate else ("scatter", "src")
    w = Workload.parse(
        f"{op}(x=f32[{n}], dim=0, index=i64[{len(each)}], {src}=f32[{len(each)}])!donate=x"
    )
    assert selection.choose(w, "cuda:0").implementation == expected
    x, there = torch.zeros(shape, device="cuda"), [i.cuda() for i in indices]
    right = tw.index_put_(torch.zeros(shape), indices, given, accumulate)
    for _ in range(4):  # until what runs is built, and then
        assert torch.equal(tw.index_put_(x.zero_(), there, given.cuda(), accumulate).cpu(), right)
    if accumulate:
        halved = (given / 3).cuda()
        found = [tw.index_put(x, there, halved, True) for _ in range(2)]
        assert torch.equal(*found)


def test_a_binary_of_sums_serves_as_many_positions_as_there_happen_to_be():
    x = torch.zeros(700, 1000, device="cuda")
    generator = torch.Generator().manual_seed(0)
    op = "index_add", torch.device("cuda:0")
    before = prepared.state.compiled[op]
    for count in range(200_000, 230_000, 977):
        i, j = (torch.randint(n, (count,), generator=generator) for n in x.shape)
        found = tw.index_put_(x.zero_(), (i.cuda(), j.cuda()), torch.ones((), device="cuda"), True)
        right = torch.bincount(i * 1000 + j, minlength=x.numel())
        assert torch.equal(found.view(-1).cpu(), right.float())
    assert prepared.state.compiled[op] - before <= 3
