"""Verification on a GPU: PyTorch's kernels pass, planted faults do not, and it is quick."""

import itertools
import time

import pytest
import torch

from tilewright.device import spec_of
from tilewright.impl import IMPLS, allocate
from tilewright.impls._vendor import vendor
from tilewright.measure.error_bound import bounds, truth_and_tolerance
from tilewright.measure.verify import Verifier
from tilewright.op import Workload

pytestmark = pytest.mark.gpu

FLOATS = ("f16", "bf16", "f32", "f64")
WORKLOADS = [
    "layer_norm(x=d[512,5140], weight=d[5140], bias=d[5140])",
    "layer_norm(x=d[64,5140]@strides(5141,1)@align8)",
    "layer_norm(x=d[1,65536])",
    "rms_norm(x=d[512,4096], weight=d[4096])",
    "softmax(x=d[128,50257])",
    "softmax(x=d[16,333,48], dim=1)",
    "lerp(x=d[16,1,1,1], end=d[16,3,244,244], weight=d[3,1,244])",
    "lerp(x=d[4096,513], end=d[513], weight=0.3)",
    "bias_layer_norm(x=d[512,5140], bias0=d[5140], bias1=d[5140], weight=d[5140], bias=d[5140])",
]
CONVOLUTIONS = [
    "conv2d_weight_grad(x=d[8,64,28,28]@channels_last, grad_output=d[8,96,28,28]@channels_last,"
    " kernel_size=3, padding=1)",
    "conv2d_weight_grad(x=d[4,3,64,64]@channels_last, grad_output=d[4,64,32,32]@channels_last,"
    " kernel_size=7, stride=2, padding=3)",
]


def typed(text, dtype):
    """ "tf32" is fp32 of which convolutions may round to TF32."""
    if dtype == "tf32":
        dtype, text = "f32", f"{text[:-1]}, allow_tf32=True)"
    return Workload.parse(text.replace("=d[", f"={dtype}["))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("text", WORKLOADS)
def test_pytorchs_own_result_passes(text, dtype, device):
    w = typed(text, dtype)
    assert Verifier(w, device).check(vendor(w)).message == ""


@pytest.mark.parametrize("dtype", [*FLOATS, "tf32"])
@pytest.mark.parametrize("text", CONVOLUTIONS)
def test_cudnns_gradient_passes_and_with_deterministic_algorithms_in_the_same_bits(
    text, dtype, device, tf32_flag
):
    w = typed(text, dtype)
    tf32_flag(dtype == "tf32")
    assert Verifier(w, device).check(vendor(w), may_race=True).message == ""
    executable = IMPLS["aten_deterministic"].build(None, w, spec_of(device.index))
    # cuDNN's deterministic algorithm of the stem in fp32 is off by 86 ulp, its own choice by 26.
    tensors = w.operator.examples(w, "random", 0, device)
    first = executable(*tensors)
    assert all(torch.equal(executable(*tensors), first) for _ in range(5))


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        *itertools.product(WORKLOADS, FLOATS),
        *itertools.product(CONVOLUTIONS, (*FLOATS, "tf32")),
    ],
)
def test_pytorchs_kernels_lie_within_the_bound_itself(text, dtype, device, tf32_flag):
    w = typed(text, dtype)
    tf32_flag(dtype == "tf32")
    tensors = w.operator.examples(w, "random", 0, device)
    out = vendor(w)(*tensors)
    ((value, tolerance),) = truth_and_tolerance(w, tensors)
    lo, hi = bounds(value, tolerance, out.dtype)
    outside = ~((out >= lo) & (out <= hi))
    assert outside.sum().item() == 0


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("text", WORKLOADS)
def test_generated_kernels_pass_with_their_heuristic_config(text, dtype, device):
    w, spec, fused = typed(text, dtype), spec_of(device.index), IMPLS["fused"]
    if reason := fused.unsupported(w, spec):
        pytest.skip(reason)
    executable = fused.build(fused.heuristic(w, spec), w, spec)
    assert Verifier(w, device).check(executable).message == ""


@pytest.mark.parametrize("half", ["f16", "bf16"])
def test_halves_beside_fp32_parameters_pass(half, device):
    w = Workload.parse(f"layer_norm(x={half}[512,768], weight=f32[768], bias=f32[768])")
    assert Verifier(w, device).check(vendor(w)).message == ""


def test_faults_are_refused_with_a_coordinate(device):
    w = Workload.parse("layer_norm(x=f16[4096,4096], weight=f16[4096], bias=f16[4096])")
    verifier = Verifier(w, device)

    def unwritten(*tensors):
        out = allocate(w.outputs[0], device)
        out[:, :-1] = vendor(w)(*tensors)[:, :-1]
        return out

    def overrun(*tensors):
        out = allocate(w.outputs[0], device).copy_(vendor(w)(*tensors))
        out.as_strided((1,), (1,), out.storage_offset() + out.numel()).zero_()
        return out

    def one_term_less(x, weight, bias):
        wide = x.float()
        mean = wide[:, :-1].sum(1, keepdim=True) / 4096
        y = (wide - mean) * torch.rsqrt(wide.var(1, correction=0, keepdim=True) + 1e-5)
        return (y * weight.float() + bias.float()).half()

    assert "never written at (0, 4095)" in verifier.check(unwritten).message
    assert "bytes past its end" in verifier.check(overrun).message
    assert "exceeds" in verifier.check(one_term_less).message
    assert "exceeds" in verifier.check(lambda x, *p: vendor(w)(x.roll(1, 0), *p)).message
    assert verifier.check(vendor(w)).ok


def test_verification_follows_the_device_of_its_tensors(device):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU here")
    w = Workload.parse("rms_norm(x=f16[512,4096], weight=f16[4096])")
    assert Verifier(w, torch.device("cuda:1")).check(vendor(w)).message == ""


@pytest.mark.alone
@pytest.mark.parametrize(
    ("text", "limit_s"),
    [
        ("layer_norm(x=f16[8192,4096], weight=f16[4096], bias=f16[4096])", 0.020),
        ("layer_norm(x=f16[8192,65536], weight=f16[65536], bias=f16[65536])", 0.300),
    ],
)
def test_a_candidate_is_checked_in_milliseconds_and_in_bounded_memory(text, limit_s, device):
    w = Workload.parse(text)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    verifier = Verifier(w, device)
    run = vendor(w)
    assert verifier.check(run).message == ""
    times = []
    for _ in range(5):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        verifier.check(run)
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    assert sorted(times)[2] < limit_s
    assert torch.cuda.max_memory_allocated(device) < 60e9
