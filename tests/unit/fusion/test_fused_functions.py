"""Functions and remainders in fused functions, on both targets, where they are hard: at zeros,
infinities, NaN, whole numbers and the ends of their domains."""

import math

import pytest
import torch
from torch.nn import functional as F

from emulated import Emulated
from tilewright.compile import cxx
from tilewright.device import DEVICES, spec_of
from tilewright.dispatch.functions.fuse import fuse
from tilewright.dispatch.functions.operator import backward_operator
from tilewright.fusion.cuda import target
from tilewright.impl import IMPLS
from tilewright.impls.fused import graph_of
from tilewright.measure.verify import Verifier
from tilewright.op import OPS
from tilewright.tensor_spec import TensorSpec

H200 = DEVICES["h200"]
pytestmark = [
    pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing())),
    pytest.mark.usefixtures("forgets_functions"),
]

HARD = torch.tensor(
    [0.0, 1e-30, 1e-8, 0.1, 0.25, 0.5, 0.7, 1.0, 1.3, 1.5, 2.0, 2.5, 3.0, 7.25, 88.0, 1e4, math.inf]
)
HARD = torch.cat((HARD, -HARD, torch.tensor([math.nan])))
UNARY = {
    name: getattr(torch, name)
    for name in (
        *("atan", "asin", "acos", "sinh", "cosh", "tan", "asinh", "acosh", "atanh", "log2"),
        *("log10", "exp2", "erfc", "square", "reciprocal", "trunc", "floor", "ceil", "round"),
        *("frac", "sign", "nan_to_num", "logit", "isfinite", "isposinf", "signbit"),
    )
}
UNARY |= {
    name: getattr(F, name)
    for name in (
        *("hardswish", "hardsigmoid", "mish", "softplus", "leaky_relu", "elu", "selu", "celu"),
        *("relu6", "softsign", "logsigmoid", "hardshrink", "softshrink", "tanhshrink"),
    )
}
UNARY |= {
    "rounded": lambda x: torch.round(x, decimals=1),
    "fmod_number": lambda x: torch.fmod(x, -0.75),
    "remainder_number": lambda x: x % -0.75,
    "floor_number": lambda x: x // 0.75,
    "masked": lambda x: x.masked_fill(x > 1, -1.0),
    "least": lambda x: x.clamp(min=0.5),
    "both_ends": lambda x: x.clip(-1, 1.5),
    "either": lambda x: (x > 2) | (x < -1) ^ ~x.isnan(),
}
BINARY = {
    "fmod": torch.fmod,
    "remainder": lambda x, y: x % y,
    "floor": lambda x, y: x // y,
    "atan2": torch.atan2,
    "hypot": torch.hypot,
    "copysign": torch.copysign,
    "xlogy": torch.xlogy,
    "clamp": lambda x, y: torch.clamp(x, y, y + 1),
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=0.5),
}
OVER_ROWS = {
    "std": lambda x: x.std(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "norm1": lambda x: torch.linalg.vector_norm(x, 1, dim=-1),
    "norm3": lambda x: torch.linalg.vector_norm(x, 3, dim=-1),
    "normalize": lambda x: F.normalize(x, dim=-1),
}


def both_targets(w):
    """The workload's kernels, as C++ and as emulated CUDA."""
    fused, spec = IMPLS["fused"], spec_of(None)
    assert fused.unsupported(w, spec) is None, fused.unsupported(w, spec)
    graph = graph_of(w)
    yield fused.build(fused.heuristic(w, spec), w, spec)
    yield Emulated(graph, target.heuristic(graph, H200), H200, w)


def all_of(functions):
    def every(x):
        return tuple(function(x) for function in functions.values())

    def every_two(x, y):
        return tuple(function(x, y) for function in functions.values())

    return every_two if functions is BINARY else every


def assert_like_pytorch(function, name, *tensors):
    fuse(function, name=name)
    w, given = OPS[name].workload_of(*tensors)
    theirs, exact = function(*tensors), function(*(t.double() for t in tensors))
    right = [_truth(t, e) for t, e in zip(theirs, exact, strict=True)]
    for built in both_targets(w):
        torch.testing.assert_close(
            list(built(*given)), right, rtol=2e-6, atol=1e-37, equal_nan=True
        )


def _truth(theirs, exact):
    """The value in fp64; where it is beyond fp32, what PyTorch gives in fp32."""
    if not theirs.is_floating_point():
        return theirs
    exact = exact.to(theirs.dtype)
    return torch.where(theirs.isfinite() & exact.isfinite(), exact, theirs)


@pytest.mark.parametrize("part", range(4))
def test_functions_of_one_number_are_pytorchs_where_they_are_hard(part):
    some = dict(list(UNARY.items())[part::4])
    assert_like_pytorch(all_of(some), f"hard{part}", HARD)


def test_functions_of_two_numbers_are_pytorchs_where_they_are_hard():
    x, y = HARD.unsqueeze(1).expand(-1, len(HARD)).contiguous(), HARD.repeat(len(HARD), 1)
    assert_like_pytorch(all_of(BINARY), "hard_pairs", x, y)


def test_remainders_have_the_bits_and_signs_of_pytorchs():
    def remainders(x, y):
        return torch.fmod(x, y), x % y, x // y, torch.div(x, y, rounding_mode="trunc")

    x, y = torch.randn(2000) * 100, torch.randn(2000)
    x[:40], y[:40] = 0.0, torch.tensor([-1.0, 1.0, -0.0, 0.0]).repeat(10)
    x[20:40] = -0.0
    fuse(remainders)
    w, given = OPS["remainders"].workload_of(x, y)
    for built in both_targets(w):
        for mine, right in zip(built(*given), remainders(x, y), strict=True):
            assert torch.equal(mine.isnan(), right.isnan())
            assert torch.equal(mine.nan_to_num(7.0), right.nan_to_num(7.0))
            known = ~right.isnan()
            assert torch.equal(mine.signbit()[known], right.signbit()[known])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_a_negative_zero_and_nan_come_through_bounds_on_a_cpu(dtype):
    def bounded(x):
        return x.relu(), x.clamp(min=0.0), x.clamp(0.0, 1.0), x.clamp(max=0.0), F.relu6(x)

    def between(x, low, high):
        return x.clamp(low, high), torch.maximum(x, low), torch.minimum(x, low)

    hard = torch.tensor([-0.0, 0.0, -1.0, 2.0, math.nan, math.inf, -math.inf])
    x, low = (t.reshape(-1).to(dtype) for t in torch.meshgrid(hard, hard, indexing="ij"))
    for function, given in ((bounded, [x]), (between, [x, low, low + 1])):
        for mine, right in zip(fuse(function)(*given), function(*given), strict=True):
            assert torch.equal(mine.isnan(), right.isnan())
            assert torch.equal(mine.nan_to_num(7.0), right.nan_to_num(7.0))
            if function is bounded:  # of two zeros it is anyone's
                known = ~right.isnan()
                assert torch.equal(mine.signbit()[known], right.signbit()[known])


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_the_gradient_of_a_smooth_loss_is_nan_where_its_input_is(reduction):
    def loss(x, y):
        return F.smooth_l1_loss(x, y, beta=0.5, reduction=reduction)

    hard = torch.tensor([0.0, 0.2, -0.5, 0.5, 2.0, -3.0, math.nan, math.inf])
    given = [t.reshape(-1) for t in torch.meshgrid(hard, hard, indexing="ij")]
    found = []
    for function in (fuse(loss, name="loss"), loss):
        leaves = [t.clone().requires_grad_() for t in given]
        out = function(*leaves)
        found.append(torch.autograd.grad(out, leaves, torch.full_like(out, 3.0)))
    torch.testing.assert_close(*found, equal_nan=True)


BENT = {
    "elu": lambda x: F.elu(x, 0.7),
    "selu": lambda x: F.selu(x),
    "celu": lambda x: F.celu(x, 1.5),
    "elu in place": lambda x: F.elu(x * 1, inplace=True),
    "hardswish": lambda x: F.hardswish(x),
}


@pytest.mark.parametrize("name", BENT)
def test_gradients_of_activations_are_nan_where_their_inputs_are(name):
    x = HARD.repeat(64)  # all in vectors, whose rest PyTorch computes otherwise
    found = []
    for function in (fuse(BENT[name], name="bent"), BENT[name]):
        leaf = x.clone().requires_grad_()
        found.append(torch.autograd.grad(function(leaf).sum(), leaf))
    assert found[1][0].isnan().sum() >= 64
    torch.testing.assert_close(*found, equal_nan=True)


@pytest.mark.parametrize("eps", [None, 0.0, 1e-3])
def test_the_gradient_of_logits_is_nan_where_its_input_is_and_0_outside_of_bounds(eps):
    def slope(function, x):
        return torch.autograd.grad(function(x.requires_grad_()).sum(), x)[0]

    def logit(x):
        return torch.logit(x, eps)

    x = HARD[(HARD != 0) | ~HARD.signbit()]  # of -0.0 PyTorch's kernels differ in sign
    right = [slope(logit, one) for one in x.clone()]  # in vectors on a CPU PyTorch's own loses NaN
    torch.testing.assert_close(
        slope(fuse(logit, name="bounded"), x), torch.stack(right), equal_nan=True
    )


def assert_verified(function, name, **specs):
    """Values and gradients against fp64, on both targets."""
    fuse(function, name=name)
    w = OPS[name].workload(**specs)
    floats = [o for o in w.outputs if o.torch_dtype.is_floating_point]
    backward = backward_operator(OPS[name], len(floats))
    given = backward.workload(**dict(zip(backward.gradients, floats, strict=True)), **specs)
    for work in (w, given):
        verifier = Verifier(work, torch.device("cpu"))
        for built in both_targets(work):
            found = verifier.check(built)
            assert found.ok, found.message


@pytest.mark.parametrize("dtype", ["f64", "bf16"])
def test_functions_and_their_gradients_are_within_what_fp64_allows(dtype):
    def functions(x, y):
        inside = torch.tanh(x) / 2
        arcs = torch.asin(inside), torch.acos(inside), torch.atan(x), torch.atan2(x, y)
        areas = torch.asinh(x), torch.acosh(x.abs() + 2), torch.atanh(inside)
        others = torch.sinh(x), torch.cosh(x), torch.tan(inside), torch.erfc(x), torch.hypot(x, y)
        return sum(arcs), sum(areas), sum(others) + torch.log10(y.abs() + 1) * torch.copysign(x, y)

    spec = TensorSpec(dtype, (7, 37))
    assert_verified(functions, "functions", x=spec, y=spec)


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_remainders_and_their_gradients_are_within_what_fp64_allows(dtype):
    def remainders(x, y):
        return torch.fmod(x, y) + (x * 3) % 0.75, x % y, torch.div(x, y, rounding_mode="trunc")

    spec = TensorSpec(dtype, (7, 37))
    assert_verified(remainders, "remainders", x=spec, y=spec)


def test_casts_to_whole_numbers_truncate():
    def whole(x):
        below = x.to(torch.int32)
        kept = torch.where(x.long() > 2, x, below)
        return (x * 3).long(), below, below.float() * 2, kept, (x > 1).int(), x.int() == x

    x = torch.cat((torch.randn(200) * 4, torch.arange(-5.0, 6.0), torch.tensor([-0.9, 1e9, -3e7])))
    fuse(whole)
    w, given = OPS["whole"].workload_of(x)
    for built in both_targets(w):
        found, right = built(*given), whole(x)
        assert [t.dtype for t in found] == [t.dtype for t in right]
        for mine, theirs in zip(found, right, strict=True):
            assert torch.equal(mine, theirs)
        verdict = Verifier(w, torch.device("cpu")).check(built)
        assert verdict.ok, verdict.message


def test_reductions_that_torch_takes_apart_are_within_what_fp64_allows():
    assert_verified(all_of(OVER_ROWS), "over_rows", x=TensorSpec("f32", (6, 50)))


def mask_of_the_greatest(x, y, z):
    product = x * y
    value = product + z
    return value == value.amax(-1, keepdim=True), product


def less_than_the_greatest(x, y, z):
    value = torch.addcmul(z + z, x, y, value=0.5)
    return value - value.amax(0, keepdim=True), value[-1:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_greatest_of_what_is_computed_is_among_it(dtype):
    given = torch.randn(3, 64, 33, dtype=dtype)
    fused = fuse(mask_of_the_greatest)
    torch.testing.assert_close(fused(*given), mask_of_the_greatest(*given))
    fused, given = fuse(less_than_the_greatest), torch.randn(3, 2, 5000, dtype=dtype)
    given = [t.requires_grad_() for t in given]
    totals = [sum(o.sum() for o in f(*given)) for f in (fused, less_than_the_greatest)]
    found, right = (torch.autograd.grad(total, given) for total in totals)
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)


def test_products_are_contracted_unless_sums_meet_their_extremes():
    spec, h200 = TensorSpec("f32", (64, 128)), H200
    met = {
        "mask": (mask_of_the_greatest, True),
        "softmax": (lambda x, y, z: (x * y + z).softmax(-1), False),
        "log_softmax": (lambda x, y, z: (x * y + z).log_softmax(-1), False),
        "logsumexp": (lambda x, y, z: (x * y + z).logsumexp(-1), False),
        "root": (lambda x, y, z: ((w := x * y + z).amax(-1, True) - w).sqrt(), True),
        "of inputs": (lambda x, y, z: (x == x.amax(-1, True)) * y + z, False),
    }
    for name, (function, expected) in met.items():
        op = f"meeting_{name}".replace(" ", "_")
        fuse(function, name=op)
        graph = graph_of(OPS[op].workload(x=spec, y=spec, z=spec))
        assert graph.meets_extremes is expected, name
        task = target.task(graph, target.heuristic(graph, h200), h200)
        assert ("--fmad=false" in task.flags) is expected, name
