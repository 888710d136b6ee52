"""What a fused function may consist of: PyTorch's values and gradients, verified, or a refusal."""

import pytest
import torch
from torch.nn import functional as F

from tilewright.compile import cxx
from tilewright.device import spec_of
from tilewright.dispatch.functions.fuse import fuse
from tilewright.dispatch.functions.operator import backward_operator
from tilewright.errors import NoImplementation
from tilewright.impl import IMPLS
from tilewright.measure.verify import Verifier
from tilewright.op import OPS
from tilewright.tensor_spec import TensorSpec

pytestmark = pytest.mark.skipif(cxx.missing() is not None, reason=str(cxx.missing()))
FUSED = IMPLS["fused"]
CPU = torch.device("cpu")


@pytest.fixture
def fused():
    yield lambda function: fuse(function, name="steps")
    for name in ("steps", "steps_backward"):
        OPS.remove(name)


def assert_pytorchs(fused, function, *shapes):
    """Values, gradients, and that verification takes the kernels of both."""
    operator = fused(function)
    torch.manual_seed(0)
    tensors = [torch.randn(shape, requires_grad=True) for shape in shapes]
    own, right = (f(*tensors) for f in (operator, function))
    torch.testing.assert_close(own, right, equal_nan=True)
    op, specs = OPS["steps"], [TensorSpec.of(t) for t in tensors]
    given = dict(zip(op.parameters, specs, strict=False))
    workloads = [op.workload(**given)]
    if right.requires_grad:
        assert type(own.grad_fn).__name__ == "GeneratedBackward"
        upstream = torch.randn_like(right)
        found, expected = (
            torch.autograd.grad(out, tensors, upstream, allow_unused=True) for out in (own, right)
        )
        for mine, theirs in zip(found, expected, strict=True):
            theirs = torch.zeros_like(mine) if theirs is None else theirs
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5, equal_nan=True)
        backward = backward_operator(op, 1)
        gradient = {"grad_output": TensorSpec.of(upstream)}
        workloads.append(backward.workload(**gradient, **given, grads=None))
    for w in workloads:
        built = FUSED.build(FUSED.heuristic(w, spec_of(None)), w, spec_of(None))
        message = Verifier(w, CPU).check(built).message
        # How well PyTorch's own rounding errors turn out on a few elements is luck.
        assert message == "" or "PyTorch's largest error" in message, message


MOVED = {
    "a transpose": (lambda x: x.t() * 2, (7, 33)),
    "a transpose beside its original": (lambda x: x + x.t().exp(), (6, 6)),
    "an outer product with itself": (lambda v: v[:, None] * v[None, :], (5,)),
    "an outer product of two": (lambda v, w: v[:, None] - w.tanh()[None, :], (5,), (9,)),
    "sums of columns along rows": (lambda x: x.sum(0)[:, None] * x, (6, 6)),
    "sums of rows along columns": (lambda x: x.sum(1) + x, (6, 6)),
    "a row's result without its dim": (lambda x: x.amax(-1), (7, 33)),
    "what follows from it": (lambda x: torch.logsumexp(x, 1) * 2, (7, 33)),
    "pairs of rows": (lambda x, y: (x[:, None, :] - y).square().sum(-1), (7, 33), (5, 33)),
    "a whole tensor's result beside another": (lambda x, y: x * y.norm(), (7, 33), (9,)),
    "one value of each row, expanded": (lambda v: (v * 2)[:, None].expand(33, 4).sin(), (33,)),
    "normalised rows": (lambda x: F.normalize(x, dim=0), (7, 33)),
    "angles of rows": (lambda x, y: F.cosine_similarity(x, y, dim=-1), (7, 33), (33,)),
    "standard deviations": (lambda x: x.std(0), (7, 33)),
    "batch normalisation": (lambda x: F.batch_norm(x, None, None, training=True), (8, 6, 4, 4)),
}


@pytest.mark.parametrize("case", MOVED)
def test_dims_may_move_vanish_and_come_back(case, fused):
    assert_pytorchs(fused, *MOVED[case])


STEPS = {
    "powers": lambda x: x**3 + (x * x + 1) ** -0.5 + (x * x + 1) ** -1 + x.abs() ** 2.5,
    "choices": lambda x: torch.where(torch.logical_xor(x > 0, x < 1), x, 2 * x),
    "logic of numbers": lambda x: torch.logical_not(x) | torch.logical_and(x, x - 1),
    "arithmetic of booleans": lambda x: ((x > 0) + (x > 1)) ^ ((x > -1) * (x > -2)),
    "booleans made numbers": lambda x: (x > 0) * x + (x < 0) / 3,
    "any": lambda x: (x > 2).any(-1),
    "all": lambda x: x.all(0) & (x > -3).all(),
    "whole numbers": lambda x: x.round() + x.floor() * 2 + x.ceil() + x.trunc() + x.sign(),
    "infinities": lambda x: torch.isinf(1 / (x - x)) | torch.isfinite(x),
    "one of two may be NaN": lambda x: torch.fmax(x, (x - 1).sqrt()) - torch.fmin(x.log(), x),
    "logarithms of softmax": lambda x: F.log_softmax(x, -1),
    "elu": lambda x: F.elu(x) + F.selu(x) + F.celu(x, 0.5),
    "rectifiers": lambda x: F.leaky_relu(x, 0.1) + F.relu6(x) + F.hardtanh(x) + F.hardswish(x),
    "log-sigmoid": lambda x: F.logsigmoid(x) + F.softplus(x) + F.mish(x),
    "a norm whose eps is its dtype's": lambda x: F.rms_norm(x * 1e-4, (33,)),
    "roundings": lambda x: torch.round(x, decimals=1) + torch.div(x, 2, rounding_mode="floor"),
    "a difference of multiples": lambda x: torch.sub(x, x.exp(), alpha=0.5),
}


@pytest.mark.parametrize("case", STEPS)
def test_steps_are_pytorchs(case, fused):
    assert_pytorchs(fused, STEPS[case], (7, 33))


REFUSED = {
    "median": lambda x: x.median(-1).indices,
    "aten.sort.default of the reference is none of those": lambda x: x.sort(-1).values,
    "decides by values": lambda x: x if x.sum() > 0 else -x,
    "_local_scalar_dense.default of the reference decides by values": lambda x: x * x.sum().item(),
    "nonzero": lambda x: x[x > 0],
    "reads the bits of one dtype as another": lambda x: x.view(torch.int32) >> 23,
    "reads the bits": lambda x: x.half().view(torch.int16) < 0,
    "returns dict; it should return a tensor, or a tuple of them": lambda x: {"x": x * 2},
    "returns NoneType as element 1": lambda x: (x * 2, None),
    "returns tuple as element 2": lambda x: [x, x * 2, torch.var_mean(x)],
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_kernels_would_compute_otherwise_is_refused_with_its_line(reason, fused):
    function = REFUSED[reason]
    line = "" if "returns" in reason else rf"fused_steps\.py:{function.__code__.co_firstlineno}"
    with pytest.raises(NoImplementation, match=rf"(?s){reason}.*{line}.*fallback=True"):
        fused(function)(torch.randn(9, 9))
    x = torch.randn(9, 9, requires_grad=True)
    with pytest.raises(NoImplementation, match=rf"(?s){reason}.*{line}"):
        fused(function)(x)


REMEDIED = {
    r"aten.arange.* by -1; whole numbers that grow are taken": lambda x: x + torch.arange(9, 0, -1),
    r"aten.bmm.*: .*\(x \* y\)\.sum\(dim\)": lambda x: torch.einsum("ij,ij->i", x, x),
    r"aten.randn_like.*: give random numbers as an argument": lambda x: x + torch.randn_like(x),
    r"of floats; of indexing, slices are taken": lambda x: x[[0, 2]],
    r"aten.index.*: of indexing, slices are taken": lambda x: x[:, [3]],
    r"torch\.int8; .*int32 and int64 are taken": lambda x: x.round().to(torch.int8).float(),
    r"integer arithmetic; cast first: \.float\(\)": lambda x: x / ((x > 0).sum() // 2),
}


@pytest.mark.parametrize("remedy", REMEDIED)
def test_a_refusal_says_what_may_be_done(remedy, fused):
    x = torch.randn(9, 9, requires_grad=True)
    with pytest.raises(NoImplementation, match=remedy):
        fused(REMEDIED[remedy])(x)


def test_whole_numbers_are_cast_where_they_meet_floats(fused):
    x, lengths = torch.randn(3), torch.arange(3)
    found = fused(lambda x, lengths: x / lengths)(x, lengths)
    torch.testing.assert_close(found, x / lengths)


@pytest.mark.parametrize("reason", REFUSED)
def test_pytorch_computes_what_is_refused_where_that_is_asked_for(reason, fused):
    function, x = REFUSED[reason], torch.randn(9, 9)
    fallen_back = fuse(function, name="steps", fallback=True)
    torch.testing.assert_close(fallen_back(x), function(x))


def test_a_gradient_that_cannot_be_fused_is_named_with_the_line_it_differentiates(fused):
    def normed(x):
        y = x * 2
        return torch._weight_norm(y, y[:, :1], 0)

    x = torch.randn(4, 5)
    torch.testing.assert_close(fused(normed)(x), normed(x))
    line = normed.__code__.co_firstlineno + 2
    out = fused(normed)(x.requires_grad_())
    with pytest.raises(NoImplementation, match=rf"_weight_norm.*fused_steps\.py:{line}\)"):
        out.sum().backward()
