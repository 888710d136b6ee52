"""Quack's own kernels, where its package is installed."""

import pytest
import torch

from tilewright.device import current_device
from tilewright.impl import IMPLS
from tilewright.measure.verify import Verifier
from tilewright.op import Workload

pytestmark = pytest.mark.gpu

DTYPES = ("f16", "bf16", "f32")
TEXTS = [
    *(f"softmax(x={d}[33,{n}])" for d in DTYPES for n in (768, 40960)),
    *(f"rms_norm(x={d}[33,{n}], weight={d}[{n}])" for d in DTYPES for n in (5140, 40960)),
    "rms_norm(x=f16[2,3,64], eps=0.5)",
    "layer_norm(x=f16[33,2560], weight=f32[2560], bias=f32[2560])",
    "layer_norm(x=f32[33,2560], weight=f32[2560], eps=0.25)",
]


def built(w):
    quack, (_, spec) = IMPLS["quack"], current_device("cuda")
    if reason := quack.unsupported(w, spec):
        pytest.skip(reason)
    return quack.build(quack.heuristic(w, spec), w, spec)


@pytest.mark.parametrize("text", TEXTS)
def test_it_passes_verification(text):
    w = Workload.parse(text)
    verdict = Verifier(w, torch.device("cuda")).check(built(w))
    assert verdict.ok, verdict.message


def test_a_graph_replays_it_on_new_values():
    w = Workload.parse("softmax(x=f16[64,4096])")
    executable = built(w)
    x = torch.randn(64, 4096, dtype=torch.float16, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        out = executable(x)
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.testing.assert_close(out, x.softmax(-1))
