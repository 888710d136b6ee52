"""A training step: forward and backward as one operator, for measuring them together."""

import pytest
import torch

from tilewright.compile import cxx
from tilewright.device import DEVICES, spec_of
from tilewright.dispatch.dumps import dump
from tilewright.errors import InvalidArgument
from tilewright.impl import IMPLS
from tilewright.impls._vendor import vendor
from tilewright.measure.verify import Verifier
from tilewright.op import Workload
from tilewright.ops._training import forward_of, gradient_arguments, halves
from tilewright.suite import SUITES

CPU = torch.device("cpu")
NORM = "layer_norm_training(x={d}[{s}], grad_output={d}[{s}], weight={d}[{h}], bias={d}[{h}])"
LERP = "lerp_training(x=f32[16,1,1,1], end=f32[16,3,24,24], weight=f32[3,1,24], grad_output=f32[16,3,24,24])"  # noqa: E501
ADDED = ", ".join(
    f"{name}={{d}}[37,200]" for name in ("x", "residual", "grad_output", "grad_output_total")
)
STEPS = (
    "rms_norm_training(x={d}[37,200], grad_output={d}[37,200], weight={d}[200])",
    "softmax_training(x={d}[37,200], grad_output={d}[37,200])",
    "softmax_training(x={d}[5,33,7], grad_output={d}[5,33,7], dim=1)",
    "bias_layer_norm_training(x={d}[37,200], grad_output={d}[37,200], bias0={d}[200],"
    " bias1={d}[200], weight={d}[200], bias={d}[200])",
    f"add_layer_norm_training({ADDED}, weight={{d}}[200], bias={{d}}[200])",
    f"add_layer_norm_training({ADDED}, weight={{d}}[200], grads=[weight])",
    f"add_rms_norm_training({ADDED}, weight={{d}}[200])",
    f"add_rms_norm_training({ADDED})",
)
runs = pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing()))


def test_pytorch_runs_it_by_autograd_and_the_reference_says_the_same():
    w = Workload.parse(NORM.format(d="f64", s="6,40", h="40"))
    x, grad_output, weight, bias = w.operator.examples(w, "random", 0, CPU)
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    out = torch.nn.functional.layer_norm(leaves[0], (40,), *leaves[1:])
    expected = (out.detach(), *torch.autograd.grad(out, leaves, grad_output))
    given = (x, grad_output, weight, bias)
    for found in (vendor(w)(*given), w.operator.reference(**w.call(given))):
        torch.testing.assert_close(found, expected)
    assert not x.requires_grad


@runs
@pytest.mark.parametrize(
    "text",
    [
        *(NORM.format(d=d, s="37,200", h="200") for d in ("f16", "bf16", "f32", "f64")),
        NORM.format(d="f32", s="5,7,33", h="33"),
        "layer_norm_training(x=f16[9,100], grad_output=f16[9,100])",
        "layer_norm_training(x=f32[9,100], grad_output=f32[9,100]@strides(128,1), weight=f32[100], grads=[weight])",  # noqa: E501
        *(text.format(d=d) for text in STEPS for d in ("f16", "bf16", "f32", "f64")),
        LERP,
        "lerp_training(x=f16[16,100], end=f16[100], weight=0.3, grad_output=f16[16,100])",
    ],
)
def test_our_kernels_of_both_halves_are_right_one_after_the_other(text):
    w, spec = Workload.parse(text), spec_of(None)
    implementation, verifier = IMPLS["fused_training"], Verifier(w, CPU)
    space = implementation.space(w, spec)
    for config in {implementation.heuristic(w, spec), *list(space)[-1:]}:
        assert config in space
        assert verifier.check(implementation.build(config, w, spec)).message == ""


def test_halves_are_never_one_kernel_since_the_backward_starts_when_the_forward_has_ended():
    w = Workload.parse(LERP)
    assert "when the forward has ended" in IMPLS["fused"].unsupported(w, spec_of(None))
    lines = IMPLS["fused_training"].describe(
        IMPLS["fused_training"].heuristic(w, DEVICES["h200"]), w, DEVICES["h200"]
    )
    assert [line.partition(",")[0] for line in lines].count("forward") == 1


def test_whose_kernels_it_calls_is_told_where_its_source_is_asked_for():
    w, device = Workload.parse(NORM.format(d="f16", s="64,128", h="128")), DEVICES["h200"]
    implementation = IMPLS["fused_training"]
    asked = "ask for layer_norm_forward or layer_norm_backward, whose kernels it calls"
    with pytest.raises(InvalidArgument, match=asked):
        dump("source", implementation, implementation.heuristic(w, device), w, device)


def test_what_both_halves_read_counts_twice():
    w = Workload.parse(NORM.format(d="f16", s="64,128", h="128"))
    forward, backward = halves(w)
    assert (forward.op, backward.op) == ("layer_norm_forward", "layer_norm_backward")
    assert w.bytes == tuple(a + b for a, b in zip(forward.bytes, backward.bytes, strict=True))
    assert w.bytes[0] > 3 * 64 * 128 * 2  # x, x and grad_output


def test_a_gradient_of_another_shape_or_of_nothing_is_refused():
    text = "layer_norm_training(x=f32[6,40], grad_output=f32[6,39])"
    with pytest.raises(InvalidArgument, match=r"grad_output is f32\[6, 39\], but layer_norm gives"):
        Workload.parse(text)
    text = "layer_norm_training(x=f32[6,40], grad_output=f32[6,40], grads=[bias])"
    with pytest.raises(InvalidArgument, match="no gradient of 'bias'; ask for some of x"):
        Workload.parse(text)
    given = "x=f32[6,40], residual=f32[6,40], grad_output=f32[6,40]"
    text = f"add_rms_norm_training({given}, grad_output_total=f16[6,40])"
    with pytest.raises(InvalidArgument, match=r"grad_output_total is f16\[6, 40\], but add_rms"):
        Workload.parse(text)
    text = f"add_rms_norm_training({given}, grad_output_total=f32[6,40], grads=[residual])"
    with pytest.raises(InvalidArgument, match="no gradient of 'residual'; ask for some of x"):
        Workload.parse(text)


def test_the_backward_of_softmax_reads_the_output_of_its_forward():
    w = Workload.parse("softmax_training(x=f16[64,128], grad_output=f16[64,128])")
    forward, backward = halves(w)
    assert (forward.op, backward.op) == ("softmax", "softmax_backward")
    assert backward["output"] == forward.outputs[0]
    assert w.bytes == (3 * 64 * 128 * 2, 2 * 64 * 128 * 2)  # x, output, grad_output; output, dx


@pytest.mark.parametrize("text", STEPS)
def test_a_step_is_its_forward_and_what_autograd_makes_of_it(text):
    w = Workload.parse(text.format(d="f64"))
    tensors = w.operator.examples(w, "random", 0, CPU)
    plain = forward_of(w)
    leaves = {n: t.requires_grad_() for n, t in zip(w.tensors, tensors, strict=True)}
    out = plain.operator.reference(**plain.call([leaves[n] for n in plain.tensors]))
    outs = (out,) if isinstance(out, torch.Tensor) else out
    given = [leaves[n] for n in gradient_arguments(w.tensors)]
    wanted = [leaves[n] for n in w["grads"]]
    expected = (*outs, *torch.autograd.grad(outs, wanted, given))
    detached = [t.detach() for t in tensors]
    for found in (vendor(w)(*detached), w.operator.reference(**w.call(detached))):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("w", SUITES["training_steps"].workloads(), ids=str)
def test_each_workload_of_the_suite_is_built_for_a_gpu_without_spilling(w):
    spec, implementation = DEVICES["h200"], IMPLS["fused_training"]
    built = implementation.build(implementation.heuristic(w, spec), w, spec)
    assert built.forward.resources.spill_bytes == 0
    assert built.backward.resources.spill_bytes == 0
