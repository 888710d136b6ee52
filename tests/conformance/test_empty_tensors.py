"""Tensors with dims of size 0: every operator gives what PyTorch gives, forward and backward.

No kernel of ours is built for them, since there is nothing to compute.
"""

import itertools

import pytest
import torch
from torch.nn import functional as F

import tilewright as tw
from tilewright.device import current_device
from tilewright.impl import IMPLS, OWN_BACKENDS, implementations
from tilewright.measure.verify import Verifier
from tilewright.op import Workload

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
on_each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
sizes = pytest.mark.parametrize(
    ("a", "b", "c"), [s for s in itertools.product((0, 1, 3), repeat=3) if 0 in s]
)

NORM = "x={d}[{a},{b},{c}]"
GRADIENT = "grad_output={d}[{a},{b},{c}], x={d}[{a},{b},{c}]"
MEAN, RSTD = "mean=f32[{a},{b},1]", "rstd=f32[{a},{b},1]"
TOTAL = "grad_output_total={d}[{a},{b},{c}], total={d}[{a},{b},{c}]"
ADDED = (
    "x={d}[{a},{b},{c}], residual={d}[{a},{b},{c}], grad_output={d}[{a},{b},{c}],"
    " grad_output_total={d}[{a},{b},{c}]"
)
TEXTS = (
    f"layer_norm({NORM}, weight={{d}}[{{c}}], bias={{d}}[{{c}}])",
    f"layer_norm_forward({NORM}, weight={{d}}[{{c}}], bias={{d}}[{{c}}])",
    f"layer_norm_backward({GRADIENT}, {MEAN}, {RSTD}, weight={{d}}[{{c}}])",
    f"layer_norm_training({GRADIENT}, weight={{d}}[{{c}}], bias={{d}}[{{c}}])",
    f"rms_norm_training({GRADIENT}, weight={{d}}[{{c}}])",
    f"add_layer_norm_training({ADDED}, weight={{d}}[{{c}}], bias={{d}}[{{c}}])",
    f"add_rms_norm_training({ADDED}, weight={{d}}[{{c}}])",
    f"softmax_training({GRADIENT}, dim=1)",
    f"rms_norm({NORM}, weight={{d}}[{{c}}])",
    f"rms_norm_backward({GRADIENT}, {RSTD}, weight={{d}}[{{c}}])",
    f"softmax({NORM})",
    f"softmax({NORM}, dim=0)",
    "softmax_backward(grad_output={d}[{a},{b},{c}], output={d}[{a},{b},{c}], dim=1)",
    f"bias_layer_norm({NORM}, bias0={{d}}[{{c}}], bias1={{d}}[{{c}}], weight={{d}}[{{c}}],"
    f" bias={{d}}[{{c}}])",
    f"bias_layer_norm_backward({GRADIENT}, bias0={{d}}[{{c}}], bias1={{d}}[{{c}}], {MEAN}, {RSTD},"
    " weight={d}[{c}])",
    f"add_layer_norm({NORM}, residual={{d}}[{{a}},{{b}},{{c}}], weight={{d}}[{{c}}],"
    " bias={d}[{c}])",
    f"add_layer_norm_backward(grad_output={{d}}[{{a}},{{b}},{{c}}], {TOTAL}, {MEAN}, {RSTD},"
    " weight={d}[{c}])",
    f"add_rms_norm({NORM}, residual={{d}}[{{a}},{{b}},{{c}}], weight={{d}}[{{c}}])",
    f"add_rms_norm_backward(grad_output={{d}}[{{a}},{{b}},{{c}}], {TOTAL}, {RSTD},"
    " weight={d}[{c}])",
    f"lerp({NORM}, end={{d}}[{{b}},{{c}}], weight={{d}}[{{a}},1,{{c}}])",
    f"lerp({NORM}, end={{d}}[{{c}}], weight=0.3)",
    f"lerp_backward({GRADIENT}, end={{d}}[{{b}},1], weight={{d}}[{{c}}])",
)


@on_each_device
@sizes
def test_every_implementation_is_right_or_says_that_there_is_nothing_to_compute(a, b, c, device):
    spec = current_device(device)[1]
    for text, dtype in itertools.product(TEXTS, ("f32", "f16")):
        w = Workload.parse(text.format(a=a, b=b, c=c, d=dtype))
        for implementation in implementations(w):
            reason = implementation.unsupported(w, spec)
            if implementation.backend in OWN_BACKENDS:
                assert reason is not None, (w, implementation.name)
        assert "empty" in IMPLS["fused"].unsupported(w, spec) or "_training" in w.op
        aten = IMPLS["aten"]
        assert aten.unsupported(w, spec) is None, w
        run = aten.build(aten.heuristic(w, spec), w, spec)
        verdict = Verifier(w, torch.device(device)).check(run, may_race=True)
        assert verdict.ok, (w, verdict.message)


def gradients(function, *tensors):
    """The results, and the gradients of their sum weighted by themselves plus one."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    outs = function(*leaves)
    outs = (outs,) if isinstance(outs, torch.Tensor) else tuple(outs)
    total = sum((o * (o.detach() + 1)).sum() for o in outs)
    found = torch.autograd.grad(total, leaves, allow_unused=True)
    return [*(o.detach() for o in outs), *found]


PUBLIC = {
    "layer_norm": (
        lambda x, v: tw.layer_norm(x, x.shape[-1:], v, v),
        lambda x, v: F.layer_norm(x, x.shape[-1:], v, v),
    ),
    "rms_norm": (
        lambda x, v: tw.rms_norm(x, x.shape[-1:], v),
        lambda x, v: F.rms_norm(x, x.shape[-1:], v),
    ),
    "softmax": (lambda x, v: tw.softmax(x, 1), lambda x, v: F.softmax(x, 1)),
    "lerp": (lambda x, v: tw.lerp(x, v, 0.3), lambda x, v: torch.lerp(x, v.expand_as(x), 0.3)),
    "bias_layer_norm": (
        lambda x, v: tw.bias_layer_norm(x, v, v, v, v),
        lambda x, v: F.layer_norm(x + v + v, x.shape[-1:], v, v),
    ),
    "add_rms_norm": (
        lambda x, v: tw.add_rms_norm(x, x, weight=v),
        lambda x, v: (F.rms_norm(x + x, x.shape[-1:], v), x + x),
    ),
    "add_layer_norm": (
        lambda x, v: tw.add_layer_norm(x, x, weight=v, bias=v),
        lambda x, v: (F.layer_norm(x + x, x.shape[-1:], v, v), x + x),
    ),
}


@on_each_device
@sizes
@pytest.mark.parametrize("name", PUBLIC)
def test_a_call_gives_pytorchs_results_and_gradients(name, a, b, c, device):
    x, v = torch.ones(a, b, c, device=device), torch.ones(c, device=device)
    ours, theirs = (gradients(function, x, v) for function in PUBLIC[name])
    for mine, its in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, its, equal_nan=True)


def elementwise(x, v):
    return torch.nn.functional.gelu(x) * v


def centred(x, v):
    return x - x.mean(-1, keepdim=True) + v


def column_sums(x, v):
    return (x * v).sum((0, 1))


def all_of_it(x, v):
    return (x * x).sum() + v.sum()


@on_each_device
@sizes
@pytest.mark.usefixtures("forgets_functions")
@pytest.mark.parametrize("function", [elementwise, centred, column_sums, all_of_it])
def test_a_function_that_is_fused_runs_as_pytorch_runs_it(function, a, b, c, device):
    x, v = torch.ones(a, b, c, device=device), torch.ones(c, device=device)
    ours, theirs = gradients(tw.fuse(function), x, v), gradients(function, x, v)
    for mine, its in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, its, equal_nan=True)
