"""Steps in fp64 among others: PyTorch's dtypes, values and gradients, verified as fp64."""

import random
import re

import pytest
import torch
from torch.nn import functional as F

from emulated import Emulated
from tilewright.compile import cxx
from tilewright.compile.cache import compiled
from tilewright.device import DEVICES, spec_of
from tilewright.dispatch.functions.fuse import fuse
from tilewright.dispatch.functions.operator import backward_operator
from tilewright.fusion.cuda import target
from tilewright.impl import IMPLS
from tilewright.impls.fused import graph_of
from tilewright.measure.verify import Verifier
from tilewright.op import OPS
from tilewright.tensor_spec import TensorSpec

pytestmark = pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing()))
CPU, H200 = torch.device("cpu"), DEVICES["h200"]

FUNCTIONS = {
    "a mean": lambda x: x.double().mean(-1),
    "a mean cast back": lambda x: x.double().mean(-1).to(x.dtype),
    "elements": lambda x: (x.to(torch.float64) * 2.7).sin().to(x.dtype),
    "a sum's dtype": lambda x: x * 1.3 + x.sum(-1, keepdim=True, dtype=torch.float64).float(),
    "softmax's dtype": lambda x: F.softmax(x, -1, dtype=torch.float64),
    "a sum beside elements": lambda x: x - x.double().sum(0),
    "a number widens no tensor": lambda x: x * x.double().mean(),
    "sums of both over rows": lambda x: x.double().sum(-1) + x.float().sum(-1) + x.amax(-1),
    "sums of both over columns": lambda x: (x.double() * 2).sum(0) * (x.float() * 3).sum(0),
    "a norm": lambda x: F.layer_norm(x.double(), x.shape[-1:]).to(x.dtype),
    "variances of both": lambda x: x.double().var(-1) + x.float().var(-1),
    "to a half": lambda x: (x.double() / 3).half() * x,
    "to bf16": lambda x: (x.double() / 3).bfloat16() * x,
    "a choice": lambda x: torch.where(x.double() / 3 > x * 0.375, x, 2 * x.exp()),
    "functions before": lambda x: (x.float().exp() + x.float().erf().atan2(x + 3)).double().cos(),
}


@pytest.fixture
def workloads():
    """A function's, by name, of tensors of these dtypes, and its gradients'."""

    def of(function, *specs, **kwargs):
        fuse(function, name="doubles", **kwargs)
        op = OPS["doubles"]
        given = dict(zip(op.parameters, specs, strict=False))
        w = op.workload(**given)
        backward = backward_operator(op, 1)
        gradient = {"grad_output": w.outputs[0]}
        return w, backward.workload(**gradient, **given, grads=None)

    yield of
    for name in ("doubles", "doubles_backward"):
        OPS.remove(name)


def assert_verified(w):
    built = IMPLS["fused"].build(IMPLS["fused"].heuristic(w, spec_of(None)), w, spec_of(None))
    message = Verifier(w, CPU).check(built).message
    # How well PyTorch's own rounding errors turn out on a few elements is luck.
    assert message == "" or "PyTorch's largest error" in message, message


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", FUNCTIONS)
def test_values_and_gradients_are_verified_in_pytorchs_dtypes(case, dtype, workloads):
    x = torch.randn(7, 133).to(dtype)
    for w in workloads(FUNCTIONS[case], TensorSpec.of(x)):
        assert_verified(w)
    x.requires_grad_()
    own, right = (f(x) for f in (OPS["doubles"].reference, FUNCTIONS[case]))
    assert (
        own.dtype
        == right.dtype
        == OPS["doubles"].workload(x=TensorSpec.of(x)).outputs[0].torch_dtype
    )


@pytest.mark.parametrize("case", ["a mean", "elements", "a sum beside elements", "a norm"])
def test_a_call_gives_what_pytorch_gives(case, workloads):
    workloads(FUNCTIONS[case], TensorSpec("f32", (7, 133)))
    operator = fuse(FUNCTIONS[case], name="doubles")
    x = torch.randn(7, 133, requires_grad=True)
    own, right = operator(x), FUNCTIONS[case](x)
    torch.testing.assert_close(own, right)  # of fp64 to 1e-7
    upstream = torch.randn_like(right)
    found, expected = (torch.autograd.grad(out, x, upstream) for out in (own, right))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("case", FUNCTIONS)
def test_kernels_for_a_gpu_compile_without_spilling_and_are_right_on_a_cpu(case, dtype, workloads):
    for w in workloads(FUNCTIONS[case], TensorSpec(dtype, (37, 133))):
        graph = graph_of(w)
        heuristic = target.heuristic(graph, H200)
        log = compiled(target.task(graph, heuristic, H200)).log
        assert set(re.findall(r"(\d+) bytes spill stores", log)) == {"0"}
        verifier = Verifier(w, CPU)
        for config in (heuristic, *target.space(graph, H200).sample(random.Random(case), 1)):
            found = verifier.check(Emulated(graph, config, H200, w))
            assert found.ok or "PyTorch's largest error" in found.message, (config, found.message)


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_tensors_of_fp64_go_beside_others(dtype, workloads):
    specs = TensorSpec("f64", (7, 33)), TensorSpec(dtype, (33,)), TensorSpec(dtype, (7, 33))
    for function in (lambda a, b, c: a * b + c.exp(), lambda a, b, c: (b * c).sum(-1) - a.sum(-1)):
        for w in workloads(function, *specs):
            assert_verified(w)
            graph = graph_of(w)
            config = target.heuristic(graph, H200)
            assert Verifier(w, CPU).check(Emulated(graph, config, H200, w)).ok


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_halves_made_of_fp64_alone_compile_for_a_gpu_too(half, workloads):
    for w in workloads(lambda x: (x / 3).to(half) * x, TensorSpec("f64", (7, 66))):
        assert_verified(w)
        graph = graph_of(w)
        config = target.heuristic(graph, H200)
        assert "error" not in compiled(target.task(graph, config, H200)).log
        assert Verifier(w, CPU).check(Emulated(graph, config, H200, w)).ok


def test_a_number_of_a_call_is_as_wide_as_the_widest_step(workloads):
    workloads(lambda x, alpha: x.double() * alpha + x * alpha, TensorSpec("f32", (33,)), 0.5)
    operator = fuse(lambda x, alpha: x.double() * alpha, name="doubles", scalars=["alpha"])
    x = torch.randn(33)
    assert torch.equal(operator(x, 0.1), x.double() * 0.1)


def test_an_error_that_only_fp64_shows_is_found(workloads):
    """Where a step before is in fp32, its rounding is allowed, and no more."""
    cases = (
        (lambda x: x.double().sum(-1), 0.0, 1e-13),
        (lambda x: x.exp().double().sum(-1), 1e-9, 1e-4),
        (lambda x: (x.double() * 2).exp(), 0.0, 1e-13),
    )
    for function, allowed, wrong in cases:
        w, _ = workloads(function, TensorSpec("f32", (9, 64)))
        verifier = Verifier(w, CPU)
        for relative, ok in ((allowed, True), (wrong, False)):
            faulty = Scaled(function, 1 + relative)
            assert verifier.check(faulty).ok is ok, (function, relative)


class Scaled:
    workspace_bytes, resources = 0, None

    def __init__(self, function, factor):
        self.function, self.factor = function, factor

    def __call__(self, x):
        return self.function(x) * self.factor


def test_whole_numbers_of_fp64_keep_their_digits(workloads):
    def function(x):
        return (x.double() * 1e6).to(torch.int64).double()

    workloads(function, TensorSpec("f32", (33,)))
    x = torch.rand(33) * 1000
    assert torch.equal(fuse(function, name="doubles")(x), (x.double() * 1e6).trunc())


BESIDE_FP64_ALONE = {
    "out of range": lambda x, i: (x * 0 + 1e30).float().square().double() * 1e-30,
    "infinite": lambda x, i: ((x * 0 + 1e30).float() * 1e30).double() * x.sign(),
    "digits lost": lambda x, i: ((x.ceil() + 16777217.0).float() + 1) - 16777216.0 + x,
    "of whole numbers": lambda x, i: ((i + 16777217).float() + 1).sub(16777216.0) + x,
    "thirds": lambda x, i: x + i / 3,
    "positions": lambda x, i: x + 0.1 * torch.arange(33),
    "a ramp": lambda x, i: x * torch.linspace(0, 1, 33),
    "two results": lambda x, i: (x * 3, (i + 2**24).float() * 0.1),
    "numbers are of fp64": lambda x, i: torch.where(x > 0, x, 0.1).clamp(0.3, 0.7) - 0.1,
}


@pytest.mark.parametrize("case", BESIDE_FP64_ALONE)
def test_steps_in_fp32_beside_tensors_of_fp64_alone_are_pytorchs(case, workloads):
    function = BESIDE_FP64_ALONE[case]
    x, i = torch.randn(7, 33, dtype=torch.float64), torch.arange(33)
    own, right = (f(x, i) for f in (fuse(function, name="doubles"), function))
    w, _ = OPS["doubles"].workload_of(x, i)
    torch.testing.assert_close(own, right, rtol=1e-15, atol=1e-15, check_stride=False)
    assert_verified(w)
    graph = graph_of(w)
    config = target.heuristic(graph, H200)
    assert Verifier(w, CPU).check(Emulated(graph, config, H200, w)).ok


def test_gradients_by_fp32_beside_tensors_of_fp64_alone_are_verified(workloads):
    for w in workloads(
        BESIDE_FP64_ALONE["a ramp"], TensorSpec("f64", (7, 33)), TensorSpec("i64", (33,))
    ):
        assert_verified(w)
