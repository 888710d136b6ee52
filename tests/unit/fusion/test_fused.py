"""The `fused` implementation before any kernel: graphs, and what they refuse."""

import threading

import pytest
import torch

from tilewright.device import DEVICES, spec_of
from tilewright.dispatch.functions.fuse import fuse
from tilewright.fusion.ir import Graph
from tilewright.impl import IMPLS
from tilewright.impls.fused import graph_of
from tilewright.op import OPS, Workload, op


def test_threads_trace_at_once():
    texts = [f"{name}(x=f32[{3 + i},17])" for i in range(8) for name in ("layer_norm", "softmax")]
    graphs, start = {}, threading.Barrier(len(texts))
    graph_of.cache_clear()

    def work(text):
        start.wait()
        graphs[text] = graph_of(Workload.parse(text))

    threads = [threading.Thread(target=work, args=(text,)) for text in texts]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all(isinstance(graphs.get(text), Graph) for text in texts)
    graph_of.cache_clear()
    assert all(graph_of(Workload.parse(text)) == graphs[text] for text in texts)


def beside_what_is_made(x, y):
    made = torch.zeros(x.shape) + torch.ones_like(x).masked_fill(x > y, 0.5)
    return 1 - torch.where(x > 0, made, x.new_full(x.shape, 2.0)).clamp(min=0.25), y.expand_as(x)


def test_a_trace_takes_no_memory_however_large_its_tensors_are():
    n = 1 << 40
    fuse(beside_what_is_made)
    name = beside_what_is_made.__name__
    texts = (
        f"lerp_backward(grad_output=f16[{n}], x=f16[1], end=f16[{n}], weight=f16[{n}])",
        f"{name}(x=f32[{n}], y=f32[1])",
        f"{name}_backward(grad_output0=f32[{n}], grad_output1=f32[{n}], x=f32[{n}], y=f32[1])",
    )
    try:
        for text in texts:
            assert n in graph_of(Workload.parse(text)).space
    finally:
        for made in (name, f"{name}_backward"):
            OPS.remove(made)


@pytest.mark.parametrize("device", [None, "h200"])
@pytest.mark.parametrize(
    "text",
    [
        "softmax(x=f32[0,8])",
        "softmax(x=f32[8,0])",
        "layer_norm(x=f32[0,8], weight=f32[8])",
        "lerp(x=f32[8,1], end=f32[0], weight=0.5)",
    ],
)
def test_nothing_is_launched_where_there_is_nothing_to_compute(text, device):
    spec = DEVICES[device] if device else spec_of(None)
    assert "empty" in IMPLS["fused"].unsupported(Workload.parse(text), spec)


@pytest.fixture
def strided_copy():
    @op(flops=lambda w: w.main.numel)
    def strided_copy(x: torch.Tensor) -> torch.Tensor:
        """x + 1 with the strides asked for."""
        return torch.ops.prims.copy_strided(x + 1.0, [1, x.shape[0]])

    yield "strided_copy(x=f32[4,8])"
    del OPS._things["strided_copy"]


def test_a_copy_to_other_strides_is_no_step(strided_copy):
    graph = graph_of(Workload.parse(strided_copy))
    assert [n.op for n in graph.nodes if n.op not in ("load", "const")] == ["add"]
