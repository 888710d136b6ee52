"""Training steps on a GPU: right, and captured by a CUDA graph, ours and PyTorch's."""

import pytest
import torch

from tilewright.device import spec_of
from tilewright.impl import IMPLS
from tilewright.measure.verify import Verifier
from tilewright.op import Workload

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
TEXTS = [
    "layer_norm_training(x=f16[512,5140], grad_output=f16[512,5140], weight=f16[5140], bias=f16[5140])",  # noqa: E501
    "rms_norm_training(x=f16[512,5140], grad_output=f16[512,5140], weight=f16[5140])",
    "softmax_training(x=f16[512,5140], grad_output=f16[512,5140])",
    "bias_layer_norm_training(x=f16[512,768], grad_output=f16[512,768], bias0=f16[768], bias1=f16[768], weight=f16[768], bias=f16[768])",  # noqa: E501
    "add_layer_norm_training(x=f16[512,5140], residual=f16[512,5140], grad_output=f16[512,5140], grad_output_total=f16[512,5140], weight=f16[5140], bias=f16[5140])",  # noqa: E501
    "add_rms_norm_training(x=f16[512,768], residual=f16[512,768], grad_output=f16[512,768], grad_output_total=f16[512,768], weight=f16[768])",  # noqa: E501
    "lerp_training(x=f32[16,1,1,1], end=f32[16,3,24,24], weight=f32[3,1,24], grad_output=f32[16,3,24,24])",  # noqa: E501
]


@pytest.mark.parametrize("text", TEXTS)
def test_schedules_of_both_halves_are_right(text):
    w, spec, implementation = Workload.parse(text), spec_of(0), IMPLS["fused_training"]
    verifier = Verifier(w, CUDA)
    for config in list(implementation.space(w, spec))[::5]:
        assert verifier.check(implementation.build(config, w, spec)).message == "", config


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", ["aten", "inductor", "fused_training"])
def test_a_captured_step_gives_what_a_call_gives(name, text):
    w, spec, implementation = Workload.parse(text), spec_of(0), IMPLS[name]
    if reason := implementation.unsupported(w, spec):
        pytest.skip(reason)
    run = implementation.build(implementation.heuristic(w, spec), w, spec)
    tensors = w.operator.examples(w, "random", 0, CUDA)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        expected = [run(*tensors) for _ in range(3)][-1]
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = run(*tensors)
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(found, expected)
