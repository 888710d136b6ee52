"""Fused functions where PyTorch runs otherwise, as methods, and names that they cannot have."""

import subprocess
import sys

import pytest
import torch

import tilewright as tw
from tilewright.compile import cxx
from tilewright.errors import InvalidArgument, NoImplementation
from tilewright.op import Workload

pytestmark = [
    pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing())),
    pytest.mark.usefixtures("records_of_its_own"),
]


def scaled_softmax(x, w):
    return (x * w).softmax(-1) * x.std(0)


def test_gradients_are_found_while_anomalies_are_detected():
    fused, w = tw.fuse(scaled_softmax), torch.randn(7)
    x = torch.randn(3, 7, requires_grad=True)
    with torch.autograd.detect_anomaly(check_nan=True):
        found = torch.autograd.grad(fused(x, w).square().sum(), x)
        assert torch.is_anomaly_enabled()
        assert torch.is_anomaly_check_nan_enabled()
    torch.testing.assert_close(found, torch.autograd.grad(scaled_softmax(x, w).square().sum(), x))


def test_hooks_of_saved_tensors_and_anomaly_detection_see_no_trace(recwarn):
    def halved(x):
        return x.softmax(-1) / 2

    fused, x, seen = tw.fuse(halved), torch.randn(3, 7, requires_grad=True), []

    def packed(t):
        seen.append(type(t))
        return t.detach().numpy().copy()

    hooks = torch.autograd.graph.saved_tensors_hooks(packed, torch.from_numpy)
    with hooks, torch.autograd.detect_anomaly():
        found = torch.autograd.grad(fused(x).square().sum(), x)
    torch.testing.assert_close(found, torch.autograd.grad(halved(x).square().sum(), x))
    assert set(seen) <= {torch.Tensor, torch.nn.Parameter}
    assert not [str(r.message) for r in recwarn if "Error detected" in str(r.message)]


def test_inference_tensors_are_taken_whether_or_not_a_gradient_follows_from_their_values():
    with torch.inference_mode():
        x = torch.randn(3, 7)
    w = torch.randn(7, requires_grad=True)
    added = tw.fuse(lambda x, w: x + w.exp(), name="added")(x, w)
    (found,) = torch.autograd.grad(added.sum(), w)
    torch.testing.assert_close(found, 3 * w.exp().detach())
    multiplied = tw.fuse(lambda x, w: x * w, name="multiplied")(x, w)
    (found,) = torch.autograd.grad(multiplied.sum(), w)
    torch.testing.assert_close(found, x.clone().sum(0))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.cfloat])
@pytest.mark.parametrize("differentiable", [False, True])
def test_pytorch_takes_tensors_of_other_dtypes_where_it_may_run_the_function(dtype, differentiable):
    def scaled(x, w):
        return x * w

    x, w = torch.randn(3, 7, requires_grad=differentiable), torch.ones(7).to(dtype)
    torch.testing.assert_close(tw.fuse(scaled, fallback=True)(x, w), scaled(x, w))


@pytest.mark.parametrize("differentiable", [False, True])
def test_a_traced_program_holds_pytorchs_steps(differentiable):
    fused, w = tw.fuse(scaled_softmax), torch.randn(7, requires_grad=differentiable)
    x, other = torch.randn(2, 3, 7)
    for _ in range(3):
        fused(x, w)
    program = torch.jit.trace(fused, (x, w))
    torch.testing.assert_close(program(other, w), scaled_softmax(other, w))


def test_so_does_one_of_a_number_alone():
    """Tensors of no dims tell calls in a trace from others by no size."""
    fused, number = tw.fuse(lambda t: t * 2, name="doubled"), torch.tensor(1.0)
    for _ in range(3):
        fused(number)
    program = torch.jit.trace(lambda x, t: x * fused(t), (torch.ones(3), number))
    assert torch.equal(program(torch.ones(3), torch.tensor(5.0)), torch.full((3,), 10.0))


def test_a_method_is_fused_with_its_object_as_an_argument():
    class Scale:
        factor = 3.0

        @tw.fuse(name="scale")
        def __call__(self, x):
            return x.exp() * self.factor

    x = torch.randn(5, requires_grad=True)
    out = Scale()(x)
    torch.testing.assert_close(out, x.exp() * 3.0)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x), (x.exp() * 3.0,))


def test_names_that_its_workloads_or_gradients_have_are_refused():
    with pytest.raises(InvalidArgument, match="takes 'flags'"):
        tw.fuse(lambda x, flags: x * flags, name="flagged")
    flags = 2.0
    with pytest.raises(InvalidArgument, match="takes 'flags' from outside"):
        tw.fuse(lambda x: x * flags, name="flagged")
    x = torch.randn(5)
    for name, function in {
        "grads": lambda x, grads: x * grads,
        "grad_output": lambda grad_output, x: x * grad_output,
    }.items():
        fused = tw.fuse(function, name="chained")
        torch.testing.assert_close(fused(x, x), x * x)
        with pytest.raises(InvalidArgument, match=f"takes '{name}', which names"):
            fused(x.clone().requires_grad_(), x)


def test_names_that_only_begin_as_a_gradients_are_arguments():
    x, y, given = torch.randn(5, requires_grad=True), torch.randn(5), torch.randn(5)
    for function in (
        lambda x, grad_output0: x * grad_output0,
        lambda x, grad_outputs: (x * grad_outputs).exp(),
    ):
        fused = tw.fuse(function, name="chained")
        right = torch.autograd.grad(function(x, y), x, given)
        torch.testing.assert_close(torch.autograd.grad(fused(x, y), x, given), right)
    w = Workload.parse("chained_backward(grad_output=f32[5], x=f32[5], grad_outputs=f32[5])")
    assert w.operator.gradients == ("grad_output",)
    tw.fuse(lambda x, grad_output0: x * grad_output0, name="chained")
    w = Workload.parse("chained_backward(grad_output=f32[5], x=f32[5], grad_output0=f32[5])")
    assert w.operator.gradients == ("grad_output",)


def test_a_function_without_results_is_refused():
    fused = tw.fuse(lambda x: (), name="nothing")
    with pytest.raises(NoImplementation, match="nothing returns no tensors"):
        fused(torch.randn(5))


def test_a_fused_function_keeps_its_name_and_documentation():
    def doubled_and_told(x):
        """Twice x."""
        return x * 2

    fused = tw.fuse(doubled_and_told)
    assert fused.__doc__ == "Twice x."
    assert fused.__name__ == "doubled_and_told"
    assert "doubled_and_told" in tw.doubled_and_told_backward.__doc__


def test_other_processes_get_a_fused_function_by_the_file_that_fuses_it(tmp_path):
    lines = ["import tilewright as tw", "@tw.fuse", "def sent(x):", "    return x * 2", "", ""]
    (tmp_path / "senders.py").write_text("\n".join(lines))
    sending = "import pickle, senders, sys; sys.stdout.buffer.write(pickle.dumps(senders.sent))"
    received = "import pickle, sys; print(pickle.load(sys.stdin.buffer))"
    there = {"cwd": tmp_path, "capture_output": True, "check": True}
    sent = subprocess.run([sys.executable, "-c", sending], **there).stdout
    found = subprocess.run([sys.executable, "-c", received], input=sent, **there).stdout
    assert found.startswith(b"<function sent at")
    assert b"senders" in sent


GATED = """if True:
    import torch
    import tilewright as tw

    @tw.fuse
    def gated_of_fx(x):
        gate, up = x.chunk(2, -1)
        return torch.sigmoid(gate) * up

    class Gated(torch.nn.Module):
        def forward(self, x):
            return gated_of_fx(x + 1)
"""


def test_proxies_of_fx_are_told_how_a_call_becomes_one_step():
    module = {"__name__": "of_fx"}
    exec(GATED, module)
    gated, x = module["Gated"](), torch.randn(3, 8)
    with pytest.raises(InvalidArgument, match=r"x is a proxy.*: torch.fx.wrap\('gated_of_fx'\)"):
        torch.fx.symbolic_trace(gated)
    exec("torch.fx.wrap('gated_of_fx')", module)
    traced = torch.fx.symbolic_trace(gated)
    assert len([n for n in traced.graph.nodes if n.op == "call_function"]) == 2
    assert torch.equal(traced(x), gated(x))
