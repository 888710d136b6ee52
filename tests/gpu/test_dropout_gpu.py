"""Masks of a seed on the GPU: the reference's, in every schedule that is tried, and in graphs."""

import random

import pytest
import torch
from torch.nn import functional as F

import tilewright as tw
from tilewright.device import spec_of
from tilewright.dispatch.functions.operator import backward_operator
from tilewright.impl import IMPLS
from tilewright.measure.verify import Verifier
from tilewright.op import OPS, Workload
from tilewright.philox import WORD, philox_bernoulli

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def dropped_norm_gpu(x, residual, weight, bias, p=0.25):
    total = F.dropout(x, p) + residual
    return F.layer_norm(total, total.shape[-1:], weight, bias)


def twice_gpu(x, weight):
    return F.dropout(F.dropout(x, 0.5) * weight, 0.25)


@pytest.fixture(autouse=True)
def fused(forgets_functions):
    return {f.__name__: tw.fuse(f) for f in (dropped_norm_gpu, twice_gpu)}


NORM = "x={d}[{r},{h}], residual={d}[{r},{h}], weight={d}[{h}], bias={d}[{h}]"


@pytest.mark.parametrize(
    "text",
    [
        "dropped_norm_gpu(" + NORM.format(d="f16", r=512, h=5140) + ", seed=i64[])",
        "dropped_norm_gpu(" + NORM.format(d="bf16", r=300, h=1001) + ", seed=i64[])",
        "dropped_norm_gpu_backward(grad_output=f32[512,768], "
        + NORM.format(d="f32", r=512, h=768)
        + ", p=0.25, seed=i64[])",
        "twice_gpu(x=f16[1000,999], weight=f16[1000,1], seed=i64[])",
        "twice_gpu_backward(grad_output=f64[70,33], x=f64[70,33], weight=f64[70,1], seed=i64[])",
    ],
)
def test_kernels_draw_the_mask_of_the_reference(text, fused):
    for name in fused:
        backward_operator(OPS[name], 1)
    w, spec, implementation = Workload.parse(text), spec_of(0), IMPLS["fused"]
    verifier = Verifier(w, CUDA)
    others = implementation.space(w, spec).sample(random.Random(text), 8)
    for config in (implementation.heuristic(w, spec), *others):
        verdict = verifier.check(implementation.build(config, w, spec))
        assert verdict.message == "", config


def test_a_seeded_generator_repeats_a_run_and_the_backward_draws_the_same_mask(fused):
    x = torch.ones(300, 500, device=CUDA, requires_grad=True)
    weight = torch.ones(300, 1, device=CUDA)
    torch.manual_seed(3)
    first, second = (fused["twice_gpu"](x, weight) for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(fused["twice_gpu"](x, weight), first)
    assert not torch.equal(first, second)
    (found,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(found, first.detach())


def test_each_replay_of_a_captured_graph_has_another_mask(fused):
    x, weight = torch.ones(300, 500, device=CUDA), torch.ones(300, 1, device=CUDA)
    fused["twice_gpu"](x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fused["twice_gpu"](x, weight)
    masks = []
    for _ in range(2):
        graph.replay()
        masks.append(out != 0)
    torch.cuda.synchronize()
    assert not torch.equal(*masks)
    assert all(abs(float(m.float().mean()) - 0.375) < 0.01 for m in masks)


def test_a_given_seed_is_the_same_on_both_devices(fused):
    seed = torch.tensor(-7)
    x, weight = torch.ones(33, 77), torch.ones(33, 1)
    first = philox_bernoulli(seed, 0, WORD // 2, (33, 77))
    second = philox_bernoulli(seed, 1, 3 * WORD // 4, (33, 77))
    own = fused["twice_gpu"](x.to(CUDA), weight.to(CUDA), seed=seed.to(CUDA))
    assert torch.equal(own.cpu() != 0, first & second)
