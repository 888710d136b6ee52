"""An index out of range ends no process's use of a GPU, by whatever dtype, layout or way."""

import subprocess
import sys

import pytest
import torch

import tilewright as tw
from tilewright.errors import IndexOutOfRange

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]
CUDA = torch.device("cuda:0")
DTYPES = [
    getattr(torch, n) for n in ("float16", "bfloat16", "float32", "float64", "int32", "int64")
]
FAR = {7: -1, 29: 2**31 - 1, 3: 5}
"""By position. There are 30, and 5 places."""


@pytest.fixture(autouse=True)
def _the_gpu_lives():
    """Without records, and to the end of each test."""
    tw.reload_records("sqlite://")
    yield
    torch.cuda.synchronize()
    assert float(torch.ones(3, device=CUDA).sum()) == 3.0
    tw.reload_records()


def positions(kind=torch.int64, spread=False):
    """On the CPU: (those with some out of range, which of them are in range)."""
    index = torch.arange(30, dtype=kind) % 5
    for position, value in FAR.items():
        index[position] = value
    kept = torch.tensor([i for i in range(30) if i not in FAR])
    return (index[:, None].expand(30, 4) if spread else index), kept


def skipped_and_told(call, expected, times=4):
    """By what runs until a shape comes back, and then by what was built for it."""
    for _ in range(times):
        found = call()
        with pytest.raises(IndexOutOfRange):
            tw.check()
        torch.testing.assert_close(found.cpu(), expected)


CALLS = {
    "scatter_add": lambda m, x, i, s: m.scatter_add(x, 0, i, s),
    **{
        f"scatter_reduce {reduce} {own}": lambda m, x, i, s, reduce=reduce, own=own: (
            m.scatter_reduce(x, 0, i, s, reduce, include_self=own)
        )
        for reduce in ("sum", "prod", "mean", "amax", "amin")
        for own in (True, False)
    },
    "index_add": lambda m, x, i, s: m.index_add(x, 0, i[:, 0].contiguous(), s),
    "index_reduce": lambda m, x, i, s: m.index_reduce(x, 0, i[:, 0].contiguous(), s, "amax"),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("layout", ["rows", "elements", "turned"])
def test_sums_leave_out_what_is_out_of_range(name, dtype, layout):
    index, kept = positions(spread=True)
    x, src = torch.ones(5, 4, dtype=dtype), torch.ones(30, 4, dtype=dtype)
    expected = CALLS[name](torch, x, index[kept], src[kept])
    x, index, src = x.to(CUDA), index.to(CUDA), src.to(CUDA)
    index = index if layout == "rows" else index.contiguous()
    if layout == "turned":
        x, src = x.t().contiguous().t(), src.t().contiguous().t()
    skipped_and_told(lambda: CALLS[name](tw, x, index, src), expected)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int16, torch.complex64])
@pytest.mark.parametrize("name", ["scatter", "scatter_add", "index_add"])
@pytest.mark.parametrize("form", ["", "_"])
def test_of_other_dtypes_too_and_the_last_of_several_writes_wins(dtype, name, form):
    index, kept = positions(spread=name != "index_add")
    x, src = torch.zeros(5, 4).to(dtype), torch.randn(30, 4).to(dtype)
    expected = getattr(torch, name)(x, 0, index[kept], src[kept])
    index, src, call = index.to(CUDA), src.to(CUDA), getattr(tw, f"{name}{form}")
    skipped_and_told(lambda: call(x.to(CUDA), 0, index, src), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [True, False])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize("turned", [True, False])
def test_a_gather_reads_zeros_there(dtype, spread, kind, turned):
    index, kept = positions(kind, spread=True)
    x = torch.arange(20).view(5, 4).to(dtype)
    expected = torch.zeros(30, 4, dtype=dtype)
    expected[kept] = x.gather(0, index[kept].long())
    x, index = x.to(CUDA), index.to(CUDA)
    x, index = x.t().contiguous().t() if turned else x, index if spread else index.contiguous()
    skipped_and_told(lambda: tw.gather(x, 0, index), expected)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8, torch.bool, torch.complex64])
@pytest.mark.parametrize("grad", [False, True])
def test_an_embedding_reads_zeros_there(dtype, grad):
    index, kept = positions()
    weight = torch.ones(5, 4).to(dtype)
    expected = torch.zeros(30, 4).to(dtype)
    expected[kept] = weight[index[kept]]
    table = weight.to(CUDA).requires_grad_(grad and dtype.is_floating_point)
    skipped_and_told(lambda: tw.embedding(index.to(CUDA), table).detach(), expected)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_no_row_of_an_embedding_learns_or_shrinks_of_them(sparse, max_norm):
    weight = torch.ones(4, 2, device=CUDA, requires_grad=True)
    index = torch.tensor([1, 7, 1, -1], device=CUDA)
    out = tw.embedding(index, weight, max_norm=max_norm, sparse=sparse)
    with pytest.raises(IndexOutOfRange):
        tw.check()
    assert (weight[[0, 2, 3]] == 1).all()
    (grad,) = torch.autograd.grad(out.sum(), weight)
    assert (grad.to_dense() if sparse else grad)[:, 0].tolist() == [0, 2, 0, 0]
    if not sparse:
        with pytest.raises(IndexOutOfRange):
            tw.check()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8, torch.bool, torch.complex64])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_index_put_leaves_out_what_is_out_of_range_in_any_dim(dtype, accumulate, in_place):
    first, second = torch.tensor([0, 3, -3, 1, -1]), torch.tensor([-1, 0, 0, 4, -4])
    values, kept = torch.ones(5, 2).to(dtype), torch.tensor([0, 2, 4])
    x = torch.zeros(3, 4, 2).to(dtype)
    expected = torch.index_put(x, (first[kept], second[kept]), values[kept], accumulate)
    form = tw.index_put_ if in_place else tw.index_put
    indices = first.to(CUDA), second.to(CUDA)
    skipped_and_told(lambda: form(x.to(CUDA), indices, values.to(CUDA), accumulate), expected)


@pytest.mark.parametrize("reduce", ["sum", "prod", "amax"])
@pytest.mark.parametrize("in_place", [False, True])
def test_gradients_of_what_was_left_out_are_zero(reduce, in_place):
    index, kept = positions(spread=True)
    found = []
    for device, i, k in (("cpu", index[kept], kept), (CUDA, index, torch.arange(30))):
        x = torch.full((5, 4), 1.5, device=device, requires_grad=True)
        src = torch.linspace(0.5, 1.5, 120).view(30, 4).to(device).requires_grad_()
        m, form = (torch if device == "cpu" else tw), "scatter_reduce"
        if in_place:
            m, form = (torch.Tensor if device == "cpu" else tw), "scatter_reduce_"
        out = getattr(m, form)(x * 1, 0, i.to(device), src[k.to(device)], reduce)
        if device == CUDA:
            with pytest.raises(IndexOutOfRange):
                tw.check()
        out.square().sum().backward()
        found.append([t.detach().cpu() for t in (out, x.grad, src.grad)])
    if reduce == "amax":  # the gradient goes by the index that the forward has moved
        tw.check()
    else:
        with pytest.raises(IndexOutOfRange):
            tw.check()
    for theirs, mine in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("name", ["gather", "index_add", "scatter_add", "embedding_backward"])
def test_pytorchs_kernels_that_are_asked_for_or_captured_see_none_either(name):
    index, kept = (t.to(CUDA) for t in positions())
    x, src = torch.zeros(5, 4, device=CUDA), torch.ones(30, 4, device=CUDA)
    spread = index[:, None].expand(30, 4)
    args = {
        "gather": (x + 1, 0, spread),
        "index_add": (x, 0, index, src),
        "scatter_add": (x, 0, spread, src),
        "embedding_backward": (src, index, 5),
    }[name]
    total = len(kept) * 4.0
    with tw.use("aten"):
        assert float(getattr(tw, name)(*args).sum()) == total
        with pytest.raises(IndexOutOfRange):
            tw.check()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = getattr(tw, name)(*args)
    for _ in range(2):
        graph.replay()
        assert float(out.sum()) == total
        with pytest.raises(IndexOutOfRange):
            tw.check()


def test_under_autocast_that_casts_they_are_left_out():
    index, kept = (t.to(CUDA) for t in positions(spread=True))
    x, src = torch.zeros(5, 4, device=CUDA), torch.ones(30, 4, device=CUDA, dtype=torch.float16)
    with torch.autocast("cuda"):
        out = tw.scatter_add(x, 0, index, src)
    assert float(out.sum()) == len(kept) * 4.0
    with pytest.raises(IndexOutOfRange):
        tw.check()


FIRST_OF_ALL = """
import torch
import tilewright as tw
from tilewright.errors import IndexOutOfRange
x, index = torch.ones(5, 4, device="cuda"), torch.zeros(6, 4, dtype=torch.int64, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph), tw.use("aten"):
    out = tw.gather(x, 0, index)
graph.replay()
tw.check()
index[2, 1] = 5
for _ in range(2):
    graph.replay()
    try:
        tw.check()
    except IndexOutOfRange:
        print(float(out.sum()))
tw.gather(x, 0, index.clamp(max=4))
index.zero_()
graph.replay()
tw.check()
print("well")
"""


def test_a_graph_captured_before_any_call_tells_what_its_replays_find():
    done = subprocess.run([sys.executable, "-c", FIRST_OF_ALL], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["23.0", "23.0", "well"]


@pytest.mark.parametrize("implementation", ["aten", "gather_cuda"])
def test_one_is_told_once_though_good_calls_were_enqueued_behind_it(implementation):
    x, index = torch.ones(5, 4, device=CUDA), torch.zeros(6, 4, dtype=torch.int64, device=CUDA)
    far = index.clone()
    far[3, 2] = 7
    with tw.use(implementation):
        tw.gather(x, 0, index)
        torch.cuda.synchronize()
        torch.cuda._sleep(20_000_000)  # all of these are enqueued before the first one runs
        for i in (far, index, index, index):
            tw.gather(x, 0, i)
        with pytest.raises(IndexOutOfRange):
            tw.check()
        for _ in range(3):
            tw.gather(x, 0, index)
            tw.check()


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("count", [300, 6000])
def test_a_table_without_columns_has_a_gradient_without_columns(count, scaled):
    """PyTorch's kernel for it makes the GPU unusable to the process."""
    table = torch.zeros(3, 0, device=CUDA, requires_grad=True)
    index = torch.arange(count, device=CUDA) % 3
    found = tw.embedding(index, table, scale_grad_by_freq=scaled)
    found.sum().backward()
    assert table.grad.shape == (3, 0)
    again = tw.embedding_backward(torch.zeros(count, 0, device=CUDA), index, 3)
    assert again.shape == (3, 0)
