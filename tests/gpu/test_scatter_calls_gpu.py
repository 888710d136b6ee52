"""Calls of the operators with an index on a GPU: their gradients, bits, memory and graphs."""

import dataclasses

import pytest
import torch

import tilewright as tw
from tilewright.compile.counters import counters
from tilewright.device import spec_of
from tilewright.impl import IMPLS
from tilewright.op import Workload
from tilewright.ops._indexing import last_written

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]
CUDA = torch.device("cuda:0")


def test_nan_and_signed_zero_come_out_as_pytorchs():
    x = torch.tensor([[1.0, float("nan")], [-0.0, 2.0]], device=CUDA)
    source = torch.tensor([[float("nan"), 3.0], [-0.0, float("inf")]], device=CUDA)
    index = torch.tensor([0, 1], device=CUDA)
    for reduce in ("amax", "amin"):
        with tw.use("rows_sorted"):
            found = tw.index_reduce(x, 0, index, source, reduce)
        expected = torch.index_reduce(x.cpu(), 0, index.cpu(), source.cpu(), reduce)
        torch.testing.assert_close(found.cpu(), expected, equal_nan=True, rtol=0, atol=0)


def test_with_gradients_an_update_keeps_the_order_and_a_sum_of_gathered_rows_its_bits():
    index = torch.randint(500, (90000,), device=CUDA)
    x = torch.zeros(500, device=CUDA, requires_grad=True)
    src = torch.randn(90000, device=CUDA, requires_grad=True)
    expected = last_written(x.detach(), 0, index, src.detach())
    weights = torch.randn(500, device=CUDA)
    for _ in range(5):
        x.grad = src.grad = None
        out = tw.scatter(x, 0, index, src)
        assert torch.equal(out, expected)
        out.backward(weights)
        assert torch.equal(src.grad, weights[index])
        assert torch.equal(x.grad, weights.index_fill(0, index, 0.0))
    grads = []
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(6):
            x.grad = None
            tw.gather(x, 0, index).backward(src.detach())
            grads.append(x.grad)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(grads[-1], grad) for grad in grads[3:])
    exact = torch.zeros(500, dtype=torch.float64, device=CUDA)
    exact.index_add_(0, index, src.detach().double())
    torch.testing.assert_close(grads[-1].double(), exact, rtol=1e-4, atol=1e-2)


def test_in_place_and_by_index_put_an_update_with_gradients_keeps_the_order():
    index = torch.randint(500, (90000,), device=CUDA)
    weights = torch.randn(500, device=CUDA)
    leaf = torch.zeros(500, device=CUDA, requires_grad=True)
    src = torch.randn(90000, device=CUDA, requires_grad=True)
    expected = last_written(leaf.detach(), 0, index, src.detach())
    calls = [
        lambda x: tw.scatter_(x, 0, index, src),
        lambda x: tw.index_put(x, (index,), src),
        lambda x: tw.index_put_(x, (index,), src),
        lambda x: tw.index_put(x.view(25, 20), (index // 20, index % 20), src).view(500),
        lambda x: tw.index_put(x.view(20, 25).t(), (index % 25, index // 25), src).t().reshape(500),
    ]
    for call in calls:
        for _ in range(4):  # first by what stands in, then by a kernel
            leaf.grad = src.grad = None
            out = call(leaf * 1)
            assert torch.equal(out, expected)
            out.backward(weights)
            assert torch.equal(src.grad, weights[index])
            assert torch.equal(leaf.grad, weights.index_fill(0, index, 0.0))


def test_memory_shared_with_what_is_written_in_place_is_refused():
    whole, index = torch.randn(80, 64, device=CUDA), torch.randint(40, (40,), device=CUDA)
    for name in ("rows_sorted", "rows_sorted_torch", "rows_unique"):
        with tw.use(name):
            with pytest.raises(ValueError, match="x is written in place and shares memory with"):
                tw.index_add_(whole[:40], 0, index, whole[20:60])
            tw.index_add_(whole[:40], 0, index, whole[40:])
    line = torch.arange(100, device=CUDA)
    with tw.use("scatter_winner"), pytest.raises(ValueError, match="shares memory with index"):
        tw.scatter_(line, 0, line, 7)
    tw.check()


def test_without_any_mode_sums_and_their_gradients_are_the_same_in_every_run():
    index = torch.randint(9, (50000,), device=CUDA)
    source = torch.randn(50000, 64, device=CUDA, requires_grad=True)
    weights = torch.randn(300, 64, device=CUDA)
    columns = index[:, None].repeat(1, 64)
    calls = {
        "index_add": lambda: tw.index_add(torch.zeros_like(weights), 0, index, source),
        "index_add_": lambda: tw.index_add_(torch.zeros_like(weights), 0, index, source),
        "scatter_add": lambda: tw.scatter_add(torch.zeros_like(weights), 0, columns, source),
        "scatter_add_": lambda: tw.scatter_add_(torch.zeros_like(weights), 0, columns, source),
        "index_put_": lambda: tw.index_put_(torch.zeros_like(weights), (index,), source, True),
        "gather": lambda: tw.gather(source, 0, columns[:700]),
    }
    exact = weights.double().zero_().index_add_(0, index, source.detach().double())
    for name, call in calls.items():
        found = []
        for _ in range(6):
            source.grad = None
            out = call()
            out.backward(weights if out.shape == weights.shape else source.detach()[:700])
            found.append((out.detach(), source.grad))
        if name != "gather":
            torch.testing.assert_close(found[0][0].double(), exact, rtol=1e-4, atol=1e-2)
        for out, grad in found[1:]:
            assert torch.equal(out, found[0][0]), name
            assert torch.equal(grad, found[0][1]), name


def test_under_the_deterministic_mode_sums_are_the_same_in_every_run():
    x, index = torch.zeros(300, 64, device=CUDA), torch.randint(9, (50000,), device=CUDA)
    source = torch.randn(50000, 64, device=CUDA)
    exact = torch.zeros_like(x).double().index_add(0, index, source.double())
    torch.use_deterministic_algorithms(True)
    try:
        first, *others = [tw.index_add(x, 0, index, source) for _ in range(9)][3:]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(first, other) for other in others)
    torch.testing.assert_close(first.double(), exact, rtol=1e-4, atol=1e-2)


def test_captured_launches_on_one_stream_share_their_counter_and_replay_beside_calls():
    w = Workload.parse("scatter_add(x=f32[300], dim=0, index=i64[5000], src=f32[5000])")
    impl, spec = IMPLS["integer_sums"], spec_of(0)
    config = dataclasses.replace(impl.heuristic(w, spec), launches=1)
    run = impl.build(config, w, spec)
    x, index, src = w.operator.examples(w, "random", 0, CUDA)
    expected = run(x, index, src).clone()
    graphs, left = [], []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        before = counters._slabs[0].numel()
        with torch.cuda.graph(graph):
            found = [run(x, index, src) for _ in range(20)]
        left.append(before - counters._slabs[0].numel())
        graphs.append((graph, torch.cuda.Stream(), found))
    assert left == [8, 8]
    for _ in range(50):  # side by side
        for graph, stream, _ in graphs:
            with torch.cuda.stream(stream):
                graph.replay()
        called = run(x, index, src)
    torch.cuda.synchronize()
    assert all(torch.equal(f, expected) for f in (called, *graphs[0][2], *graphs[1][2]))
