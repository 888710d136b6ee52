"""Blocks that join partial rows on a GPU: calls, graphs and streams side by side, the same bits."""

import pytest
import torch

from tilewright.device import spec_of
from tilewright.impl import IMPLS
from tilewright.op import Workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]
CUDA = torch.device("cuda:0")


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("spread", ["uniform", "zipf", "constant"])
def test_streams_and_replays_side_by_side_have_the_bits_of_one_call(spread, blocks):
    text = "x=f32[5000,64], dim=0, index=i64[16384], source=f32[16384,64]"
    w, impl = Workload.parse(f"index_add({text})!indices={spread}"), IMPLS["rows_balanced"]
    config = impl.Config(block_threads=512, blocks=blocks, lanes=16, vec=4, unrolled=2)
    run = impl.build(config, w, spec_of(0))
    sets = [w.operator.examples(w, "random", seed, CUDA) for seed in range(2)]
    expected = [run(*tensors) for tensors in sets]
    for out, (x, index, source) in zip(expected, sets, strict=True):
        exact = torch.index_add(x.double(), 0, index, source.double())
        torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [run(*tensors) for tensors in sets]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in sets]
    for _ in range(50):
        found = []
        for stream, tensors in zip(streams, sets, strict=True):
            with torch.cuda.stream(stream):
                found.append(run(*tensors))
        graph.replay()
        torch.cuda.synchronize()
        for results in (found, captured):
            assert all(map(torch.equal, results, expected))
