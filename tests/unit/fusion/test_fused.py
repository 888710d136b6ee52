"""The `fused` implementation before any kernel: graphs, and what they refuse."""

import threading

import pytest
import torch

from tilewright.device import DEVICES, spec_of
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
